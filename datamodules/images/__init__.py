"""Image files and captions: where samples come from, how they are checked, decoded and drawn."""
