"""Fused kernels for the gradients of what RWKV7 computes between its projections: they read and write every array once."""
