"""The data of a run: pairs of pictures, cached latents, streamed shards, and what to edit."""
