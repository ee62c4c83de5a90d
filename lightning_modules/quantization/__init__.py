"""Formats of frozen weights, and the layers that multiply by them."""
