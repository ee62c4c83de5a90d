"""Qwen-Image-Edit and Edit-Plus."""
