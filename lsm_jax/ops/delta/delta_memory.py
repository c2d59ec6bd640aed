"""Delta-rule memories: decay, erase what the key holds, write the new value.

`M_t = (I - β_t k_tᵀ k_t) diag(a_t) M_{t-1} + β_t k_tᵀ v_t`, `o_t = q_t M_t`: DeltaNet (arXiv 2406.06484), Gated DeltaNet
(arXiv 2412.06464, scalar decay), KDA (arXiv 2510.26692, a decay a key channel).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lsm_jax.ops.backends import chosen, dispatch, one_token
from lsm_jax.ops.core import checks
from lsm_jax.ops.core.decays import (
    channel_scores,
    forget,
    halve,
    inverse_unit_lower,
    pairwise_decay,
)
from lsm_jax.ops.core.segments import Chunks, cut_into_chunks, finish_output, read_tokens, select
from lsm_jax.ops.core.states import (
    DeltaState,
    associate_chunks,
    delta_state,
    per_chunk,
    run_masks,
    scan_chunks,
    scan_tokens,
)
from lsm_jax.ops.delta import kernels as delta_kernels
from lsm_jax.ops.delta import shared_rows as matrix_sequence


def delta_memory(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T G V"],
    beta: Float[Array, "B T G"],
    log_decay: Float[Array, ...] | None = None,
    *,
    scale: float | None = None,
    initial_state: DeltaState | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    update_mask: Array | None = None,
    form: str = "chunk",
    implementation: str | None = None,
    chunk_size: int | None = None,
) -> tuple[Float[Array, "B T max(H,G) V"], DeltaState]:
    """Move what the memory holds at `k` towards `v` by the share `beta`, and read it with `q`.

    Args:
        q: [B, T, H, K] queries; H is a multiple or a divisor of G.
        k: [B, T, Hk, K] keys of L2 norm at most 1 (with beta <= 2 the memory then stays bounded); Hk divides G.
        v: [B, T, G, V] values; one memory for each of the G heads.
        beta: [B, T, G], from 0 to 2.
        log_decay: natural logarithm, at most 0: [G] constant, [B, T, G] a token, or [B, T, G, K] a key channel.
        scale: multiplies q; None is `K ** -0.5`.
        initial_state: the state to go on from; with memory [B, S, ...], segment id s has state s - 1. None is empty.
        segment_ids: [B, T] integers, 0 padding; see `lsm_jax.ops.core.segments`.
        update_mask: [B, T], 0 where a token must not change the memory (it still reads it).
        form: "recurrent" (token by token), "chunk" (one triangular solve a chunk, scan over chunks) or "associative"
            (associative scan over chunks).
        implementation: None (the fused kernel where it serves: NVIDIA Hopper, bfloat16, chunk form, K of 64, 128 or 256, V also
            512, with a decay a key channel V of 64 or a multiple of 128; one token alone, also in float32,
            with K a multiple of 16 up to 256 and V of 32; else XLA, one token alone in the recurrent form), "xla", "mosaic_gpu"
            or, by name only, "mosaic_tpu" (no one has run it on a TPU yet).
        chunk_size: tokens in a chunk of the XLA form, a power of two; None is 64.

    Returns:
        The output in v's dtype, and the final state in float32 (float64 if an input is).

    Raises:
        NotImplementedError: the kernel asked for by name does not serve the call; the message says why.
        ValueError: shapes, heads, form, implementation or chunk size that are not accepted.
    """
    op = "delta_memory"
    checks.check_form(op, form, implementation, delta_kernels.KERNELS)
    batch, length, _, _, heads, key_dim, value_dim = checks.check_qkv(op, q, k, v)
    checks.check_rows(op, batch, length, segment_ids, update_mask)
    asked, form = form, chosen.form_of(form, implementation, length)
    initial_state, layer = one_token.take(initial_state)
    checks.check_shape(op, "beta", beta, (batch, length, heads), "B, T, G")
    checks.check_log_decay(op, log_decay, (batch, length, heads, key_dim))
    size = checks.check_chunk_size(op, chunk_size, length)
    dtype = checks.compute_dtype(q, k, v, beta, log_decay)
    empty = functools.partial(delta_state, batch, heads, key_dim, value_dim, dtype=dtype)
    state = checks.state_or_empty(op, initial_state, empty, segment_ids)

    def why_not(kernel):
        return delta_kernels.why_not(kernel, form, q, k, v, log_decay, state.memory)

    picked = dispatch.pick(
        op, form, asked, implementation, why_not, q, k, v, state.memory, layer=layer
    )

    by_token, constant = dispatch.split_decay(log_decay)
    batched = dict(
        q=q,
        k=k,
        v=v,
        beta=beta,
        log_decay=by_token,
        state=state,
        segment_ids=segment_ids,
        update_mask=update_mask,
    )
    shared = dict(constant_log_decay=constant)
    options = _Options(
        scale=checks.scale_or_default(op, scale, key_dim),
        form=form,
        **picked._asdict(),
        size=size,
        dtype=dtype,
        precision=checks.matmul_precision(q, k, v),
    )
    return dispatch.run_over_mesh(
        _delta_memory, batched, shared, options, layer=layer, in_sequence=_in_sequence
    )


def _in_sequence(axis, function, options, **arguments):
    """The op on one of the devices that share a row."""

    def takes(v):
        q, k, decay = (arguments[name] for name in ("q", "k", "log_decay"))
        memory = arguments["state"].memory
        return delta_kernels.why_not(options.kernel, options.form, q, k, v, decay, memory) is None

    return matrix_sequence.in_sequence(axis, function, options, _by_xla, takes, arguments)


class _Options(NamedTuple):
    scale: float
    form: str
    size: int
    dtype: Any
    precision: jax.lax.Precision
    fused: chosen.Fused = "never"
    kernel: str = ""


class _Inputs(NamedTuple):
    """Arrays by head: q [..., G, R, K], k [..., G, K], v [..., G, V], beta [..., G]; at most one decay."""

    q: Array
    k: Array
    v: Array
    beta: Array
    decay: Array | None
    key_decay: Array | None


# Compiled as a whole also when called outside `jax.jit`, as in a notebook.
@functools.partial(jax.jit, static_argnums=0)
def _delta_memory(options, layer=None, **arrays):
    return dispatch.run(options, _by_xla, delta_kernels.run_kernel, layer, arrays)


def _by_xla(options, q, k, v, beta, log_decay, state, segment_ids, update_mask, constant_log_decay):
    batch, length, heads, _ = v.shape
    dtype = options.dtype
    num_segments = state.memory.shape[1] if state.memory.ndim == 5 else None
    tokens = read_tokens(segment_ids, update_mask, state.segment_id, num_segments)
    log_decay = dispatch.spread_decay(log_decay, constant_log_decay, tokens, v, dtype)

    def prepare(x) -> Any:
        return None if x is None else select(tokens.written, jnp.asarray(x).astype(dtype))

    log_decay = prepare(log_decay)
    by_channel = log_decay is not None and log_decay.ndim == 4
    inputs = _Inputs(
        q=checks.group_queries(select(tokens.real, q).astype(dtype) * options.scale, heads),
        k=prepare(checks.spread_keys(k, heads)),
        v=prepare(v),
        beta=prepare(beta),
        decay=None if by_channel else log_decay,
        key_decay=log_decay if by_channel else None,
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
    if x.decay is not None:
        memory = forget(memory, x.decay[..., None, None])
    if x.key_decay is not None:
        memory = forget(memory, x.key_decay[..., None])
    held = jnp.sum(x.k[..., None] * memory, axis=-2)
    memory = memory + x.k[..., None] * (x.beta[..., None] * (x.v - held))[..., None, :]
    return memory, jnp.sum(x.q[..., None] * memory[:, :, None], axis=-2)


def _chunked(inputs: _Inputs, memory, chunks: Chunks, options: _Options):
    """Inputs [B, T, ...] -> output [B, N, C, G, R, V] and the final memory.

    Inside a chunk the writes U solve `(I + L) U = β (V - K̃ M)` with L the decayed, β-weighted products of earlier keys
    (the WY representation of DeltaNet, in solve form); M is the memory the chunk starts from.
    """
    precision = options.precision

    def by_head(x):  # [B, N, C, G, ..., *] -> [B, N, G, ..., C, *]
        x = jnp.moveaxis(chunks.split(x), 2, 3)
        return x if x.ndim < 6 else jnp.moveaxis(x, 3, -2)

    x = jax.tree.map(by_head, inputs)
    same, enters, stays = run_masks(chunks)
    queries = x.q.shape[3]

    # Decayed products of keys with keys, and of queries with keys: [B, N, G, R + 1, C, C].
    rows = jnp.concatenate([x.q, x.k[:, :, :, None]], axis=3)
    if x.key_decay is not None:
        halving = halve(x.key_decay)
        shared = halving._replace(
            levels=tuple((p[:, :, :, None], s[:, :, :, None]) for p, s in halving.levels)
        )
        keys = x.k[:, :, :, None]
        scores = channel_scores(rows, keys, shared, jnp.sum(rows * keys, axis=-1), precision)
    else:
        scores = jnp.einsum("bngrik,bngjk->bngrij", rows, x.k, precision=precision)
        scores = jnp.tril(scores)
        if x.decay is None:
            halving = None
        else:
            halving = halve(x.decay[..., None])
            scores = scores * pairwise_decay(halving)[:, :, :, None]
    if same is not None:
        scores = jnp.where(same[:, :, None, None], scores, 0)
    beta = x.beta[..., None]
    inverse = inverse_unit_lower(jnp.tril(beta * scores[:, :, :, queries], -1))

    # The chunk as one update: U = new - erase M.
    read, written_keys, kept = rows, x.k, jnp.ones((1, 1, 1, 1, 1), x.k.dtype)
    if halving is not None:
        read = read * jnp.exp(halving.prefix)[:, :, :, None]
        written_keys = written_keys * jnp.exp(halving.suffix)
        kept = jnp.exp(halving.total)[..., None]
    if same is not None:
        read = jnp.where(enters[:, :, None, None, :, None], read, 0)
        written_keys = jnp.where(stays[:, :, None, :, None], written_keys, 0)
        kept = jnp.where(per_chunk(enters[:, :, -1], kept), kept, 0)
    kept = jnp.broadcast_to(kept, (*x.k.shape[:2], *kept.shape[2:]))
    erase = jnp.matmul(inverse, beta * read[:, :, :, queries], precision=precision)
    new = jnp.matmul(inverse, beta * x.v, precision=precision)

    if options.form == "chunk":

        def update(m, chunk):
            kept, keys, new, erase = chunk
            writes = new - jnp.matmul(erase, m, precision=precision)
            return kept * m + jnp.einsum("bgck,bgcv->bgkv", keys, writes, precision=precision)

        arrays = (kept, written_keys, new, erase)
        entering, memory = scan_chunks(update, arrays, memory, chunks)
    else:
        identity = jnp.eye(x.k.shape[-1], dtype=x.k.dtype)
        erased = jnp.einsum("bngck,bngcl->bngkl", written_keys, erase, precision=precision)
        transition = kept * identity - erased
        write = jnp.einsum("bngck,bngcv->bngkv", written_keys, new, precision=precision)

        def product(a, b):
            return jnp.matmul(a, b, precision=precision)

        entering, memory = associate_chunks(product, product, transition, write, memory, chunks)

    writes = new - jnp.matmul(erase, entering, precision=precision)
    output = jnp.einsum(
        "bngrck,bngkv->bngrcv", read[:, :, :, :queries], entering, precision=precision
    )
    output = output + jnp.einsum(
        "bngrij,bngjv->bngriv", scores[:, :, :, :queries], writes, precision=precision
    )
    return jnp.moveaxis(output, -2, 2), memory
