"""Shards of encoded samples: WebDataset tars on disk or at a URL, written and read."""
