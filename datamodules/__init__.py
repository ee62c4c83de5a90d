"""The data of a run: pairs of images, cached latents, streamed shards, and what to edit."""
