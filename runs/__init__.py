"""The process of a run: its folder, signals, and the division of work among processes."""
