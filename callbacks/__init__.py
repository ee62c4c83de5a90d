"""What happens around the steps of a run: Lightning's callbacks, and what they write and read."""
