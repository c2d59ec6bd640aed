"""Native sparse attention (NSA, arXiv 2502.11089): attention to means of blocks, to the tokens of blocks that these select,
and to a window, added with gates.

The layer is flash-linear-attention's (fla/layers/nsa.py): rotary positions, one group of at least 16 query heads for each head
of keys and values, and gates sigmoid(x W) of each query head; blocks are represented by the means of their keys and values.
The paper's learned compression of blocks, with positions inside of them, is not in that code and not here. Its kernels
require groups of 16 heads; here any number is accepted.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax import ops
from lsm_jax.mixers import checks
from lsm_jax.mixers.base import Context
from lsm_jax.mixers.layers import Dense, split_heads
from lsm_jax.mixers.method import Method
from lsm_jax.mixers.softmax import Softmax, SoftmaxConfig


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class NSAConfig(SoftmaxConfig):
    """The config of a layer of native sparse attention: the fields of softmax attention, and

    Attributes:
        window: the number of tokens of the window, the query's own among them.
        block_size: tokens in a block.
        num_blocks: the number of selected blocks, at least 3.
    """

    num_heads: int = 64
    num_kv_heads: int | None = 4
    head_dim: int | None = 64
    window: int | None = 512
    block_size: int = 64
    num_blocks: int = 16

    @classmethod
    def for_width(cls, hidden_size: int) -> NSAConfig:
        """Return the config of NSA for a model of width `hidden_size`, with the published proportions: query heads of 64
        channels in all twice the width, in groups of 16 for each head of keys, blocks of 64 tokens and a window of 512;
        heads, blocks and window are smaller below width 512.
        """
        head_dim = min(64, max(2, hidden_size // 16 * 2))
        heads = max(16, 2 * hidden_size // head_dim // 16 * 16)
        return cls(
            num_heads=heads, num_kv_heads=heads // 16, head_dim=head_dim,
            window=min(512, 2 * hidden_size), block_size=min(64, max(4, hidden_size // 8)),
        )  # fmt: skip

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of NSA is not accepted, or does not fit a model of width
        `hidden_size`.
        """
        super().validate(hidden_size)
        checks.positive(self, block_size=self.block_size)
        if self.num_blocks < 3:
            raise ValueError(f"NSAConfig.num_blocks={self.num_blocks}: accepted are numbers from 3")
        if self.window is None:
            raise ValueError("NSAConfig.window=None: accepted are positive numbers")

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: the projections, and for each kind of
        attention the scores and weighted sums over the keys that a query attends to on average.
        """
        dim, heads, kv_heads = self.dim(hidden_size), self.num_heads, self.kv_heads()
        assert self.window is not None
        half = (seq_len + 1) / 2
        seen = min(half, self.window) + min(half, self.block_size * self.num_blocks)
        seen += half / self.block_size
        projections = 4.0 * hidden_size * dim * (heads + kv_heads) + 6.0 * hidden_size * heads
        return projections + 4 * seen * heads * dim


class NSA(Softmax):
    """The layer of native sparse attention: a mixer that maps [B, T, D] to [B, T, D]; `NSAConfig` says what its options
    mean.
    """

    op = ops.native_sparse_attention
    config: NSAConfig

    def __init__(
        self, config: NSAConfig, hidden_size: int, *, rngs: nnx.Rngs, init_std: float = 0.02
    ):
        super().__init__(config, hidden_size, rngs=rngs, init_std=init_std)
        self.gate_proj = Dense(
            hidden_size, 3 * config.num_heads, axes=("embed", "heads"), rngs=rngs, init_std=init_std
        )

    def write(self, x: jax.Array, context: Context) -> tuple[dict[str, Any], Context]:
        """Return the arguments of `native_sparse_attention` by name, and the context: keys and values, and the gates
        [B, T, H, 3] of means, selected blocks and window.
        """
        written, context = super().write(x, context)
        gates = jax.nn.sigmoid(self.gate_proj(x, dtype=jnp.float32))
        return written | {"gates": split_heads(gates, self.config.num_heads)}, context

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of `native_sparse_attention` that do not depend on the input: blocks, window, and the
        names of backends.
        """
        config = self.config
        return dict(super().options(), block_size=config.block_size, num_blocks=config.num_blocks)

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> ops.AttentionState:
        """Return an empty state with capacity for `max_length` keys and values: blocks may be anywhere in the document."""
        heads, dim = self.config.kv_heads(), self.head_dim
        return ops.attention_state(batch_size, max_length, heads, dim, dim, dtype=dtype)


METHOD = Method(
    name="nsa",
    paper="arXiv 2502.11089",
    op="native_sparse_attention",
    gate="none: keys and values are stored",
    write="k, v",
    read="Σ gates × softmax(q Kᵀ) V of means of blocks, of the 16 blocks they select, and of a window",
    state="k and v of every token",
    forms=(),
    config=NSAConfig,
    module=NSA,
    note="the memory grows with the sequence: no other forms",
)
