"""Bases from disk or hub."""
