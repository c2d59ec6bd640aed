"""LightNet (arXiv 2405.21022): linear attention whose keys are softmax weights over the tokens so far.

With z_t = log Σ_{i ≤ t} exp(k_i), channel by channel, `M_t = diag(e^(z_{t-1} - z_t)) M_{t-1} + (e^(k_t - z_t))ᵀ v_t` and
`o_t = silu(q_t) M_t / √K`: each key channel has a running mean of the values. z is by `running_logsumexp`.

The layer is flash-linear-attention's (fla/layers/lightnet.py), without its optional convolutions. It has no step-by-step
reference; the definition above is that of its kernels, which also continue z from their cache.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from lsm_jax import ops
from lsm_jax.mixers import checks
from lsm_jax.mixers.base import Context, Mixer
from lsm_jax.mixers.layers import Dense, RMSNorm, merge_heads, split_heads
from lsm_jax.mixers.method import Method
from lsm_jax.mixers.op_config import RecurrentConfig


class LightNetState(NamedTuple):
    """The state of LightNet between calls; [B, S, ...] in place of [B, ...] with one state per segment.

    Attributes:
        memory: [B, H, K, V], the means of values; float32.
        weight: [B, H, K], z, the logarithm of a channel's total weight, 0 if `filled` is.
        filled: [B, H, K], 1 where a channel has a token, else 0.
        segment_id: [B], the last nonzero segment id seen, 0 before any.
    """

    memory: Float[Array, ...]
    weight: Float[Array, ...]
    filled: Float[Array, ...]
    segment_id: Int[Array, " B"]


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class LightNetConfig(RecurrentConfig):
    """The config of a LightNet layer.

    Attributes:
        head_dim: key and value channels of a head; hidden_size / head_dim heads.
        gate_rank: inner width of the output gate's two matrices.
        norm_eps: epsilon of the norm over all channels.
    """

    head_dim: int = 128
    gate_rank: int = 128
    norm_eps: float = 1e-5

    @classmethod
    def for_width(cls, hidden_size: int) -> LightNetConfig:
        """Return the config of LightNet for a model of width `hidden_size`, with the published proportions: heads of 128
        channels and a gate of rank 128; both smaller below width 512.
        """
        size = min(128, hidden_size // 4)
        return cls(head_dim=size, gate_rank=size)

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of LightNet is not accepted, or does not fit a model of width
        `hidden_size`.
        """
        self.validate_fields()
        checks.divides(self, "head_dim", self.head_dim, "hidden_size", hidden_size)
        checks.positive(self, gate_rank=self.gate_rank, norm_eps=self.norm_eps)

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: the projections, 4 for each key channel, and
        per head K V to decay the memory and 2 K V each to write and to read.
        """
        projections = 8.0 * hidden_size**2 + 4 * hidden_size * self.gate_rank
        return projections + hidden_size * (4 + 5 * self.head_dim)


def mean_memory(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    initial_state: LightNetState | None = None,
    segment_ids: jax.Array | None = None,
    update_mask: jax.Array | None = None,
    **call,
) -> tuple[jax.Array, LightNetState]:
    """Update and read LightNet's memory.

    Args:
        q: [B, T, H, K] queries, after silu.
        k: [B, T, H, K], the logarithms of the keys' weights.
        v: [B, T, H, V] values.
        initial_state: the state to continue from, or None.
        segment_ids: [B, T] or None.
        update_mask: [B, T] or None.
        call: further arguments of `linear_memory`.

    Returns:
        The output [B, T, H, V], and the final state.
    """
    memory = sums = None
    if initial_state is not None:
        memory, weight, filled, last_id = initial_state
        memory = ops.LinearState(memory, None, None, last_id)
        weight, filled = (x.reshape(*x.shape[:-2], -1) for x in (weight, filled))
        sums = ops.LogSumExpState(weight, filled, last_id)
    tokens: Any = dict(segment_ids=segment_ids, update_mask=update_mask)
    z, decay, sums = ops.running_logsumexp(merge_heads(k), initial_state=sums, **tokens)
    heads = k.shape[2]
    share = jnp.exp(k.astype(z.dtype) - split_heads(z, heads)).astype(v.dtype)
    o, memory = ops.linear_memory(
        q, share, v, split_heads(decay, heads), initial_state=memory, **tokens, **call
    )
    weight, filled = (split_heads(x, heads) for x in (sums.value, sums.filled))
    return o, LightNetState(memory.memory, weight, filled, memory.segment_id)


class LightNet(Mixer):
    """The layer of LightNet: a mixer that maps [B, T, D] to [B, T, D]; `LightNetConfig` says what its options mean."""

    op = ops.linear_memory
    memory_parts = ("k_proj", "v_proj")
    token_parts = ("q_proj", "k_proj", "v_proj")

    def __init__(
        self, config: LightNetConfig, hidden_size: int, *, rngs: nnx.Rngs, init_std: float = 0.02
    ):
        super().__init__(config, hidden_size)
        self.num_heads = hidden_size // config.head_dim
        small = dict(rngs=rngs, init_std=init_std)
        into = dict(axes=("embed", "heads"), **small)
        self.q_proj = Dense(hidden_size, hidden_size, **into)
        self.k_proj = Dense(hidden_size, hidden_size, **into)
        self.v_proj = Dense(hidden_size, hidden_size, **into)
        self.gate_down = Dense(hidden_size, config.gate_rank, axes=("embed", None), **small)
        self.gate_up = Dense(config.gate_rank, hidden_size, axes=(None, "heads"), **small)
        self.norm = RMSNorm(hidden_size, eps=config.norm_eps)
        self.o_proj = Dense(hidden_size, hidden_size, axes=("heads", "embed"), **small)

    def read(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return the queries silu(x W_q) [B, T, H, K] of tokens x [B, T, D], and the context."""
        return jax.nn.silu(split_heads(self.q_proj(x), self.num_heads)), context

    def write(self, x: jax.Array, context: Context) -> tuple[dict[str, Any], Context]:
        """Return the arguments of `mean_memory` that update the memory, by name, and the context: logarithms of the keys'
        weights in float32, and values.
        """
        return dict(
            k=split_heads(self.k_proj(x, dtype=jnp.float32), self.num_heads),
            v=split_heads(self.v_proj(x), self.num_heads),
        ), context

    def apply(self, query: jax.Array, written: dict[str, Any], **call) -> tuple[jax.Array, Any]:
        """Return the output [B, T, H, V] of `mean_memory` and its final state."""
        return mean_memory(query, **written, **call)

    def finish(self, o: jax.Array, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return (y, context), with the layer's output y [B, T, D] from the memory's output o [B, T, H, V]: normalise all
        channels together, multiply by silu(x W₁ W₂), and project.
        """
        return self.o_proj(self.norm(merge_heads(o), self.gate_up(self.gate_down(x)))), context

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> LightNetState:
        """Return the state before any token, zeros in float32 for `batch_size` rows; `max_length` and `dtype` do not affect
        it.
        """
        size = self.config.head_dim
        state = ops.linear_state(batch_size, self.num_heads, size, size)
        zeros = jnp.zeros((batch_size, self.num_heads, size), jnp.float32)
        return LightNetState(state.memory, zeros, zeros, state.segment_id)


METHOD = Method(
    name="lightnet",
    paper="arXiv 2405.21022",
    op="linear_memory",
    gate="e^(z_{t-1} - z_t), each key channel; z_t = log Σ e^k of the tokens so far",
    write="(e^(k - z))ᵀ v",
    read="silu(q) M",
    state="K × (V + 1) a head",
    config=LightNetConfig,
    module=LightNet,
)
