"""Mamba (S6, arXiv 2312.00752): `h_t = exp(Δ_t A) h_{t-1} + Δ_t B_t x_t`, `y_t = C_t h_t + D x_t` for each
channel, gated, with no feedforward.

The published block has one projection into x and z and one from x to Δ, B and C; here each part has one,
which is the same function with the same number of parameters.
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
from lsm_jax.mixers.layers import Dense, log_uniform_step_bias, parameter
from lsm_jax.mixers.method import Method
from lsm_jax.mixers.op_config import RecurrentConfig


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class MambaConfig(RecurrentConfig):
    """The config of a Mamba layer: a state-space model whose step sizes, write and read vectors depend on the token.

    Attributes:
        expand: number of inner channels, divided by hidden_size.
        state_size: number of numbers in the memory of each channel (N).
        step_rank: inner width of Δ's two matrices; None is hidden_size / 16, rounded up.
        conv_size: width of the short convolution; 1 means no convolution, only the SiLU that follows it.
    """

    expand: int = 2
    state_size: int = 16
    step_rank: int | None = None
    conv_size: int = 4

    @classmethod
    def for_width(cls, hidden_size: int) -> MambaConfig:
        """Return the config of Mamba for a model of width `hidden_size`, with the published proportions: 16 numbers of
        the memory for each channel, at any width.
        """
        return cls()

    def rank(self, hidden_size: int) -> int:
        """Return the inner width of the low-rank projection to the step size Δ: `step_rank`, or hidden_size / 16
        rounded up if that is None.
        """
        return -(-hidden_size // 16) if self.step_rank is None else self.step_rank

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of Mamba is not accepted, or does not fit a model of
        width `hidden_size`.
        """
        self.validate_fields()
        checks.positive(self, expand=self.expand, state_size=self.state_size)
        if self.step_rank is not None:
            checks.positive(self, step_rank=self.step_rank)
        checks.convolution_width(self)

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: the projections and the
        convolution, and for each number of the memory 1 each for Δ A and to decay, and 2 each to write and to
        read.
        """
        inner, rank = self.expand * hidden_size, self.rank(hidden_size)
        projections = 2.0 * inner * (3 * hidden_size + 2 * rank + 2 * self.state_size)
        return projections + inner * (2 * checks.convolution_taps(self) + 6 * self.state_size + 3)


class Mamba(Mixer):
    """The layer of Mamba: a mixer that maps [B, T, D] to [B, T, D]; `MambaConfig` says what its options mean."""

    op = ops.selective_memory
    memory_parts = ("x_proj", "b_proj", "dt_down", "dt_up")
    token_parts = ("x_proj",)

    def __init__(
        self, config: MambaConfig, hidden_size: int, *, rngs: nnx.Rngs, init_std: float = 0.02
    ):
        super().__init__(config, hidden_size)
        self.inner, rank = config.expand * hidden_size, config.rank(hidden_size)
        into = dict(axes=("embed", "heads"), rngs=rngs, init_std=init_std)
        self.x_proj = Dense(hidden_size, self.inner, **into)
        self.z_proj = Dense(hidden_size, self.inner, **into)
        self.conv = short_convolution(
            "x", self.inner, config.conv_size, rngs=rngs, axis="heads", bias=True
        )
        down = dict(axes=("heads", None), rngs=rngs, init_std=init_std)
        self.b_proj = Dense(self.inner, config.state_size, **down)
        self.c_proj = Dense(self.inner, config.state_size, **down)
        self.dt_down = Dense(self.inner, rank, **down)
        self.dt_up = Dense(rank, self.inner, axes=(None, "heads"), rngs=rngs)
        bound = rank**-0.5
        kernel = jax.random.uniform(rngs.params(), (rank, self.inner), jnp.float32, -bound, bound)
        self.dt_up.kernel = parameter(kernel, (None, "heads"), weight_decay=True)
        fixed = dict(logical_axes=("heads",), weight_decay=False)
        self.dt_bias = parameter(log_uniform_step_bias(rngs, self.inner), **fixed)
        self.skip = parameter(jnp.ones(self.inner, jnp.float32), **fixed)
        rates = jnp.log(jnp.arange(1, config.state_size + 1, dtype=jnp.float32))
        self.a_log = parameter(
            jnp.tile(rates, (self.inner, 1)), ("heads", None), weight_decay=False
        )
        self.o_proj = Dense(
            self.inner, hidden_size, axes=("heads", "embed"), rngs=rngs, init_std=init_std
        )

    def _convolved(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return Mamba's inner channels [B, T, D] of the tokens x after the short convolution, which are
        written to the memory and from which Δ, B and C are computed; and the context, in which they are
        saved, so that one call computes them once.
        """
        if "inner" not in context.saved:
            inner, context = self.conv(self.x_proj(x), context)
            context = context.add(saved={"inner": inner})
        return context.saved["inner"], context

    def read(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return the read vector C [B, T, N] of each token, a projection of the inner channels after the
        short convolution, and the context.
        """
        inner, context = self._convolved(x, context)
        return self.c_proj(inner), context

    def write(self, x: jax.Array, context: Context) -> tuple[dict[str, Any], Context]:
        """Return the arguments of `selective_memory` that update the memory, by name, and the context: the convolved
        channels u [B, T, D], their step sizes Δ [B, T, D], the decay rates A [D, N], the write vectors B [B, T, N], and
        the weights D of the skip connection.
        """
        inner, context = self._convolved(x, context)
        step = self.dt_up(self.dt_down(inner), dtype=jnp.float32) + self.dt_bias[...]
        written = dict(
            u=inner,
            delta=jax.nn.softplus(step),
            A=-jnp.exp(self.a_log[...]),
            B=self.b_proj(inner),
            D=self.skip[...],
        )
        return written, context

    def apply(self, query: jax.Array, written: dict[str, Any], **call) -> tuple[jax.Array, Any]:
        """Run `selective_memory` with the queries as its read vectors C, and the arguments from `write`;
        return its output [B, T, D] and its final state.
        """
        return type(self).op(C=query, **written, **call)

    def finish(self, o: jax.Array, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return (y, context), with the layer's output y [B, T, D] from the op's output o in inner channels:
        multiply by silu(z), where z is a projection of x, and project.
        """
        gate = jax.nn.silu(self.z_proj(x, dtype=jnp.float32))
        return self.o_proj((o.astype(gate.dtype) * gate).astype(x.dtype)), context

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> ops.SelectiveState:
        """Return the state before any token: a memory of zeros [B, D, N], N numbers for each inner channel, for
        `batch_size` rows; `max_length` and `dtype` do not affect it.
        """
        return ops.selective_state(batch_size, self.inner, self.config.state_size)


METHOD = Method(
    name="mamba",
    paper="arXiv 2312.00752",
    op="selective_memory",
    gate="exp(-A Δ), each channel and state",
    write="Δ B x",
    read="C h + D x",
    state="N a channel; 3 tokens",
    config=MambaConfig,
    module=Mamba,
    feedforward=None,
)
