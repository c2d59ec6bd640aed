"""Fused kernels for memories whose entries stand alone: Mamba's, and complex ones of one number a channel."""

from pallas_kernels.selective_scan.api import (
    complex_reason,
    complex_scan,
    reason,
    selective_scan,
)

__all__ = ["complex_reason", "complex_scan", "reason", "selective_scan"]
