"""Running a transformer: kernels, checkpointing, offloading."""
