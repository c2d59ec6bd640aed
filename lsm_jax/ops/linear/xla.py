"""Compute `linear_memory` by XLA in three forms: recurrent (token by token), by chunks, and by an associative
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
    fold_chunks,
    per_chunk,
    run_masks,
    scan_tokens,
)
from lsm_jax.ops.core.decays import (
    Halving,
    blocks_of,
    channel_scores,
    forget,
    halve,
    pair_blocks,
    pairwise_decay,
    spread_constant,
)
from lsm_jax.ops.core.segments import (
    Chunks,
    Tokens,
    cut_into_chunks,
    finish_output,
    read_tokens,
    select,
)
from lsm_jax.ops.core.states import LinearState
from lsm_jax.ops.linear import stabilized


class LinearOptions(NamedTuple):
    """The options of `linear_memory` that are constant when a program is compiled.

    Attributes:
        scale: multiplies the queries.
        normalize: the epsilon of the normaliser that divides the output; None without one.
        form: "recurrent", "chunk" or "associative", how the op is computed.
        size: tokens in a chunk.
        dtype: the dtype of the state and of all sums.
        precision: the precision of matrix products.
        exact: whether a fused kernel returns its output in float32 (slot memory requires it).
        rank: number of consecutive rows that are one token, of which each reads after all are written.
        fresh: whether the state is empty, so that a kernel need not load its memories.
    """

    scale: float
    normalize: float | None
    form: str
    size: int
    dtype: Any
    precision: jax.lax.Precision
    exact: bool = False
    rank: int = 1
    fresh: bool = False


class _Inputs(NamedTuple):
    """The arrays of `linear_memory`, split by head: queries q [..., G, R, K], keys k [..., G, K], values v [..., G, V];
    at most one of the log decays `decay` (of a whole memory) and `key_decay` (of key channels) is given.
    """

    q: Array
    k: Array
    v: Array
    decay: Array | None
    key_decay: Array | None
    value_decay: Array | None


def by_xla(
    options: LinearOptions, q, k, v, log_decay, value_log_decay, log_input_gate, state, segment_ids, update_mask,
    constant_log_decay, bonus,
):  # fmt: skip
    """Compute `linear_memory` by XLA in the form that `options` says; return the output [B, T, H, V] in v's dtype and
    the state after the last token.
    """
    batch, length, heads, value_dim = v.shape
    dtype = options.dtype
    num_segments = state.memory.shape[1] if state.memory.ndim == 5 else None
    tokens = read_tokens(segment_ids, update_mask, state.segment_id, num_segments)

    def prepare(x) -> Any:
        return None if x is None else select(tokens.written, jnp.asarray(x).astype(dtype))

    log_decay = spread_constant(log_decay, constant_log_decay, tokens, v, dtype)
    values = v.astype(dtype)
    memory = state.memory.astype(dtype)
    if (
        options.normalize is not None
    ):  # one more value channel, of ones, which only the keys' decay affects
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
    """Return the output and the final state of `linear_memory` with exponential gates (`log_input_gate`); the
    normaliser is stored as the memory's last value channel.
    """
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


def _chunked(inputs: _Inputs, bonus, memory, chunks: Chunks, options: LinearOptions):
    """Return the output [B, N, C, G, R, V] and the final memory of `linear_memory`, computed by chunks, from inputs [B,
    T, ...].
    """
    exclusive, precision = bonus is not None, options.precision

    def by_head(x):  # [B, N, C, G, ..., *] -> [B, N, G, ..., C, *]
        x = jnp.moveaxis(chunks.split(x), 2, 3)
        return x if x.ndim < 6 else jnp.moveaxis(x, 3, -2)

    x = jax.tree.map(by_head, inputs)
    same, enters, stays = run_masks(chunks)

    # Scores between the tokens of one chunk.
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
            # Masked before the decay: an overflowed score of a later token times 0 is NaN.
            scores = jnp.tril(scores, -1 if exclusive else 0)
            if scalar_halving is not None:
                scores = scores * pairwise_decay(scalar_halving, exclusive=exclusive)[:, :, :, None]
            if exclusive:
                scores = scores + current[..., None] * jnp.eye(chunks.size, dtype=scores.dtype)
        if same is not None:
            scores = jnp.where(same[:, :, None, None], scores, 0)
        output = jnp.einsum("bngrij,bngjv->bngriv", scores, x.v, precision=precision)

    # The chunk as one update of the memory, and the chunk's read of the memory before it.
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
    """Return the decayed scores of each chunk's queries and keys, where R query heads read each of the G memories.

    `x` holds the chunk's queries and keys, and `halving` the sums of the log decay of key channels, by which the scores
    are decayed.
    """
    spread = Halving(
        tuple((p[:, :, :, None], s[:, :, :, None]) for p, s in halving.levels), *halving[1:]
    )
    return channel_scores(x.q, x.k[:, :, :, None], spread, diagonal, precision)


def _by_halving(x: _Inputs, current, keys: Halving | None, values: Halving, same, precision):
    """Return the part of the outputs, [B, N, G, R, C, V], that a chunk's tokens contribute to tokens of the same chunk,
    computed block by block; for decays of value channels.
    """
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
