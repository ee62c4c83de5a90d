"""Objectives of a step: losses, preservation, sliders, preferences."""
