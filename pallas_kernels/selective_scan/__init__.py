"""Fused kernels for scans of memories whose entries do not depend on each other: Mamba's (`selective_scan`),
and memories of one complex number for each channel (`complex_scan`).
"""

from pallas_kernels.selective_scan.api import (
    complex_scan,
    complex_unsupported,
    selective_scan,
    unsupported,
)

__all__ = ["complex_scan", "complex_unsupported", "selective_scan", "unsupported"]
