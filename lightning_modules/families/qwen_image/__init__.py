"""Qwen-Image, Qwen-Image-Edit and Edit-Plus."""
