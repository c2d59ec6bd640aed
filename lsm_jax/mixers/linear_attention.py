"""Basic linear attention (arXiv 2006.16236): `M_t = M_{t-1} + φ(k_t)ᵀ v_t`, `o_t = φ(q_t) M_t`, optionally
divided by `φ(q_t) z_t`, z the sum of φ(k).

As in Linear-MoE (arXiv 2503.05447) the normaliser is off by default and a norm over each head's output takes
its place.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import nnx

from lsm_jax import ops
from lsm_jax.mixers import checks, feature_maps
from lsm_jax.mixers.base import Context, Mixer
from lsm_jax.mixers.layers import Dense, RMSNorm, merge_heads, split_heads
from lsm_jax.mixers.method import Method
from lsm_jax.mixers.op_config import RecurrentConfig

_NORMALIZER_EPS = 1e-10


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class LinearAttentionConfig(RecurrentConfig):
    """The config of a layer of basic linear attention: a feature map of queries and keys, and no decay.

    Attributes:
        num_heads: number of heads.
        expand_k: number of key channels of all heads, divided by hidden_size.
        expand_v: number of value channels of all heads, divided by hidden_size.
        feature_map: φ on queries and keys: "identity", "elu" (elu + 1), "relu", "silu", "dpfp", or a learned one, for queries
            and keys apart: "t2r", "hedgehog" or "elementwise_product"; `FeatureMap` says what they are.
        shared_feature_map: whether all heads have the same matrices of a learned φ, as in flash-linear-attention.
        sum_normalize_q: divide φ(q) by the sum of its features; needs a non-negative φ.
        sum_normalize_k: the same of φ(k).
        normalize: divide by the query's product with the sum of keys; needs a non-negative φ.
        output_gate: multiply the normed output by silu(x W).
        qkv_bias: whether the projections to queries, keys, values and the output gate have biases, as in Linear-MoE's models of
            Qwen2's layers (arXiv 2503.05447, its code).
        norm_eps: epsilon of the norm over each head's output.
    """

    num_heads: int = 4
    expand_k: float = 1.0
    expand_v: float = 1.0
    feature_map: str = "elu"
    shared_feature_map: bool = False
    sum_normalize_q: bool = False
    sum_normalize_k: bool = False
    normalize: bool = False
    output_gate: bool = False
    qkv_bias: bool = False
    norm_eps: float = 1e-5

    @classmethod
    def for_width(cls, hidden_size: int) -> LinearAttentionConfig:
        """Return the config of linear attention for a model of width `hidden_size`, with the customary proportions:
        heads of 128 channels.
        """
        return cls(num_heads=hidden_size // min(128, hidden_size // 4))

    def head_dims(self, hidden_size: int) -> tuple[int, int]:
        """Return the numbers of key channels and of value channels of one head of linear attention in a model of width
        `hidden_size`.
        """
        return (
            checks.expanded(self, "expand_k", self.expand_k, hidden_size, self.num_heads),
            checks.expanded(self, "expand_v", self.expand_v, hidden_size, self.num_heads),
        )

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of linear attention is not accepted, or does not fit a model of
        width `hidden_size`.
        """
        self.validate_fields()
        self.head_dims(hidden_size)
        accepted = (*feature_maps.FIXED, *feature_maps.LEARNED)
        checks.one_of(self, "feature_map", self.feature_map, accepted)
        for name in ("normalize", "sum_normalize_q", "sum_normalize_k"):
            if getattr(self, name) and self.feature_map not in feature_maps.NON_NEGATIVE:
                raise ValueError(
                    f"LinearAttentionConfig.{name}=True needs feature_map in {feature_maps.NON_NEGATIVE}, whose sums "
                    f"cannot vanish by cancelling; given {self.feature_map!r}"
                )
        checks.positive(self, norm_eps=self.norm_eps)

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: the projections and learned
        feature maps, and per head 2 K V each to write and to read.
        """
        k, v = self.head_dims(hidden_size)
        projections = 2 * k + (3 if self.output_gate else 2) * v
        learned = 4 * k * k * feature_maps.LEARNED.get(self.feature_map, 0)
        features = feature_maps.num_features(self.feature_map, k)
        memory = 4 * features * v + (4 * features if self.normalize else 0)
        return self.num_heads * (2.0 * hidden_size * projections + learned + memory)


class LinearAttention(Mixer):
    """The layer of basic linear attention: a mixer that maps [B, T, D] to [B, T, D]; `LinearAttentionConfig` says what
    its options mean.
    """

    op = ops.linear_memory
    memory_parts = ("k_proj", "v_proj")
    token_parts = ("q_proj", "k_proj", "v_proj")

    def __init__(
        self,
        config: LinearAttentionConfig,
        hidden_size: int,
        *,
        rngs: nnx.Rngs,
        init_std: float = 0.02,
    ):
        super().__init__(config, hidden_size)
        self.key_dim, self.value_dim = config.head_dims(hidden_size)
        keys, values = config.num_heads * self.key_dim, config.num_heads * self.value_dim
        into = dict(axes=("embed", "heads"), rngs=rngs, init_std=init_std, bias=config.qkv_bias)
        self.q_proj = Dense(hidden_size, keys, **into)
        self.k_proj = Dense(hidden_size, keys, **into)
        self.v_proj = Dense(hidden_size, values, **into)
        self.g_proj = Dense(hidden_size, values, **into) if config.output_gate else None
        maps = dict(rngs=rngs, init_std=init_std)
        maps_of_heads = 1 if config.shared_feature_map else config.num_heads
        shape = (config.feature_map, maps_of_heads, self.key_dim)
        self.q_features = feature_maps.FeatureMap(*shape, **maps)
        self.k_features = feature_maps.FeatureMap(*shape, **maps)
        self.norm = RMSNorm(self.value_dim, eps=config.norm_eps)
        self.o_proj = Dense(
            values, hidden_size, axes=("heads", "embed"), rngs=rngs, init_std=init_std
        )

    def read(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return the queries [B, T, H, K] of tokens x [B, T, D], φ(x W_q) with the feature map φ of the config, and the
        context. They are divided by their sum if the config says so.
        """
        q = self.q_features(split_heads(self.q_proj(x), self.config.num_heads))
        return feature_maps.normalize_sum(q) if self.config.sum_normalize_q else q, context

    def write(self, x: jax.Array, context: Context) -> tuple[dict[str, Any], Context]:
        """Return the arguments of `linear_memory` that update the memory, by name, and the context: keys φ(x W_k) [B,
        T, H, K] with the feature map φ of the config, and values x W_v [B, T, H, V].
        """
        k = self.k_features(split_heads(self.k_proj(x), self.config.num_heads))
        k = feature_maps.normalize_sum(k) if self.config.sum_normalize_k else k
        return dict(k=k, v=split_heads(self.v_proj(x), self.config.num_heads)), context

    def finish(self, o: jax.Array, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return (y, context), with the layer's output y [B, T, D] from the memory's output o [B, T, H, V]: normalise each
        head, multiply by a gate of x if the config has one, and project.
        """
        gate = None
        if self.g_proj is not None:
            gate = split_heads(self.g_proj(x), self.config.num_heads)
        return self.o_proj(merge_heads(self.norm(o, gate))), context

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of `linear_memory` that do not depend on the input, with the epsilon of the
        normaliser, or None without one.
        """
        return dict(super().options(), normalize=_NORMALIZER_EPS if self.config.normalize else None)

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> ops.LinearState:
        """Return the state before any token: a memory of zeros [B, H, K, V] for K features, and a zero normaliser if
        the config has one, for `batch_size` rows; `max_length` and `dtype` do not affect it.
        """
        return ops.linear_state(
            batch_size,
            self.config.num_heads,
            feature_maps.num_features(self.config.feature_map, self.key_dim),
            self.value_dim,
            normalize=self.config.normalize,
        )


METHOD = Method(
    name="linear_attention",
    paper="arXiv 2006.16236",
    op="linear_memory",
    gate="1",
    write="φ(k)ᵀ v",
    read="φ(q) M, optionally over φ(q) z",
    state="K × V a head for K features; K more with the normaliser",
    config=LinearAttentionConfig,
    module=LinearAttention,
)
