"""Where mini-batches stand in the windows that the chunk form of `online_memory` reads a row by.

A window has at most as many tokens as a mini-batch, wherever those begin. So it holds at most: the rest of the mini-batch it
starts in; the next mini-batch of that document, which it does not fill; and the first, unfilled mini-batches of documents
that begin inside it. All of the latter start from the initial weights, so that three passes cover every case exactly.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from lsm_jax.ops.core.decays import halve, pairwise_decay
from lsm_jax.ops.core.segments import Chunks, Tokens


class Part(NamedTuple):
    """Tokens of a window that share the weights their gradients are taken at, and what they leave behind.

    Of several documents in one part, what is left is the last one's.

    Attributes:
        here: [B, N, C], True at the part's tokens.
        into_sums: [B, N, G, C], how much of each token's step the sums hold in the end.
        into_current: [B, N, G, C], likewise, the current weights; None for TTT, as is the rest.
        log_decay: [B, N, G], of the current weights.
        lift: [B, N, G], how much of the earlier sums the current weights receive.
        keep_sums: [B, N, G], the decay of the earlier sums.
    """

    here: Bool[Array, "B N C"]
    into_sums: Float[Array, "B N G C"]
    into_current: Any
    log_decay: Any
    lift: Any
    keep_sums: Any


class Windows(NamedTuple):
    """N windows of C tokens. The weights a token i reads are

        keep_i W + lift_i S + sum_j lower_ij x_jᵀ (-η_j g_j)

    with W and S the weights and sums its part starts from. G is 1 where all heads agree.

    Attributes:
        lower: [B, N, G, C, C], 0 unless token j is written and stands at or before i in the same mini-batch.
        keep: [B, N, G, C].
        lift: [B, N, G, C].
        reset: [B, N], True where the first token of a window begins a document; None where none can.
        full: [B, N], True where `goes_on` completes its mini-batch.
        goes_on: the mini-batch the window starts in.
        next: the one after it; None where there can be none.
        begins: those of documents that begin further inside; None where there can be none.
    """

    lower: Float[Array, "B N G C C"]
    keep: Float[Array, "B N G C"]
    lift: Float[Array, "B N G C"]
    reset: Bool[Array, "B N"] | None
    full: Bool[Array, "B N"]
    goes_on: Part
    next: Part | None
    begins: Part | None


def cut_into_windows(
    tokens: Tokens,
    chunks: Chunks,
    position: Array,
    length: int,
    mini_batch: int,
    coefficients: Array | None,
    log_momentum: Any,
    log_decay: Any,
    *,
    crosses: bool,
) -> tuple[Windows, Array]:
    """The windows of a call, and the states' positions after it.

    Args:
        tokens: what each token does.
        chunks: the windows' layout.
        position: [B] or [B, S], of the states.
        length: T.
        mini_batch: tokens in one.
        coefficients: TTT's, [mini_batch], or None.
        log_momentum: Titans', [B, T, G], 0 at tokens that are not written, or None.
        log_decay: likewise.
        crosses: False where every window is known to start at a multiple of its size in a document without gaps.
    """
    size = chunks.size
    real, written, count, after = _count(tokens, chunks, position, length)
    batch_of = (
        jnp.maximum(count - 1, 0) // mini_batch
    )  # a document's mini-batches, from the state's on
    run = jnp.zeros_like(count) if chunks.run is None else chunks.run
    many = jnp.iinfo(jnp.int32).max

    first = jnp.min(jnp.where(real, run, many), axis=-1)
    first = jnp.where(first == many, run[..., 0], first)[..., None]
    goes_on = real & (run == first)
    before = jnp.min(jnp.where(goes_on, count - written, many), axis=-1, keepdims=True)
    present = jnp.where(before == many, 0, before) // mini_batch
    full = jnp.any(goes_on & written & (count == (present + 1) * mini_batch), axis=-1)
    crossed = goes_on & (batch_of > present)
    reset = None
    if chunks.run is not None:
        ended = jnp.concatenate([jnp.zeros_like(run[:, :1, -1]), run[:, :-1, -1]], axis=1)
        reset = first[..., 0] > ended

    same = (run[..., :, None] == run[..., None, :]) & (
        batch_of[..., :, None] == batch_of[..., None, :]
    )
    same = (same & written[..., None, :] & jnp.tril(jnp.ones((size, size), bool)))[:, :, None]
    if coefficients is not None:
        momentum = same.astype(coefficients.dtype)
        lift = coefficients[jnp.maximum(count - 1, 0) % mini_batch][:, :, None]
        lower, keep, sums_kept, log_kept = (
            lift[..., None] * momentum,
            jnp.ones_like(lift),
            None,
            None,
        )
    else:
        by_head = [jnp.moveaxis(chunks.split(x), 2, 3) for x in (log_momentum, log_decay)]
        pairs = [jnp.where(same, pairwise_decay(halve(x[..., None])), 0) for x in by_head]
        sums_kept, log_kept = (
            jnp.sum(jnp.where(same, x[..., None, :], 0), axis=-1) for x in by_head
        )
        momentum, decay = pairs
        highest = jax.lax.Precision.HIGHEST
        lower = jnp.matmul(decay, momentum, precision=highest)
        lift = jnp.matmul(decay, jnp.exp(sums_kept)[..., None], precision=highest)[..., 0]
        keep = jnp.exp(log_kept)

    def part(here: Array) -> Part:
        """What the last token of the part sees is what is left."""
        place = jnp.arange(size)
        last = place == jnp.max(jnp.where(here, place, -1), axis=-1, keepdims=True)
        last = last[:, :, None]

        def pick(x):
            return jnp.sum(jnp.where(last.reshape(*last.shape, *(1,) * (x.ndim - 4)), x, 0), axis=3)

        if sums_kept is None:
            return Part(here, pick(momentum), None, None, None, None)
        return Part(
            here,
            pick(momentum),
            pick(lower),
            pick(log_kept),
            pick(lift),
            jnp.exp(pick(sums_kept)),
        )

    crosses = size > 1 and (crosses or mini_batch % size != 0)
    begins = size > 1 and chunks.run is not None
    windows = Windows(
        lower,
        keep,
        lift,
        reset,
        full,
        part(goes_on & ~crossed),
        part(crossed) if crosses else None,
        part(real & (run > first)) if begins else None,
    )
    return windows, after % mini_batch


def _count(
    tokens: Tokens, chunks: Chunks, position: Array, length: int
) -> tuple[Array, Array, Array, Array]:
    """Real and written tokens, each one's document's written tokens up to it [B, N, C], and those of each state in the end.

    Both count from the state's position, a new document's from 0.
    """
    batch, shape = position.shape[0], (-1, chunks.count, chunks.size)
    everywhere = jnp.ones((batch, length), bool)
    real = chunks.split(everywhere if tokens.real is None else tokens.real)
    written = chunks.split(everywhere if tokens.written is None else tokens.written)
    flat = written.reshape(batch, -1)
    count = jnp.cumsum(flat, axis=1, dtype=jnp.int32)
    start = jnp.zeros_like(count)
    if chunks.slot is not None:
        assert chunks.first is not None
        inside = jnp.arange(chunks.size) == 0
        begins = (chunks.first[..., None] & inside).reshape(flat.shape)
        start = jnp.repeat(jnp.take_along_axis(position, chunks.slot, axis=1), chunks.size, axis=1)
    elif chunks.run is not None:
        run = chunks.run.reshape(flat.shape)
        begins = jnp.diff(run, axis=1, prepend=jnp.zeros_like(run[:, :1])) > 0
    else:
        begins = jnp.zeros_like(flat)
    latest = jax.lax.cummax(jnp.where(begins, jnp.arange(flat.shape[1]), -1), axis=1)
    base = jnp.take_along_axis(count - flat - start, jnp.maximum(latest, 0), axis=1)
    if chunks.slot is None:
        base = jnp.where(latest >= 0, base, -position[:, None])
    count = count - base
    after = count[:, -1]
    if chunks.last is not None:
        ends = jnp.maximum(chunks.last, 0) * chunks.size + chunks.size - 1
        after = jnp.take_along_axis(count, ends, axis=1)
        after = jnp.where(chunks.last >= 0, after, position)
    return real, written, count.reshape(shape), after
