"""ReBased (arXiv 2402.10644): `M_t = M_{t-1} + φ(k_t)ᵀ v_t`, `o_t = φ(q_t) M_t / (φ(q_t) z_t + ε)`, φ a
learned quadratic.

`φ(q) φ(k) = (q' k')² / F` for `x' = γ ⊙ layernorm(x) + β` of F channels: as features the F squares and, since
the products x'_i x'_j and x'_j x'_i are one, the F (F - 1) / 2 products weighted by sqrt 2.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lsm_jax import ops
from lsm_jax.mixers import checks
from lsm_jax.mixers.base import Context, Mixer
from lsm_jax.mixers.layers import Dense, merge_heads, parameter, rms_normalize, split_heads
from lsm_jax.mixers.method import Method
from lsm_jax.mixers.op_config import RecurrentConfig

_LAYER_NORM_EPS = 1e-5


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class RebasedConfig(RecurrentConfig):
    """The config of a ReBased layer: linear attention whose feature map is a learned quadratic function.

    Attributes:
        num_heads: number of heads.
        feature_dim: query and key channels of a head ahead of φ (F); φ has F (F + 1) / 2 features.
        normalizer_eps: ε of the normaliser.
    """

    num_heads: int = 16
    feature_dim: int = 16
    normalizer_eps: float = 1e-5

    @classmethod
    def for_width(cls, hidden_size: int) -> RebasedConfig:
        """Return the config of ReBased for a model of width `hidden_size`, with the customary proportions: 16 heads of
        16 channels; fewer heads below width 256, 8 channels at 32.
        """
        return cls(num_heads=min(16, hidden_size // 16), feature_dim=min(16, hidden_size // 4))

    def num_features(self) -> int:
        """Return the number of features F (F + 1) / 2 of ReBased's quadratic map φ for the F channels of a key: all
        squares and products of two.
        """
        return self.feature_dim * (self.feature_dim + 1) // 2

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of ReBased is not accepted, or does not fit a model of width
        `hidden_size`.
        """
        self.validate_fields()
        checks.divides(self, "num_heads", self.num_heads, "hidden_size", hidden_size)
        checks.positive(self, feature_dim=self.feature_dim, normalizer_eps=self.normalizer_eps)

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: the projections and features,
        and per head 2 K V each to write and to read, and 4 K for the normaliser.
        """
        features = self.num_features()
        projections = 4.0 * hidden_size * (self.num_heads * self.feature_dim + hidden_size)
        return projections + 4.0 * features * hidden_size + 6.0 * self.num_heads * features


class QuadraticFeatures(nnx.Module):
    """ReBased's feature map φ for queries or for keys: a layer norm with learned scale γ and bias β, then all squares
    and products of two channels.
    """

    def __init__(self, size: int):
        self.gamma = parameter(jnp.ones(size, jnp.float32), ("norm",), weight_decay=False)
        self.beta = parameter(jnp.zeros(size, jnp.float32), ("norm",), weight_decay=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return ReBased's quadratic features [..., F (F + 1) / 2] of queries or keys x [..., F], in float32
        (float64 for float64).
        """
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = rms_normalize(wide, _LAYER_NORM_EPS) * self.gamma[...] + self.beta[...]
        size = x.shape[-1]
        first, second = np.triu_indices(size)
        weight = np.where(first == second, size**-0.5, (2 / size) ** 0.5)
        return wide[..., first] * wide[..., second] * weight.astype(wide.dtype)


class Rebased(Mixer):
    """The layer of ReBased: a mixer that maps [B, T, D] to [B, T, D]; `RebasedConfig` says what its options mean."""

    op = ops.linear_memory
    memory_parts = ("k_proj", "v_proj")
    token_parts = ("q_proj", "k_proj", "v_proj")

    def __init__(
        self, config: RebasedConfig, hidden_size: int, *, rngs: nnx.Rngs, init_std: float = 0.02
    ):
        super().__init__(config, hidden_size)
        keys = config.num_heads * config.feature_dim
        into = dict(axes=("embed", "heads"), rngs=rngs, init_std=init_std)
        self.q_proj = Dense(hidden_size, keys, **into)
        self.k_proj = Dense(hidden_size, keys, **into)
        self.v_proj = Dense(hidden_size, hidden_size, **into)
        self.q_features = QuadraticFeatures(config.feature_dim)
        self.k_features = QuadraticFeatures(config.feature_dim)
        self.o_proj = Dense(
            hidden_size, hidden_size, axes=("heads", "embed"), rngs=rngs, init_std=init_std
        )

    def read(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return the queries [B, T, H, K] of tokens x [B, T, D], φ(x W_q) with the learned quadratic features φ, and
        the context.
        """
        return self.q_features(split_heads(self.q_proj(x), self.config.num_heads)), context

    def write(self, x: jax.Array, context: Context) -> tuple[dict[str, Any], Context]:
        """Return the arguments of `linear_memory` that update the memory, by name, and the context: keys φ(x W_k) [B,
        T, H, K] with the learned quadratic features φ, and values x W_v [B, T, H, V].
        """
        heads = self.config.num_heads
        k = self.k_features(split_heads(self.k_proj(x), heads))
        return dict(k=k, v=split_heads(self.v_proj(x), heads)), context

    def finish(self, o: jax.Array, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return (y, context), with the layer's output y [B, T, D] from the memory's output o [B, T, H, V]: project the heads
        together. ReBased has a normaliser instead of a norm.
        """
        return self.o_proj(merge_heads(o)), context

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of `linear_memory` that do not depend on the input.

        The scale is 1, since the features φ contain one.
        """
        return dict(super().options(), scale=1.0, normalize=self.config.normalizer_eps)

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> ops.LinearState:
        """Return the state before any token: a memory of zeros [B, H, K, V] for K quadratic features, and a zero
        normaliser, for `batch_size` rows; `max_length` and `dtype` do not affect it.
        """
        config = self.config
        value_dim = self.hidden_size // config.num_heads
        return ops.linear_state(
            batch_size, config.num_heads, config.num_features(), value_dim, normalize=True
        )


METHOD = Method(
    name="rebased",
    paper="arXiv 2402.10644",
    op="linear_memory",
    gate="1",
    write="φ(k)ᵀ v, φ a learned quadratic",
    read="φ(q) M over φ(q) z",
    state="(V + 1) F (F + 1) / 2 a head for F channels",
    config=RebasedConfig,
    module=Rebased,
    note="where a query meets no key its weights vanish like ε, and float32 rounding shows",
)
