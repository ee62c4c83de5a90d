"""The README.md beside a run's weights: its callback, its parts, its template."""
