"""What `benchmarks/gpu_check.py` runs."""
