"""A fused kernel that applies one token of each row to its matrix memories, as in generation: decay, write
and read in one pass over the memory, in place.
"""

from pallas_kernels.decode_step.api import decode_step, unsupported

__all__ = ["decode_step", "unsupported"]
