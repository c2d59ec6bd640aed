"""Attention with forget gates on Hopper GPUs (Mosaic GPU). The forward pass is one kernel; the backward pass
has two: one for the gradient of the queries, one for those of keys, values and gates.
"""

from pallas_kernels.forgetting_attention.hopper.backward import backward
from pallas_kernels.forgetting_attention.hopper.forward import forward
from pallas_kernels.forgetting_attention.hopper.requirements import REQUIREMENTS, tile, unsupported
from pallas_kernels.forgetting_attention.hopper.schedule import (
    TILE,
)

__all__ = ["REQUIREMENTS", "TILE", "backward", "forward", "tile", "unsupported"]
