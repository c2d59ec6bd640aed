"""Comba (arXiv 2506.02475): a gated delta rule whose erasing key reads the memory ahead of its decay, and whose queries
are corrected by the key.

`M_t = α_t M_{t-1} - β_t k_tᵀ (p_t M_{t-1}) + β_t k_tᵀ v_t`. With p = α k it is Gated DeltaNet; with any p it would be
`dplr_memory` with a = -β p and b = k.

The recurrence is that of the authors' chunk code and of flash-linear-attention's kernels. The latter's
`naive_recurrent_comba` decays before p reads, which is another recurrence (Gated DeltaNet for p = k).

The layer is flash-linear-attention's (fla/layers/comba.py): p = sigmoid(d) k and q' = q - D p with d and D learned for
each head, then q', k and p are made of unit length. p and k are parallel, so that p = c k with a number c, which is 1 but for
the epsilon of the lengths (`erase_ratio`). The layer is therefore `delta_memory` with `erase="undecayed"`, the strength β c and
the value v / c, which costs half the products of `dplr_memory`. d acts nearly only through q'; the eigenvalue along k is α - β, in
(-1, 1). D starts at 1 in that layer, and at 0.01 or 0.02 in other codes (`correction`).

Its output gate is a sigmoid, where Gated DeltaNet has SiLU. At 10M it is behind Gated DeltaNet for that after 8.4 M bytes (one seed), and
ahead with equal gates (benchmarks/NOTES.md).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax import ops
from lsm_jax.mixers import checks
from lsm_jax.mixers.base import Context, Mixer, short_convolution
from lsm_jax.mixers.delta_config import GroupedDeltaRuleConfig
from lsm_jax.mixers.heads import head_size
from lsm_jax.mixers.layers import (
    Dense,
    RMSNorm,
    log_uniform_rate,
    log_uniform_step_bias,
    merge_heads,
    parameter,
    recomputed,
    split_heads,
)
from lsm_jax.mixers.method import Method
from lsm_jax.ops.convolution.backends import l2_normalize

_EPS = 1e-6  # of `l2_normalize`


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class CombaConfig(GroupedDeltaRuleConfig):
    """The config of a Comba layer: the fields of `GroupedDeltaRuleConfig`, and

    Attributes:
        correction: initial value of D, the share of p that is subtracted from a query.
    """

    correction: float = 1.0

    @classmethod
    def for_width(cls, hidden_size: int) -> CombaConfig:
        """Return the config of Comba for a model of width `hidden_size`, with the published proportions: heads of 256
        channels (smaller ones below width 768), and at most 3/4 as many key channels in all heads as the width: 2/3 at 768.
        """
        head_dim = head_size(hidden_size, 256)
        return cls(head_dim=head_dim, num_heads=max(1, 3 * hidden_size // (4 * head_dim)))

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: the projections and
        convolutions, and per head K V to decay the memory and 2 K V each to erase, to write and to read.
        """
        keys, heads = self.num_heads * self.head_dim, self.value_heads()
        values = heads * self.value_dim()
        projections = 2.0 * hidden_size * (2 * keys + 3 * values + 2 * heads)
        convolutions = 2 * checks.convolution_taps(self) * (2 * keys + values)
        return projections + convolutions + 7 * self.head_dim * values


def erase_ratio(k: jax.Array, erase_scale: jax.Array) -> jax.Array:
    """Return c [B, T, H] float32 (float64 if an input is), with which the erasing key of unit length is c times the key
    of unit length.

    Both are made by `l2_normalize`, whose epsilon is the only cause of a c other than 1: `c = s sqrt((|k|² + ε) / (s² |k|²
    + ε))` for s = sigmoid(d), from s for keys near 0 to 1.

    c is at least the square of the dtype's epsilon (1.4e-14 in float32), by which the layer can divide: s is 0 for d below
    -103. A key of that length erases less than the memory's rounding, so that the result does not depend on the bound.

    Args:
        k: [B, T, H, K] keys before the normalisation.
        erase_scale: [H], d.
    """
    wide = k.astype(jnp.promote_types(k.dtype, jnp.float32))
    squares = jnp.sum(wide * wide, axis=-1)
    scale = jax.nn.sigmoid(erase_scale)
    ratio = scale * jnp.sqrt((squares + _EPS) / (scale * scale * squares + _EPS))
    return jnp.maximum(ratio, float(jnp.finfo(ratio.dtype).eps) ** 2)


