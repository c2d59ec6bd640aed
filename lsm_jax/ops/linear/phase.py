"""Sums of angles along a document, for memories with complex decays; long sums lose no precision."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lsm_jax.ops.core import checks
from lsm_jax.ops.core.chunk_scans import associate_chunks
from lsm_jax.ops.core.segments import Chunks, cut_into_chunks, finish_output, read_tokens, select
from lsm_jax.ops.core.shared_rows import (
    Update,
    emptied_by,
    ends_of_documents,
    newer_id,
    resume,
    unless_restarted,
)
from lsm_jax.parallel import TOKENS, over_mesh

# By dtype: the integers that angles are counted in, the power of two by which a radian is multiplied, and a full turn.
_COUNTS = {"float32": ("int32", 28, 1686629713), "float64": ("int64", 60, 7244019458077122842)}

_FIRST_BLOCK, _BLOCK = 8, 16  # entries that are added in one pass, and sums of blocks
_SPARE = 4  # bits that a sum of `_BLOCK` integers needs


def cumulative_phase(
    angle: Float[Array, "B T H"],
    *,
    num_segments: int | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    update_mask: Array | None = None,
) -> tuple[Float[Array, "B T H"], Float[Array, ...]]:
    """Return the sum of the angles of a document's written tokens in this call, up to each token, without
    full turns; it rotates queries and keys for complex decays. It has derivatives in reverse mode only.

    The sum is one of integers, which does not round: in float32 an angle is exact to 2e-9 and a full turn to
    3e-10. A memory that is rotated back by the final sum at the end of a call does not need to store a phase.

    Args:
        angle: [B, T, H], radians, from -π to π.
        num_segments: the number of separate sums in a row with one state per segment; None is one per row.
        segment_ids: [B, T] integers, 0 padding; see `lsm_jax.ops.core.segments`.
        update_mask: [B, T], 0 for tokens whose angle is not added.

    Returns:
        The sums [B, T, H], and the final sum [B, H] or [B, S, H]; from -π to π, in float32 (float64 for
        float64 inputs).

    Raises:
        ValueError: a shape is not accepted, or `num_segments` is given without `segment_ids`.
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
    rows = ("batch",) if num_segments is None else ("batch", None)
    return over_mesh(
        _cumulative_phase, batched, {}, num_segments,
        axes=dict.fromkeys(batched, TOKENS), out_axes=(TOKENS, (*rows, "heads")),
        in_sequence=_in_sequence,
    )  # fmt: skip


class _Sums(NamedTuple):
    """The sums of angles along a document, from its first token to the last that was read, for each head.

    Angles are stored as integers, a fixed fraction of a turn each, so that long documents lose no precision.

    Attributes:
        count: [B, H] or [B, S, H] integers.
        zero: [B, H] or [B, S, H] zeros that carry the gradient.
        segment_id: [B], the last nonzero segment id.
    """

    count: Array
    zero: Array
    segment_id: Array

    def angle(self) -> Array:
        """Return in radians the angles that a state stores as integers: the sum of the angles of the document's tokens so far, [B, H],
        or [B, S, H] with one state per segment.
        """
        _, bits, _ = _COUNTS[self.zero.dtype.name]
        return self.count.astype(self.zero.dtype) * 2.0**-bits + self.zero


def _no_sums(num_segments, angle) -> _Sums:
    """Return sums of angles that are zero, for rows of which no token has been read: [B, H], or [B, S, H] with one
    state per segment.
    """
    dtype = checks.compute_dtype(angle)
    batch, _, heads = angle.shape
    rows = (batch,) if num_segments is None else (batch, num_segments)
    count = jnp.zeros((*rows, heads), _COUNTS[jnp.dtype(dtype).name][0])
    return _Sums(count, jnp.zeros((*rows, heads), dtype), jnp.zeros(batch, jnp.int32))


def _cumulative_phase(num_segments, **arguments):
    """Compute the results of `cumulative_phase` on one device, which has complete rows: the sums of angles
    [B, T, H] up to each token of its document, and the last sums, in radians.
    """
    output, final = _sum_up(
        num_segments, **arguments, state=_no_sums(num_segments, arguments["angle"])
    )
    return output, final.angle()


