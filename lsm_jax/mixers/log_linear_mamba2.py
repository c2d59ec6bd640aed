"""Log-linear Mamba-2 (arXiv 2506.04761): Mamba-2 with a memory for each power of two of tokens into the past, which each
head reads with weights of its own; see `lsm_jax.mixers.log_linear_gated_deltanet` for these weights.

The layer is that of the authors and of flash-linear-attention: the projections have biases, the convolutions none, and
the rates start at 1, 2, ... H.
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
from lsm_jax.mixers.layers import parameter
from lsm_jax.mixers.log_linear_gated_deltanet import FORMS, LevelScales, level_flops
from lsm_jax.mixers.mamba2 import Mamba2, Mamba2Config
from lsm_jax.mixers.method import Method


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class LogLinearMamba2Config(Mamba2Config):
    """The config of a layer of log-linear Mamba-2: the fields of Mamba-2, and

    Attributes:
        num_levels: L, the memories of a head; 15 are exact for documents of up to 16,384 tokens, and the last contains all
            tokens further back.
    """

    num_levels: int = 15

    @classmethod
    def for_width(cls, hidden_size: int) -> LogLinearMamba2Config:
        """Return the config of log-linear Mamba-2 for a model of width `hidden_size`, with the published proportions:
        heads of 64 channels and 128 state channels; both smaller below width 512.
        """
        return cls(head_dim=min(64, hidden_size // 4), state_size=min(128, hidden_size // 4))

    def validate_fields(self, forms: tuple[str, ...] = FORMS) -> None:
        """Raise ValueError unless every field has the type of its annotation and is accepted."""
        super().validate_fields(forms)
        checks.positive(self, num_levels=self.num_levels)

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: those of Mamba-2, with 5 K V a head for
        each level beyond the first that a row of `seq_len` tokens fills, and the projection to the levels' weights.
        """
        return super().flops_per_token(hidden_size, seq_len) + level_flops(
            self.num_levels, seq_len, hidden_size, self.num_heads(hidden_size), self.state_size * self.head_dim
        )  # fmt: skip


class LogLinearMamba2(Mamba2):
    """The layer of log-linear Mamba-2: a mixer that maps [B, T, D] to [B, T, D]; `LogLinearMamba2Config` says what its
    options mean.
    """

    op = ops.log_linear_memory
    projection_bias = True
    convolution_bias = False

    def __init__(
        self, config: LogLinearMamba2Config, hidden_size: int, *, rngs: nnx.Rngs, init_std: float = 0.02
    ):  # fmt: skip
        super().__init__(config, hidden_size, rngs=rngs, init_std=init_std)
        heads = self.num_heads
        rates = jnp.arange(1, heads + 1, dtype=jnp.float32)
        self.a_log = parameter(jnp.log(rates), logical_axes=("heads",), weight_decay=False)
        self.level_scales = LevelScales(
            hidden_size, heads, config.num_levels, rngs=rngs, init_std=init_std, bias=True
        )

    def write(self, x: jax.Array, context: Context) -> tuple[dict[str, Any], Context]:
        """Return the arguments of `log_linear_memory`, by name: those of Mamba-2, and the weights of the levels
        [B, T, H, L]; and the context.
        """
        written, context = super().write(x, context)
        return written | {"level_scales": self.level_scales(x)}, context

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> Any:
        """Return the state before any token: memories of zeros [B, H, L, K, V] in float32 for `batch_size` rows;
        `max_length` and `dtype` do not affect it.
        """
        config = self.config
        sizes = config.num_levels, config.state_size, config.head_dim
        return ops.log_linear_state(batch_size, self.num_heads, *sizes)


METHOD = Method(
    name="log_linear_mamba2",
    paper="arXiv 2506.04761",
    op="log_linear_memory",
    gate="exp(-A Δ), each head; levels merge by the token's position",
    write="Δ Bᵀ x, to level 0",
    read="Σ_l λ_l C M_l + D x",
    state="15 times N × V a head; 3 tokens of x, B, C",
    forms=FORMS,
    config=LogLinearMamba2Config,
    module=LogLinearMamba2,
    feedforward=None,
    in_loop=True,
    note="which levels merge depends on positions: chunks do not compose by one scan",
)
