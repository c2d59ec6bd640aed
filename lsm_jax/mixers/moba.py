"""MoBA (arXiv 2502.13189): softmax attention to a query's own block of tokens and to the earlier blocks whose mean keys agree
best with it.

The layer is flash-linear-attention's (fla/layers/moba.py): rotary positions, an RMS norm of each head's output, and an output
gate sigmoid(x W₁ W₂) of the rank of a head. There decoding attends to all tokens; here it selects blocks, as training does.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import nnx

from lsm_jax import ops
from lsm_jax.mixers import checks
from lsm_jax.mixers.base import Context
from lsm_jax.mixers.layers import Dense, RMSNorm, merge_heads
from lsm_jax.mixers.method import Method
from lsm_jax.mixers.softmax import Softmax, SoftmaxConfig


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class MoBAConfig(SoftmaxConfig):
    """The config of a MoBA layer: the fields of softmax attention, of which `window` is None, and

    Attributes:
        block_size: tokens in a block.
        num_blocks: the number of blocks that a query attends to, its own among them.
        output_gate: whether each channel of the output is multiplied by sigmoid(x W₁ W₂).
        output_norm_eps: epsilon of the norm over each head's output.
    """

    block_size: int = 256
    num_blocks: int = 4
    output_gate: bool = True
    output_norm_eps: float = 1e-6

    @classmethod
    def for_width(cls, hidden_size: int) -> MoBAConfig:
        """Return the config of MoBA for a model of width `hidden_size`: the heads of softmax attention, and the published
        blocks of 256 tokens, or smaller ones below width 1024.
        """
        heads = SoftmaxConfig.for_width(hidden_size).num_heads
        return cls(num_heads=heads, block_size=min(256, max(4, hidden_size // 4)))

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of MoBA is not accepted, or does not fit a model of width
        `hidden_size`.
        """
        super().validate(hidden_size)
        checks.positive(
            self, block_size=self.block_size, num_blocks=self.num_blocks,
            output_norm_eps=self.output_norm_eps,
        )  # fmt: skip
        if self.window is not None:
            raise ValueError(f"MoBAConfig.window={self.window}: accepted is None")

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: the projections, the scores and weighted
        sums over the keys of the blocks that a query attends to on average, and the scores of blocks.
        """
        dim, heads, kv_heads = self.dim(hidden_size), self.num_heads, self.kv_heads()
        seen = min((seq_len + 1) / 2, self.block_size * (self.num_blocks - 0.5))
        gate = dim * hidden_size * (1 + heads) * self.output_gate
        means = seq_len / self.block_size
        scores = heads * dim * (4 * seen + means)
        return 4.0 * hidden_size * dim * (heads + kv_heads) + 2 * gate + scores


class MoBA(Softmax):
    """The layer of MoBA: a mixer that maps [B, T, D] to [B, T, D]; `MoBAConfig` says what its options mean."""

    op = ops.block_attention
    config: MoBAConfig

    def __init__(
        self, config: MoBAConfig, hidden_size: int, *, rngs: nnx.Rngs, init_std: float = 0.02
    ):
        super().__init__(config, hidden_size, rngs=rngs, init_std=init_std)
        dense: dict[str, Any] = dict(rngs=rngs, init_std=init_std)
        inner = config.num_heads * self.head_dim
        rank, gate = self.head_dim, config.output_gate
        down = Dense(hidden_size, rank, axes=("embed", None), **dense) if gate else None
        up = Dense(rank, inner, axes=(None, "heads"), **dense) if gate else None
        self.gate_down, self.gate_up = down, up
        self.norm = RMSNorm(self.head_dim, eps=config.output_norm_eps)

    def finish(self, o: jax.Array, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return (y, context), with the layer's output y [B, T, D] from the memory's output o [B, T, H, V]: normalise each
        head, multiply by the gate sigmoid(x W₁ W₂) if the config has it, and project.
        """
        y = merge_heads(self.norm(o))
        if self.gate_down is not None and self.gate_up is not None:
            y = y * jax.nn.sigmoid(self.gate_up(self.gate_down(x)))
        return self.o_proj(y), context

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of `block_attention` that do not depend on the input: the blocks, and the names of
        backends.
        """
        config = self.config
        return dict(
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            implementation=config.implementation,
        )


METHOD = Method(
    name="moba",
    paper="arXiv 2502.13189",
    op="block_attention",
    gate="none: keys and values are stored",
    write="k, v",
    read="softmax(q Kᵀ) V over the own block and the 3 with the largest q · mean(k)",
    state="k and v of every token",
    forms=(),
    config=MoBAConfig,
    module=MoBA,
    note="the memory grows with the sequence: no other forms",
)
