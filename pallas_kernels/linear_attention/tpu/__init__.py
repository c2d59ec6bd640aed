"""Kernels of linear attention for TPU."""
