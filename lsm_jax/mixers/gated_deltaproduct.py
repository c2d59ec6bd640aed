"""Gated DeltaProduct (arXiv 2502.10297): n steps of the delta rule for each token, after one decay.

`M ← α_t M_{t-1}`, then `M ← M + β_tj k_tjᵀ (v_tj - k_tj M)` for the steps j = 1..n, and `o_t = q_t M`. The token's
transition is a product of n generalised Householder matrices, with negative eigenvalues for β in (1, 2): it can permute
and reflect, which one step of the delta rule cannot. DeltaProduct is the same without the decay (`decay=False`).

`delta_memory` computes it on rows of n T tokens, of which the first of each n decays and the last is read.

The layer is that of flash-linear-attention (fla/layers/gated_deltaproduct.py): one convolution along the tokens for the keys of
all steps, and channels in the order steps, heads, channels of a head. Its layer and the defaults of its model's config
disagree; here are the layer's: two steps, a decay, negative eigenvalues, since the config's (one step, no decay, positive
eigenvalues) are DeltaNet. Matrices are drawn as in all models of this library (and of its own models): it also defines a Xavier
initialisation that nothing calls.
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
from lsm_jax.mixers.gated_deltanet import GatedDeltaNetConfig
from lsm_jax.mixers.layers import (
    Dense,
    RMSNorm,
    log_uniform_rate,
    log_uniform_step_bias,
    merge_heads,
    parameter,
    split_heads,
)
from lsm_jax.mixers.method import Method
from lsm_jax.mixers.steps import run_steps


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class GatedDeltaProductConfig(GatedDeltaNetConfig):
    """The config of a layer of Gated DeltaProduct: the fields of Gated DeltaNet, and

    Attributes:
        num_steps: the steps n of the delta rule for each token.
        allow_negative_eigenvalues: β in (0, 2) instead of (0, 1).
        decay: whether a token decays the memory first; False is DeltaProduct.
        output_gate: whether the norm's output is multiplied by silu(x W_g).
    """

    num_steps: int = 2
    allow_negative_eigenvalues: bool = True
    decay: bool = True
    output_gate: bool = True

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of Gated DeltaProduct is not accepted, or does not fit a model of
        width `hidden_size`.
        """
        super().validate(hidden_size)
        checks.positive(self, num_steps=self.num_steps)

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: the projections and
        convolutions, and per head K V to decay the memory, 2 K V each to erase and to write in each step, and 2 K V to
        read.
        """
        keys, heads, steps = self.num_heads * self.head_dim, self.value_heads(), self.num_steps
        values = heads * self.value_dim()
        outputs = (1 + steps) * (keys + values) + self.output_gate * values
        projections = 2.0 * hidden_size * (outputs + (steps + self.decay) * heads)
        convolved = keys + steps * (keys + values)
        memory = (2 + self.decay + 4 * steps) * self.head_dim * values
        return projections + 2 * checks.convolution_taps(self) * convolved + memory


def product_memory(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    beta: jax.Array,
    log_decay: jax.Array | None,
    **call,
) -> tuple[jax.Array, ops.DeltaState]:
    """Decay the memory, write n keys and values for each token by the delta rule, one after another, and read the result.

    Args:
        q: [B, T, H, K] queries.
        k: [B, T, n, H, K] keys of the n steps of a token.
        v: [B, T, n, G, V] values.
        beta: [B, T, n, G] write strengths.
        log_decay: [B, T, G], the decay before a token's first step, or None.
        call: further arguments of `delta_memory`; a chunk's size counts steps.

    Returns:
        The output [B, T, G, V], and the final state.
    """
    q = jnp.repeat(q[:, :, None], k.shape[2], axis=2)
    arguments = dict(q=q, k=k, v=v, beta=beta)
    o, state = run_steps(ops.delta_memory, arguments, log_decay, **call)
    return o[:, :, -1], state


class GatedDeltaProduct(Mixer):
    """The layer of Gated DeltaProduct: a mixer that maps [B, T, D] to [B, T, D]; `GatedDeltaProductConfig` says what its
    options mean.
    """

    op = ops.delta_memory
    memory_parts = ("k_proj", "v_proj", "beta_proj", "decay_proj")
    token_parts = ("q_proj", "k_proj", "v_proj", "beta_proj", "decay_proj")

    def __init__(
        self,
        config: GatedDeltaProductConfig,
        hidden_size: int,
        *,
        rngs: nnx.Rngs,
        init_std: float = 0.02,
    ):
        super().__init__(config, hidden_size)
        heads, value_dim, steps = config.value_heads(), config.value_dim(), config.num_steps
        keys, values = config.num_heads * config.head_dim, heads * value_dim
        into = dict(axes=("embed", "heads"), rngs=rngs, init_std=init_std)
        bias: dict[str, Any] = dict(bias=config.qkv_bias)
        self.q_proj = Dense(hidden_size, keys, **into, **bias)
        self.k_proj = Dense(hidden_size, steps * keys, **into, **bias)
        self.v_proj = Dense(hidden_size, steps * values, **into, **bias)
        self.beta_proj = Dense(hidden_size, steps * heads, **into)
        fixed = dict(logical_axes=("heads",), weight_decay=False)
        if config.decay:
            self.decay_proj = Dense(hidden_size, heads, **into)
            self.dt_bias = parameter(log_uniform_step_bias(rngs, heads), **fixed)
            self.a_log = parameter(log_uniform_rate(rngs, heads, low=0.0, high=16.0), **fixed)
        if config.output_gate:
            self.g_proj = Dense(hidden_size, values, **into, **bias)
        convolution = dict(width=config.conv_size, rngs=rngs, axis="heads")
        self.q_conv = short_convolution("q", keys, **convolution)
        self.k_conv = short_convolution("k", steps * keys, **convolution)
        self.v_conv = short_convolution("v", steps * values, **convolution)
        self.norm = RMSNorm(value_dim, eps=config.norm_eps) if config.output_norm else None
        self.o_proj = Dense(
            values, hidden_size, axes=("heads", "embed"), rngs=rngs, init_std=init_std
        )

    def _steps(self, x: jax.Array, *shape: int) -> jax.Array:
        """Cut the channels of x [B, T, n ...] into the steps of a token and `shape`: [B, T, n, *shape]."""
        return x.reshape(*x.shape[:2], self.config.num_steps, *shape)

    def read(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return the queries [B, T, H, K] of tokens x [B, T, D], x W_q after the short convolution, each of unit
        length, and the context.
        """
        q, context = self.q_conv(self.q_proj(x), context, self.config.head_dim)
        return split_heads(q, self.config.num_heads), context

    def write(self, x: jax.Array, context: Context) -> tuple[dict[str, Any], Context]:
        """Return the arguments of `product_memory` that update the memory, by name, and the context: keys of unit
        length, values and write strengths of each step, and the log decay of each value head [B, T, G] or None.
        """
        config, heads = self.config, self.config.value_heads()
        beta = jax.nn.sigmoid(self.beta_proj(x, dtype=jnp.float32))
        k, context = self.k_conv(self.k_proj(x), context, config.head_dim)
        v, context = self.v_conv(self.v_proj(x), context)
        log_decay = None
        if config.decay:
            step = jax.nn.softplus(self.decay_proj(x, dtype=jnp.float32) + self.dt_bias[...])
            log_decay = -jnp.exp(self.a_log[...]) * step
        written = dict(
            k=self._steps(k, config.num_heads, config.head_dim),
            v=self._steps(v, heads, config.value_dim()),
            beta=self._steps(2 * beta if config.allow_negative_eigenvalues else beta, heads),
            log_decay=log_decay,
        )
        return written, context

    def apply(self, query: jax.Array, written: dict[str, Any], **call) -> tuple[jax.Array, Any]:
        """Return the output [B, T, G, V] of `product_memory` and its final state."""
        return product_memory(query, **written, **call)

    def finish(self, o: jax.Array, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return (y, context), with the layer's output y [B, T, D] from the memory's output o [B, T, G, V]: normalise each
        head and multiply by silu(x W_g), where the config says so, and project.
        """
        gate = None
        if self.config.output_gate:
            gate = split_heads(self.g_proj(x), self.config.value_heads())
        if self.norm is not None:
            o = self.norm(o, gate)
        elif gate is not None:
            o = o * jax.nn.silu(gate)
        return self.o_proj(merge_heads(o)), context

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> ops.DeltaState:
        """Return the state before any token: a memory of zeros [B, G, K, V] in float32 for `batch_size` rows;
        `max_length` and `dtype` do not affect it.
        """
        config = self.config
        return ops.delta_state(
            batch_size, config.value_heads(), config.head_dim, config.value_dim()
        )


METHOD = Method(
    name="gated_deltaproduct",
    paper="arXiv 2502.10297",
    op="delta_memory",
    gate="(I - β_n k_nᵀ k_n) ... (I - β_1 k_1ᵀ k_1) α, n steps a token, β in (0, 2), α each head",
    write="Σ_j (I - β_n k_nᵀ k_n) ... (I - β_{j+1} k_{j+1}ᵀ k_{j+1}) β_j k_jᵀ v_j",
    read="q M",
    state="K × V a head; 3 tokens of q, and of k and v of all steps",
    config=GatedDeltaProductConfig,
    module=GatedDeltaProduct,
    note="`delta_memory` on rows of n T tokens; DeltaProduct without the decay (`decay=False`)",
)
