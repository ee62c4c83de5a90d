"""The frozen base: its repository, components and weights."""
