"""Fused kernels for memories under a diagonal-plus-low-rank transition (RWKV7)."""

from pallas_kernels.dplr.api import dplr, reason, reasons

__all__ = ["dplr", "reason", "reasons"]
