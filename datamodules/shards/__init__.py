"""Shards of encoded samples: WebDataset tars on disk or behind a URL, how they are written and read."""
