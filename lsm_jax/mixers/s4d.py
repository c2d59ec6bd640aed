"""S4D (arXiv 2206.11893): `h_t = exp(Δ A) h_{t-1} + (exp(Δ A) - 1) / A x_t`, `y_t = 2 Re(C h_t) + D x_t` for
each channel; all constant.

S4 (arXiv 2111.00396) with a diagonal A. Channels are mixed only afterwards, by a projection and a gated
linear unit.
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
from lsm_jax.mixers.base import Context, Mixer
from lsm_jax.mixers.layers import Dense, parameter
from lsm_jax.mixers.method import Method
from lsm_jax.mixers.op_config import RecurrentConfig


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class S4DConfig(RecurrentConfig):
    """The config of an S4D layer: a state-space model with complex decays that are constant in time.

    Attributes:
        state_size: N; a channel stores one number of each conjugate pair, N / 2 complex numbers.
        min_step: smallest initial Δ.
        max_step: largest initial Δ.
        convolution: "blocks" computes one document from an empty state as a convolution by matrix products,
            and other calls like "scan"; "scan" calls the op with `form`.
    """

    state_size: int = 64
    min_step: float = 1e-3
    max_step: float = 1e-1
    convolution: str = "blocks"

    @classmethod
    def for_width(cls, hidden_size: int) -> S4DConfig:
        """Return the config of S4D for a model of width `hidden_size`, with the published 32 conjugate pairs for each
        channel; fewer below width 256.
        """
        return cls(state_size=min(64, hidden_size // 4))

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of S4D is not accepted, or does not fit a model of width
        `hidden_size`.
        """
        self.validate_fields()
        checks.positive(self, state_size=self.state_size, min_step=self.min_step)
        if self.state_size % 2:
            raise ValueError(f"S4DConfig.state_size={self.state_size}: it must be even")
        if self.max_step < self.min_step:
            raise ValueError(
                f"S4DConfig.max_step={self.max_step}: it must be at least min_step={self.min_step}"
            )
        # Checked here, since with the default convolution the op, which accepts these two, may not be called.
        checks.one_of(self, "op.implementation", self.op.implementation, (None, "xla"))
        checks.one_of(self, "convolution", self.convolution, ("blocks", "scan"))

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: the projection, and for each
        complex number of the memory 6 to decay, 4 to write and 4 to read.
        """
        return hidden_size * (4.0 * hidden_size + 14 * (self.state_size // 2) + 2)


class S4D(Mixer):
    """The layer of S4D: a mixer that maps [B, T, D] to [B, T, D]; `S4DConfig` says what its options mean."""

    single_because = (
        "its transition and its write do not depend on the token: all memories would be alike"
    )
    op = ops.selective_memory

    def __init__(
        self, config: S4DConfig, hidden_size: int, *, rngs: nnx.Rngs, init_std: float = 0.02
    ):
        super().__init__(config, hidden_size)
        pairs = (hidden_size, config.state_size // 2)
        low, high = math.log(config.min_step), math.log(config.max_step)
        step = jax.random.uniform(rngs.params(), (hidden_size,), jnp.float32, low, high)
        # S4D-Lin: A_n = -1/2 + i π n.
        turns = jnp.pi * jnp.arange(pairs[1], dtype=jnp.float32)
        # A complex normal number of variance 1.
        c = math.sqrt(0.5) * jax.random.normal(rngs.params(), (*pairs, 2), jnp.float32)
        fixed = dict(weight_decay=False)
        self.log_step = parameter(step, ("heads",), **fixed)
        self.a_log = parameter(
            jnp.full(pairs, math.log(0.5), jnp.float32), ("heads", None), **fixed
        )
        self.a_imag = parameter(jnp.tile(turns, (hidden_size, 1)), ("heads", None), **fixed)
        self.c = parameter(c, ("heads", None, None), **fixed)
        skip = jax.random.normal(rngs.params(), (hidden_size,), jnp.float32)
        self.skip = parameter(skip, ("heads",), **fixed)
        self.o_proj = Dense(
            hidden_size,
            2 * hidden_size,
            axes=("heads", "embed"),
            rngs=rngs,
            bias=True,
            init_std=init_std,
        )

    def read(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return the read vector C [D, N / 2], a complex parameter constant in time, and the context.

        C is doubled, since the memory has one number of each conjugate pair, and the output is the real part
        of the sum of both.
        """
        c = self.c[...]
        return 2 * jax.lax.complex(c[..., 0], c[..., 1]), context

    def write(self, x: jax.Array, context: Context) -> tuple[dict[str, Any], Context]:
        """Return the arguments of `selective_memory` that update the memory, by name, and the context: the channels u
        [B, T, D] and, constant in time, the step sizes Δ [D], the complex rates A [D, N / 2], B (ones), and the weights
        D [D] of the skip connection.
        """
        rate = -jnp.exp(self.a_log[...])
        return dict(
            u=x,
            delta=jnp.exp(self.log_step[...]),
            A=jax.lax.complex(rate, self.a_imag[...]),
            B=jnp.ones_like(rate),
            D=self.skip[...],
        ), context

    def apply(self, query: jax.Array, written: dict[str, Any], **call) -> tuple[jax.Array, Any]:
        """Return S4D's output [B, T, D] and the final state: computed as a convolution for one document
        without a state if the config says so, else by `selective_memory`.
        """
        plain = all(call[n] is None for n in ("initial_state", "segment_ids", "update_mask"))
        if self.config.convolution == "blocks" and plain:
            return ops.time_invariant_memory(C=query, **written)
        return type(self).op(C=query, **written, discretization="zoh", **call)

    def finish(self, o: jax.Array, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return (y, context), with the layer's output y [B, T, D] from the op's output o [B, T, D]: apply
        gelu, project to twice the width, and apply a gated linear unit.
        """
        y, gate = jnp.split(self.o_proj(jax.nn.gelu(o, approximate=False)), 2, axis=-1)
        return y * jax.nn.sigmoid(gate), context

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> ops.SelectiveState:
        """Return the state before any token: a complex memory of zeros [B, D, N / 2], one number for each conjugate
        pair of a channel, for `batch_size` rows; `max_length` and `dtype` do not affect it.
        """
        pairs = self.config.state_size // 2
        return ops.selective_state(batch_size, self.hidden_size, pairs, is_complex=True)


METHOD = Method(
    name="s4d",
    paper="arXiv 2206.11893",
    op="selective_memory",
    gate="exp(Δ A), A complex, constant for each channel and state",
    write="(exp(Δ A) - 1) / A x",
    read="2 Re(C h) + D x",
    state="N / 2 complex a channel",
    config=S4DConfig,
    module=S4D,
    note="its default computes one document from an empty state as a convolution, by blocks",
)
