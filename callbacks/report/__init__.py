"""A run on one page, report.html: its callback, its figures, its commands, its template."""
