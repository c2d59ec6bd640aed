"""Forgetting attention on Mosaic TPU: one kernel forward (`forward`), two backward (`backward`).

The scores are those of `hopper`. In the forward kernel and in that of the gradient of q, a program computes
one tile of queries and one tile of keys; consecutive programs have the keys from the first tile that one of
the queries sees (`Bounds`, loaded before the programs run) to the tile with the queries' own tokens. In the
kernel of the gradients of k, v and F_j, consecutive programs have the queries of all heads that share a tile
of keys, whose gradients stay in VMEM. A program beyond the last tile loads and computes nothing.

Heads of 128 or 256 channels are column blocks of [B, T, heads * D], so that nothing is transposed; arrays of
other heads are transposed to [B, heads, T, D].
"""

from pallas_kernels.forgetting_attention.tpu.backward import backward
from pallas_kernels.forgetting_attention.tpu.forward import forward
from pallas_kernels.forgetting_attention.tpu.requirements import REQUIREMENTS, tile, unsupported

__all__ = ["REQUIREMENTS", "backward", "forward", "tile", "unsupported"]
