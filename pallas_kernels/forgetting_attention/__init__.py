"""Softmax attention with a forget gate (FoX) as a fused kernel."""

from pallas_kernels.forgetting_attention.api import forgetting_attention, unsupported

__all__ = ["forgetting_attention", "unsupported"]
