"""A fused kernel for the root-mean-square norm at the end of a mixer, with its skip, scale and gate."""

from pallas_kernels.gated_norm.api import gated_rms_norm, gated_rms_norm_gradients, unsupported

__all__ = ["gated_rms_norm", "gated_rms_norm_gradients", "unsupported"]
