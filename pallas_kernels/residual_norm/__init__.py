"""A fused kernel for the gradient of a residual stream and of the root-mean-square norms of it that layers read."""

from pallas_kernels.residual_norm.api import residual_norm_gradients, unsupported
from pallas_kernels.residual_norm.hopper import MOST

__all__ = ["MOST", "residual_norm_gradients", "unsupported"]
