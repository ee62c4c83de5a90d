"""How a transformer's blocks run."""
