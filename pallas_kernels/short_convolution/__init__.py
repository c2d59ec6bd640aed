"""A fused kernel for short causal convolutions with the SiLU and the unit length of heads that follow them."""

from pallas_kernels.short_convolution.api import reason, short_convolution

__all__ = ["reason", "short_convolution"]
