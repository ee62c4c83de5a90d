"""What a step minimizes, against independent computations."""
