"""LongCat-Image-Edit."""
