"""A short causal convolution with the SiLU and the normalisation that follow it, on Mosaic GPU (Hopper).

A warpgroup computes a block of consecutive tokens and some of the channels. It loads the channels of each
token once. The channels of the W - 1 tokens before the current one, and the partial sums of their gradients,
stay in registers. Tokens are copied to shared memory some steps before they are computed, or the next four are loaded while
the current four are computed, as the table in `tilings` says.

If a row has several documents, its tokens are computed in `order`, in which padding comes last. The W - 1
tokens before a token in this order are then those that it may see. If no padding is inside documents, this
already holds where the tokens are.

Heads are normalised within a warp. Where whole heads, or channels without heads, cannot be divided among the four warps of
warpgroups (3 heads of 256; 128 channels), the four warps have the same channels in four rows of the batch, or in four parts of rows,
and the sums of the weight's gradient are added through shared memory. Their tokens must then be at the same positions, so that rows have no
order of their own.
"""

from pallas_kernels.short_convolution.hopper.backward import backward
from pallas_kernels.short_convolution.hopper.forward import forward
from pallas_kernels.short_convolution.hopper.requirements import (
    COMPUTES_IN_PLACE,
    MULTIPLE,
    REQUIREMENTS,
    unsupported,
)

__all__ = [
    "COMPUTES_IN_PLACE",
    "MULTIPLE",
    "REQUIREMENTS",
    "backward",
    "forward",
    "unsupported",
]
