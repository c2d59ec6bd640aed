"""Compute `path_attention` by XLA in two forms: recurrent (token by token, which changes all stored keys), and by chunks.

Where devices have consecutive parts of each row, a device computes the chunks of its tokens: their keys at the chunk's end, and
the product of their matrices, K x K. These are gathered with the values (for chunks of K tokens, 1.5 times the numbers that
softmax attention gathers, in float32); the device's queries then go back over the chunks of the complete row. All queries meet all chunks,
masked or not, so that devices have equal work. Token by token, and with one state per segment, where a chunk contains tokens of
several devices, every device computes complete rows.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lsm_jax.ops.attention.forget_gates import GateSum, sum_gates
from lsm_jax.ops.attention.shared_rows import gather_tokens, part_of_device
from lsm_jax.ops.attention.state import AttentionState, without_free_places
from lsm_jax.ops.attention.token_positions import (
    newest_sum,
    prepend_state,
    token_positions,
    write_tokens,
)
from lsm_jax.ops.backends.registry import Backend, register
from lsm_jax.ops.core import checks
from lsm_jax.ops.core.chunk_scans import per_chunk, scan_tokens
from lsm_jax.ops.core.decays import inverse_unit_lower
from lsm_jax.ops.core.segments import Chunks, cut_into_chunks, finish_output, read_tokens, select
from lsm_jax.ops.path.online_softmax import Weighed, finish, meet, nothing


class Options(NamedTuple):
    """The options of `path_attention` that are constant when a program is compiled.

    Attributes:
        scale: multiplies the scores.
        by_token: whether the form is "recurrent".
        size: tokens in a chunk.
        no_state: whether the caller gave no state.
        dtype: the dtype of keys in the state and of all sums.
        precision: the precision of matrix products.
        axis: the mesh axis that rows are split over; None if a device has complete rows.
    """

    scale: float
    by_token: bool
    size: int
    no_state: bool
    dtype: Any
    precision: jax.lax.Precision
    axis: str | None = None


class _Inputs(NamedTuple):
    """The arrays of `path_attention`, split by head: queries q [..., G, R, K], keys k and directions w [..., G, K],
    values v [..., G, V], strengths beta [..., G], and the sums of log gates [..., N] or None.
    """

    q: Array
    k: Array
    v: Array
    w: Array
    beta: Array
    sums: GateSum | None


def run_xla(
    options: Options,
    q,
    k,
    v,
    w,
    beta,
    log_forget,
    state: AttentionState,
    segment_ids,
    update_mask,
) -> tuple[Array, AttentionState]:
    """Compute `path_attention` by XLA on one device: return the output [B, T, H, V] of the device's tokens, in v's dtype, and
    the state after the row's last token.
    """
    batch, length, heads, _ = v.shape
    dtype, axis = options.dtype, options.axis
    num_segments = state.keys.shape[1] if state.keys.ndim == 5 else None
    part = functools.partial(part_of_device, axis, length)
    segment_ids, update_mask, log_forget = gather_tokens(
        axis, (segment_ids, update_mask, log_forget)
    )
    complete = options.by_token or num_segments is not None
    if complete:
        q, k, v, w, beta = gather_tokens(axis, (q, k, v, w, beta))
        options = options._replace(axis=None)
    row_length = length * (1 if axis is None else jax.lax.axis_size(axis))
    tokens = read_tokens(segment_ids, update_mask, state.segment_id, num_segments)
    positions = token_positions(tokens, state, batch, row_length)
    sums = None if log_forget is None else sum_gates(log_forget, tokens, newest_sum(state))
    no_id: Any = None
    own = part(tokens._replace(last_id=no_id))
    of_arrays = tokens if complete else own  # of the tokens in q, k, v, w and beta

    def prepare(x) -> Any:
        return select(of_arrays.written, jnp.asarray(x).astype(dtype))

    inputs = _Inputs(
        q=checks.group_queries(select(of_arrays.real, q).astype(dtype), heads) * options.scale,
        k=prepare(checks.spread_keys(k, heads)),
        v=prepare(v),
        w=prepare(checks.spread_keys(w, heads)),
        beta=prepare(beta),
        sums=sums if complete else part(sums),
    )
    if options.by_token:
        # Values in the wide dtype, so that their gradients are summed in it.
        rings = state.keys.astype(dtype), state.values.astype(dtype)
        memory = *rings, state.log_forget, state.count
        step = functools.partial(_step, options.precision)
        output, after = scan_tokens(
            step, (inputs, positions.written), memory, tokens.run, tokens.slot
        )
        keys, values, sums_after, count = after
        values = values.astype(state.values.dtype)
        state_after = AttentionState(keys, values, count, tokens.last_id, sums_after)
    else:
        chunks = cut_into_chunks(tokens, row_length, options.size, num_segments)
        of_inputs = positions if complete else part(positions)
        output, keys, values, state_keys = _chunked(options, inputs, of_inputs, state, chunks)
        written = state._replace(keys=state_keys)
        state_after = write_tokens(written, keys, values, sums, positions, tokens)
    if complete:
        output = part(output)
    output = output.reshape(batch, length, -1, output.shape[-1])
    if not options.no_state:
        beyond = part(positions.rank) >= state.keys.shape[-3]
        output = jnp.where(beyond[:, :, None, None], jnp.nan, output)
    return finish_output(own, output).astype(v.dtype), without_free_places(state_after)


def _step(precision, memory: tuple, token: tuple[_Inputs, Array]) -> tuple[tuple, Array]:
    """Apply one token to the stored keys [B, C, G, K], values, sums of log gates and count [B], and attend; return them
    and the output [B, G, R, V].
    """
    (keys, values, sums, count), (x, written) = memory, token
    held = jnp.einsum("bcgk,bgk->bcg", keys, x.w, precision=precision)
    keys = keys - (x.beta[:, None] * held)[..., None] * x.w[:, None]
    place = jnp.arange(keys.shape[1])
    new = (place == count[:, None]) & written[:, None]

    def store(ring, value):
        return jnp.where(per_chunk(new, ring), value[:, None].astype(ring.dtype), ring)

    keys, values, sums = store(keys, x.k), store(values, x.v), jax.tree.map(store, sums, x.sums)
    count = count + written
    scores = jnp.einsum("bgrk,bcgk->bgrc", x.q, keys, precision=precision)
    if x.sums is not None:
        scores = scores + _bias(x.sums, sums, scores.shape)
    mask = (place < count[:, None])[:, None, None]
    top = jnp.max(jnp.where(mask, scores, -jnp.inf), axis=-1, keepdims=True)
    top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
    weights = jnp.where(mask, jnp.exp(jnp.where(mask, scores - top, 0)), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1)
    output = jnp.einsum("bgrc,bcgv->bgrv", weights, values, precision=precision)
    return (keys, values, sums, count), output


def _bias(queries: GateSum, keys: GateSum, shape: tuple[int, ...]) -> Array:
    """Return the sum of log gates after each key up to a query, in the `shape` of the scores [B, G, R, C], of one query
    [B, N] and keys [B, C, N]. The query's sum changes all its scores alike: it has no gradient.
    """
    high, low = (
        jax.lax.stop_gradient(a)[..., None] - jnp.swapaxes(b, 1, 2)
        for a, b in zip(queries, keys, strict=True)
    )
    return (high + low).reshape(shape)


class _Chunked(NamedTuple):
    """The arrays of the chunks: keys at their chunk's end [B, N, G, C, K], values [B, N, G, C, V], the matrix of each
    chunk [B, N, G, K, K], and of each token [B, N, C] the document, the rank and whether it is written, and its sums of
    log gates [B, N, H, C] or None.
    """

    keys: Array
    values: Array
    matrix: Array
    document: Array
    rank: Array
    written: Array
    sums: GateSum | None


def _chunked(options: Options, inputs: _Inputs, positions, state: AttentionState, row: Chunks):
    """Return the output [B, T, G, R, V] of this device's tokens, the complete row's keys as they are after its last token and
    its values [B, n T, G, *], and the state's keys.

    Key j at token t is k_j H_{j+1} ... H_t with H = I - β wᵀ w. For a chunk with rows W the product of all H is
    A = I - (S W)ᵀ W, S = (I + tril(β W Wᵀ, -1))⁻¹ diag(β). Keys are carried to their chunk's end, queries to their chunk's
    start, and then by one chunk's A after another to earlier chunks, whose keys they meet on the way.
    """
    precision, length = options.precision, inputs.v.shape[1]
    matmul = functools.partial(jnp.matmul, precision=precision)
    chunks = row if options.axis is None else row._replace(count=length // row.size)

    def by_head(x):  # [B, N, C, G, ..., *] -> [B, N, G, ..., C, *]
        x = jnp.moveaxis(chunks.split(x), 2, 3)
        return x if x.ndim < 6 else jnp.moveaxis(x, 3, -2)

    x = jax.tree.map(by_head, inputs)
    queries, beta = x.q.shape[3], x.beta[..., None]
    transposed = jnp.swapaxes(x.w, -1, -2)
    lower = jnp.tril(beta * matmul(x.w, transposed), -1)
    solved = inverse_unit_lower(lower) * jnp.swapaxes(beta, -1, -2)
    rows = matmul(solved, x.w)  # S W
    held = matmul(solved, jnp.tril(matmul(x.w, jnp.swapaxes(x.k, -1, -2)), -1))  # [B, N, G, t, j]
    with_w = jnp.tril(matmul(x.q, transposed[:, :, :, None]))
    scores = matmul(x.q, jnp.swapaxes(x.k, -1, -2)[:, :, :, None]) - matmul(
        with_w, held[:, :, :, None]
    )
    start = x.q - matmul(with_w, rows[:, :, :, None])
    matrix = jnp.eye(x.k.shape[-1], dtype=x.k.dtype) - matmul(jnp.swapaxes(rows, -1, -2), x.w)
    keys = x.k - matmul(jnp.swapaxes(held, -1, -2), x.w)
    document, rank, written = (chunks.split(y) for y in positions)
    of_chunks = _Chunked(keys, x.v, matrix, document, rank, written, x.sums)

    result = meet(
        nothing(start, x.v.shape[-1]), scores + _chunk_bias(x.sums, x.sums, queries),
        _mask(of_chunks, of_chunks), x.v, precision,
    )  # fmt: skip
    of_row = gather_tokens(options.axis, of_chunks)
    result, start = _walk_back(options, result, start, of_chunks, of_row, row)
    if not options.no_state:
        result = _meet_state(options, result, start, of_chunks, inputs, positions, state)
    final, state_keys = _keys_after(of_row, state, row, precision)

    def by_token(chunks: Chunks, x: Array, length: int) -> Array:
        return chunks.join(jnp.moveaxis(x, -2, 2), length)

    row_length = row.size * row.count if options.axis is not None else length
    of_tokens = (by_token(row, x, row_length) for x in (final, of_row.values))
    return by_token(chunks, finish(result), length), *of_tokens, state_keys


def _mask(queries: _Chunked, keys: _Chunked) -> Array:
    """Return whether tokens attend to tokens of a chunk, [B, N, 1, 1, C, C]."""
    same = queries.document[..., :, None] == keys.document[..., None, :]
    causal = queries.rank[..., :, None] >= keys.rank[..., None, :]
    return (same & causal & keys.written[..., None, :])[:, :, None, None]


def _chunk_bias(queries: GateSum | None, keys: GateSum | None, groups: int) -> Any:
    """Return the sum of log gates after each key up to each query, [B, N, G, R, C, C], of sums [B, N, H, C]; 0 without."""
    if queries is None or keys is None:
        return 0
    high, low = (
        jax.lax.stop_gradient(a)[..., :, None] - b[..., None, :]
        for a, b in zip(queries, keys, strict=True)
    )
    bias = high + low
    return bias.reshape(*bias.shape[:2], -1, groups, *bias.shape[3:])


def _walk_back(
    options: Options, result: Weighed, start: Array, x: _Chunked, row: _Chunked, chunks: Chunks
) -> tuple[Weighed, Array]:
    """Let the queries of this device's chunks x meet the chunk before in the row, then the one before it, and so on; return
    what they have attended to, and the queries as they are at the row's start, or their segment's.

    The backward pass stores the queries of every n-th step, for about n² chunks.
    """
    matmul = functools.partial(jnp.matmul, precision=options.precision)
    count, groups = x.document.shape[1], start.shape[3]
    offset = 0 if options.axis is None else jax.lax.axis_index(options.axis) * count
    index = offset + jnp.arange(count)
    # A device's chunks are a part of the row: its rotation is cut out of two rows in a line, which one device does not store.
    shared = options.axis is not None
    twice = jax.tree.map(lambda y: jnp.concatenate([y, y], axis=1), row) if shared else row

    def earlier(y, distance):
        if not shared:
            return jnp.roll(y, distance, axis=1)
        place = chunks.count + offset - distance
        return jax.lax.dynamic_slice_in_dim(y, place, count, axis=1)

    def step(carry, distance):
        result, q = carry
        before: _Chunked = jax.tree.map(lambda y: earlier(y, distance), twice)
        exists = jnp.broadcast_to(index >= distance, x.document.shape[:2])
        if chunks.slot is not None:
            exists = exists & (chunks.slot == jnp.roll(chunks.slot, distance, axis=1))
        scores = matmul(q, jnp.swapaxes(before.keys, -1, -2)[:, :, :, None])
        scores = scores + _chunk_bias(x.sums, before.sums, groups)
        mask = _mask(x, before) & per_chunk(exists, scores)
        result = meet(result, scores, mask, before.values, options.precision)
        carried = matmul(q, jnp.swapaxes(before.matrix, -1, -2)[:, :, :, None])
        return (result, jnp.where(per_chunk(exists, q), carried, q)), None

    steps = chunks.count - 1
    if not steps:
        return result, start
    inner = math.isqrt(steps - 1) + 1
    outer = -(-steps // inner)
    distances = (1 + jnp.arange(inner * outer)).reshape(outer, inner)  # those beyond meet nothing
    body = jax.checkpoint(lambda carry, part: jax.lax.scan(step, carry, part), prevent_cse=False)
    return jax.lax.scan(body, (result, start), distances)[0]


def _meet_state(options, result, q, x: _Chunked, inputs: _Inputs, positions, state) -> Weighed:
    """Let the queries, carried to the row's start or their segment's, meet the tokens of the state."""
    own = (inputs.k, inputs.v, inputs.sums)
    length, dtype = positions.rank.shape[1], inputs.k.dtype
    all_positions, arrays = prepend_state(
        state._replace(keys=state.keys.astype(dtype)), positions, own
    )
    stored, (keys, values, sums) = jax.tree.map(lambda y: y[:, :-length], (all_positions, arrays))
    scores = jnp.einsum("bngrck,bsgk->bngrcs", q, keys, precision=options.precision)
    if sums is not None:
        of_keys = jax.tree.map(lambda y: jnp.swapaxes(y, 1, 2)[:, None], sums)
        scores = scores + _chunk_bias(x.sums, of_keys, q.shape[3])
    mask = x.document[..., None] == stored.document[:, None, None]
    mask = (mask & stored.written[:, None, None])[:, :, None, None]
    of_chunks = jnp.moveaxis(values, 1, 2)[:, None].astype(dtype)  # [B, 1, G, S, V]
    return meet(result, scores, mask, of_chunks, options.precision)


def _keys_after(x: _Chunked, state: AttentionState, chunks: Chunks, precision):
    """Return the call's keys [B, N, G, C, K] and the state's, multiplied by the matrices of all chunks after them, of their
    segment if there is one state per segment.
    """
    matmul = functools.partial(jnp.matmul, precision=precision)
    identity = jnp.broadcast_to(
        jnp.eye(x.matrix.shape[-1], dtype=x.matrix.dtype), x.matrix[:, 0].shape
    )
    same = jnp.ones(x.document.shape[:2], bool)
    if chunks.slot is not None:
        same = chunks.slot == jnp.roll(chunks.slot, -1, axis=1)

    def step(product, chunk):
        matrix, same = chunk
        after = jnp.where(per_chunk(same, product), product, identity)
        product = matmul(matrix, after)
        return product, (after, product)

    inputs = jax.tree.map(lambda y: jnp.moveaxis(y, 1, 0), (x.matrix, same.at[:, -1].set(False)))
    total, results = jax.lax.scan(step, identity, inputs, reverse=True)
    after, products = (jnp.moveaxis(y, 0, 1) for y in results)
    keys = matmul(x.keys, after)
    stored = state.keys.astype(x.keys.dtype)
    if chunks.slot is None:
        return keys, jnp.einsum("bcgk,bgkl->bcgl", stored, total, precision=precision)
    assert chunks.first is not None
    at = (chunks.slot[:, :, None] == jnp.arange(state.keys.shape[1])) & chunks.first[:, :, None]
    first = jnp.argmax(at, axis=1)  # of each segment
    of_segment = jax.vmap(lambda p, i: p[i])(products, first)
    return keys, jnp.einsum("bscgk,bsgkl->bscgl", stored, of_segment, precision=precision)


register(
    "path_attention",
    Backend(name="xla", run=lambda call: run_xla(call.options, **call.arguments)),
)
