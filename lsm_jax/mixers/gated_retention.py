"""Gated retention (YOCO, arXiv 2405.05254, Section 3.1): retention whose decay is a gate per head,
`γ_t = sigmoid(x_t W_γ)^(1/τ)`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax.mixers import checks
from lsm_jax.mixers.base import Context
from lsm_jax.mixers.heads import head_size
from lsm_jax.mixers.layers import Dense, split_heads
from lsm_jax.mixers.method import Method
from lsm_jax.mixers.retnet import RetNet, RetNetConfig


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class GatedRetentionConfig(RetNetConfig):
    """The config of gated retention: the fields of RetNet, with as many value channels as key channels by
    default, and the gate's temperature.

    Attributes:
        gate_temperature: τ; a larger one forgets more slowly.
    """

    expand_v: float = 1.0
    gate_temperature: float = 16.0

    @classmethod
    def for_width(cls, hidden_size: int) -> GatedRetentionConfig:
        """Return the config of gated retention for a model of width `hidden_size`, with heads of 256 channels
        (smaller ones below width 768)."""
        return cls(num_heads=hidden_size // head_size(hidden_size, 256))

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of gated retention is not accepted, or does not fit a model of
        width `hidden_size`.
        """
        super().validate(hidden_size)
        checks.positive(self, gate_temperature=self.gate_temperature)

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: those of RetNet, and the
        projection of tokens to gates.
        """
        return super().flops_per_token(hidden_size, seq_len) + 2.0 * hidden_size * self.num_heads


class GatedRetention(RetNet):
    """The layer of gated retention: a mixer that maps [B, T, D] to [B, T, D]; `GatedRetentionConfig` says what its
    options mean.
    """

    config: GatedRetentionConfig
    memory_parts = ("k_proj", "v_proj", "decay_proj")
    token_parts = ("q_proj", "k_proj", "v_proj", "decay_proj")

    def __init__(
        self,
        config: GatedRetentionConfig,
        hidden_size: int,
        *,
        rngs: nnx.Rngs,
        init_std: float = 0.02,
    ):
        super().__init__(config, hidden_size, rngs=rngs, init_std=init_std)
        self.decay_proj = Dense(
            hidden_size, config.num_heads, axes=("embed", "heads"), rngs=rngs, init_std=init_std
        )

    def write(self, x: jax.Array, context: Context) -> tuple[dict[str, Any], Context]:
        """Return the arguments of `linear_memory` that update the memory, by name, and the context: keys, rotated if
        the config has a rotation, values, and the log decay of each token and head [B, T, H].
        """
        gate = self.decay_proj(x, dtype=jnp.float32)
        return dict(
            k=self._features(self.k_proj(x), context),
            v=split_heads(self.v_proj(x), self.config.num_heads),
            log_decay=jax.nn.log_sigmoid(gate) / self.config.gate_temperature,
        ), context


METHOD = Method(
    name="gated_retention",
    paper="arXiv 2405.05254",
    op="linear_memory",
    gate="sigmoid(x W)^(1/16), each head",
    write="kᵀ v, k rotated",
    read="q M, q rotated",
    state="K × V a head",
    config=GatedRetentionConfig,
    module=GatedRetention,
)
