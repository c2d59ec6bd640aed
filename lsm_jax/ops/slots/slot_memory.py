"""Gated slot attention (arXiv 2409.07146): a softmax over M slots between two linear memories, whose slots
decay by α and are written with the strengths s.

`K̃_t = K̃_{t-1} diag(α_t) + k_tᵀ s_t`, `p_t = softmax(scale q_t K̃_t)`, `Ṽ_t = diag(α_t) Ṽ_{t-1} + s_tᵀ
v_t`, `o_t = p_t Ṽ_t`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lsm_jax.ops.backends.registry import check_implementation
from lsm_jax.ops.backends.run import run, static_of
from lsm_jax.ops.core import checks
from lsm_jax.ops.core.decays import forget
from lsm_jax.ops.core.segments import read_tokens, select
from lsm_jax.ops.core.shared_rows import (
    Update,
    emptied_by,
    ends_of_documents,
    newer_id,
    resume,
    state_axes,
    staying,
    total_of,
    unless_restarted,
)
from lsm_jax.ops.linear.shared_rows import weighed_writes
from lsm_jax.ops.linear.xla import LinearOptions
from lsm_jax.ops.slots import backends  # noqa: F401  (registers them)
from lsm_jax.ops.slots.state import SlotState, slot_state
from lsm_jax.parallel import TOKENS, over_mesh


def slot_memory(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T G V"],
    s: Float[Array, "B T G M"],
    log_decay: Float[Array, "B T G M"] | None = None,
    *,
    scale: float | None = None,
    initial_state: SlotState | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    update_mask: Array | None = None,
    form: str = "chunk",
    implementation: str | tuple[str, ...] | None = None,
    chunk_size: int | None = None,
) -> tuple[Float[Array, "B T max(H,G) V"], SlotState]:
    """Write each token's key and value into M decaying slots, and return the softmax attention of q to the slots.

    A slot that no token has written has score 0; the softmax includes it.

    Args:
        q: [B, T, H, K] queries; H is a multiple or a divisor of G.
        k: [B, T, Hk, K] keys; Hk divides G.
        v: [B, T, G, V] values; one pair of memories for each of the G heads.
        s: [B, T, G, M], the strength of the write to each slot; 1 - α in the paper.
        log_decay: [B, T, G, M], log α of each slot, natural logarithm, at most 0. None means no decay.
        scale: multiplies q; None is `K ** -0.5`.
        initial_state: the state to continue from; None is an empty one. With keys [B, S, ...] there is one
            state per segment: the tokens of id s use state s - 1.
        segment_ids: [B, T] integers, 0 for padding; see `lsm_jax.ops.core.segments`.
        update_mask: [B, T], 0 for tokens that do not change the memory (they still read it).
        form: "recurrent" (token by token), "chunk" (matrix products in each chunk, and a scan over chunks)
            or "associative" (an associative scan over chunks); for both linear memories.
        implementation: None (the first automatic backend that supports the call; see docs/kernels.md), a
            backend's name ("xla", "mosaic_gpu", ...), or a tuple of names in order of preference. The
            backends are those of `linear_memory`, and must support both memories. The fused kernels round
            the softmax's weights to q's dtype, and the strengths too ("mosaic_gpu" and "triton" not inside a chunk).
        chunk_size: tokens in a chunk of the XLA form, a power of two; None is 64.

    Returns:
        The output in v's dtype, and the final state in float32 (float64 if an input is).

    Raises:
        NotImplementedError: no backend of the given names supports the call; the message names the
            requirement.
        ValueError: a shape, number of heads, form, implementation or chunk size is not accepted.
    """
    op = "slot_memory"
    checks.check_form(op, form)
    check_implementation(op, implementation)
    batch, length, _, _, heads, key_dim, value_dim = checks.check_qkv(op, q, k, v)
    checks.check_rows(op, batch, length, segment_ids, update_mask)
    checks.check_shape(op, "s", s, (batch, length, heads, None), "B, T, G, M")
    checks.check_filled(op, "s", s)
    slots = s.shape[3]
    if log_decay is not None:
        checks.check_shape(op, "log_decay", log_decay, (batch, length, heads, slots), "B, T, G, M")
        checks.check_logarithm(op, "log_decay", log_decay)
    size = checks.check_chunk_size(op, chunk_size, length)
    dtype = checks.compute_dtype(q, k, v, s, log_decay)
    empty = functools.partial(slot_state, batch, heads, slots, key_dim, value_dim, dtype=dtype)
    state = checks.state_or_empty(op, initial_state, empty, segment_ids)
    batched = dict(
        q=q,
        k=k,
        v=v,
        s=s,
        log_decay=log_decay,
        state=state,
        segment_ids=segment_ids,
        update_mask=update_mask,
    )
    options = LinearOptions(
        scale=checks.scale_or_default(op, scale, key_dim),
        normalize=None,
        form=form,
        size=size,
        dtype=dtype,
        precision=checks.matmul_precision(q, k, v),
    )
    axes: dict[str, Any] = dict.fromkeys(batched, TOKENS)
    axes["state"] = state_axes(state, segments=state.keys.ndim == 5)
    return over_mesh(
        run,
        batched,
        {},
        static_of(op, options, implementation),
        axes=axes,
        out_axes=(TOKENS, "state"),
        in_sequence=_in_sequence,
    )


def _in_sequence(axis, function, static, **arguments):
    """Compute `slot_memory` on one of several devices that have consecutive parts of each row: the outputs of its
    tokens, and the state after the whole row.
    """
    update = _update(function, static, **arguments)
    return resume(axis, function, (static,), arguments, update, _advance)


def _update(function, static, q, k, v, s, log_decay, state, segment_ids, update_mask) -> Update:
    """Return the effect of this device's tokens on both memories of `slot_memory`, that of keys and that of
    values, as one update: the sum of the tokens' log decays, and what the tokens write.

    Neither memory's update depends on the other memory.
    """
    options = static.options
    batch, _, heads, _ = v.shape
    num_segments = state.keys.shape[1] if state.keys.ndim == 5 else None
    empty = jax.tree.map(jnp.zeros_like, state)
    tokens = read_tokens(segment_ids, update_mask, empty.segment_id, num_segments)
    restarts, first_id = ends_of_documents(segment_ids, tokens.run)
    dtype = options.dtype
    decay = None if log_decay is None else select(tokens.written, log_decay.astype(dtype))
    total = total_of(decay, tokens, num_segments, batch)
    if num_segments is not None:
        _, written = function(
            static._replace(options=options._replace(form="chunk")),
            q=q,
            k=k,
            v=v,
            s=s,
            log_decay=log_decay,
            state=empty,
            segment_ids=segment_ids,
            update_mask=update_mask,
        )
        return Update(total, written, restarts, first_id)
    stays = staying(tokens)
    s, v = select(stays, s.astype(dtype)), select(stays, v.astype(dtype))
    keys = weighed_writes(k.astype(dtype), s, None, decay, stays, options.precision)
    values = weighed_writes(s, v, decay, None, stays, options.precision)
    return Update(total, SlotState(keys, values, tokens.last_id), restarts, first_id)


def _advance(state: SlotState, update: Update) -> SlotState:
    """Return the state of `slot_memory` after the tokens of one device: the slots' keys and values before them, decayed
    by the sum of their log decays (`update.transition`), plus what these tokens write.

    Where a document begins among these tokens, nothing of the state before is left.
    """
    state, decay = emptied_by(state, update), update.transition
    keys, values = state.keys, state.values
    if decay is not None:
        keys, values = forget(keys, decay[..., None, :]), forget(values, decay[..., None])
    return SlotState(
        unless_restarted(update, keys) + update.written.keys,
        unless_restarted(update, values) + update.written.values,
        newer_id(state, update),
    )
