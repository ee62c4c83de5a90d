"""Shared parts of tests: commands, tiny pipelines, images, probes."""
