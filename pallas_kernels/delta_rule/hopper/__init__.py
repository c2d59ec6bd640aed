"""Kernels of the delta rule for NVIDIA Hopper."""
