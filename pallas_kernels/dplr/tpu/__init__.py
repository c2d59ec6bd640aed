"""Kernels of diagonal-plus-low-rank memories for TPU."""
