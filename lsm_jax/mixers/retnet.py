"""RetNet's retention (arXiv 2307.08621): `M_t = γ_h M_{t-1} + k_tᵀ v_t` with `γ_h = 1 - 2^(-5-h)` and rotated
q and k.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax import ops
from lsm_jax.mixers import checks, feature_maps
from lsm_jax.mixers.base import Context, Mixer
from lsm_jax.mixers.heads import head_size
from lsm_jax.mixers.layers import Dense, RMSNorm, merge_heads, rotate, split_heads
from lsm_jax.mixers.method import Method
from lsm_jax.mixers.op_config import RecurrentConfig

FEATURE_MAPS = ("identity", "silu", "elu")


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class RetNetConfig(RecurrentConfig):
    """The config of a layer of RetNet's retention: linear attention with rotated keys and a constant decay for each
    head.

    Attributes:
        num_heads: heads; head h decays by 1 - 2^(-5-h) a token.
        expand_k: number of key channels of all heads, divided by hidden_size.
        expand_v: number of value channels of all heads, divided by hidden_size.
        rotary: whether q and k are rotated; Linear-MoE (arXiv 2503.05447, its code) does not.
        rope_base: base of the rotary embedding of q and k.
        feature_map: φ on queries and keys: "identity", "silu" or "elu" (elu + 1); Linear-MoE has "silu".
        qkv_bias: whether the projections to queries, keys, values and the output gate have biases, as in Linear-MoE.
        norm_eps: epsilon of the norm over each head's output.
    """

    num_heads: int = 8
    expand_k: float = 1.0
    expand_v: float = 2.0
    rotary: bool = True
    rope_base: float = 10000.0
    feature_map: str = "identity"
    qkv_bias: bool = False
    norm_eps: float = 1e-5

    @classmethod
    def for_width(cls, hidden_size: int) -> RetNetConfig:
        """Return the config of RetNet for a model of width `hidden_size`, with the published proportions: key heads of
        256 channels (smaller ones below width 768), and value heads twice as wide.
        """
        return cls(num_heads=hidden_size // head_size(hidden_size, 256))

    def head_dims(self, hidden_size: int) -> tuple[int, int]:
        """Return the numbers of key channels and of value channels of one head of RetNet in a model of width
        `hidden_size`.
        """
        return (
            checks.expanded(self, "expand_k", self.expand_k, hidden_size, self.num_heads),
            checks.expanded(self, "expand_v", self.expand_v, hidden_size, self.num_heads),
        )

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of RetNet is not accepted, or does not fit a model of width
        `hidden_size`.
        """
        self.validate_fields()
        key_dim, _ = self.head_dims(hidden_size)
        if self.rotary and key_dim % 2:
            raise ValueError(
                f"RetNetConfig.num_heads={self.num_heads} gives key heads of {key_dim} channels; "
                "rotation needs an even number"
            )
        checks.one_of(self, "feature_map", self.feature_map, FEATURE_MAPS)
        checks.positive(self, rope_base=self.rope_base, norm_eps=self.norm_eps)

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: the projections, and per head K
        V to decay the memory and 2 K V each to write and to read.
        """
        k, v = self.head_dims(hidden_size)
        return self.num_heads * (2.0 * hidden_size * (2 * k + 3 * v) + 5 * k * v)


class RetNet(Mixer):
    """The layer of RetNet's retention: a mixer that maps [B, T, D] to [B, T, D]; `RetNetConfig` says what its options
    mean.
    """

    op = ops.linear_memory
    uses_positions = True
    memory_parts = ("k_proj", "v_proj")
    token_parts = ("q_proj", "k_proj", "v_proj")

    def __init__(
        self, config: RetNetConfig, hidden_size: int, *, rngs: nnx.Rngs, init_std: float = 0.02
    ):
        super().__init__(config, hidden_size)
        self.key_dim, self.value_dim = config.head_dims(hidden_size)
        keys, values = config.num_heads * self.key_dim, config.num_heads * self.value_dim
        self.uses_positions = config.rotary
        into = dict(axes=("embed", "heads"), rngs=rngs, init_std=init_std, bias=config.qkv_bias)
        self.q_proj = Dense(hidden_size, keys, **into)
        self.k_proj = Dense(hidden_size, keys, **into)
        self.v_proj = Dense(hidden_size, values, **into)
        self.g_proj = Dense(hidden_size, values, **into)
        self.norm = RMSNorm(self.value_dim, eps=config.norm_eps)
        self.o_proj = Dense(
            values, hidden_size, axes=("heads", "embed"), rngs=rngs, init_std=init_std
        )

    def _features(self, x: jax.Array, context: Context) -> jax.Array:
        """Cut x, projected to queries or keys, into heads [B, T, H, K], apply the feature map φ, and rotate them by the
        tokens' positions if the config has a rotation.
        """
        heads = feature_maps.FIXED[self.config.feature_map](split_heads(x, self.config.num_heads))
        if not self.config.rotary:
            return heads
        return rotate(heads, context.positions, base=self.config.rope_base)

    def read(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return the queries [B, T, H, K] of tokens x [B, T, D], φ(x W_q), rotated by the tokens' positions if the
        config has a rotation, and the context.
        """
        return self._features(self.q_proj(x), context), context

    def write(self, x: jax.Array, context: Context) -> tuple[dict[str, Any], Context]:
        """Return the arguments of `linear_memory` that update the memory, by name, and the context: keys, rotated if
        the config has a rotation, values, and the log decay of each head [H], constant in time.
        """
        heads = jnp.arange(self.config.num_heads, dtype=jnp.float32)
        return dict(
            k=self._features(self.k_proj(x), context),
            v=split_heads(self.v_proj(x), self.config.num_heads),
            log_decay=jnp.log1p(-jnp.exp2(-5 - heads)),
        ), context

    def finish(self, o: jax.Array, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return (y, context), with the layer's output y [B, T, D] from the memory's output o [B, T, H, V]: normalise each
        head, multiply by silu(x W_g), and project.
        """
        gate = split_heads(self.g_proj(x), self.config.num_heads)
        return self.o_proj(merge_heads(self.norm(o, gate))), context

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> ops.LinearState:
        """Return the state before any token: a memory of zeros [B, H, K, V] in float32 for `batch_size` rows;
        `max_length` and `dtype` do not affect it.
        """
        return ops.linear_state(batch_size, self.config.num_heads, self.key_dim, self.value_dim)


METHOD = Method(
    name="retnet",
    paper="arXiv 2307.08621",
    op="linear_memory",
    gate="1 - 2^(-5-h), constant for each head",
    write="kᵀ v, k rotated",
    read="q M, q rotated",
    state="K × V a head",
    config=RetNetConfig,
    module=RetNet,
)
