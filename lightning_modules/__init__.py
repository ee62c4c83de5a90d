"""Models and how they train."""
