"""What a step computes and holds."""
