"""Linear memories: `M_t = a_t ⊙ M_{t-1} + k_tᵀ v_t`, `o_t = q_t M_t`, under every decay that factorises.

Linear-MoE (arXiv 2503.05447) Eq. 5 with Θ elementwise: basic linear attention, RetNet, GLA, Mamba2 and their kin.
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
    Halving,
    blocks_of,
    channel_scores,
    forget,
    halve,
    pair_blocks,
    pairwise_decay,
)
from lsm_jax.ops.core.segments import (
    Chunks,
    Tokens,
    cut_into_chunks,
    finish_output,
    read_tokens,
    select,
)
from lsm_jax.ops.core.shared_rows import resume
from lsm_jax.ops.core.states import (
    LinearState,
    associate_chunks,
    fold_chunks,
    linear_state,
    per_chunk,
    run_masks,
    scan_tokens,
)
from lsm_jax.ops.linear import kernels as linear_kernels
from lsm_jax.ops.linear import shared_rows as linear_sequence
from lsm_jax.ops.linear import stabilized


def linear_memory(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T G V"],
    log_decay: Float[Array, ...] | None = None,
    *,
    value_log_decay: Float[Array, "B T G V"] | None = None,
    log_input_gate: Float[Array, "B T G"] | None = None,
    bonus: Float[Array, "G K"] | None = None,
    normalize: float | None = None,
    scale: float | None = None,
    initial_state: LinearState | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    update_mask: Array | None = None,
    form: str = "chunk",
    implementation: str | None = None,
    chunk_size: int | None = None,
) -> tuple[Float[Array, "B T max(H,G) V"], LinearState]:
    """Write `kᵀ v` into a decaying memory and read it with `q`.

    Args:
        q: [B, T, H, K] queries; H is a multiple or a divisor of G.
        k: [B, T, Hk, K] keys; Hk divides G.
        v: [B, T, G, V] values; one memory for each of the G heads.
        log_decay: natural logarithm, at most 0: [G] constant, [B, T, G] a token, or [B, T, G, K] a key channel.
        value_log_decay: [B, T, G, V], a decay of the value channels; multiplies `log_decay`'s.
        log_input_gate: [B, T, G], natural logarithm, of any size: `e^log_input_gate` multiplies what is written to memory and
            normaliser, which are kept stabilised (mLSTM; `lsm_jax.ops.linear.stabilized`). Needs `normalize`, and goes with
            `log_decay` [G], [B, T, G] or None only.
        bonus: [G, K]. If given, the read comes before decay and write and sees the current token through
            `q diag(bonus) kᵀ v` (RWKV6, arXiv 2404.05892 Eq. 18).
        normalize: None, or the ε of `o = q M / (q z + ε)` with z the decayed sum of keys. With `log_input_gate` it is the ε of
            `o = q M / (max(|q z|, e^-m) + ε)`, M and z as kept and m their stabiliser: with ε left out, `q C / max(|q n|, 1)`
            of the true ones (xLSTM, arXiv 2405.04517 Eq. 21).
        scale: multiplies q; None is `K ** -0.5`.
        initial_state: the state to go on from; with memory [B, S, ...], segment id s has state s - 1. None is empty.
        segment_ids: [B, T] integers, 0 padding; see `lsm_jax.ops.core.segments`.
        update_mask: [B, T], 0 where a token must not change the memory (it still reads it).
        form: "recurrent" (token by token), "chunk" (matrix products in a chunk, scan over chunks) or "associative"
            (associative scan over chunks).
        implementation: None (the fused kernel where it serves: NVIDIA Hopper, bfloat16, chunk form, K and V of 64 or 128, of 256
            and 512 too where no channel has a decay of its own, of any multiple of 128 where channels have one; not both decays,
            no normaliser or input gate; one token alone, also in float32, with K a multiple of 16 up to 256 and V of 32, where
            its memory is a `Layer`; else XLA, one token alone in the recurrent form), "xla", "mosaic_gpu" or, by name only,
            "mosaic_tpu" (no one has run it on a TPU yet).
        chunk_size: tokens in a chunk of the XLA form, a power of two; None is 64.

    Returns:
        The output in v's dtype, and the final state in float32 (float64 if an input is).

    Raises:
        NotImplementedError: a kernel asked for by name does not serve the call; the message says why.
        ValueError: shapes, heads, form, implementation or chunk size that are not accepted.
    """
    op = "linear_memory"
    checks.check_form(op, form, implementation, linear_kernels.KERNELS)
    batch, length, _, _, heads, key_dim, value_dim = checks.check_qkv(op, q, k, v)
    checks.check_rows(op, batch, length, segment_ids, update_mask)
    asked, form = form, chosen.form_of(form, implementation, length)
    initial_state, layer = one_token.take(initial_state)
    size = checks.check_chunk_size(op, chunk_size, length)
    _check(op, (batch, length, heads, key_dim, value_dim), log_decay, value_log_decay, bonus)
    gated = log_input_gate is not None
    if gated:
        _check_gated(
            op, (batch, length, heads), log_decay, value_log_decay, log_input_gate, bonus, normalize
        )
    dtype = checks.compute_dtype(q, k, v, log_decay, value_log_decay, log_input_gate, bonus)
    if normalize is not None:
        normalize = checks.check_number(op, "normalize", normalize, at_least=0)
    _check_kept(op, initial_state, normalize, gated)
    kept = dict(normalize=normalize is not None, stabilize=gated)
    empty = functools.partial(linear_state, batch, heads, key_dim, value_dim, **kept, dtype=dtype)
    state = checks.state_or_empty(op, initial_state, empty, segment_ids)

    plain = dict(
        value_log_decay=value_log_decay, log_input_gate=log_input_gate, normalize=normalize
    )

    def why_not(kernel):
        return linear_kernels.why_not(kernel, form, q, k, v, log_decay, bonus, state.memory, plain)

    picked = dispatch.pick(
        op, form, asked, implementation, why_not, q, k, v, state.memory, layer=layer, passes=2,
        absent=dict(log_input_gate=log_input_gate, normalize=normalize),
    )  # fmt: skip
    by_token, constant = dispatch.split_decay(log_decay)
    batched = dict(
        q=q,
        k=k,
        v=v,
        log_decay=by_token,
        value_log_decay=value_log_decay,
        log_input_gate=log_input_gate,
        state=state,
        segment_ids=segment_ids,
        update_mask=update_mask,
    )
    shared = dict(constant_log_decay=constant, bonus=bonus)
    options = _Options(
        scale=checks.scale_or_default(op, scale, key_dim),
        normalize=normalize,
        form=form,
        **picked._asdict(),
        size=size,
        dtype=dtype,
        precision=checks.matmul_precision(q, k, v),
    )
    return dispatch.run_over_mesh(
        _linear_memory, batched, shared, options, layer=layer, in_sequence=_in_sequence
    )


def _in_sequence(axis, function, options, **arguments):
    """The op on one of the devices that share a row."""
    update = linear_sequence.update_of(options, _by_xla, arguments)
    return resume(axis, function, (options,), arguments, update, linear_sequence.advance)


class _Options(NamedTuple):
    scale: float
    normalize: float | None
    form: str
    size: int
    dtype: Any
    precision: jax.lax.Precision
    fused: chosen.Fused = "never"
    kernel: str = ""
    exact: bool = False  # a kernel's output in float32


class _Inputs(NamedTuple):
    """Arrays by head: q [..., G, R, K], k [..., G, K], v [..., G, V]; at most one of `decay`, `key_decay`."""

    q: Array
    k: Array
    v: Array
    decay: Array | None
    key_decay: Array | None
    value_decay: Array | None


# Compiled as a whole also when called outside `jax.jit`, as in a notebook.
@functools.partial(jax.jit, static_argnums=0)
def _linear_memory(options, layer=None, **arrays):

    def kernel(name, scale, *, log_input_gate, **given):
        del log_input_gate  # None: it knows none
        return linear_kernels.run_kernel(name, scale, exact=options.exact, **given)

    return dispatch.run(options, _by_xla, kernel, layer, arrays)


def _by_xla(
    options, q, k, v, log_decay, value_log_decay, log_input_gate, state, segment_ids, update_mask,
    constant_log_decay, bonus,
):  # fmt: skip
    batch, length, heads, value_dim = v.shape
    dtype = options.dtype
    num_segments = state.memory.shape[1] if state.memory.ndim == 5 else None
    tokens = read_tokens(segment_ids, update_mask, state.segment_id, num_segments)

    def prepare(x) -> Any:
        return None if x is None else select(tokens.written, jnp.asarray(x).astype(dtype))

    log_decay = dispatch.spread_decay(log_decay, constant_log_decay, tokens, v, dtype)
    values = v.astype(dtype)
    memory = state.memory.astype(dtype)
    if options.normalize is not None:  # one more value channel, of ones, that only keys decay
        values = jnp.concatenate([values, jnp.ones_like(values[..., :1])], axis=-1)
        memory = jnp.concatenate([memory, state.normalizer.astype(dtype)[..., None]], axis=-1)
        if value_log_decay is not None:
            value_log_decay = jnp.pad(value_log_decay, [(0, 0)] * 3 + [(0, 1)])
    log_decay, value_log_decay = prepare(log_decay), prepare(value_log_decay)
    if log_input_gate is not None:
        gate = prepare(log_input_gate)
        if tokens.written is not None:
            gate = jnp.where(tokens.written[..., None], gate, stabilized.NEVER)
        decay = jnp.zeros_like(gate) if log_decay is None else log_decay
        x = stabilized.Gated(
            q=checks.group_queries(select(tokens.real, q).astype(dtype) * options.scale, heads),
            k=prepare(checks.spread_keys(k, heads)),
            v=select(tokens.written, values),
            decay=jnp.broadcast_to(decay, gate.shape),
            gate=gate,
        )
        return _stabilized(options, x, memory, state.stabilizer.astype(dtype), tokens, v.dtype)
    by_channel = log_decay is not None and log_decay.ndim == 4
    if log_decay is not None and not by_channel and value_log_decay is not None:
        by_channel, log_decay = True, log_decay[..., None]
    inputs = _Inputs(
        q=checks.group_queries(select(tokens.real, q).astype(dtype) * options.scale, heads),
        k=prepare(checks.spread_keys(k, heads)),
        v=select(tokens.written, values),
        decay=None if by_channel else log_decay,
        key_decay=log_decay if by_channel else None,
        value_decay=value_log_decay,
    )
    if bonus is not None:
        bonus = bonus.astype(dtype)
    if options.form == "recurrent":
        output, memory = _recurrent(inputs, bonus, memory, tokens)
    else:
        chunks = cut_into_chunks(tokens, length, options.size, num_segments)
        output, memory = _chunked(inputs, bonus, memory, chunks, options)
        output = chunks.join(output, length)

    output = output.reshape(batch, length, -1, output.shape[-1])
    normalizer = None
    if options.normalize is not None:
        output = output[..., :value_dim] / (output[..., value_dim:] + options.normalize)
        memory, normalizer = memory[..., :value_dim], memory[..., value_dim]
    output = finish_output(tokens, output).astype(v.dtype)
    return output, LinearState(memory, normalizer, None, tokens.last_id)


def _stabilized(options, x: stabilized.Gated, memory, stabilizer, tokens: Tokens, dtype):
    """The rest of `_linear_memory` where writes are gated; the last value channel is the normaliser's."""
    batch, length = x.gate.shape[:2]
    if options.form == "recurrent":
        output, m, memory, stabilizer = stabilized.by_token(x, memory, stabilizer, tokens)
    else:
        num_segments = memory.shape[1] if memory.ndim == 5 else None
        chunks = cut_into_chunks(tokens, length, options.size, num_segments)
        written = jnp.ones((batch, length), bool) if tokens.written is None else tokens.written
        output, m, memory, stabilizer = stabilized.by_chunk(
            x, written, memory, stabilizer, chunks, options.form, options.precision
        )
        output, m = chunks.join(output, length), chunks.join(m, length)
    output = stabilized.normalized(
        output[..., :-1], output[..., -1:], m[..., None, None], options.normalize
    )
    output = finish_output(tokens, output.reshape(batch, length, -1, output.shape[-1]))
    state = LinearState(memory[..., :-1], memory[..., -1], stabilizer, tokens.last_id)
    return output.astype(dtype), state


