"""The process of a run: its folder, signals, the division of work among processes, uploads."""
