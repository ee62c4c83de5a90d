"""What trains, and its files."""
