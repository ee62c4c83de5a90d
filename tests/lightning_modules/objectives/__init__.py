"""Objectives, compared with independent computations."""
