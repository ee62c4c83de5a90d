"""The checks and measurements of `benchmarks/gpu_check.py`."""
