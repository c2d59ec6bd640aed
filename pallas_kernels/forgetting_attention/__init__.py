"""Fused kernels for causal softmax attention whose keys lose weight by learned forget gates (FoX, the
forgetting transformer), on Hopper GPUs and TPUs.
"""

from pallas_kernels.forgetting_attention.api import forgetting_attention, unsupported

__all__ = ["forgetting_attention", "unsupported"]
