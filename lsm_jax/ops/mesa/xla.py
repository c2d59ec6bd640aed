"""Compute `mesa_memory` by XLA in three forms: recurrent (token by token), by chunks, and by an associative scan over
chunks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lsm_jax.ops.backends.registry import Backend, register
from lsm_jax.ops.core import checks
from lsm_jax.ops.core.chunk_scans import (
    associate_chunks,
    per_chunk,
    run_masks,
    scan_chunks,
    scan_tokens,
)
from lsm_jax.ops.core.decays import forget, halve, pairwise_decay
from lsm_jax.ops.core.segments import Chunks, cut_into_chunks, finish_output, read_tokens, select
from lsm_jax.ops.mesa.conjugate_gradients import solve
from lsm_jax.ops.mesa.state import MesaState


class Options(NamedTuple):
    """The options of `mesa_memory` that are constant when a program is compiled.

    Attributes:
        steps, start, epsilon, gradient: the arguments of `mesa_memory` with these names.
        form: "recurrent", "chunk" or "associative", how the memories are computed.
        size: tokens in a chunk.
        dtype: the dtype of the state and of all sums.
        precision: the precision of matrix products.
    """

    steps: int
    start: str
    epsilon: float
    gradient: str
    form: str
    size: int
    dtype: Any
    precision: jax.lax.Precision


class _Inputs(NamedTuple):
    """The arrays of `mesa_memory`, split by head: queries q [..., G, R, K], keys k [..., G, K], keys times write
    strengths [..., G, K], keys and values side by side [..., G, K + V], and log decays [..., G] or None.
    """

    q: Array
    k: Array
    weighed: Array
    both: Array
    decay: Array | None


def run_xla(
    options: Options,
    q,
    k,
    v,
    beta,
    log_decay,
    state: MesaState,
    segment_ids,
    update_mask,
    regularizer,
) -> tuple[Array, MesaState]:
    """Compute `mesa_memory` by XLA on one device: return the output [B, T, H, V] in v's dtype and the state after the
    last token.

    Both memories are written with the same keys, so that they are one memory [K, K + V] here.
    """
    batch, length, heads, _ = v.shape
    dtype, key_dim = options.dtype, k.shape[-1]
    num_segments = state.keys.shape[1] if state.keys.ndim == 5 else None
    tokens = read_tokens(segment_ids, update_mask, state.segment_id, num_segments)

    def prepare(x) -> Any:
        return None if x is None else select(tokens.written, jnp.asarray(x).astype(dtype))

    k, v_wide, beta = prepare(checks.spread_keys(k, heads)), prepare(v), prepare(beta)
    inputs = _Inputs(
        q=checks.group_queries(select(tokens.real, q).astype(dtype), heads),
        k=k,
        weighed=beta[..., None] * k,
        both=jnp.concatenate([k, v_wide], axis=-1),
        decay=prepare(log_decay),
    )
    memory = jnp.concatenate([state.keys, state.values], axis=-1).astype(dtype)
    regularizer = regularizer.astype(dtype)
    if options.form == "recurrent":
        step = _step_of(options, regularizer)
        output, memory = scan_tokens(step, inputs, memory, tokens.run, tokens.slot)
    else:
        chunks = cut_into_chunks(tokens, length, options.size, num_segments)
        output, memory = _chunked(inputs, regularizer, memory, chunks, options)
        output = chunks.join(output, length)
    output = output.reshape(batch, length, -1, output.shape[-1])
    state = MesaState(memory[..., :key_dim], memory[..., key_dim:], tokens.last_id)
    return finish_output(tokens, output).astype(v.dtype), state


def _solve(options: Options, matvec, q: Array, diagonal) -> Array:
    """Return the solutions for the queries q; `diagonal()` returns the diagonals of the matrices."""
    return solve(
        matvec,
        q,
        None if options.start == "zero" else 1 / diagonal(),
        steps=options.steps,
        epsilon=options.epsilon,
        implicit=options.gradient == "implicit",
    )


def _step_of(options: Options, regularizer: Array):
    """Return the function that applies one token to the memory [B, G, K, K + V], and returns it and the output
    [B, G, R, V].
    """

    def step(memory: Array, x: _Inputs) -> tuple[Array, Array]:
        if x.decay is not None:
            memory = forget(memory, x.decay[..., None, None])
        memory = memory + x.weighed[..., None] * x.both[..., None, :]
        keys, values = jnp.split(memory, [x.k.shape[-1]], axis=-1)

        def matvec(p):
            held = jnp.einsum("bgkl,bgrl->bgrk", keys, p, precision=options.precision)
            return held + regularizer[:, None] * p

        def diagonal():
            return (jnp.diagonal(keys, axis1=-2, axis2=-1) + regularizer)[:, :, None]

        solved = _solve(options, matvec, x.q, diagonal)
        return memory, jnp.einsum("bgrk,bgkv->bgrv", solved, values, precision=options.precision)

    return step


def _chunked(inputs: _Inputs, regularizer: Array, memory, chunks: Chunks, options: Options):
    """Return the output [B, N, C, G, R, V] and the final memory, computed by chunks, from inputs [B, T, ...].

    The product with the matrix of a token is a masked product with the chunk's keys plus one with the matrix that the
    chunk starts from, so that no token's matrix is made; all tokens of a row are solved at once.
    """
    precision, key_dim = options.precision, inputs.k.shape[-1]

    def by_head(x):  # [B, N, C, G, ..., *] -> [B, N, G, ..., C, *]
        x = jnp.moveaxis(chunks.split(x), 2, 3)
        return x if x.ndim < 6 else jnp.moveaxis(x, 3, -2)

    x = jax.tree.map(by_head, inputs)
    same, enters, stays = run_masks(chunks)
    size = x.k.shape[-2]
    decay = jnp.tril(jnp.ones((1, 1, 1, size, size), x.k.dtype))
    prefix = jnp.ones((1, 1, 1, size, 1), x.k.dtype)
    keys, kept = x.weighed, jnp.ones((1, 1, 1, 1, 1), x.k.dtype)
    if x.decay is not None:
        halving = halve(x.decay[..., None])
        decay, prefix = pairwise_decay(halving), jnp.exp(halving.prefix)
        keys, kept = keys * jnp.exp(halving.suffix), jnp.exp(halving.total)[..., None]
    if same is not None:
        decay = jnp.where(same[:, :, None], decay, 0)
        prefix = jnp.where(enters[:, :, None, :, None], prefix, 0)
        keys = jnp.where(stays[:, :, None, :, None], keys, 0)
        kept = jnp.where(per_chunk(enters[:, :, -1], kept), kept, 0)
    kept = jnp.broadcast_to(kept, (*x.k.shape[:3], 1, 1))
    decay, prefix = (jnp.expand_dims(y, -3) for y in (decay, prefix))  # queries of a head

    if options.form == "chunk":

        def update(m, chunk):
            kept, keys, both = chunk
            return kept * m + jnp.einsum("bgck,bgcv->bgkv", keys, both, precision=precision)

        entering, memory = scan_chunks(update, (kept, keys, x.both), memory, chunks)
    else:
        write = jnp.einsum("bngck,bngcv->bngkv", keys, x.both, precision=precision)
        entering, memory = associate_chunks(jnp.multiply, jnp.multiply, kept, write, memory, chunks)

    def read(p, values, before):
        """Return the product of vectors p [B, N, G, R, C, K] with Σ β kᵀ values."""
        scores = jnp.einsum("bngrik,bngjk->bngrij", p, x.weighed, precision=precision)
        # Products with later keys may overflow, and their decay of 0 would make them NaN.
        scores = jnp.tril(scores) * decay
        inside = jnp.einsum("bngrij,bngjv->bngriv", scores, values, precision=precision)
        return inside + jnp.einsum("bngrck,bngkv->bngrcv", prefix * p, before, precision=precision)

    matrix = jnp.swapaxes(entering[..., :key_dim], -1, -2)

    def matvec(p):
        return read(p, x.k, matrix) + regularizer[:, None, None] * p

    def diagonal():
        squares, weights = x.weighed * x.k, decay[:, :, :, 0]
        finite = jnp.isfinite(squares)
        overflown = jnp.matmul((weights > 0).astype(x.k.dtype), 1 - finite.astype(x.k.dtype)) > 0
        squares = jnp.matmul(weights, jnp.where(finite, squares, 0), precision=precision)
        squares = jnp.where(overflown, jnp.inf, squares)
        before = jnp.diagonal(matrix, axis1=-2, axis2=-1)[..., None, :]
        return (squares + prefix[:, :, :, 0] * before + regularizer[:, None])[:, :, :, None]

    solved = _solve(options, matvec, x.q, diagonal)
    output = read(solved, x.both[..., key_dim:], entering[..., key_dim:])
    return jnp.moveaxis(output, -2, 2), memory


register(
    "mesa_memory",
    Backend(name="xla", run=lambda call: run_xla(call.options, **call.arguments)),
)
