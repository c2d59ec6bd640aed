"""Diagonal-plus-low-rank memories (RWKV7) in Triton, for NVIDIA cards of compute capability 8.0 or more."""
