"""Where mini-batches (the tokens whose gradients are taken at the same weights) lie in the windows of a row, for the
chunk form of `online_memory`.

A window has at most as many tokens as a mini-batch. It therefore contains at most: the rest of the mini-batch
that it starts in; the beginning of the next mini-batch of that document; and the beginnings of the first
mini-batches of documents that begin inside the window. The latter all start from the initial weights, so that
three passes over a window, one for each of these, are exact in every case.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from lsm_jax.ops.core.decays import halve, pairwise_decay
from lsm_jax.ops.core.segments import Chunks, Tokens


class Part(NamedTuple):
    """Tokens of a window whose gradients are taken at the same weights, and the factors by which they change
    the online memory: the sums of gradient steps, and the current weights.

    If a part has tokens of several documents, the memory after it is that of the last document.

    Attributes:
        member: [B, N, C], True for the tokens of the part.
        into_sums: [B, N, G, C], the factor of each token's gradient step in the sums after the part.
        into_current: [B, N, G, C], the factor of each token's gradient step in the current weights after the
            part. None for TTT, as are the fields below.
        log_decay: [B, N, G], the log of the factor by which the current weights decay over the part.
        lift: [B, N, G], the factor by which the sums before the part are added to the current weights.
        keep_sums: [B, N, G], the factor by which the sums before the part decay over it.
    """

    member: Bool[Array, "B N C"]
    into_sums: Float[Array, "B N G C"]
    into_current: Any
    log_decay: Any
    lift: Any
    keep_sums: Any


class Windows(NamedTuple):
    """N windows of C tokens for `online_memory`: the mini-batches that they contain, and the factors with
    which a token's weights are computed. The weights that token i reads are

        keep_i W + lift_i S + sum_j lower_ij x_jᵀ (-η_j g_j)

    with W and S the weights and the sums of gradient steps that token i's part starts from, x_j a layer's
    input at token j, g_j the gradient with respect to the layer's output, and η_j the step size. G is 1 if
    all heads have the same factors.

    Attributes:
        lower: [B, N, G, C, C], 0 unless token j is written, of the same mini-batch as i, and not after i.
        keep: [B, N, G, C], the factor of W.
        lift: [B, N, G, C], the factor of S.
        reset: [B, N], True if the first token of the window begins a document; None if none can.
        full: [B, N], True if `present` contains the last token of its mini-batch.
        present: the tokens of the mini-batch that the window starts in.
        next: the tokens of the mini-batch after it; None if there can be none.
        new_documents: the tokens of documents that begin after the window's first token; None if there can
            be none.
    """

    lower: Float[Array, "B N G C C"]
    keep: Float[Array, "B N G C"]
    lift: Float[Array, "B N G C"]
    reset: Bool[Array, "B N"] | None
    full: Bool[Array, "B N"]
    present: Part
    next: Part | None
    new_documents: Part | None


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
    unaligned: bool,
) -> tuple[Windows, Array]:
    """Divide a call's tokens into windows of C tokens; return the windows, with the mini-batches that each
    contains, and the position of each state in its mini-batch after the call, [B] or [B, S].

    Args:
        tokens: which tokens write, and where documents begin.
        chunks: the layout of the windows: which tokens each of them contains.
        position: [B] or [B, S], the position of each state in its mini-batch before the call: the number of
            written tokens, 0 to mini_batch - 1, that the unfinished mini-batch has.
        length: T, the number of tokens in a row.
        mini_batch: the number of tokens in a mini-batch.
        coefficients: [mini_batch], TTT's factors of the summed gradient steps, by the token's place in its
            mini-batch; None for Titans.
        log_momentum: [B, T, G], Titans' log momentum, 0 for tokens that are not written; None for TTT.
        log_decay: [B, T, G], Titans' log decay of the weights, 0 for tokens that are not written; None for
            TTT.
        unaligned: False if every window is known to start at a multiple of its size in a document without
            gaps.
    """
    size = chunks.size
    real, written, count, after = _count(tokens, chunks, position, length)
    batch_of = (
        jnp.maximum(count - 1, 0) // mini_batch
    )  # the index in the document, from the state on
    run = jnp.zeros_like(count) if chunks.run is None else chunks.run
    largest = jnp.iinfo(jnp.int32).max

    first = jnp.min(jnp.where(real, run, largest), axis=-1)
    first = jnp.where(first == largest, run[..., 0], first)[..., None]
    in_first = real & (run == first)  # tokens of the window's first document
    before = jnp.min(jnp.where(in_first, count - written, largest), axis=-1, keepdims=True)
    present = jnp.where(before == largest, 0, before) // mini_batch
    full = jnp.any(in_first & written & (count == (present + 1) * mini_batch), axis=-1)
    in_next = in_first & (batch_of > present)
    reset = None
    if chunks.run is not None:
        previous = jnp.concatenate([jnp.zeros_like(run[:, :1, -1]), run[:, :-1, -1]], axis=1)
        reset = first[..., 0] > previous

    same = (run[..., :, None] == run[..., None, :]) & (
        batch_of[..., :, None] == batch_of[..., None, :]
    )
    same = (same & written[..., None, :] & jnp.tril(jnp.ones((size, size), bool)))[:, :, None]
    if coefficients is not None:
        factors = _ttt_factors(coefficients, count, same, mini_batch)
    else:
        factors = _titans_factors(chunks, log_momentum, log_decay, same)

    has_next = size > 1 and (unaligned or mini_batch % size != 0)
    has_new_documents = size > 1 and chunks.run is not None
    windows = Windows(
        factors.lower,
        factors.keep,
        factors.lift,
        reset,
        full,
        _part(factors, in_first & ~in_next),
        _part(factors, in_next) if has_next else None,
        _part(factors, real & (run > first)) if has_new_documents else None,
    )
    return windows, after % mini_batch


class _Factors(NamedTuple):
    """The factors by which gradient steps are multiplied in the sums and in the weights that each token of a
    window reads.

    Attributes:
        momentum: [B, N, G, C, C], the factor of token j's step in the sums at token i.
        lower: [B, N, G, C, C], the factor of token j's step in the weights that token i reads.
        keep: [B, N, G, C], the factor, in the weights that token i reads, of the weights that its part starts
            from.
        lift: [B, N, G, C], the factor, in the weights that token i reads, of the sums that its part starts
            from.
        log_kept_sums: [B, N, G, C], the log decay of the sums up to token i; None for TTT.
        log_kept: [B, N, G, C], the log decay of the weights up to token i; None for TTT.
    """

    momentum: Array
    lower: Array
    keep: Array
    lift: Array
    log_kept_sums: Array | None
    log_kept: Array | None


def _ttt_factors(coefficients: Array, count: Array, same: Array, mini_batch: int) -> _Factors:
    """Return TTT's factors, by which each token's gradient step is multiplied in the sums and weights at
    later tokens of its window.

    `count` [B, N, C] is the number of written tokens of the document up to each token, and `same`
    [B, N, 1, C, C] is True if token j's step is in the sums at token i.
    """
    momentum = same.astype(coefficients.dtype)
    lift = coefficients[jnp.maximum(count - 1, 0) % mini_batch][:, :, None]
    return _Factors(momentum, lift[..., None] * momentum, jnp.ones_like(lift), lift, None, None)


def _titans_factors(chunks: Chunks, log_momentum: Array, log_decay: Array, same: Array) -> _Factors:
    """Return Titans' factors, by which momentum and weight decay multiply each token's gradient step in the
    sums and weights at later tokens of its window.

    `same` [B, N, 1, C, C] is True where the step of token j counts at token i.
    """
    by_head = [jnp.moveaxis(chunks.split(x), 2, 3) for x in (log_momentum, log_decay)]
    momentum, decay = (jnp.where(same, pairwise_decay(halve(x[..., None])), 0) for x in by_head)
    log_kept_sums, log_kept = (
        jnp.sum(jnp.where(same, x[..., None, :], 0), axis=-1) for x in by_head
    )
    highest = jax.lax.Precision.HIGHEST
    lower = jnp.matmul(decay, momentum, precision=highest)
    lift = jnp.matmul(decay, jnp.exp(log_kept_sums)[..., None], precision=highest)[..., 0]
    return _Factors(momentum, lower, jnp.exp(log_kept), lift, log_kept_sums, log_kept)


def _part(factors: _Factors, member: Array) -> Part:
    """Return the `Part` of the tokens where `member` [B, N, C] is True: its factors are those of the part's
    last token, since the memory after the part is the memory after that token.
    """
    index = jnp.arange(member.shape[-1])
    last = index == jnp.max(jnp.where(member, index, -1), axis=-1, keepdims=True)
    last = last[:, :, None]

    def at_last(x):
        return jnp.sum(jnp.where(last.reshape(*last.shape, *(1,) * (x.ndim - 4)), x, 0), axis=3)

    if factors.log_kept_sums is None or factors.log_kept is None:
        return Part(member, at_last(factors.momentum), None, None, None, None)
    return Part(
        member,
        at_last(factors.momentum),
        at_last(factors.lower),
        at_last(factors.log_kept),
        at_last(factors.lift),
        jnp.exp(at_last(factors.log_kept_sums)),
    )


def _count(
    tokens: Tokens, chunks: Chunks, position: Array, length: int
) -> tuple[Array, Array, Array, Array]:
    """Count the written tokens of each document, from `position`, the number with which each state begins, or
    from 0 in a new document.

    Returns:
        Which tokens are real and which are written, [B, N, C]; the number of written tokens of each token's
        document up to and with the token, [B, N, C]; and the number of each state's document after the call.
    """
    batch, shape = position.shape[0], (-1, chunks.count, chunks.size)
    all_tokens = jnp.ones((batch, length), bool)
    real = chunks.split(all_tokens if tokens.real is None else tokens.real)
    written = chunks.split(all_tokens if tokens.written is None else tokens.written)
    flat = written.reshape(batch, -1)
    count = jnp.cumsum(flat, axis=1, dtype=jnp.int32)
    offset = jnp.zeros_like(count)
    if chunks.slot is not None:
        assert chunks.first is not None
        is_first = jnp.arange(chunks.size) == 0
        starts = (chunks.first[..., None] & is_first).reshape(flat.shape)
        offset = jnp.repeat(jnp.take_along_axis(position, chunks.slot, axis=1), chunks.size, axis=1)
    elif chunks.run is not None:
        run = chunks.run.reshape(flat.shape)
        starts = jnp.diff(run, axis=1, prepend=jnp.zeros_like(run[:, :1])) > 0
    else:
        starts = jnp.zeros_like(flat)
    latest = jax.lax.cummax(jnp.where(starts, jnp.arange(flat.shape[1]), -1), axis=1)
    base = jnp.take_along_axis(count - flat - offset, jnp.maximum(latest, 0), axis=1)
    if chunks.slot is None:
        base = jnp.where(latest >= 0, base, -position[:, None])
    count = count - base
    after = count[:, -1]
    if chunks.last is not None:
        ends = jnp.maximum(chunks.last, 0) * chunks.size + chunks.size - 1
        after = jnp.take_along_axis(count, ends, axis=1)
        after = jnp.where(chunks.last >= 0, after, position)
    return real, written, count.reshape(shape), after
