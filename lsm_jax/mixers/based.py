"""Based (arXiv 2402.18668): linear attention whose feature map is the second-order Taylor expansion of the exponential.

`φ(x) = [1, x / d^¼, x_i x_j / √d (i < j), x_i² / √(2 d)]`, so that φ(q) φ(k)ᵀ = 1 + s + s² / 2 with s = q kᵀ / √d, which
is at least ½; the output is divided by φ(q) z + ε, with z the sum of features of keys.

The layer is flash-linear-attention's (fla/layers/based.py), without convolution, gate or norm; the paper's models alternate
it with sliding windows and convolutions. ε is 1e-6, as in its kernels (its reference has 1e-12).
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
from lsm_jax.mixers.layers import Dense, merge_heads, split_heads
from lsm_jax.mixers.method import Method
from lsm_jax.mixers.op_config import RecurrentConfig


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class BasedConfig(RecurrentConfig):
    """The config of a Based layer.

    Attributes:
        num_heads: number of heads.
        feature_dim: query and key channels d of a head ahead of φ; φ has 1 + d + d (d + 1) / 2 features.
        normalizer_eps: ε of the normaliser.
    """

    num_heads: int = 12
    feature_dim: int = 16
    normalizer_eps: float = 1e-6

    @classmethod
    def for_width(cls, hidden_size: int) -> BasedConfig:
        """Return the config of Based for a model of width `hidden_size`: 12 heads of 16 channels, as published, or 16 heads
        where 12 do not divide the width; fewer heads below width 256, fewer channels below width 128.
        """
        heads = 12 if hidden_size % 12 == 0 else 16
        return cls(num_heads=min(heads, hidden_size // 16), feature_dim=min(16, hidden_size // 8))

    def num_features(self) -> int:
        """Return the number of features of φ for the d channels of a key: 1 + d + d (d + 1) / 2."""
        return 1 + self.feature_dim * (self.feature_dim + 3) // 2

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of Based is not accepted, or does not fit a model of width
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


def taylor_features(x: jax.Array) -> jax.Array:
    """Return φ(x) [..., 1 + d + d (d + 1) / 2] of queries or keys x [..., d], in float32 (float64 for float64)."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    size = x.shape[-1]
    first, second = np.triu_indices(size)
    weight = np.where(first == second, (2 * size) ** -0.5, size**-0.5).astype(x.dtype)
    products = x[..., first] * x[..., second] * weight
    return jnp.concatenate([jnp.ones_like(x[..., :1]), x * size**-0.25, products], axis=-1)


class Based(Mixer):
    """The layer of Based: a mixer that maps [B, T, D] to [B, T, D]; `BasedConfig` says what its options mean."""

    op = ops.linear_memory
    memory_parts = ("k_proj", "v_proj")
    token_parts = ("q_proj", "k_proj", "v_proj")

    def __init__(
        self, config: BasedConfig, hidden_size: int, *, rngs: nnx.Rngs, init_std: float = 0.02
    ):
        super().__init__(config, hidden_size)
        keys = config.num_heads * config.feature_dim
        into = dict(axes=("embed", "heads"), rngs=rngs, init_std=init_std)
        self.q_proj = Dense(hidden_size, keys, **into)
        self.k_proj = Dense(hidden_size, keys, **into)
        self.v_proj = Dense(hidden_size, hidden_size, **into)
        self.o_proj = Dense(
            hidden_size, hidden_size, axes=("heads", "embed"), rngs=rngs, init_std=init_std
        )

    def _features(self, x: jax.Array) -> jax.Array:
        """Return φ of x, projected to queries or keys and cut into heads, in x's dtype."""
        return taylor_features(split_heads(x, self.config.num_heads)).astype(x.dtype)

    def read(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return the queries φ(x W_q) [B, T, H, K] of tokens x [B, T, D], and the context."""
        return self._features(self.q_proj(x)), context

    def write(self, x: jax.Array, context: Context) -> tuple[dict[str, Any], Context]:
        """Return the arguments of `linear_memory` that update the memory, by name, and the context: keys φ(x W_k) [B,
        T, H, K], and values x W_v [B, T, H, V].
        """
        v = split_heads(self.v_proj(x), self.config.num_heads)
        return dict(k=self._features(self.k_proj(x)), v=v), context

    def finish(self, o: jax.Array, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return (y, context), with the layer's output y [B, T, D] from the memory's output o [B, T, H, V]: project the
        heads together.
        """
        return self.o_proj(merge_heads(o)), context

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of `linear_memory` that do not depend on the input; the scale is 1, since the
        features φ contain one.
        """
        return dict(super().options(), scale=1.0, normalize=self.config.normalizer_eps)

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> ops.LinearState:
        """Return the state before any token: a memory of zeros [B, H, K, V] for K features, and a zero normaliser, for
        `batch_size` rows; `max_length` and `dtype` do not affect it.
        """
        config = self.config
        value_dim = self.hidden_size // config.num_heads
        return ops.linear_state(
            batch_size, config.num_heads, config.num_features(), value_dim, normalize=True
        )


METHOD = Method(
    name="based",
    paper="arXiv 2402.18668",
    op="linear_memory",
    gate="1",
    write="φ(k)ᵀ v, φ the Taylor expansion of exp to second order",
    read="φ(q) M over φ(q) z",
    state="(V + 1) (1 + d + d (d + 1) / 2) a head for d channels",
    config=BasedConfig,
    module=Based,
)
