"""The tokens of `linear_memory` on one device as one update of its state: a total decay and the sum of the
decayed writes.

With a_t and b_t the sums of the log decays after token t, the writes sum to
`Σ_t (k_t e^{a_t})ᵀ (v_t e^{b_t})`: one product over time, in which every exponential is at most 1. It stores
no memory per chunk, whichever backend then computes the outputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lsm_jax.ops.core import checks
from lsm_jax.ops.core.decays import forget
from lsm_jax.ops.core.segments import read_tokens, select
from lsm_jax.ops.core.shared_rows import (
    Update,
    emptied_by,
    ends_of_documents,
    newer_id,
    staying,
    total_of,
    unless_restarted,
)
from lsm_jax.ops.core.states import LinearState
from lsm_jax.ops.linear import stabilized
from lsm_jax.ops.linear.xla import LinearOptions, by_xla


class Decays(NamedTuple):
    """The sums of a device's log decays; a field is None if there is no such decay.

    Attributes:
        keys: [B, G, 1 or K] or [B, S, G, 1 or K].
        values: [B, G, V] or [B, S, G, V].
    """

    keys: Float[Array, ...] | None
    values: Float[Array, ...] | None


def sum_after(x: Float[Array, "B T ..."]) -> Float[Array, "B T ..."]:
    """The sum of x over the tokens after each token."""
    later = jnp.concatenate([x[:, 1:], jnp.zeros_like(x[:, :1])], axis=1)
    return jax.lax.cumsum(later, axis=1, reverse=True)


def weighed_writes(k, v, key_decay, value_decay, stays, precision) -> Array:
    """Return the sum of the writes `kᵀ v` of all tokens, each decayed up to the last token: [B, G, K, V].

    Args:
        k: [B, T, G, K].
        v: [B, T, G, V].
        key_decay: [B or 1, T, G, K or 1] or None, a log decay.
        value_decay: [B or 1, T, G, V] or None, a log decay.
        stays: [B, T], False for tokens whose writes are left out of the sum; None to include all.
        precision: of the product.
    """
    keys, values = select(stays, k), v
    if key_decay is not None:
        keys = keys * jnp.exp(sum_after(key_decay))
    if value_decay is not None:
        values = values * jnp.exp(sum_after(value_decay))
    return jnp.einsum("btgk,btgv->bgkv", keys, values, precision=precision)


def update_of(options: LinearOptions, arguments: dict[str, Any]) -> Update:
    """Return the tokens of this device as one update.

    The XLA form computes the states that one product cannot compute: one state per segment, or gated writes.

    Args:
        options: the op's static options.
        arguments: the op's arrays on this device.
    """
    k, v, state = (arguments[name] for name in ("k", "v", "state"))
    segment_ids = arguments["segment_ids"]
    batch, length, heads, value_dim = v.shape
    num_segments = state.memory.shape[1] if state.memory.ndim == 5 else None
    tokens = read_tokens(
        segment_ids, arguments["update_mask"], jnp.zeros_like(state.segment_id), num_segments
    )
    restarts, first_id = ends_of_documents(segment_ids, tokens.run)

    def prepare(x) -> Any:
        return None if x is None else select(tokens.written, jnp.asarray(x).astype(options.dtype))

    key_decay = arguments["log_decay"]
    if arguments["constant_log_decay"] is not None:
        rows = 1 if tokens.written is None else batch
        key_decay = jnp.broadcast_to(arguments["constant_log_decay"], (rows, length, heads))
    key_decay, value_decay = prepare(key_decay), prepare(arguments["value_log_decay"])
    if key_decay is not None and key_decay.ndim == 3:
        key_decay = key_decay[..., None]
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
    keys = checks.spread_keys(k, heads).astype(options.dtype)
    memory = weighed_writes(
        keys, select(stays, values), key_decay, value_decay, stays, options.precision
    )
    if options.normalize is not None:
        memory, normalizer = memory[..., :value_dim], memory[..., value_dim]
    return Update(totals, LinearState(memory, normalizer, None, tokens.last_id), restarts, first_id)


def advance(state: LinearState, update: Update) -> LinearState:
    """The state after an update."""
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
    """Add an update to a state if both are stabilised; the sum's stabiliser is the greater of the two."""
    written, decays = update.written, update.transition
    assert state.normalizer is not None
    total = state.stabilizer if decays.keys is None else decays.keys[..., 0] + state.stabilizer
    before = unless_restarted(update, total, stabilized.NEVER)
    after = jnp.maximum(before, written.stabilizer)
    kept, gained = jnp.exp(before - after), jnp.exp(written.stabilizer - after)
    memory = kept[..., None, None] * state.memory + gained[..., None, None] * written.memory
    normalizer = kept[..., None] * state.normalizer + gained[..., None] * written.normalizer
    return LinearState(memory, normalizer, after, newer_id(state, update))
