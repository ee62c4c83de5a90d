"""A training step and its parts."""
