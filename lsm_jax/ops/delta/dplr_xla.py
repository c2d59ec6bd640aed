"""Compute `dplr_memory` by XLA in three forms: recurrent (token by token), by chunks, and by an associative
scan over chunks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lsm_jax.ops.core import checks
from lsm_jax.ops.core.chunk_scans import (
    associate_chunks,
    per_chunk,
    run_masks,
    scan_chunks,
    scan_tokens,
)
from lsm_jax.ops.core.decays import (
    Halving,
    channel_scores,
    forget,
    halve,
    inverse_unit_lower,
    spread_constant,
)
from lsm_jax.ops.core.segments import Chunks, cut_into_chunks, finish_output, read_tokens, select
from lsm_jax.ops.core.states import DeltaState
from lsm_jax.ops.delta.options import MatrixOptions


class _Inputs(NamedTuple):
    """The arrays of `dplr_memory`, split by head: queries q [..., G, R, K]; keys k and the vectors a and b of the
    rank-one transition [..., G, K]; values v [..., G, V]; log_decay [..., G, K], or [..., G, 1] for all channels.
    """

    q: Array
    k: Array
    v: Array
    a: Array
    b: Array
    log_decay: Array


def by_xla(
    options: MatrixOptions,
    q,
    k,
    v,
    a,
    b,
    log_decay,
    state,
    segment_ids,
    update_mask,
    constant_log_decay,
):
    """Compute `dplr_memory` by XLA in the form that `options` says; return the output [B, T, H, V] in v's dtype and the
    state after the last token.
    """
    batch, length, heads, _ = v.shape
    dtype = options.dtype
    num_segments = state.memory.shape[1] if state.memory.ndim == 5 else None
    tokens = read_tokens(segment_ids, update_mask, state.segment_id, num_segments)
    log_decay = spread_constant(log_decay, constant_log_decay, tokens, v, dtype)

    def prepare(x) -> Any:
        return select(tokens.written, jnp.asarray(x).astype(dtype))

    inputs = _Inputs(
        q=checks.group_queries(select(tokens.real, q).astype(dtype) * options.scale, heads),
        k=prepare(checks.spread_keys(k, heads)),
        v=prepare(v),
        a=prepare(checks.spread_keys(a, heads)),
        b=prepare(checks.spread_keys(b, heads)),
        log_decay=prepare(log_decay if log_decay.ndim == 4 else log_decay[..., None]),
    )
    memory = state.memory.astype(dtype)
    if options.form == "recurrent":
        output, memory = scan_tokens(_step, inputs, memory, tokens.run, tokens.slot)
    else:
        chunks = cut_into_chunks(tokens, length, options.size, num_segments)
        output, memory = _chunked(inputs, memory, chunks, options)
        output = chunks.join(output, length)
    output = output.reshape(batch, length, -1, output.shape[-1])
    return finish_output(tokens, output).astype(v.dtype), DeltaState(memory, tokens.last_id)


def _step(memory: Array, x: _Inputs) -> tuple[Array, Array]:
    held = jnp.sum(x.a[..., None] * memory, axis=-2, keepdims=True)
    memory = forget(memory, x.log_decay[..., None])
    memory = memory + x.b[..., None] * held + x.k[..., None] * x.v[..., None, :]
    return memory, jnp.sum(x.q[..., None] * memory[:, :, None], axis=-2)


def _chunked(inputs: _Inputs, memory, chunks: Chunks, options: MatrixOptions):
    """Return the output [B, N, C, G, R, V] and the final memory of `dplr_memory`, computed by chunks, from
    inputs [B, T, ...].

    Inside a chunk U, the values that the vectors a read from the memory, solve `(I - A) U = Ã M + B V`. A
    contains the decayed products of a with earlier b, and B those with earlier k; Ã are the vectors a decayed
    from the chunk's start, M is the memory that the chunk starts from, and V are the values.
    """
    precision = options.precision

    def by_head(x):  # [B, N, C, G, ..., *] -> [B, N, G, ..., C, *]
        x = jnp.moveaxis(chunks.split(x), 2, 3)
        return x if x.ndim < 6 else jnp.moveaxis(x, 3, -2)

    x = jax.tree.map(by_head, inputs)
    same, enters, stays = run_masks(chunks)

    # q reads after this token's decay and write, a before both. Scores: [B, N, G, (k, b), R, C, C].
    after, before = halve(x.log_decay), halve(x.log_decay, exclusive=True)
    columns = jnp.stack([x.k, x.b], axis=3)[:, :, :, :, None]
    own = jnp.sum(x.q[:, :, :, None] * columns, axis=-1)
    by_q = channel_scores(x.q[:, :, :, None], columns, _spread(after), own, precision)
    by_a = channel_scores(
        x.a[:, :, :, None, None],
        columns,
        _spread(before),
        jnp.zeros_like(own[..., :1, :]),
        precision,
    )[..., 0, :, :]
    if same is not None:
        by_q = jnp.where(same[:, :, None, None, None], by_q, 0)
        by_a = jnp.where(same[:, :, None, None], by_a, 0)
    inverse = inverse_unit_lower(-by_a[:, :, :, 1])

    # The chunk as one update: U = new + held M.
    read = x.q * jnp.exp(after.prefix)[:, :, :, None]
    reach = x.a * jnp.exp(before.prefix)
    written_k, written_b = x.k * jnp.exp(after.suffix), x.b * jnp.exp(after.suffix)
    kept = jnp.exp(after.total)[..., None]
    if same is not None:
        read = jnp.where(enters[:, :, None, None, :, None], read, 0)
        reach = jnp.where(enters[:, :, None, :, None], reach, 0)
        written_k = jnp.where(stays[:, :, None, :, None], written_k, 0)
        written_b = jnp.where(stays[:, :, None, :, None], written_b, 0)
        kept = jnp.where(per_chunk(enters[:, :, -1], kept), kept, 0)
    kept = jnp.broadcast_to(kept, (*x.k.shape[:2], *kept.shape[2:]))
    held = jnp.matmul(inverse, reach, precision=precision)
    of_values = jnp.matmul(by_a[:, :, :, 0], x.v, precision=precision)
    new = jnp.matmul(inverse, of_values, precision=precision)
    write = jnp.einsum("bngck,bngcv->bngkv", written_k, x.v, precision=precision)

    if options.form == "chunk":

        def update(m, chunk):
            kept, write, b, new, held = chunk
            back = new + jnp.matmul(held, m, precision=precision)
            return kept * m + write + jnp.einsum("bgck,bgcv->bgkv", b, back, precision=precision)

        arrays = (kept, write, written_b, new, held)
        entering, memory = scan_chunks(update, arrays, memory, chunks)
    else:
        identity = jnp.eye(x.k.shape[-1], dtype=x.k.dtype)
        back = jnp.einsum("bngck,bngcl->bngkl", written_b, held, precision=precision)
        transition = kept * identity + back
        write = write + jnp.einsum("bngck,bngcv->bngkv", written_b, new, precision=precision)

        def product(a, b):
            return jnp.matmul(a, b, precision=precision)

        entering, memory = associate_chunks(product, product, transition, write, memory, chunks)

    back = new + jnp.matmul(held, entering, precision=precision)
    output = jnp.einsum("bngrck,bngkv->bngrcv", read, entering, precision=precision)
    for scores, written in ((by_q[:, :, :, 0], x.v), (by_q[:, :, :, 1], back)):
        output = output + jnp.einsum("bngrij,bngjv->bngriv", scores, written, precision=precision)
    return jnp.moveaxis(output, -2, 2), memory


def _spread(halving: Halving) -> Halving:
    """Add two axes of size 1 before the tokens' axis to the sums of log decay in `halving`, so that they broadcast over
    pairs of arrays.
    """
    levels = tuple((p[:, :, :, None, None], s[:, :, :, None, None]) for p, s in halving.levels)
    return halving._replace(levels=levels)
