"""Callbacks and what they write."""
