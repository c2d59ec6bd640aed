"""A fused kernel that applies one token of each row to its matrix memories, as in generation: decay, write
and read in one pass over the memory, in place.
"""

from pallas_kernels.decode_step.api import Gate, decode_step, unsupported
from pallas_kernels.decode_step.deferred import Pending, apply_writes, deferred_step, empty_writes
from pallas_kernels.decode_step.deferred import unsupported as deferred_unsupported

__all__ = [
    "Gate",
    "Pending",
    "apply_writes",
    "decode_step",
    "deferred_step",
    "deferred_unsupported",
    "empty_writes",
    "unsupported",
]
