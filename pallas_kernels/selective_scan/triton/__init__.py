"""Mamba's selective scan by Triton kernels, for NVIDIA cards of compute capability 8.0 or more."""
