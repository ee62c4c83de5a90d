"""Memory and work of a step, before it is taken."""
