"""What the commands are made of."""