class Comba(Mixer):
    """The layer of Comba: a mixer that maps [B, T, D] to [B, T, D]; `CombaConfig` says what its options mean."""

    op = ops.delta_memory
    memory_parts = ("k_proj", "v_proj", "beta_proj", "decay_proj")
    token_parts = ("q_proj", "k_proj", "v_proj", "beta_proj", "decay_proj")

    def __init__(
        self, config: CombaConfig, hidden_size: int, *, rngs: nnx.Rngs, init_std: float = 0.02
    ):
        super().__init__(config, hidden_size)
        heads, value_dim = config.value_heads(), config.value_dim()
        keys, values = config.num_heads * config.head_dim, heads * value_dim
        into = dict(axes=("embed", "heads"), rngs=rngs, init_std=init_std)
        self.q_proj = Dense(hidden_size, keys, **into)
        self.k_proj = Dense(hidden_size, keys, **into)
        self.v_proj = Dense(hidden_size, values, **into)
        self.g_proj = Dense(hidden_size, values, **into)
        self.beta_proj = Dense(hidden_size, heads, **into)
        self.decay_proj = Dense(hidden_size, heads, **into)
        fixed = dict(logical_axes=("heads",), weight_decay=False)
        ones = jnp.ones(config.num_heads, jnp.float32)
        self.erase_scale = parameter(ones, **fixed)
        self.correction = parameter(config.correction * ones, **fixed)
        self.dt_bias = parameter(log_uniform_step_bias(rngs, heads), **fixed)
        self.a_log = parameter(log_uniform_rate(rngs, heads, low=0.0, high=16.0), **fixed)
        convolution = dict(width=config.conv_size, rngs=rngs, axis="heads")
        self.q_conv = short_convolution("q", keys, **convolution)
        self.k_conv = short_convolution("k", keys, **convolution)
        self.v_conv = short_convolution("v", values, **convolution)
        self.norm = RMSNorm(value_dim, eps=config.norm_eps)
        self.o_proj = Dense(
            values, hidden_size, axes=("heads", "embed"), rngs=rngs, init_std=init_std
        )

    def _keys(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return the keys k of tokens x [B, T, D], [B, T, H, K] before the normalisation; and the context, in which they
        are saved, so that one call computes them once.
        """
        if "keys" not in context.saved:
            k, context = self.k_conv(self.k_proj(x), context)
            context = context.add(saved={"keys": split_heads(k, self.config.num_heads)})
        return context.saved["keys"], context

    def read(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return the queries [B, T, H, K] of tokens x [B, T, D]: q - D p of unit length, with q x W_q after the short
        convolution; and the context.
        """
        q, context = self.q_conv(self.q_proj(x), context)
        k, context = self._keys(x, context)
        share = self.correction[...] * jax.nn.sigmoid(self.erase_scale[...])
        corrected = split_heads(q, self.config.num_heads) - share[:, None].astype(k.dtype) * k
        return l2_normalize(corrected), context

    def write(self, x: jax.Array, context: Context) -> tuple[dict[str, Any], Context]:
        """Return the arguments of `delta_memory` that update the memory, by name, and the context: keys k of unit length,
        the values v / c after the short convolution, and the write strength β c and the log decay of each value head
        [B, T, G]. c is the ratio of the erasing key to the key (`erase_ratio`).
        """
        k, context = self._keys(x, context)
        v, context = self.v_conv(self.v_proj(x), context)

        @recomputed
        def update(k, erase_scale, v, beta, gate, bias, a_log):
            ratio = erase_ratio(k, erase_scale)
            ratio = jnp.repeat(ratio, v.shape[2] // k.shape[2], axis=2)
            return dict(
                k=l2_normalize(k),
                v=(v / ratio[..., None]).astype(v.dtype),
                beta=jax.nn.sigmoid(beta) * ratio,
                log_decay=-jnp.exp(a_log) * jax.nn.softplus(gate + bias),
            )

        written = update(
            k,
            self.erase_scale[...],
            split_heads(v, self.config.value_heads()),
            self.beta_proj(x, dtype=jnp.float32),
            self.decay_proj(x, dtype=jnp.float32),
            self.dt_bias[...],
            self.a_log[...],
        )
        return written, context

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of `delta_memory` that do not depend on the input; keys read the memory ahead of its
        decay.
        """
        return dict(super().options(), erase="undecayed")

    def finish(self, o: jax.Array, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return (y, context), with the layer's output y [B, T, D] from the memory's output o [B, T, G, V]: normalise each
        head, multiply by sigmoid(x W_g), and project.
        """

        gate = self.g_proj(x, dtype=jnp.float32)
        gate = split_heads(gate, self.config.value_heads())
        return self.o_proj(merge_heads(self.norm(o, gate, activation="sigmoid"))), context

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> ops.DeltaState:
        """Return the state before any token: a memory of zeros [B, G, K, V] in float32 for `batch_size` rows;
        `max_length` and `dtype` do not affect it.
        """
        config = self.config
        return ops.delta_state(
            batch_size, config.value_heads(), config.head_dim, config.value_dim()
        )


METHOD = Method(
    name="comba",
    paper="arXiv 2506.02475",
    op="delta_memory",
    gate="α - β kᵀ p, α each head",
    write="β kᵀ v",
    read="q M, q corrected by p",
    state="K × V a head; 3 tokens of q, k, v",
    config=CombaConfig,
    module=Comba,
)
