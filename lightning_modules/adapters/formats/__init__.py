"""Formats of LoRA files."""
