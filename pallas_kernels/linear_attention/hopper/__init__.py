"""Kernels of linear attention for NVIDIA Hopper."""
