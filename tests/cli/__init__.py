"""Tasks, settings and folders."""
