"""Attention with forget gates by Triton kernels, for NVIDIA cards of compute capability 8.0 or more. The forward pass is one kernel;
the backward pass has two: one for the gradient of the queries, one for those of keys, values and gates. Another sums the gates.
"""

from pallas_kernels.forgetting_attention.triton.gates import sum_gates
from pallas_kernels.forgetting_attention.triton.passes import backward, forward
from pallas_kernels.forgetting_attention.triton.requirements import REQUIREMENTS, tile, unsupported

__all__ = ["REQUIREMENTS", "backward", "forward", "sum_gates", "tile", "unsupported"]
