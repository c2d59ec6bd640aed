"""A fused kernel that applies one token of each row to its matrix memories, as in generation: decay, write
and read in one pass over the memory, in place.
"""

from pallas_kernels.decode_step.api import Gate, decode_step, unsupported

__all__ = ["Gate", "decode_step", "unsupported"]
