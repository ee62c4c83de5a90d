"""Work and memory of a step."""
