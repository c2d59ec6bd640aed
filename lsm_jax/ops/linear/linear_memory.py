"""Linear memories: `M_t = a_t ⊙ M_{t-1} + k_tᵀ v_t`, `o_t = q_t M_t`, for every decay that is the product of
a factor per key channel and a factor per value channel.

Linear-MoE (arXiv 2503.05447) Eq. 5 with Θ elementwise: basic linear attention, RetNet, GLA, Mamba2 and
similar methods.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lsm_jax.ops.backends import one_token
from lsm_jax.ops.backends.registry import check_implementation
from lsm_jax.ops.backends.run import run, static_of
from lsm_jax.ops.core import checks
from lsm_jax.ops.core.decays import split_constant
from lsm_jax.ops.core.segments import select
from lsm_jax.ops.core.shared_rows import memory_axes
from lsm_jax.ops.core.states import LinearState, linear_state, store_layer, unwrap_layer
from lsm_jax.ops.linear import (
    backends,  # noqa: F401  (registers them)
    shared_rows,
)
from lsm_jax.ops.linear.writes import add_later_rows, add_skip, scale_values
from lsm_jax.ops.linear.xla import LinearOptions
from lsm_jax.parallel import TOKENS, over_mesh, shards_of


def linear_memory(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T G V"],
    log_decay: Float[Array, ...] | None = None,
    *,
    value_log_decay: Float[Array, "B T G V"] | None = None,
    log_input_gate: Float[Array, "B T G"] | None = None,
    bonus: Float[Array, "G K"] | None = None,
    log_write: Float[Array, "B T G"] | None = None,
    skip: Float[Array, " G"] | None = None,
    rank: int = 1,
    normalize: float | None = None,
    scale: float | None = None,
    initial_state: LinearState | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    update_mask: Array | None = None,
    form: str = "chunk",
    implementation: str | tuple[str, ...] | None = None,
    chunk_size: int | None = None,
) -> tuple[Float[Array, "B T max(H,G) V"], LinearState]:
    """Write each token's `kᵀ v` into a decaying memory, and read the memory with q: linear attention with decays.

    Args:
        q: [B, T, H, K] queries; H is a multiple or a divisor of G.
        k: [B, T, Hk, K] keys; Hk divides G.
        v: [B, T, G, V] values; one memory for each of the G heads.
        log_decay: natural logarithm, at most 0: [G] for a constant, [B, T, G] for one value per token, or
            [B, T, G, K] for one per token and key channel.
        value_log_decay: [B, T, G, V], the log decay of value channels; the two decays are multiplied.
        log_input_gate: [B, T, G], natural logarithm, of any size: `e^log_input_gate` multiplies the write to
            memory and normaliser, which are stored stabilised (mLSTM; `lsm_jax.ops.linear.stabilized`).
            Requires `normalize`, and `log_decay` [G], [B, T, G] or None.
        bonus: [G, K]. If given, a token reads before its decay and its write, and its own write enters the
            read as `q diag(bonus) kᵀ v` (RWKV6, arXiv 2404.05892 Eq. 18).
        log_write: [B, T, G], natural logarithm: the memory is written with `e^log_write v` (Mamba2's step size). Accepted without
            `normalize`.
        skip: [G]; `skip v` of a token, without `e^log_write`, is added to its output (Mamba2's D). Hopper's kernel multiplies and adds
            both in registers, for a log_decay [B, T, G] of more than one token without update_mask, bonus or value_log_decay, on rows
            that devices do not share. Otherwise they are passes over v and the output.
        rank: number R of consecutive rows that are one token (T is a multiple), with one document and one mask: each reads after all of
            them are written (Mamba-3's MIMO). `log_decay` must be 0 but at the first, where it decays the memory before the token.
            Hopper's kernel computes it for a log_decay [B, T, G] or none and an R that divides 64; elsewhere what a row reads from
            later ones is added to the output. More than 1 is not accepted with `value_log_decay`, `log_input_gate`, `bonus`,
            `log_write`, `skip` or `normalize`, nor with a log_decay [G] or [B, T, G, K].
        normalize: None, or the ε of `o = q M / (q z + ε)` with z the decayed sum of keys. With
            `log_input_gate` it is the ε of `o = q M / (max(|q z|, e^-m) + ε)`, M and z as stored and m their
            stabiliser; for ε = 0 this is `q C / max(|q n|, 1)` of the unscaled C and n (xLSTM, arXiv
            2405.04517 Eq. 21).
        scale: multiplies q; None is `K ** -0.5`.
        initial_state: the state to continue from; None is an empty one. With memory [B, S, ...] there is one
            state per segment: the tokens of id s use state s - 1.
        segment_ids: [B, T] integers, 0 for padding; see `lsm_jax.ops.core.segments`.
        update_mask: [B, T], 0 for tokens that do not change the memory (they still read it).
        form: "recurrent" (token by token), "chunk" (matrix products in a chunk, scan over chunks) or
            "associative" (associative scan over chunks).
        implementation: None (the first automatic backend that supports the call; docs/kernels.md lists what
            each requires), a backend's name ("xla", "mosaic_gpu" on Hopper, "mosaic_tpu", or "triton" on NVIDIA
            cards of compute capability 8.0 or more), or a tuple of names in order of preference.
        chunk_size: tokens in a chunk of the XLA form, a power of two; None is 64.

    Returns:
        The output in v's dtype, and the final state in float32 (float64 if an input is).

    Raises:
        NotImplementedError: a backend that is asked for by name does not support the call; the message names
            the requirement.
        ValueError: shapes, heads, form, implementation or chunk size that are not accepted.
    """
    op = "linear_memory"
    checks.check_form(op, form)
    check_implementation(op, implementation)
    batch, length, _, _, heads, key_dim, value_dim = checks.check_qkv(op, q, k, v)
    checks.check_rows(op, batch, length, segment_ids, update_mask)
    initial_state, layer = unwrap_layer(initial_state)
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
    _check_writes(op, (batch, length, heads), log_write, skip, normalize)
    if rank != 1:
        others = dict(
            value_log_decay=value_log_decay, log_input_gate=log_input_gate, bonus=bonus, log_write=log_write, skip=skip,
            normalize=normalize,
        )  # fmt: skip
        _check_rank(op, rank, length, log_decay, others)
        if shards_of("sequence") > 1:
            given = dict(
                scale=scale, initial_state=initial_state if layer is None else initial_state._replace(memory=layer),
                segment_ids=segment_ids, update_mask=update_mask, form=form, implementation=implementation,
                chunk_size=chunk_size,
            )  # fmt: skip
            output, state = linear_memory(q, k, v, log_decay, **given)
            real = None if segment_ids is None else segment_ids != 0
            mask = None if update_mask is None else update_mask != 0
            written = real if mask is None else mask if real is None else mask & real
            q, k, v = select(real, q), select(written, k), select(written, v)
            scale = checks.scale_or_default(op, scale, key_dim)
            return add_later_rows(output, q, k, v, rank, scale), state
    # A masked token has a skip, but no backend must see its value, which may not be finite.
    by_backend = (
        log_decay is not None and jnp.ndim(log_decay) == 3 and update_mask is None and layer is None
        and value_log_decay is None and bonus is None and length > 1 and shards_of("sequence") == 1
    )  # fmt: skip
    if (log_write is not None or skip is not None) and not by_backend:
        real = None if segment_ids is None else segment_ids != 0
        written = (
            real if update_mask is None else (update_mask != 0) & (True if real is None else real)
        )
        v, writes = select(real, v), select(written, v)
        if log_write is not None:
            writes = scale_values(writes, select(written, log_write))
        given = dict(
            value_log_decay=value_log_decay, bonus=bonus, scale=scale,
            initial_state=initial_state if layer is None else initial_state._replace(memory=layer),
            segment_ids=segment_ids, update_mask=update_mask, form=form, implementation=implementation,
            chunk_size=chunk_size,
        )  # fmt: skip
        output, state = linear_memory(q, k, writes, log_decay, **given)
        return output if skip is None else add_skip(output, skip, v), state
    _check_state(op, initial_state, normalize, gated)
    fields = dict(normalize=normalize is not None, stabilize=gated)
    empty = functools.partial(linear_state, batch, heads, key_dim, value_dim, **fields, dtype=dtype)
    state = checks.state_or_empty(op, initial_state, empty, segment_ids)
    by_token, constant = split_constant(log_decay)
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
    if log_write is not None or skip is not None:
        zeros: Any = jnp.zeros
        batched["log_write"] = zeros(v.shape[:3], dtype) if log_write is None else log_write
        shared["skip"] = zeros(heads, dtype) if skip is None else skip
    options = LinearOptions(
        scale=checks.scale_or_default(op, scale, key_dim),
        normalize=normalize,
        form=form,
        size=size,
        dtype=dtype,
        precision=checks.matmul_precision(q, k, v),
        rank=rank,
        fresh=initial_state is None and layer is None,
    )
    in_place = one_token.in_place(layer, q)
    result = over_mesh(
        run,
        batched,
        shared if in_place is None else shared | {"layer": in_place},
        static_of(op, options, implementation),
        axes=memory_axes(batched, shared),
        out_axes=(TOKENS, "state"),
        in_sequence=_in_sequence,
    )
    return result if in_place is not None else store_layer(layer, result)


def _in_sequence(axis, function, static, **arguments):
    """Compute `linear_memory` on one of several devices that have consecutive parts of each row: the outputs of its
    tokens, and the state after the whole row.
    """
    static = static._replace(options=static.options._replace(fresh=False))
    return shared_rows.in_sequence(axis, function, static, arguments)


def _check(op, dims, log_decay, value_log_decay, bonus):
    batch, length, heads, key_dim, value_dim = dims
    checks.check_log_decay(op, log_decay, (batch, length, heads, key_dim))
    if value_log_decay is not None:
        checks.check_shape(
            op, "value_log_decay", value_log_decay, (batch, length, heads, value_dim), "B, T, G, V"
        )
        checks.check_logarithm(op, "value_log_decay", value_log_decay)
    if bonus is not None:
        checks.check_shape(op, "bonus", bonus, (heads, key_dim), "G, K")


def _check_rank(op, rank, length, log_decay, others):
    if not checks.is_count(rank) or length % rank:
        raise ValueError(
            f"{op}: rank={rank!r}; accepted are positive integers that divide the number of rows, {length}"
        )
    for name, value in others.items():
        if value is not None:
            raise ValueError(
                f"{op}: {name} is given with rank={rank}; accepted with more than 1 is None"
            )
    if log_decay is not None and jnp.ndim(log_decay) != 3:
        raise ValueError(
            f"{op}: log_decay has shape {jnp.shape(log_decay)} with rank={rank}; accepted with more than 1 are [B, T, G] and None"
        )


def _check_writes(op, dims, log_write, skip, normalize):
    if log_write is None and skip is None:
        return
    if normalize is not None:
        raise ValueError(
            f"{op}: normalize={normalize}; accepted with log_write or skip is None, for the normaliser has no such factors"
        )
    if log_write is not None:
        checks.check_shape(op, "log_write", log_write, dims, "B, T, G")
    if skip is not None:
        checks.check_shape(op, "skip", skip, dims[2:], "G")


def _check_state(op, state, normalize, gated):
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
            f"{op}: normalize=None; log_input_gate requires normalize, or the output would grow with e^gate"
        )
    if value_log_decay is not None or bonus is not None or jnp.ndim(log_decay) == 4:
        raise ValueError(
            f"{op}: log_input_gate requires log_decay [G], [B, T, G] or None, and neither value_log_decay nor bonus; given "
            f"are log_decay {None if log_decay is None else jnp.shape(log_decay)}, value_log_decay "
            f"{'no' if value_log_decay is None else 'yes'}, bonus {'no' if bonus is None else 'yes'}"
        )
