"""Sums of angles along a document, for decays that turn: exact over any length, and continued from call to call."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lsm_jax.ops import checks
from lsm_jax.ops.segments import cut_into_chunks, finish_output, read_tokens, select
from lsm_jax.ops.states import associate_chunks, per_chunk, run_masks
from lsm_jax.parallel import over_batch

# A turn in two parts: the first has so few bits that its small multiples are exact in float32.
_TURN_HIGH = 6.28125
_TURN_LOW = 2 * math.pi - _TURN_HIGH


class PhaseState(NamedTuple):
    """State of `cumulative_phase`.

    Attributes:
        phase: [B, H], or [B, S, H] with one state a segment; from -π to π, float32.
        segment_id: [B], the last nonzero segment id seen, 0 before any.
    """

    phase: Float[Array, ...]
    segment_id: Int[Array, " B"]


def phase_state(
    batch_size: int, num_heads: int, *, num_segments: int | None = None, dtype=jnp.float32
) -> PhaseState:
    """A `PhaseState` of zeros; `num_segments` gives each row that many states."""
    rows = (batch_size,) if num_segments is None else (batch_size, num_segments)
    return PhaseState(jnp.zeros((*rows, num_heads), dtype), jnp.zeros(batch_size, jnp.int32))


def cumulative_phase(
    angle: Float[Array, "B T H"],
    *,
    initial_state: PhaseState | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    update_mask: Array | None = None,
) -> tuple[Float[Array, "B T H"], PhaseState]:
    """The sum of the angles of a document's written tokens up to each token, without whole turns.

    The sum is a tree's, each of whose nodes drops a whole turn as soon as there is one: rounding grows with the tree's depth,
    not with the number of tokens or turns.

    Args:
        angle: [B, T, H], radians, from -π to π.
        initial_state: the state to go on from; with phase [B, S, H], segment id s has state s - 1. None is zero.
        segment_ids: [B, T] integers, 0 padding; see `lsm_jax.ops.segments`.
        update_mask: [B, T], 0 where a token's angle must not count.

    Returns:
        [B, T, H] and the final state, both in float32 (float64 for float64).

    Raises:
        ValueError: shapes that do not fit.
    """
    op = "cumulative_phase"
    if jnp.ndim(angle) != 3 or angle.shape[1] == 0:
        raise ValueError(
            f"{op}: angle has shape {jnp.shape(angle)}; accepted is [B, T, H], T at least 1"
        )
    batch, length, heads = angle.shape
    checks.check_rows(op, batch, length, segment_ids, update_mask)
    dtype = checks.compute_dtype(angle)
    state = initial_state
    if state is None:
        state = phase_state(batch, heads, dtype=dtype)
    rows = (batch,) if jnp.ndim(state.phase) == 2 else (batch, None)
    letters = "B, H" if len(rows) == 1 else "B, S, H"
    checks.check_shape(op, "initial_state.phase", state.phase, (*rows, heads), letters)
    batched = dict(angle=angle, state=state, segment_ids=segment_ids, update_mask=update_mask)
    return over_batch(lambda b, _: _cumulative_phase(dtype, **b), batched, {})


# Compiled as a whole also when called outside `jax.jit`, as in a notebook.
@functools.partial(jax.jit, static_argnums=0)
def _cumulative_phase(dtype, angle, state, segment_ids, update_mask):
    length = angle.shape[1]
    num_segments = state.phase.shape[1] if state.phase.ndim == 3 else None
    tokens = read_tokens(segment_ids, update_mask, state.segment_id, num_segments)
    chunks = cut_into_chunks(tokens, length, 1, num_segments)
    turn = chunks.split(select(tokens.written, angle).astype(dtype))[:, :, 0]
    keep = jnp.ones_like(turn)
    _, enters, _ = run_masks(chunks)
    if enters is not None:  # 0 where a document begins
        keep = jnp.where(per_chunk(enters[:, :, 0], keep), keep, 0)
    entering, phase = associate_chunks(
        jnp.multiply, jnp.multiply, keep, turn, state.phase.astype(dtype), chunks, add=add_angles
    )
    output = chunks.join(add_angles(keep * entering, turn)[:, :, None], length)
    return finish_output(tokens, output), PhaseState(phase, tokens.last_id)


def add_angles(a: Array, b: Array) -> Array:
    """a + b less a whole turn where it leaves [-π, π]; a and b in there."""
    total = a + b
    turns = jnp.round(total / (2 * math.pi))
    return (total - turns * _TURN_HIGH) - turns * _TURN_LOW
