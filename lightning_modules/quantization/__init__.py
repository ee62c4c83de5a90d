"""Quantized weights: the formats, and layers that multiply by them."""
