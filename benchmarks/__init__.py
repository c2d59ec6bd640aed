"""Benchmarks of the library: `python -m benchmarks` lists them."""
