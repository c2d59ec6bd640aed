"""Fused kernels for memories whose entries are independent: Mamba's, and memories of one complex number for
each channel.
"""

from pallas_kernels.selective_scan.api import (
    complex_scan,
    complex_unsupported,
    selective_scan,
    unsupported,
)

__all__ = ["complex_scan", "complex_unsupported", "selective_scan", "unsupported"]
