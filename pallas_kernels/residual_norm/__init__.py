"""Fused kernels for the sum of a residual stream and the root-mean-square norms of it that layers read, and for their gradient."""

from pallas_kernels.residual_norm.api import (
    residual_norm_forward,
    residual_norm_gradients,
    unsupported,
    unsupported_forward,
)
from pallas_kernels.residual_norm.hopper import MOST

__all__ = [
    "MOST",
    "residual_norm_forward",
    "residual_norm_gradients",
    "unsupported",
    "unsupported_forward",
]
