"""GateLoop (arXiv 2311.01927): `M_t = a_t M_{t-1} + k_tᵀ v_t`, `o_t = Re(q_t M_t)`, with a complex gate of
the token, `|a| < 1`.

A complex gate with angle θ_t is a decay |a_t|, and a rotation of queries and keys by the cumulative sum of
the angles: wide heads are computed by a real `linear_memory` with twice as many key channels. Their memory is
stored rotated back by the sum, as the real and imaginary parts of M's conjugate, so that the sum starts from
0 in every call. With one head per channel, M is one complex number.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax import ops
from lsm_jax.mixers import checks
from lsm_jax.mixers.base import Context, Mixer
from lsm_jax.mixers.layers import Dense, RMSNorm, parameter, split_heads
from lsm_jax.mixers.method import Method
from lsm_jax.mixers.op_config import RecurrentConfig


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class GateLoopConfig(RecurrentConfig):
    """The config of a GateLoop layer: linear attention whose decay is a complex number that depends on the token.

    Attributes:
        num_heads: number of gates, each for hidden_size / num_heads key and value channels; None means one
            per channel, as published.
        gate_gradient: factor of the gradient that the gate's projection receives, instead of a lower learning
            rate.
        gate_bias: initial real part of z; a large one means a slow decay and small angles. The angle of a z
            near 0 depends on rounding errors.
        norm: whether each head's output is normalised before the output gate (all channels together if each
            head is one channel).
        norm_eps: epsilon of that norm.
    """

    num_heads: int | None = None
    gate_gradient: float = 0.9
    gate_bias: float = 0.0
    norm: bool = False
    norm_eps: float = 1e-5

    @classmethod
    def for_width(cls, hidden_size: int) -> GateLoopConfig:
        """Return the config of GateLoop for a model of width `hidden_size`, with the published proportions: one head
        for each channel.
        """
        return cls()

    def heads(self, hidden_size: int) -> int:
        """Return the number of heads, each with one complex gate: `num_heads`, or one for each of the `hidden_size`
        channels if that is None.
        """
        return hidden_size if self.num_heads is None else self.num_heads

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of GateLoop is not accepted, or does not fit a model of width
        `hidden_size`.
        """
        self.validate_fields()
        checks.divides(self, "num_heads", self.heads(hidden_size), "hidden_size", hidden_size)
        checks.positive(self, gate_gradient=self.gate_gradient, norm_eps=self.norm_eps)

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: the projections, and for each
        complex number of the memory 6 to decay, 2 to write and 2 to read.
        """
        heads = self.heads(hidden_size)
        projections = 2.0 * hidden_size * (5 * hidden_size + 2 * heads)
        return projections + 10 * hidden_size * (hidden_size // heads)


def polar(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the absolute value and the angle in radians of the complex numbers x + iy, from which a gate is made.

    Numbers below 1e-12 count as 0; their angle and their gradients are 0.
    """
    zero = jnp.maximum(jnp.abs(x), jnp.abs(y)) < 1e-12
    x, y = jnp.where(zero, 1, x), jnp.where(zero, 0, y)
    return jnp.where(zero, 0, jnp.sqrt(x * x + y * y)), jnp.arctan2(y, x)


def turn_back(memory: jax.Array, phase: jax.Array) -> jax.Array:
    """Multiply a complex memory by exp(-i phase), with the phase [...] in radians; the memory is [..., 2 K, V], its
    real parts in the first K key channels and its imaginary parts in the others.
    """
    real, imag = jnp.split(memory, 2, axis=-2)
    cos, sin = jnp.cos(phase)[..., None, None], jnp.sin(phase)[..., None, None]
    return jnp.concatenate([real * cos + imag * sin, imag * cos - real * sin], axis=-2)