def _recurrent(inputs: _Inputs, bonus, memory, tokens):
    def step(memory, x: _Inputs):
        write = x.k[..., :, None] * x.v[..., None, :]
        decay = jnp.zeros((1, 1, 1, 1), memory.dtype)
        if x.decay is not None:
            decay = decay + x.decay[..., None, None]
        if x.key_decay is not None:
            decay = decay + x.key_decay[..., :, None]
        if x.value_decay is not None:
            decay = decay + x.value_decay[..., None, :]
        after = forget(memory, decay) + write
        seen = after if bonus is None else memory + bonus[..., None] * write
        return after, jnp.sum(x.q[..., None] * seen[:, :, None], axis=-2)

    return scan_tokens(step, inputs, memory, tokens.run, tokens.slot)


def _chunked(inputs: _Inputs, bonus, memory, chunks: Chunks, options: _Options):
    """Inputs [B, T, ...] -> output [B, N, C, G, R, V] and the final memory."""
    exclusive, precision = bonus is not None, options.precision

    def by_head(x):  # [B, N, C, G, ..., *] -> [B, N, G, ..., C, *]
        x = jnp.moveaxis(chunks.split(x), 2, 3)
        return x if x.ndim < 6 else jnp.moveaxis(x, 3, -2)

    x = jax.tree.map(by_head, inputs)
    same, enters, stays = run_masks(chunks)

    # What the chunk's own tokens give each other.
    current = jnp.einsum("bngrck,bngck->bngrc", x.q, x.k if bonus is None else x.k * bonus[:, None])
    key_halving = None if x.key_decay is None else halve(x.key_decay, exclusive=exclusive)
    value_halving = None if x.value_decay is None else halve(x.value_decay, exclusive=exclusive)
    scalar_halving = None if x.decay is None else halve(x.decay[..., None], exclusive=exclusive)
    if value_halving is not None:
        output = _by_halving(x, current, key_halving, value_halving, same, precision)
    else:
        if key_halving is not None:
            scores = _with_queries(x, key_halving, current, precision)
        else:
            scores = jnp.einsum("bngrik,bngjk->bngrij", x.q, x.k, precision=precision)
            # Masked first: a later score that overflowed is not 0 times 0.
            scores = jnp.tril(scores, -1 if exclusive else 0)
            if scalar_halving is not None:
                scores = scores * pairwise_decay(scalar_halving, exclusive=exclusive)[:, :, :, None]
            if exclusive:
                scores = scores + current[..., None] * jnp.eye(chunks.size, dtype=scores.dtype)
        if same is not None:
            scores = jnp.where(same[:, :, None, None], scores, 0)
        output = jnp.einsum("bngrij,bngjv->bngriv", scores, x.v, precision=precision)

    # The chunk as one update of the memory, and its read of what was there before.
    read, written_keys, written_values = x.q, x.k, x.v
    log_transition = jnp.zeros((1, 1, 1, 1, 1), x.k.dtype)
    out_decay = None
    for halving in (scalar_halving, key_halving):
        if halving is not None:
            read = read * jnp.exp(halving.prefix)[:, :, :, None]
            written_keys = written_keys * jnp.exp(halving.suffix)
            log_transition = log_transition + halving.total[..., None]
    if value_halving is not None:
        out_decay = jnp.exp(value_halving.prefix)[:, :, :, None]
        written_values = written_values * jnp.exp(value_halving.suffix)
        log_transition = log_transition + value_halving.total[..., None, :]
    if same is not None:
        read = jnp.where(enters[:, :, None, None, :, None], read, 0)
        written_keys = jnp.where(stays[:, :, None, :, None], written_keys, 0)
        lasts = per_chunk(enters[:, :, -1], log_transition)
        log_transition = jnp.where(lasts, log_transition, -jnp.inf)
    write = jnp.einsum("bngck,bngcv->bngkv", written_keys, written_values, precision=precision)
    log_transition = jnp.broadcast_to(log_transition, (*write.shape[:2], *log_transition.shape[2:]))

    if options.form == "chunk":
        entering, memory = fold_chunks(
            lambda log_decay, m: forget(m, log_decay), jnp.add, log_transition, write, memory, chunks
        )  # fmt: skip
    else:
        entering, memory = associate_chunks(
            jnp.multiply, jnp.multiply, jnp.exp(log_transition), write, memory, chunks
        )
    carried = jnp.einsum("bngrck,bngkv->bngrcv", read, entering, precision=precision)
    output = output + (carried if out_decay is None else carried * out_decay)
    return jnp.moveaxis(output, -2, 2), memory


