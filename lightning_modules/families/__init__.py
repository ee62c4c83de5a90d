"""A folder for each model family."""
