"""Fused kernels for memories without decay, with a scalar one, or with one of each key or value channel."""

from pallas_kernels.linear_attention.api import linear_attention, reason, reasons

__all__ = ["linear_attention", "reason", "reasons"]
