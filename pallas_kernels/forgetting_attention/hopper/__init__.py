"""Forgetting attention on Mosaic GPU (Hopper): one kernel forward (`forward`), two backward (`backward`)."""

from pallas_kernels.forgetting_attention.hopper.backward import backward
from pallas_kernels.forgetting_attention.hopper.forward import forward
from pallas_kernels.forgetting_attention.hopper.requirements import REQUIREMENTS, tile, unsupported
from pallas_kernels.forgetting_attention.hopper.schedule import (
    TILE,
)

__all__ = ["REQUIREMENTS", "TILE", "backward", "forward", "tile", "unsupported"]
