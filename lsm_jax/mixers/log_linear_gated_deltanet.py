"""Log-linear Gated DeltaNet (arXiv 2506.04761): Gated DeltaNet with a memory for each power of two of tokens into the
past, which each head reads with weights of its own.

The weights are λ = softplus(L ⊙ x W_λ), one for each level and head, with L learned from 1 on. The layer is that of the
authors' code and of jax-linear-attention; flash-linear-attention has no log-linear Gated DeltaNet. The authors divide λ
by the queries' scale, so that the two cancel: the scale is 1. Their code has a second partition of the past, in levels of half the
size ("strong"), that none of their models uses, and other functions than the softplus for λ; they are not here. Packed rows, which
neither their code nor flash-linear-attention's accepts, begin at position 0 with every document.
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
from lsm_jax.mixers.gated_deltanet import GatedDeltaNet, GatedDeltaNetConfig
from lsm_jax.mixers.layers import Dense, parameter, split_heads
from lsm_jax.mixers.method import Method

FORMS = ("recurrent", "chunk")


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class LogLinearGatedDeltaNetConfig(GatedDeltaNetConfig):
    """The config of a layer of log-linear Gated DeltaNet: the fields of Gated DeltaNet, and

    Attributes:
        num_levels: L, the memories of a head; 15 are exact for documents of up to 16,384 tokens, and the last contains all
            tokens further back.
    """

    num_levels: int = 15

    @classmethod
    def for_width(cls, hidden_size: int) -> LogLinearGatedDeltaNetConfig:
        """Return the config of log-linear Gated DeltaNet for a model of width `hidden_size`, with the published
        proportions: heads of 192 channels (smaller ones below width 768), and 3/4 as many key channels as the width.
        """
        head_dim = min(192, hidden_size // 4)
        return cls(head_dim=head_dim, num_heads=max(1, 3 * hidden_size // (4 * head_dim)))

    def validate_fields(self, forms: tuple[str, ...] = FORMS) -> None:
        """Raise ValueError unless every field has the type of its annotation and is accepted."""
        super().validate_fields(forms)
        checks.positive(self, num_levels=self.num_levels)

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: those of Gated DeltaNet, with 5 K V a head
        for each level beyond the first that a row of `seq_len` tokens fills, and the projection to the levels' weights.
        """
        return super().flops_per_token(hidden_size, seq_len) + level_flops(
            self.num_levels, seq_len, hidden_size, self.value_heads(), self.head_dim * self.value_dim()
        )  # fmt: skip


def level_flops(levels: int, seq_len: int, hidden_size: int, heads: int, memory: int) -> float:
    """Return the forward operations per token that levels add: a projection, and 5 for each number of the memories
    beyond the first that a row fills, of which each has `memory` numbers.
    """
    filled = min(levels, (seq_len - 1).bit_length() + 1)
    return heads * (2.0 * hidden_size * levels + 5 * (filled - 1) * memory)


class LevelScales(nnx.Module):
    """The weights with which heads read the memories of levels: softplus(L ⊙ x W)."""

    def __init__(
        self, hidden_size: int, heads: int, levels: int, *, rngs: nnx.Rngs, init_std: float, bias: bool = False
    ):  # fmt: skip
        into = dict(axes=("embed", "heads"), rngs=rngs, init_std=init_std)
        self.heads = heads
        self.proj = Dense(hidden_size, heads * levels, bias=bias, **into)
        ones = jnp.ones((heads, levels), jnp.float32)
        self.gain = parameter(ones, ("heads", None), weight_decay=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the weights [B, T, heads, levels] of tokens x [B, T, D], float32."""
        y = split_heads(self.proj(x, dtype=jnp.float32), self.heads)
        return jax.nn.softplus(self.gain[...] * y)


class LogLinearGatedDeltaNet(GatedDeltaNet):
    """The layer of log-linear Gated DeltaNet: a mixer that maps [B, T, D] to [B, T, D]; `LogLinearGatedDeltaNetConfig`
    says what its options mean.
    """

    op = ops.log_linear_memory

    def __init__(
        self,
        config: LogLinearGatedDeltaNetConfig,
        hidden_size: int,
        *,
        rngs: nnx.Rngs,
        init_std: float = 0.02,
    ):
        super().__init__(config, hidden_size, rngs=rngs, init_std=init_std)
        heads, levels = config.value_heads(), config.num_levels
        self.level_scales = LevelScales(hidden_size, heads, levels, rngs=rngs, init_std=init_std)

    def write(self, x: jax.Array, context: Context) -> tuple[dict[str, Any], Context]:
        """Return the arguments of `log_linear_memory`, by name: those of Gated DeltaNet, and the weights of the levels
        [B, T, G, L]; and the context.
        """
        written, context = super().write(x, context)
        return written | {"level_scales": self.level_scales(x)}, context

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of `log_linear_memory` that do not depend on the input; the scale is 1."""
        return dict(super().options(), scale=1.0)

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> Any:
        """Return the state before any token: memories of zeros [B, G, L, K, V] in float32 for `batch_size` rows;
        `max_length` and `dtype` do not affect it.
        """
        config = self.config
        sizes = config.num_levels, config.head_dim, config.value_dim()
        return ops.log_linear_state(batch_size, config.value_heads(), *sizes)


METHOD = Method(
    name="log_linear_gated_deltanet",
    paper="arXiv 2506.04761",
    op="log_linear_memory",
    gate="(I - β kᵀ k) α, α each head; levels merge by the token's position",
    write="β kᵀ v, to level 0",
    read="Σ_l λ_l q M_l",
    state="15 times K × V a head; 3 tokens of q, k, v",
    forms=FORMS,
    config=LogLinearGatedDeltaNetConfig,
    module=LogLinearGatedDeltaNet,
    in_loop=True,
    note="which levels merge depends on positions: chunks do not compose by one scan",
)
