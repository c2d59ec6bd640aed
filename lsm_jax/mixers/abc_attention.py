"""ABC, attention with bounded-memory control (arXiv 2110.02488): a softmax over M slots, each of which has the means of keys
and values weighted by a learned control.

With the scores s_t of the slots and z_t = log Σ_{i ≤ t} exp(s_i), slot by slot, `K̃_t = e^(z_{t-1} - z_t) K̃_{t-1} +
e^(s_t - z_t) k_t`, likewise Ṽ, and `o_t = softmax(q_t K̃_t / √K) Ṽ_t`: a `slot_memory`, with z by `running_logsumexp`.

The layer is flash-linear-attention's (fla/layers/abc.py), with one difference: its state lacks z, so that going on from a
state forgets the past's weight there. Here z is part of the state.
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
from lsm_jax.mixers.heads import three_or_four
from lsm_jax.mixers.layers import Dense, RMSNorm, merge_heads, rotate, split_heads
from lsm_jax.mixers.method import Method
from lsm_jax.mixers.op_config import RecurrentConfig


class ABCState(NamedTuple):
    """The state of ABC between calls; [B, S, ...] in place of [B, ...] with one state per segment.

    Attributes:
        keys: [B, H, K, M], the slots' means of keys; float32.
        values: [B, H, M, V], their means of values; float32.
        weight: [B, H, M], z, the logarithm of a slot's total weight, 0 if `filled` is.
        filled: [B, H, M], 1 where a slot has a token, else 0.
        segment_id: [B], the last nonzero segment id seen, 0 before any.
    """

    keys: Float[Array, ...]
    values: Float[Array, ...]
    weight: Float[Array, ...]
    filled: Float[Array, ...]
    segment_id: Int[Array, " B"]


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class ABCConfig(RecurrentConfig):
    """The config of a layer of ABC.

    Attributes:
        num_heads: number of heads.
        num_slots: slots of a head (M).
        expand_k: number of key channels of all heads, divided by hidden_size.
        expand_v: number of value channels of all heads, divided by hidden_size.
        largest_score: bound of the absolute scores of slots.
        rope_base: base of the wavelengths of the rotary embedding of queries and keys.
        norm_eps: epsilon of the norm over each head's output.
    """

    num_heads: int = 4
    num_slots: int = 64
    expand_k: float = 0.5
    expand_v: float = 1.0
    largest_score: float = 32.0
    rope_base: float = 10000.0
    norm_eps: float = 1e-5

    @classmethod
    def for_width(cls, hidden_size: int) -> ABCConfig:
        """Return the config of ABC for a model of width `hidden_size`: four heads of 64 slots at any width, but three at widths such as
        768 and 1,536; fewer slots below width 256.
        """
        return cls(num_heads=three_or_four(hidden_size), num_slots=min(64, hidden_size // 4))

    def head_dims(self, hidden_size: int) -> tuple[int, int]:
        """Return the numbers of key channels and of value channels of one head in a model of width `hidden_size`."""
        return (
            checks.expanded(self, "expand_k", self.expand_k, hidden_size, self.num_heads),
            checks.expanded(self, "expand_v", self.expand_v, hidden_size, self.num_heads),
        )

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of ABC is not accepted, or does not fit a model of width
        `hidden_size`.
        """
        self.validate_fields()
        checks.positive(
            self,
            num_slots=self.num_slots,
            largest_score=self.largest_score,
            rope_base=self.rope_base,
            norm_eps=self.norm_eps,
        )
        if (size := self.head_dims(hidden_size)[0]) % 2:
            raise ValueError(
                f"ABCConfig.num_heads={self.num_heads}: heads of {size} channels; rotation needs an even number"
            )

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: the projections, and per head 5 M (K + V)
        to decay, write and read the two memories, and 8 M for the softmax and the weights.
        """
        k, v = self.head_dims(hidden_size)
        slots = self.num_slots
        projections = 2.0 * hidden_size * (2 * k + 3 * v + slots)
        return self.num_heads * (projections + 5 * slots * (k + v) + 8 * slots)


def bounded_memory(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    scores: jax.Array,
    *,
    initial_state: ABCState | None = None,
    segment_ids: jax.Array | None = None,
    update_mask: jax.Array | None = None,
    **call,
) -> tuple[jax.Array, ABCState]:
    """Update and read the slots of ABC.

    Args:
        q: [B, T, H, K] queries.
        k: [B, T, H, K] keys.
        v: [B, T, H, V] values.
        scores: [B, T, H, M], s of each slot.
        initial_state: the state to continue from, or None.
        segment_ids: [B, T] or None.
        update_mask: [B, T] or None.
        call: further arguments of `slot_memory`.

    Returns:
        The output [B, T, H, V], and the final state.
    """
    slots = sums = None
    if initial_state is not None:
        keys, values, weight, filled, last_id = initial_state
        slots = ops.SlotState(keys, values, last_id)
        weight, filled = (x.reshape(*x.shape[:-2], -1) for x in (weight, filled))
        sums = ops.LogSumExpState(weight, filled, last_id)
    tokens: Any = dict(segment_ids=segment_ids, update_mask=update_mask)
    z, decay, sums = ops.running_logsumexp(merge_heads(scores), initial_state=sums, **tokens)
    heads = scores.shape[2]
    share = jnp.exp(scores - split_heads(z, heads))
    o, slots = ops.slot_memory(
        q, k, v, share, split_heads(decay, heads), initial_state=slots, **tokens, **call
    )
    weight, filled = (split_heads(x, heads) for x in (sums.value, sums.filled))
    return o, ABCState(slots.keys, slots.values, weight, filled, slots.segment_id)


class ABC(Mixer):
    """The layer of ABC: a mixer that maps [B, T, D] to [B, T, D]; `ABCConfig` says what its options mean."""

    op = ops.slot_memory
    uses_positions = True
    memory_parts = ("k_proj", "v_proj", "s_proj")
    token_parts = ("q_proj", "k_proj", "v_proj", "s_proj")

    def __init__(
        self, config: ABCConfig, hidden_size: int, *, rngs: nnx.Rngs, init_std: float = 0.02
    ):
        super().__init__(config, hidden_size)
        self.key_dim, self.value_dim = config.head_dims(hidden_size)
        heads = config.num_heads
        keys, values = heads * self.key_dim, heads * self.value_dim
        into = dict(axes=("embed", "heads"), rngs=rngs, init_std=init_std)
        self.q_proj = Dense(hidden_size, keys, **into)
        self.k_proj = Dense(hidden_size, keys, **into)
        self.v_proj = Dense(hidden_size, values, **into)
        self.s_proj = Dense(hidden_size, heads * config.num_slots, **into)
        self.g_proj = Dense(hidden_size, values, **into)
        self.norm = RMSNorm(self.value_dim, eps=config.norm_eps)
        self.o_proj = Dense(
            values, hidden_size, axes=("heads", "embed"), rngs=rngs, init_std=init_std
        )

    def _rotated(self, x: jax.Array, context: Context) -> jax.Array:
        """Cut x, projected to queries or keys, into heads [B, T, H, K], rotated by the tokens' positions."""
        heads = split_heads(x, self.config.num_heads)
        return rotate(heads, context.positions, base=self.config.rope_base)

    def read(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return the rotated queries [B, T, H, K] of tokens x [B, T, D], and the context."""
        return self._rotated(self.q_proj(x), context), context

    def write(self, x: jax.Array, context: Context) -> tuple[dict[str, Any], Context]:
        """Return the arguments of `bounded_memory` that update the memory, by name, and the context: rotated keys, values,
        and the scores of the slots [B, T, H, M].
        """
        heads, most = self.config.num_heads, self.config.largest_score
        scores = jnp.clip(self.s_proj(x, dtype=jnp.float32), -most, most)
        return dict(
            k=self._rotated(self.k_proj(x), context),
            v=split_heads(self.v_proj(x), heads),
            scores=split_heads(scores, heads),
        ), context

    def apply(self, query: jax.Array, written: dict[str, Any], **call) -> tuple[jax.Array, Any]:
        """Return the output [B, T, H, V] of `bounded_memory` and its final state."""
        return bounded_memory(query, **written, **call)

    def finish(self, o: jax.Array, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return (y, context), with the layer's output y [B, T, D] from the memory's output o [B, T, H, V]: normalise each
        head, multiply by silu(x W_g), and project.
        """
        gate = split_heads(self.g_proj(x), self.config.num_heads)
        return self.o_proj(merge_heads(self.norm(o, gate))), context

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> ABCState:
        """Return the state before any token, zeros in float32 for `batch_size` rows; `max_length` and `dtype` do not affect
        it.
        """
        heads, slots = self.config.num_heads, self.config.num_slots
        state = ops.slot_state(batch_size, heads, slots, self.key_dim, self.value_dim)
        zeros = jnp.zeros((batch_size, heads, slots), jnp.float32)
        return ABCState(state.keys, state.values, zeros, zeros, state.segment_id)


METHOD = Method(
    name="abc",
    paper="arXiv 2110.02488",
    op="slot_memory",
    gate="e^(z_{t-1} - z_t), each slot; z_t = log Σ e^s of the tokens so far",
    write="e^(s - z)ᵀ k into keys, e^(s - z)ᵀ v into values",
    read="softmax(q K) V over slots",
    state="M × (K + V + 1) a head, M slots",
    config=ABCConfig,
    module=ABC,
)
