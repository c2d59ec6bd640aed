"""A short causal convolution with the SiLU and the normalisation that follow it, on Mosaic GPU (Hopper).

A warpgroup computes a block of consecutive tokens and some of the channels. It loads the channels of each
token once. The channels of the W - 1 tokens before the current one, and the partial sums of their gradients,
stay in registers; shared memory is not used. The next four tokens are loaded while the current four are
computed.

If a row has several documents, its tokens are computed in `order`, in which padding comes last. The W - 1
tokens before a token in this order are then those that it may see.
"""

from pallas_kernels.short_convolution.hopper.backward import backward
from pallas_kernels.short_convolution.hopper.forward import forward
from pallas_kernels.short_convolution.hopper.requirements import (
    MULTIPLE,
    REQUIREMENTS,
    unsupported,
)

__all__ = ["MULTIPLE", "REQUIREMENTS", "backward", "forward", "unsupported"]