class GateLoop(Mixer):
    """The layer of GateLoop: a mixer that maps [B, T, D] to [B, T, D]; `GateLoopConfig` says what its options mean."""

    op = ops.selective_memory
    memory_parts = ("k_proj", "v_proj", "a_proj")
    token_parts = ("q_proj", "k_proj", "v_proj", "a_proj")
    memories_in_place = False

    def __init__(
        self, config: GateLoopConfig, hidden_size: int, *, rngs: nnx.Rngs, init_std: float = 0.02
    ):
        super().__init__(config, hidden_size)
        self.num_heads = config.heads(hidden_size)
        into = dict(axes=("embed", "heads"), rngs=rngs, init_std=init_std)
        self.q_proj = Dense(hidden_size, hidden_size, **into)
        self.k_proj = Dense(hidden_size, hidden_size, **into)
        self.v_proj = Dense(hidden_size, hidden_size, **into)
        self.g_proj = Dense(hidden_size, hidden_size, **into)
        self.a_proj = Dense(hidden_size, 2 * self.num_heads, bias=True, **into)
        start = jnp.repeat(jnp.array([config.gate_bias, 0.0], jnp.float32), self.num_heads)
        self.a_proj.bias = parameter(start, ("heads",), weight_decay=False)
        size = hidden_size if config.num_heads is None else hidden_size // self.num_heads
        self.norm = RMSNorm(size, eps=config.norm_eps) if config.norm else None
        self.o_proj = Dense(
            hidden_size, hidden_size, axes=("heads", "embed"), rngs=rngs, init_std=init_std
        )

    def read(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return the queries [B, T, H, K] of tokens x [B, T, D], x W_q cut into heads, and the context."""
        return split_heads(self.q_proj(x), self.num_heads), context

    def write(self, x: jax.Array, context: Context) -> tuple[dict[str, Any], Context]:
        """Return the arguments of `linear_memory` that update the memory, by name, and the context: keys and values,
        and the complex gate a of each head [B, T, H] as its log magnitude log |a| and its angle in radians.
        """
        share = self.config.gate_gradient
        z = self.a_proj(x, dtype=jnp.float32)
        z = share * z + (1 - share) * jax.lax.stop_gradient(z)
        length, angle = polar(*jnp.split(z, 2, axis=-1))
        return dict(
            k=split_heads(self.k_proj(x), self.num_heads),
            v=split_heads(self.v_proj(x), self.num_heads),
            log_decay=jax.nn.log_sigmoid(length),
            angle=angle,
        ), context

    def apply(self, query: jax.Array, written: dict[str, Any], **call) -> tuple[jax.Array, Any]:
        """Return GateLoop's output [B, T, H, V] and the final state: by `selective_memory` with one complex
        number per channel if `num_heads` is None, else by `linear_memory` with rotated queries and keys.
        """
        k, v, log_decay, angle = (written[n] for n in ("k", "v", "log_decay", "angle"))
        if self.config.num_heads is None:
            ones = jnp.ones((self.num_heads, 1), log_decay.dtype)
            o, memory = type(self).op(
                (k * v)[..., 0],
                jax.lax.complex(log_decay, angle),
                ones,
                ones,
                query,
                discretization="none",
                **call,
            )
            return o[..., None], memory

        before = call["initial_state"]
        segmented = before is not None and before.memory.ndim == 5
        phase, final = ops.cumulative_phase(
            angle,
            num_segments=before.memory.shape[1] if segmented else None,
            segment_ids=call["segment_ids"],
            update_mask=call["update_mask"],
        )

        def turned(heads: jax.Array) -> jax.Array:
            parts = (heads * jnp.cos(phase)[..., None], heads * jnp.sin(phase)[..., None])
            return jnp.concatenate(parts, axis=-1).astype(heads.dtype)

        o, after = ops.linear_memory(turned(query), turned(k), v, log_decay, scale=1.0, **call)
        return o, after._replace(memory=turn_back(after.memory, final))

    def finish(self, o: jax.Array, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return (y, context), with the layer's output y [B, T, D] from the op's output o: normalise o if the
        config has a norm, multiply by silu(x W_g), and project.
        """
        if self.norm is not None:
            o = self.norm(o) if self.config.num_heads is not None else self.norm(o[..., 0])
        gate = jax.nn.silu(self.g_proj(x, dtype=jnp.float32))
        return self.o_proj((o.reshape(x.shape) * gate).astype(x.dtype)), context

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> Any:
        """Return the state before any token, zeros for `batch_size` rows; `max_length` and `dtype` do not affect it.

        It is one complex number for each channel if `num_heads` is None; else a real memory [B, H, 2 K, V] of
        `linear_memory`.
        """
        if self.config.num_heads is None:
            return ops.selective_state(batch_size, self.num_heads, 1, is_complex=True)
        size = self.hidden_size // self.num_heads
        return ops.linear_state(batch_size, self.num_heads, 2 * size, size)


METHOD = Method(
    name="gateloop",
    paper="arXiv 2311.01927",
    op="selective_memory",
    gate="a complex, |a| = sigmoid(|z|) and arg a = arg z with z = x W + b, each head",
    write="kᵀ v",
    read="Re(q M)",
    state="1 complex a channel",
    config=GateLoopConfig,
    module=GateLoop,
    note="one head a channel; wider heads (num_heads) run on linear_memory with rotated q and k",
)
