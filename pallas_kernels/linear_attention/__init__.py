"""Fused kernels for memories without decay or with a scalar one."""

from pallas_kernels.linear_attention.api import linear_attention, reason, reasons

__all__ = ["linear_attention", "reason", "reasons"]
