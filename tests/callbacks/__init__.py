"""What observes a run."""
