"""Fused kernels for memories with a diagonal-plus-low-rank transition (RWKV7)."""

from pallas_kernels.dplr.api import dplr, unsupported

__all__ = ["dplr", "unsupported"]