def _with_queries(x: _Inputs, halving: Halving, diagonal, precision):
    """`channel_scores` for R queries on one key."""
    spread = Halving(
        tuple((p[:, :, :, None], s[:, :, :, None]) for p, s in halving.levels), *halving[1:]
    )
    return channel_scores(x.q, x.k[:, :, :, None], spread, diagonal, precision)


def _by_halving(x: _Inputs, current, keys: Halving | None, values: Halving, same, precision):
    """The chunk's own outputs when values decay too: block by block, [B, N, G, R, C, V]."""
    output = current[..., None] * x.v[:, :, :, None]
    for level, (value_prefix, value_suffix) in enumerate(values.levels):
        size = 2**level
        _, q_right = pair_blocks(blocks_of(x.q, size))
        k_left, _ = pair_blocks(blocks_of(x.k, size))
        v_left, _ = pair_blocks(blocks_of(x.v, size))
        if keys is not None:
            q_right = q_right * jnp.exp(keys.levels[level][0])[:, :, :, None]
            k_left = k_left * jnp.exp(keys.levels[level][1])
        scores = jnp.einsum("bngrmik,bngmjk->bngrmij", q_right, k_left, precision=precision)
        if same is not None:
            chunk = same.reshape(
                *same.shape[:2], -1, 2, size, same.shape[-1] // (2 * size), 2, size
            )
            pairs = jnp.moveaxis(jnp.diagonal(chunk[:, :, :, 1, :, :, 0], axis1=2, axis2=4), -1, 2)
            scores = jnp.where(pairs[:, :, None, None], scores, 0)
        off = jnp.einsum(
            "bngrmij,bngmjv->bngrmiv", scores, v_left * jnp.exp(value_suffix), precision=precision
        )
        off = off * jnp.exp(value_prefix)[:, :, :, None]
        blocks = output.reshape(*output.shape[:4], -1, 2, size, output.shape[-1])
        output = jnp.stack([blocks[..., 0, :, :], blocks[..., 1, :, :] + off], axis=-3)
        output = output.reshape(*output.shape[:4], -1, output.shape[-1])
    return output


