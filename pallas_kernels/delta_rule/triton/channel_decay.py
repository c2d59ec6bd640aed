"""The delta rule with a decay per key channel (KDA) in Triton: the functions of `scalar_decay`, for a log decay in float32."""

from pallas_kernels.delta_rule.triton import scalar_decay
from pallas_kernels.delta_rule.triton.scalar_decay import (
    CHUNK,
    Residuals,
    backward,
    forward,
    length_multiple,
)
from pallas_kernels.memory_calls import DECAYED_ERASE, FLOAT32_DECAY

__all__ = ["CHUNK", "REQUIREMENTS", "Residuals", "backward", "forward", "length_multiple"]

REQUIREMENTS = (FLOAT32_DECAY, DECAYED_ERASE, *scalar_decay.REQUIREMENTS)
