"""Memories under a diagonal-plus-low-rank transition: RWKV7's generalised delta rule.

`M_t = diag(e^w_t) M_{t-1} + b_tᵀ (a_t M_{t-1}) + k_tᵀ v_t`, `o_t = q_t M_t` (RWKV7, arXiv 2503.14456): `a` reads the
memory as the token before left it, ahead of this token's decay, and what it reads is written back at `b`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lsm_jax.ops.backends import chosen, dispatch, one_token
from lsm_jax.ops.core import checks
from lsm_jax.ops.core.decays import Halving, channel_scores, forget, halve, inverse_unit_lower
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


def dplr_memory(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T G V"],
    a: Float[Array, "B T Ha K"],
    b: Float[Array, "B T Hb K"],
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
    """Decay the memory, write back at `b` what `a` read from it, write `kᵀ v`, and read the result with `q`.

    With decays of at most 1, `a = -κ` of unit length and `b = κ ⊙ gate`, gates from 0 to 1, the memory stays bounded;
    the op itself holds for any a and b, as long as what the transitions of some thousand tokens make of the identity stays
    finite: a long row's parts, inside a card and over a sequence axis, are joined by it.

    Args:
        q: [B, T, H, K] queries; H is a multiple or a divisor of G.
        k: [B, T, Hk, K] keys; Hk divides G.
        v: [B, T, G, V] values; one memory for each of the G heads.
        a: [B, T, Ha, K], what reads the old memory; Ha divides G.
        b: [B, T, Hb, K], where that is written; Hb divides G.
        log_decay: natural logarithm, at most 0: [G] constant, [B, T, G] a token, or [B, T, G, K] a key channel.
        scale: multiplies q; None is `K ** -0.5`.
        initial_state: the state to go on from; with memory [B, S, ...], segment id s has state s - 1. None is empty.
        segment_ids: [B, T] integers, 0 padding; see `lsm_jax.ops.core.segments`.
        update_mask: [B, T], 0 where a token must not change the memory (it still reads it).
        form: "recurrent" (token by token), "chunk" (one triangular solve a chunk, scan over chunks) or "associative"
            (associative scan over chunks).
        implementation: None (the fused kernel where it serves: NVIDIA Hopper, bfloat16, chunk form, K of 64, 128 or 256, V of 64 or a
            multiple of 128; one token alone, also in float32, with K a multiple of 16 up to 256 and V of 32; else XLA, one token
            alone in the recurrent form), "xla", "mosaic_gpu" or, by name only, "mosaic_tpu" (no one has run it on a TPU yet).
        chunk_size: tokens in a chunk of the XLA form, a power of two; None is 64.

    Returns:
        The output in v's dtype, and the final state in float32 (float64 if an input is).

    Raises:
        NotImplementedError: the kernel asked for by name does not serve the call; the message says why.
        ValueError: shapes, heads, form, implementation or chunk size that are not accepted.
    """
    op = "dplr_memory"
    checks.check_form(op, form, implementation, delta_kernels.KERNELS)
    batch, length, _, _, heads, key_dim, value_dim = checks.check_qkv(op, q, k, v)
    checks.check_rows(op, batch, length, segment_ids, update_mask)
    asked, form = form, chosen.form_of(form, implementation, length)
    initial_state, layer = one_token.take(initial_state)
    for name, array in (("a", a), ("b", b)):
        checks.check_shape(op, name, array, (batch, length, None, key_dim), "B, T, H, K")
        if heads % array.shape[2]:
            raise ValueError(
                f"{op}: {name} has {array.shape[2]} heads; they must divide v's {heads}"
            )
    checks.check_log_decay(op, log_decay, (batch, length, heads, key_dim))
    size = checks.check_chunk_size(op, chunk_size, length)
    dtype = checks.compute_dtype(q, k, v, a, b, log_decay)
    empty = functools.partial(delta_state, batch, heads, key_dim, value_dim, dtype=dtype)
    state = checks.state_or_empty(op, initial_state, empty, segment_ids)

    def why_not(kernel):
        return delta_kernels.why_not_dplr(kernel, form, q, k, v, a, b, state.memory)

    picked = dispatch.pick(
        op, form, asked, implementation, why_not, q, k, v, state.memory, layer=layer
    )

    if log_decay is None:
        log_decay = jnp.zeros(heads, dtype)
    by_token, constant = dispatch.split_decay(log_decay)
    batched = dict(
        q=q,
        k=k,
        v=v,
        a=a,
        b=b,
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
        _dplr_memory, batched, shared, options, layer=layer, in_sequence=_in_sequence
    )


def _in_sequence(axis, function, options, **arguments):
    """The op on one of the devices that share a row."""

    def takes(v):
        q, k, a, b = (arguments[name] for name in "qkab")
        why = delta_kernels.why_not_dplr(
            options.kernel, options.form, q, k, v, a, b, arguments["state"].memory
        )
        return why is None

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
    """Arrays by head: q [..., G, R, K]; k, a, b [..., G, K]; v [..., G, V]; log_decay [..., G, K] or, of all channels, 1."""

    q: Array
    k: Array
    v: Array
    a: Array
    b: Array
    log_decay: Array


# Compiled as a whole also when called outside `jax.jit`, as in a notebook.
@functools.partial(jax.jit, static_argnums=0)
def _dplr_memory(options, layer=None, **arrays):
    return dispatch.run(options, _by_xla, delta_kernels.run_dplr, layer, arrays)


def _by_xla(options, q, k, v, a, b, log_decay, state, segment_ids, update_mask, constant_log_decay):
    batch, length, heads, _ = v.shape
    dtype = options.dtype
    num_segments = state.memory.shape[1] if state.memory.ndim == 5 else None
    tokens = read_tokens(segment_ids, update_mask, state.segment_id, num_segments)
    log_decay = dispatch.spread_decay(log_decay, constant_log_decay, tokens, v, dtype)

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


def _chunked(inputs: _Inputs, memory, chunks: Chunks, options: _Options):
    """Inputs [B, T, ...] -> output [B, N, C, G, R, V] and the final memory.

    Inside a chunk what `a` reads, U, solves `(I - A) U = Ã M + B V`: A are the decayed products of a with the b before it,
    B those with the k before it, and M is the memory the chunk starts from.
    """
    precision = options.precision

    def by_head(x):  # [B, N, C, G, ..., *] -> [B, N, G, ..., C, *]
        x = jnp.moveaxis(chunks.split(x), 2, 3)
        return x if x.ndim < 6 else jnp.moveaxis(x, 3, -2)

    x = jax.tree.map(by_head, inputs)
    same, enters, stays = run_masks(chunks)

    # q sees this token's write after its decay; a sees the memory before either. Scores: [B, N, G, (k, b), R, C, C].
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
    """For rows and columns with two more axes ahead of the tokens'."""
    levels = tuple((p[:, :, :, None, None], s[:, :, :, None, None]) for p, s in halving.levels)
    return halving._replace(levels=levels)
