"""How a transformer is run: kernels, checkpointing, offloading."""
