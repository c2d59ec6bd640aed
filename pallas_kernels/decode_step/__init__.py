"""A fused kernel for one token: decay, write and read of a memory in one pass over it, in place."""

from pallas_kernels.decode_step.api import decode_step, unsupported

__all__ = ["decode_step", "unsupported"]
