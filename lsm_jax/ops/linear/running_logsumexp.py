"""Running logarithms of sums of exponentials along a document, by which memories of running means are normalised."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lsm_jax.ops.core import checks
from lsm_jax.ops.core.chunk_scans import associate_chunks, per_chunk, run_masks
from lsm_jax.ops.core.segments import cut_into_chunks, read_tokens, select
from lsm_jax.ops.core.shared_rows import (
    Update,
    emptied_by,
    ends_of_documents,
    newer_id,
    resume,
    unless_restarted,
)
from lsm_jax.parallel import TOKENS, over_mesh

_NOTHING = (
    -1e30
)  # the logarithm of an empty sum: finite, since the gradient of logaddexp is NaN for two -inf


class LogSumExpState(NamedTuple):
    """The state of `running_logsumexp` between calls; zeros are an empty one.

    Attributes:
        value: [B, D], or [B, S, D] with one state per segment: the logarithm of the sum, 0 if `filled` is.
        filled: [B, D] or [B, S, D], 1 where the sum has a term, else 0.
        segment_id: [B], the last nonzero segment id seen, 0 before any.
    """

    value: Float[Array, ...]
    filled: Float[Array, ...]
    segment_id: Int[Array, " B"]

    def logarithm(self) -> Array:
        """Return the logarithm of the sum, a large negative number where it is empty."""
        return jnp.where(self.filled > 0, self.value, _NOTHING)


def running_logsumexp(
    x: Float[Array, "B T D"],
    *,
    initial_state: LogSumExpState | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    update_mask: Array | None = None,
) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"], LogSumExpState]:
    """Return z_t = log Σ_{s ≤ t} exp(x_s) over the written tokens of a document, and z_{t-1} - z_t.

    With the write exp(x_t - z_t) and the log decay z_{t-1} - z_t, a linear memory is a mean of its values, weighted by
    exp(x).

    Args:
        x: [B, T, D].
        initial_state: the state to continue from; None is an empty one. With value [B, S, D] there is one state per
            segment: the tokens of id s use state s - 1.
        segment_ids: [B, T] integers, 0 padding; see `lsm_jax.ops.core.segments`.
        update_mask: [B, T], 0 for tokens that do not count.

    Returns:
        z [B, T, D]; the difference [B, T, D], at most 0, and 0 for a document's first token; and the final state. In
        float32 (float64 for float64 inputs). For tokens that are not written, z is x and the difference 0.

    Raises:
        ValueError: a shape is not accepted.
    """
    op = "running_logsumexp"
    batch, length, channels = checks.check_row_channels(op, "x", x)
    checks.check_rows(op, batch, length, segment_ids, update_mask)
    dtype = checks.compute_dtype(x)
    empty = functools.partial(logsumexp_state, batch, channels, dtype=dtype)
    state = checks.state_or_empty(op, initial_state, empty, segment_ids)
    segmented = state.value.ndim == 3
    rows = ("batch", None, "heads") if segmented else ("batch", "heads")
    batched = dict(x=x, state=state, segment_ids=segment_ids, update_mask=update_mask)
    axes = dict.fromkeys(batched, TOKENS)
    axes["state"] = LogSumExpState(rows, rows, ("batch",))  # pyrefly: ignore
    (z, difference), state = over_mesh(
        _run, batched, {},
        axes=axes, out_axes=((TOKENS, TOKENS), "state"), in_sequence=_in_sequence,
    )  # fmt: skip
    return z, difference, state


def logsumexp_state(
    batch_size: int, channels: int, *, num_segments: int | None = None, dtype=jnp.float32
) -> LogSumExpState:
    """Return the state of `running_logsumexp` before any token, for `channels` sums in each of `batch_size` rows; each row
    has `num_segments` states, or one if that is None.
    """
    rows = (batch_size,) if num_segments is None else (batch_size, num_segments)
    zeros = jnp.zeros((*rows, channels), dtype)
    return LogSumExpState(zeros, zeros, jnp.zeros(batch_size, jnp.int32))


def _state_of(z: Array, segment_id: Array) -> LogSumExpState:
    """Return the state whose sums have the logarithms z."""
    filled = z > _NOTHING / 2
    return LogSumExpState(jnp.where(filled, z, 0), filled.astype(z.dtype), segment_id)


# Compiled as one program also when called outside `jax.jit`, as in a notebook.
@jax.jit
def _run(x, segment_ids, update_mask, state):
    """Compute the results of `running_logsumexp` on one device, which has complete rows."""
    length = x.shape[1]
    num_segments = state.value.shape[1] if state.value.ndim == 3 else None
    tokens = read_tokens(segment_ids, update_mask, state.segment_id, num_segments)
    chunks = cut_into_chunks(tokens, length, 1, num_segments)
    x = select(tokens.written, x).astype(state.value.dtype)
    written = x if tokens.written is None else jnp.where(tokens.written[..., None], x, _NOTHING)
    term = chunks.split(written)[:, :, 0]
    if chunks.source is not None:  # empty places
        term = jnp.where((chunks.source < length)[..., None], term, _NOTHING)
    keep = jnp.zeros_like(term)
    _, enters, _ = run_masks(chunks)
    if enters is not None:
        keep = jnp.where(per_chunk(enters[:, :, 0], keep), keep, _NOTHING)
    entering, final = associate_chunks(
        jnp.add, jnp.add, keep, term, state.logarithm(), chunks,
        add=jnp.logaddexp, zero=_NOTHING,
    )  # fmt: skip
    before = jnp.maximum(entering + keep, _NOTHING)
    after = jnp.logaddexp(before, term)
    difference = jnp.where(before > _NOTHING / 2, before - after, 0)
    z, difference = (chunks.join(y[:, :, None], length) for y in (after, difference))
    if tokens.written is not None:
        keeps = tokens.written[..., None]
        z, difference = jnp.where(keeps, z, x), jnp.where(keeps, difference, 0)
    return (z, difference), _state_of(final, tokens.last_id)


def _in_sequence(axis, function, **arguments):
    """Compute `running_logsumexp` on one of several devices that have consecutive parts of each row: the results for its
    tokens, and the state after the whole row.
    """
    ids, empty = arguments["segment_ids"], jax.tree.map(jnp.zeros_like, arguments["state"])
    _, written = function(**(arguments | {"state": empty}))
    num_segments = empty.value.shape[1] if empty.value.ndim == 3 else None
    run = read_tokens(ids, None, empty.segment_id, num_segments).run
    update = Update((), written, *ends_of_documents(ids, run))
    return resume(axis, function, (), arguments, update, _advance)


def _advance(state: LogSumExpState, update: Update) -> LogSumExpState:
    """Return the state after one device's tokens: the sums before them plus those of its tokens (`update`), which begin
    again where a document begins.
    """
    state, written = emptied_by(state, update), update.written
    value, filled = (unless_restarted(update, x) for x in (state.value, state.filled))
    before = LogSumExpState(value, filled, state.segment_id).logarithm()
    return _state_of(jnp.logaddexp(before, written.logarithm()), newer_id(state, update))
