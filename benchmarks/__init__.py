"""Benchmarks of this library's ops, models and training: `python -m benchmarks` lists them."""
