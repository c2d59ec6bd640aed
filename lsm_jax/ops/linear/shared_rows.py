"""`linear_memory` on one of the devices that share a row: the tokens are one update of the state, a total decay
and the sum of the decayed writes.

With a_t and b_t the sums of the log decays of keys and values after token t, the writes sum to
`Σ_t (k_t e^{a_t})ᵀ (v_t e^{b_t})`: one product over time, in which every exponential is at most 1. It stores
no memory per chunk, whichever backend then computes the outputs.

A fused kernel runs from an empty memory. With A_t and B_t the sums of the log decays up to token t (up to the
token before it with a bonus), the memory M that the device starts from adds `scale (q_t e^{A_t}) M e^{B_t}` to
the output of token t, and nothing once a document has begun.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lsm_jax.ops.backends.registry import Call
from lsm_jax.ops.backends.run import Static
from lsm_jax.ops.backends.select import select as select_backends
from lsm_jax.ops.core import checks
from lsm_jax.ops.core.decays import forget
from lsm_jax.ops.core.segments import Tokens, read_tokens, select
from lsm_jax.ops.core.shared_rows import (
    Update,
    emptied_by,
    ends_of_documents,
    newer_id,
    resume,
    resume_from_empty,
    staying,
    total_of,
    unless_restarted,
)
from lsm_jax.ops.core.states import LinearState
from lsm_jax.ops.linear import stabilized
from lsm_jax.ops.linear.xla import LinearOptions, by_xla


class Decays(NamedTuple):
    """Log decays of `linear_memory` on one device, or their sums, by which the memory before the device's
    tokens decays; a field is None if the call has no such decay.

    Attributes:
        keys: the sums of the log decay of each memory or key channel, [B, G, 1 or K] or [B, S, G, 1 or K].
        values: the sums of the log decay of each value channel, [B, G, V] or [B, S, G, V].
    """

    keys: Float[Array, ...] | None
    values: Float[Array, ...] | None


def sum_after(x: Float[Array, "B T ..."]) -> Float[Array, "B T ..."]:
    """Return, for each token, the sum of x [B, T, ...] over the tokens after it, without itself: for log decays, how
    much of the token's write is left after the last token.
    """
    later = jnp.concatenate([x[:, 1:], jnp.zeros_like(x[:, :1])], axis=1)
    return jax.lax.cumsum(later, axis=1, reverse=True)


def weighed_writes(k, v, key_decay, value_decay, stays, precision) -> Array:
    """Return the sum of the writes `kᵀ v` of all tokens, each decayed up to the last token: [B, G, K, V].

    Args:
        k: [B, T, Hk, K]; Hk divides G.
        v: [B, T, G, V].
        key_decay: [B or 1, T, G, K or 1] or None, a log decay.
        value_decay: [B or 1, T, G, V] or None, a log decay.
        stays: [B, T], False for tokens whose writes are left out of the sum; None to include all.
        precision: the precision of the matrix product.
    """
    batch, length, heads, value_dim = v.shape
    keys, values = select(stays, k), v
    if key_decay is not None:
        weight = jnp.exp(sum_after(key_decay))
        if key_decay.shape[-1] > 1:
            keys = checks.spread_keys(keys, heads) * weight
        else:  # one number per memory: keys that memories share are not multiplied for each of them
            values = values * weight
    if value_decay is not None:
        values = values * jnp.exp(sum_after(value_decay))
    values = values.reshape(batch, length, keys.shape[2], -1, value_dim)
    memory = jnp.einsum("btnk,btnpv->bnpkv", keys, values, precision=precision)
    return memory.reshape(batch, heads, -1, value_dim)


def in_sequence(
    axis: str, function: Callable[..., Any], static: Static, arguments: dict[str, Any]
) -> tuple[Array, LinearState]:
    """Return the output of `linear_memory` for this device's tokens, computed from the state after the
    earlier devices' tokens; and the state after the complete row.

    Args:
        axis: the mesh axis that rows are split over.
        function: the op on one device, a function of `static` and `arguments`.
        static: the call without its arrays.
        arguments: the op's arrays on this device; `state` is the state before the first device's tokens.
    """
    update = update_of(static.options, arguments)
    if not _is_fused(static, arguments):
        return resume(axis, function, (static,), arguments, update, advance)
    # Recomputed in the backward pass: `q e^A` would be stored in float32, for key channels of every token.
    read = jax.checkpoint(functools.partial(read_of_memory, static.options), prevent_cse=False)
    given = {name: x for name, x in arguments.items() if name != "state"}
    return resume_from_empty(
        axis,
        function,
        (static,),
        arguments,
        update,
        advance,
        lambda state: read(state.memory, given),
    )


def _is_fused(static: Static, arguments: dict[str, Any]) -> bool:
    """Return whether a fused kernel computes this call of `linear_memory` on the devices of the current mesh;
    False with one state per segment.

    With one state per segment the update of a device's tokens is computed by a form of the complete op, which
    costs as much as the kernel.
    """
    if arguments["state"].memory.ndim == 5 or arguments.get("layer") is not None:
        return False
    call = Call(static.op, static.options, arguments, static.implementation)
    return not select_backends(call).on_mesh().only("xla")


def _log_decays(options: LinearOptions, arguments: dict[str, Any], tokens: Tokens) -> Decays:
    """Return the log decays of each token as `Decays`: those of keys, [B or 1, T, G, 1 or K], and of values,
    [B, T, G, V], in the op's dtype; 0 for tokens that write nothing; a field is None if the call has no such
    decay.
    """

    def prepare(x) -> Any:
        return None if x is None else select(tokens.written, jnp.asarray(x).astype(options.dtype))

    batch, length, heads, _ = arguments["v"].shape
    key_decay = arguments["log_decay"]
    if arguments["constant_log_decay"] is not None:
        rows = 1 if tokens.written is None else batch
        key_decay = jnp.broadcast_to(arguments["constant_log_decay"], (rows, length, heads))
    key_decay, value_decay = prepare(key_decay), prepare(arguments["value_log_decay"])
    if key_decay is not None and key_decay.ndim == 3:
        key_decay = key_decay[..., None]
    return Decays(key_decay, value_decay)


def read_of_memory(
    options: LinearOptions, memory: Float[Array, "B G K V"], arguments: dict[str, Any]
) -> Float[Array, "B T max(H,G) V"]:
    """Return the part of the output that this device's tokens read from the memory before the device's first
    token, in the op's dtype.

    Args:
        options: the op's static options.
        memory: [B, G, K, V], the memory before the first token; 0 in rows where that token begins a document.
        arguments: the op's arrays on this device, by name.
    """
    q, v, segment_ids = (arguments[name] for name in ("q", "v", "segment_ids"))
    batch, length, memories, value_dim = v.shape
    tokens = read_tokens(segment_ids, arguments["update_mask"], jnp.zeros(batch, jnp.int32), None)
    reads = tokens.real
    if reads is not None and tokens.run is not None:
        reads = reads & (tokens.run == 0)
    keys, values = (
        _decay_until(x, arguments["bonus"]) for x in _log_decays(options, arguments, tokens)
    )

    q = select(reads, q).astype(options.dtype)
    if keys is not None and keys.shape[-1] > 1:  # a decay per channel
        q = checks.group_queries(q, memories) * keys[:, :, :, None]
        q = q.reshape(batch, length, -1, q.shape[-1])
        keys = None
    # [N, R, P] queries and memories: R queries read one memory, or P memories have one query.
    groups = min(q.shape[2], memories)
    q = q.reshape(batch, length, groups, -1, q.shape[3])
    memory = (options.scale * memory).reshape(batch, groups, -1, *memory.shape[2:])
    output = jnp.einsum("btnrk,bnpkv->btnrpv", q, memory, precision=options.precision)
    for decay in (keys, values):
        if decay is not None:
            decay = decay.reshape(*decay.shape[:2], groups, 1, -1, decay.shape[3])
            output = output * decay
    return output.reshape(batch, length, -1, value_dim)


def _decay_until(log_decay: Array | None, bonus: Array | None) -> Array | None:
    """Return the decay from the first token up to each token, the exponential of the sum of a log decay [B, T, ...];
    without the token's own decay if there is a bonus, with which a token reads before its decay.
    """
    if log_decay is None:
        return None
    sums = jax.lax.cumsum(log_decay, axis=1)
    if bonus is not None:
        sums = jnp.concatenate([jnp.zeros_like(sums[:, :1]), sums[:, :-1]], axis=1)
    return jnp.exp(sums)


def update_of(options: LinearOptions, arguments: dict[str, Any]) -> Update:
    """Return the effect of this device's tokens on the state of `linear_memory`, as one update: the sums of their log
    decays, and what they write.

    The XLA form computes the states that one product cannot compute: one state per segment, or gated writes.

    Args:
        options: the op's static options.
        arguments: the op's arrays on this device.
    """
    k, v, state = (arguments[name] for name in ("k", "v", "state"))
    segment_ids = arguments["segment_ids"]
    batch, _, _, value_dim = v.shape
    num_segments = state.memory.shape[1] if state.memory.ndim == 5 else None
    tokens = read_tokens(
        segment_ids, arguments["update_mask"], jnp.zeros_like(state.segment_id), num_segments
    )
    restarts, first_id = ends_of_documents(segment_ids, tokens.run)
    key_decay, value_decay = _log_decays(options, arguments, tokens)
    totals = Decays(*(total_of(x, tokens, num_segments, batch) for x in (key_decay, value_decay)))

    gated = state.stabilizer is not None
    if num_segments is not None or gated:
        empty = jax.tree.map(jnp.zeros_like, state)
        if gated:
            empty = empty._replace(stabilizer=jnp.full_like(state.stabilizer, stabilized.NEVER))
        in_chunks = options._replace(form="chunk")
        _, written = by_xla(in_chunks, **(arguments | {"state": empty}))
        return Update(totals, written, restarts, first_id)

    stays = staying(tokens)
    values = v.astype(options.dtype)
    normalizer = None
    if options.normalize is not None:  # a value channel of ones, which only the keys' decay affects
        values = jnp.concatenate([values, jnp.ones_like(values[..., :1])], axis=-1)
        if value_decay is not None:
            value_decay = jnp.pad(value_decay, [(0, 0)] * 3 + [(0, 1)])
    memory = weighed_writes(
        k.astype(options.dtype),
        select(stays, values),
        key_decay,
        value_decay,
        stays,
        options.precision,
    )
    if options.normalize is not None:
        memory, normalizer = memory[..., :value_dim], memory[..., value_dim]
    return Update(totals, LinearState(memory, normalizer, None, tokens.last_id), restarts, first_id)


def advance(state: LinearState, update: Update) -> LinearState:
    """Return the state of `linear_memory` after the tokens of one device: the memory and normaliser before
    these tokens, decayed by the tokens' summed log decays (`update.transition`), plus what the tokens write.

    Where a document begins among these tokens, nothing of the state before is left.
    """
    state, written, decays = emptied_by(state, update), update.written, update.transition
    if written.stabilizer is not None:
        return _advance_stabilized(state, update)
    over_keys = (
        jnp.zeros_like(state.memory[..., :1]) if decays.keys is None else decays.keys[..., None]
    )
    over_both = over_keys if decays.values is None else over_keys + decays.values[..., None, :]
    normalizer = None
    if written.normalizer is not None:
        normalizer = forget(state.normalizer, over_keys[..., 0])
        normalizer = unless_restarted(update, normalizer) + written.normalizer
    memory = unless_restarted(update, forget(state.memory, over_both)) + written.memory
    return LinearState(memory, normalizer, None, newer_id(state, update))


def _advance_stabilized(state: LinearState, update: Update) -> LinearState:
    """Return the state of a stabilised `linear_memory` (mLSTM) after one device's tokens: the decayed state
    before them plus what they write, with the greater of the two stabilisers.
    """
    written, decays = update.written, update.transition
    assert state.normalizer is not None
    total = state.stabilizer if decays.keys is None else decays.keys[..., 0] + state.stabilizer
    before = unless_restarted(update, total, stabilized.NEVER)
    after = jnp.maximum(before, written.stabilizer)
    kept, gained = jnp.exp(before - after), jnp.exp(written.stabilizer - after)
    memory = kept[..., None, None] * state.memory + gained[..., None, None] * written.memory
    normalizer = kept[..., None] * state.normalizer + gained[..., None] * written.normalizer
    return LinearState(memory, normalizer, after, newer_id(state, update))