def _in_sequence(axis, _, num_segments, **arguments):
    """Compute `cumulative_phase` on one of several devices that have consecutive parts of each row: the sums of angles
    of its tokens [B, T, H], and those after the whole row, in radians.

    The sums of each device's tokens are exchanged, so that each device begins with those of the devices before.
    """
    empty = _no_sums(num_segments, arguments["angle"])
    ids = arguments["segment_ids"]
    _, written = _sum_up(num_segments, **arguments, state=empty)
    run = read_tokens(ids, None, empty.segment_id, num_segments).run
    update = Update((), written, *ends_of_documents(ids, run))
    arguments = arguments | {"state": empty}
    output, final = resume(axis, _sum_up, (num_segments,), arguments, update, _advance)
    return output, final.angle()


def _advance(state: _Sums, update: Update) -> _Sums:
    """Return the sums of angles after one device's tokens: the sums before them plus those of its tokens (`update`),
    which begin at zero again where a document begins.
    """
    state, written = emptied_by(state, update), update.written
    count, zero = (unless_restarted(update, x) for x in (state.count, state.zero))
    return _Sums(_add(count, written.count), zero + written.zero, newer_id(state, update))


def _add(a: Array, b: Array) -> Array:
    """Return the sum of two angles that are stored as integers, reduced to one turn, from minus half a turn to half a
    turn.
    """
    turn = next(turn for kind, _, turn in _COUNTS.values() if kind == a.dtype.name)
    total = a + b
    return total - turn * jnp.sign(total) * (jnp.abs(total) > turn // 2)


# Compiled as one program also when called outside `jax.jit`, as in a notebook.
@functools.partial(jax.jit, static_argnums=0)
def _sum_up(num_segments, angle, segment_ids, update_mask, state):
    """Return the sums of the angles of each token's document up to the token, in radians [B, T, H], and the
    sums after the call, as integers, with which the next call continues.
    """
    batch, length, _ = angle.shape
    tokens = read_tokens(segment_ids, update_mask, state.segment_id, num_segments)
    chunks = cut_into_chunks(tokens, length, 1, num_segments)
    angle = select(tokens.written, angle).astype(checks.compute_dtype(angle))
    angle = chunks.split(angle)[:, :, 0]
    # Zeros of the angles' type, which the gradient has too: under `jax.shard_map` they vary along the axes that angles do.
    no_angle = jnp.zeros_like(angle[:, 0] if num_segments is None else angle[:, :1])
    phase, last, zero = _add_angles(angle, state.count, state.zero + no_angle, chunks)
    output = chunks.join(phase[:, :, None], length)
    return finish_output(tokens, output), _Sums(last, zero, tokens.last_id)


@jax.custom_vjp
def _add_angles(
    angle: Array, count: Array, zero: Array, chunks: Chunks
) -> tuple[Array, Array, Array]:
    """Return the sums of angles [B, N, H] in radians up to each entry, and the last sums, as integers and as the zeros that
    carry their gradient; `count` and `zero` are those before the call. Integers have no gradient of their own.
    """
    counts, bits, _ = _COUNTS[angle.dtype.name]
    # Stored, since each count is one term of several sums, for each of which XLA would compute it again.
    each = jax.lax.optimization_barrier(jnp.round(angle * 2.0**bits).astype(counts))
    phase, last = _running_sum(each, count, chunks)
    phase = phase.astype(angle.dtype) * 2.0**-bits
    # Zeros that depend on the angles: `jax.vmap` adds the gradients of what it believes to be constant.
    return phase, last, zero + 0 * last.astype(angle.dtype)


def _add_angles_forward(angle, count, zero, chunks):
    return _add_angles(angle, count, zero, chunks), (jnp.zeros_like(zero), chunks)


def _add_angles_backward(saved, gradients):
    """Return the gradients of the angles and of `zero`: sums over the later entries of the same document."""
    (zero, chunks), (d_sums, _, d_last) = saved, gradients
    if chunks.slot is not None:
        sums = functools.partial(_running_sum, chunks=chunks)
        transposed = jax.linear_transpose(sums, d_sums, zero)
        d_angle, d_zero = transposed((d_sums, d_last))
        return d_angle, None, d_zero, None
    run = _runs(chunks)
    d_sums = jnp.concatenate([d_sums[:, :-1], d_sums[:, -1:] + d_last[:, None]], axis=1)
    reversed_run = None if run is None else run[:, ::-1]
    d_angle = _blocked_sum(d_sums[:, ::-1], reversed_run, zero)[:, ::-1]
    d_zero = d_angle[:, 0]
    return d_angle, None, d_zero if run is None else jnp.where(run[:, :1] == 0, d_zero, 0), None


_add_angles.defvjp(_add_angles_forward, _add_angles_backward)


def _runs(chunks: Chunks) -> Array | None:
    """Return the document of each entry [B, N], 0 for that of the call before, or None if all are of that one."""
    return None if chunks.run is None else chunks.run[:, :, 0]


def _running_sum(x: Array, initial: Array, chunks: Chunks) -> tuple[Array, Array]:
    """Return the sum of x [B, N, H] over the entries of the same document up to each entry, [B, N, H], and
    the sum up to the last entry of each state; `initial` are the sums before the call. Integers are angles, which are
    added without full turns.
    """
    if chunks.slot is None:
        sums = _blocked_sum(x, _runs(chunks), initial)
        return sums, sums[:, -1]
    add = _add if jnp.issubdtype(x.dtype, jnp.integer) else jnp.add
    entering, final = associate_chunks(
        jnp.multiply, jnp.multiply, jnp.ones_like(x), x, initial, chunks, add=add, zero=0
    )
    return add(entering, x), final


def _blocked_sum(x: Array, run: Array | None, initial: Array, size: int = _FIRST_BLOCK) -> Array:
    """Return the sum of x [B, N, H] over the entries of the same run up to each entry, with `initial` [B, H] in run 0.

    Blocks of entries are summed, then their sums in the same way, so that all entries are passed over only at the beginning
    and at the end, and arrays have the same layout at every step; an associative scan has 2 log2(N) steps, of which a
    GPU executes each as a kernel.

    Args:
        x: numbers, or integers that are angles.
        run: [B, N], a number that changes where the sum begins again, or None if it does not.
        initial: the sums before the first entry.
        size: number of entries of a block.
    """
    add = _add if jnp.issubdtype(x.dtype, jnp.integer) else jnp.add
    batch, count, heads = x.shape
    size = min(count, size)
    padding = [(0, 0), (0, -count % size)]
    x = jnp.pad(x, [*padding, (0, 0)]).reshape(batch, -1, size, heads)
    if run is not None:
        run = jnp.pad(run, padding, mode="edge").reshape(batch, -1, size)
    sums, entering = _sum_in_blocks(x, run), initial[:, None]
    if x.shape[1] > 1:
        ends = None if run is None else run[:, :, -1]
        after = _blocked_sum(sums[:, :, -1], ends, initial, _BLOCK)
        entering = jnp.concatenate([entering, after[:, :-1]], axis=1)
    entering = entering[:, :, None]
    if run is not None:
        before = jnp.pad(run[:, :-1, -1], [(0, 0), (1, 0)])
        entering = jnp.where((run == before[..., None])[..., None], entering, 0)
    return add(entering, sums).reshape(batch, -1, heads)[:, :count]


def _sum_in_blocks(x: Array, run: Array | None) -> Array:
    """Return the sum of x [B, N, C, H] over the entries of the same block and run up to each entry.

    Integers wrap around; the sum of their leading bits says how many full turns it has, so that the sum without them is exact.
    """
    terms = [x]
    for distance in range(1, x.shape[2]):
        earlier = jnp.pad(x[:, :, :-distance], [(0, 0), (0, 0), (distance, 0), (0, 0)])
        if run is not None:
            same = run[:, :, distance:] == run[:, :, :-distance]
            same = jnp.pad(same, [(0, 0), (0, 0), (distance, 0)])
            earlier = jnp.where(same[..., None], earlier, 0)
        terms.append(earlier)
    total = sum(terms[1:], terms[0])
    if not jnp.issubdtype(x.dtype, jnp.integer):
        return total
    kind, turn = next((name, turn) for name, (i, _, turn) in _COUNTS.items() if i == x.dtype.name)
    leading = sum((term >> _SPARE for term in terms[1:]), terms[0] >> _SPARE)
    turns = jnp.round(leading.astype(kind) * (2.0**_SPARE / turn)).astype(x.dtype)
    return _add(total - turns * turn, jnp.zeros_like(total))
