"""Running a transformer: its blocks, checkpointing, offloading and sharding."""
