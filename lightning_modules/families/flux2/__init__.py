"""FLUX.2 [klein] and FLUX.2 [dev]."""