def _check(op, dims, log_decay, value_log_decay, bonus):
    batch, length, heads, key_dim, value_dim = dims
    checks.check_log_decay(op, log_decay, (batch, length, heads, key_dim))
    if value_log_decay is not None:
        checks.check_shape(
            op, "value_log_decay", value_log_decay, (batch, length, heads, value_dim), "B, T, G, V"
        )
    if bonus is not None:
        checks.check_shape(op, "bonus", bonus, (heads, key_dim), "G, K")


def _check_kept(op, state, normalize, gated):
    if not isinstance(state, LinearState):
        return
    if (normalize is None) != (state.normalizer is None):
        given = "has no normalizer" if state.normalizer is None else "has a normalizer"
        raise ValueError(f"{op}: initial_state {given}, but normalize={normalize}")
    if gated != (state.stabilizer is not None):
        given = "has no stabilizer" if gated else "has a stabilizer"
        raise ValueError(
            f"{op}: initial_state {given}, but log_input_gate is {'given' if gated else 'None'}"
        )


def _check_gated(op, dims, log_decay, value_log_decay, log_input_gate, bonus, normalize):
    checks.check_shape(op, "log_input_gate", log_input_gate, dims, "B, T, G")
    if normalize is None:
        raise ValueError(
            f"{op}: log_input_gate needs normalize: without it the output is as large as e^gate; normalize=None"
        )
    if value_log_decay is not None or bonus is not None or jnp.ndim(log_decay) == 4:
        raise ValueError(
            f"{op}: log_input_gate goes with log_decay [G], [B, T, G] or None and neither value_log_decay nor bonus; given "
            f"are log_decay {None if log_decay is None else jnp.shape(log_decay)}, value_log_decay "
            f"{'no' if value_log_decay is None else 'yes'}, bonus {'no' if bonus is None else 'yes'}"
        )
