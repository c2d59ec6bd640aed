"""Sums of angles along a document, for decays that turn: as exact after many tokens as after one."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lsm_jax.ops import checks
from lsm_jax.ops.segments import Chunks, cut_into_chunks, finish_output, read_tokens, select
from lsm_jax.ops.states import associate_chunks, per_chunk, run_masks
from lsm_jax.parallel import over_batch

# By dtype: integers to count angles in, the power of two that makes a radian one of them, and a whole turn.
_COUNTS = {"float32": ("int32", 28, 1686629713), "float64": ("int64", 60, 7244019458077122842)}


def cumulative_phase(
    angle: Float[Array, "B T H"],
    *,
    num_segments: int | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    update_mask: Array | None = None,
) -> tuple[Float[Array, "B T H"], Float[Array, ...]]:
    """The sum of the angles of a document's written tokens in this call, up to each token, less whole turns.

    It is a sum of integers, which does not round: in float32 an angle enters to 2e-9, and a whole turn leaves to 3e-10. A
    memory that is turned back by the final sum when a call ends needs no phase of its own to go on from.

    Args:
        angle: [B, T, H], radians, from -π to π.
        num_segments: sums to keep apart in a row, where one state a segment is kept; None is one a row.
        segment_ids: [B, T] integers, 0 padding; see `lsm_jax.ops.segments`.
        update_mask: [B, T], 0 where a token's angle must not count.

    Returns:
        [B, T, H], and the sum at the end, [B, H] or [B, S, H]; from -π to π, in float32 (float64 for float64).

    Raises:
        ValueError: shapes that do not fit.
    """
    op = "cumulative_phase"
    batch, length, _ = checks.check_row_channels(op, "angle", angle)
    checks.check_rows(op, batch, length, segment_ids, update_mask)
    if num_segments is not None and (segment_ids is None or not checks.is_count(num_segments)):
        given = "None" if segment_ids is None else "given"
        raise ValueError(
            f"{op}: num_segments={num_segments!r} with segment_ids {given}; accepted are None, and integers from 1 with "
            "segment_ids"
        )
    batched = dict(angle=angle, segment_ids=segment_ids, update_mask=update_mask)
    return over_batch(_cumulative_phase, batched, {}, num_segments)


# Compiled as a whole also when called outside `jax.jit`, as in a notebook.
@functools.partial(jax.jit, static_argnums=0)
def _cumulative_phase(num_segments, angle, segment_ids, update_mask):
    batch, length, _ = angle.shape
    tokens = read_tokens(segment_ids, update_mask, jnp.zeros(batch, jnp.int32), num_segments)
    chunks = cut_into_chunks(tokens, length, 1, num_segments)
    angle = select(tokens.written, angle).astype(checks.compute_dtype(angle))
    angle = chunks.split(angle)[:, :, 0]
    counts, bits, turn = _COUNTS[angle.dtype.name]

    def add(a, b):
        total = a + b
        return total - turn * jnp.sign(total) * (jnp.abs(total) > turn // 2)

    count = jnp.round(jax.lax.stop_gradient(angle) * 2.0**bits).astype(counts)
    phase, final = (
        x.astype(angle.dtype) * 2.0**-bits for x in _running_sum(count, chunks, num_segments, add)
    )
    # Zero: it carries the gradient, which integers have not.
    zero, final_zero = _running_sum(
        angle - jax.lax.stop_gradient(angle), chunks, num_segments, jnp.add
    )
    output = chunks.join((phase + zero)[:, :, None], length)
    return finish_output(tokens, output), final + final_zero


def _running_sum(x: Array, chunks: Chunks, num_segments: int | None, add) -> tuple[Array, Array]:
    """x [B, N, H] -> the sum up to each, begun again with every document, [B, N, H], and the last of each state."""
    keep = jnp.ones_like(x)
    _, enters, _ = run_masks(chunks)
    if enters is not None:
        keep = jnp.where(per_chunk(enters[:, :, 0], keep), keep, 0)
    rows = (x.shape[0],) if num_segments is None else (x.shape[0], num_segments)
    entering, final = associate_chunks(
        jnp.multiply,
        jnp.multiply,
        keep,
        x,
        jnp.zeros((*rows, x.shape[2]), x.dtype),
        chunks,
        add=add,
        zero=0,
    )
    return add(keep * entering, x), final
