"""A fused kernel for short causal convolutions of each channel over a document's last few tokens, with the
SiLU and the normalisation of heads that follow them.
"""

from pallas_kernels.short_convolution.api import short_convolution, unsupported

__all__ = ["short_convolution", "unsupported"]
