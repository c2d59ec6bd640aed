"""Momentum DeltaNet (arXiv 2605.05838): Gated DeltaNet whose gradient steps have momentum.

`N_t = μ_t N_{t-1} - η_t kᵀ (v_t - α_t k_t M_{t-1})`, `M_t = α_t M_{t-1} - β_t N_t`, with keys of unit length.

The layer is flash-linear-attention's (fla/layers/momentum_deltanet.py): η = 1 + tanh(x W_e / sqrt(D)); an angle
θ = arctan(η e^c), c learned for each head, bounds β = sin²θ sigmoid(x W_b) and α = cos²θ exp(-rate softplus(x W_a + δ)); log μ
is a gate like that of α without the bound, and at least -2. Queries lose a share of the key, q - e^d k, ahead of unit length.
There, packed documents have no momentum; here they have. Its chunk form adds 1e-6 to β and is another recurrence where β is small;
here all forms are the recurrence.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax import ops
from lsm_jax.mixers import checks
from lsm_jax.mixers.base import Context, Mixer, short_convolution
from lsm_jax.mixers.delta_config import DeltaRuleConfig
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


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class MomentumDeltaNetConfig(DeltaRuleConfig):
    """The config of a layer of momentum DeltaNet: the fields of `DeltaRuleConfig`, and

    Attributes:
        least_log_momentum: the smallest value of log μ, below 0.
    """

    num_heads: int = 4
    least_log_momentum: float = -2.0

    @classmethod
    def for_width(cls, hidden_size: int) -> MomentumDeltaNetConfig:
        """Return the config of momentum DeltaNet for a model of width `hidden_size`, with the published proportions: heads
        of 256 channels (smaller ones below width 768), and as many key channels in all heads as the width.
        """
        head_dim = head_size(hidden_size, 256)
        return cls(head_dim=head_dim, num_heads=max(1, hidden_size // head_dim))

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of momentum DeltaNet is not accepted, or does not fit a model of
        width `hidden_size`.
        """
        super().validate(hidden_size)
        if self.least_log_momentum >= 0:
            raise ValueError(
                f"MomentumDeltaNetConfig.least_log_momentum={self.least_log_momentum}: accepted are negative numbers"
            )

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: the projections and convolutions, and per
        head K V each to decay memory and momentum, and 2 K V each to erase, to write, to step and to read.
        """
        keys, values = (self.num_heads * d for d in (self.head_dim, self.value_dim()))
        projections = 2.0 * hidden_size * (2 * keys + 3 * values + 4 * self.num_heads)
        convolutions = 2 * checks.convolution_taps(self) * (2 * keys + values)
        return projections + convolutions + 10 * self.head_dim * values


class MomentumDeltaNet(Mixer):
    """The layer of momentum DeltaNet: a mixer that maps [B, T, D] to [B, T, D]; `MomentumDeltaNetConfig` says what its
    options mean.
    """

    op = ops.momentum_memory
    memory_parts = ("k_proj", "v_proj", "beta_proj", "decay_proj", "momentum_proj", "eta_proj")
    token_parts = ("q_proj", *memory_parts)

    def __init__(
        self,
        config: MomentumDeltaNetConfig,
        hidden_size: int,
        *,
        rngs: nnx.Rngs,
        init_std: float = 0.02,
    ):
        super().__init__(config, hidden_size)
        heads, value_dim = config.num_heads, config.value_dim()
        keys, values = heads * config.head_dim, heads * value_dim
        into = dict(axes=("embed", "heads"), rngs=rngs, init_std=init_std)
        self.q_proj = Dense(hidden_size, keys, **into)
        self.k_proj = Dense(hidden_size, keys, **into)
        self.v_proj = Dense(hidden_size, values, **into)
        self.g_proj = Dense(hidden_size, values, **into)
        self.beta_proj = Dense(hidden_size, heads, **into)
        self.decay_proj = Dense(hidden_size, heads, **into)
        self.momentum_proj = Dense(hidden_size, heads, **into)
        self.eta_proj = Dense(hidden_size, heads, **into)
        fixed = dict(logical_axes=("heads",), weight_decay=False)
        bias = log_uniform_step_bias(rngs, heads)
        self.dt_bias, self.momentum_bias = parameter(bias, **fixed), parameter(bias, **fixed)
        self.a_log = parameter(log_uniform_rate(rngs, heads, low=0.0, high=16.0), **fixed)
        self.momentum_log = parameter(log_uniform_rate(rngs, heads, low=0.0, high=16.0), **fixed)
        self.angle_log = parameter(log_uniform_rate(rngs, heads, low=0.0, high=4.0), **fixed)
        self.correction_log = parameter(log_uniform_rate(rngs, heads, low=0.0, high=1.0), **fixed)
        convolution = dict(width=config.conv_size, rngs=rngs, axis="heads")
        self.q_conv = short_convolution("q", keys, **convolution)
        self.k_conv = short_convolution("k", keys, **convolution)
        self.v_conv = short_convolution("v", values, **convolution)
        self.norm = RMSNorm(value_dim, eps=config.norm_eps)
        self.o_proj = Dense(
            values, hidden_size, axes=("heads", "embed"), rngs=rngs, init_std=init_std
        )

    def _keys(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return the keys [B, T, H, K] of tokens x [B, T, D] before the normalisation, and the context, in which they are
        saved, so that one call computes them once.
        """
        if "keys" not in context.saved:
            k, context = self.k_conv(self.k_proj(x), context)
            context = context.add(saved={"keys": split_heads(k, self.config.num_heads)})
        return context.saved["keys"], context

    def read(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return the queries [B, T, H, K] of tokens x [B, T, D]: q - e^d k of unit length, with q x W_q after the short
        convolution; and the context.
        """
        q, context = self.q_conv(self.q_proj(x), context)
        k, context = self._keys(x, context)
        share = jnp.exp(self.correction_log[...])[:, None].astype(k.dtype)
        return l2_normalize(split_heads(q, self.config.num_heads) - share * k), context

    def write(self, x: jax.Array, context: Context) -> tuple[dict[str, Any], Context]:
        """Return the arguments of `momentum_memory` that update the memory, by name, and the context: keys of unit length
        and α k, values, and β, η, log α and log μ of each head [B, T, H].
        """
        config = self.config
        k, context = self._keys(x, context)
        v, context = self.v_conv(self.v_proj(x), context)
        least, tau = config.least_log_momentum, math.sqrt(self.hidden_size)

        @recomputed
        def gates(k, beta, decay, momentum, eta, biases, logs):
            eta = 1 + jnp.tanh(eta / tau)
            tangent = eta * jnp.exp(logs[2])  # of the angle θ
            log_cosine = -jnp.log1p(tangent * tangent)  # log cos²θ
            log_decay = log_cosine - jnp.exp(logs[0]) * jax.nn.softplus(decay + biases[0])
            log_momentum = -jnp.exp(logs[1]) * jax.nn.softplus(momentum + biases[1])
            k = l2_normalize(k)
            p = (jnp.exp(log_decay)[..., None] * k.astype(log_decay.dtype)).astype(k.dtype)
            return dict(
                k=k, p=p, beta=-jnp.expm1(log_cosine) * jax.nn.sigmoid(beta), eta=eta,
                log_decay=log_decay, log_momentum=jnp.maximum(log_momentum, least),
            )  # fmt: skip

        parts = self.beta_proj, self.decay_proj, self.momentum_proj, self.eta_proj
        written = gates(
            k,
            *(part(x, dtype=jnp.float32) for part in parts),
            (self.dt_bias[...], self.momentum_bias[...]),
            (self.a_log[...], self.momentum_log[...], self.angle_log[...]),
        )
        return written | {"v": split_heads(v, config.num_heads)}, context

    def finish(self, o: jax.Array, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return (y, context), with the layer's output y [B, T, D] from the memory's output o [B, T, H, V]: normalise each
        head, multiply by silu(x W_g), and project.
        """
        gate = split_heads(self.g_proj(x), self.config.num_heads)
        return self.o_proj(merge_heads(self.norm(o, gate))), context

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> ops.MomentumState:
        """Return the state before any token: memory and momentum of zeros [B, H, K, V] in float32 for `batch_size` rows;
        `max_length` and `dtype` do not affect it.
        """
        config = self.config
        return ops.momentum_state(batch_size, config.num_heads, config.head_dim, config.value_dim())


METHOD = Method(
    name="momentum_deltanet",
    paper="arXiv 2605.05838",
    op="momentum_memory",
    gate="M: α; momentum N: μ, each head",
    write="-η kᵀ (v - α k M) to N, -β N to M",
    read="q M, q corrected by k",
    state="2 times K × V a head; 3 tokens of q, k, v",
    config=MomentumDeltaNetConfig,
    module=MomentumDeltaNet,
)
