"""Forgetting attention on Mosaic GPU (Hopper)."""

from pallas_kernels.forgetting_attention.hopper.kernels import (
    REQUIREMENTS,
    TILE,
    backward,
    forward,
    tile,
    unsupported,
)

__all__ = ["REQUIREMENTS", "TILE", "backward", "forward", "tile", "unsupported"]
