"""Kernels of the delta rule for TPU."""
