"""Fused kernels for memories without decay, with a scalar decay, or with a decay per key channel or per value channel."""

from pallas_kernels.linear_attention.api import linear_attention, unsupported

__all__ = ["linear_attention", "unsupported"]
