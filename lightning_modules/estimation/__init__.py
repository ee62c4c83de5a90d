"""Estimates of a training step: its work and its memory."""
