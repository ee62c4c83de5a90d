"""Adapters: the trainable part of a model."""
