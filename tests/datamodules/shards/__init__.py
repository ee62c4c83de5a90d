"""Caches and streams of latents."""
