"""The backend of `attention` that XLA compiles, for every platform: it computes the output for one block of queries
after another.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lsm_jax.ops.attention import shared_rows
from lsm_jax.ops.attention.forget_gates import GateSum
from lsm_jax.ops.attention.query_blocks import attend_causally, attend_in_blocks
from lsm_jax.ops.attention.state import AttentionState
from lsm_jax.ops.attention.token_positions import TokenPositions, in_rings, prepend_state
from lsm_jax.ops.backends.registry import Call
from lsm_jax.ops.core import checks


class AttentionOptions(NamedTuple):
    """The options of `attention` that are constant when a program is compiled.

    Attributes:
        window: the number of keys that a query may attend to, its own among them; None for all earlier ones.
        scale: multiplies the scores.
        prune: whether keys are skipped whose weight the forget gates make negligible (see `attention`).
        no_state: whether the caller gave no state.
        unmasked: whether the caller gave neither a state nor segment ids nor a mask, so that masks depend
            on positions alone.
        axis: the mesh axis that rows are split over; None if a device has complete rows.
    """

    window: int | None
    scale: float
    prune: bool
    no_state: bool
    unmasked: bool
    axis: str | None = None


def run_xla(call: Call) -> Array:
    """Compute the output [B, T, H, V] of softmax attention by XLA, in v's dtype."""
    options = call.options
    q, k, v, sums, positions, state = (
        call.arguments[n] for n in ("q", "k", "v", "sums", "positions", "state")
    )
    if options.axis is not None:
        output = _in_shared_row(options, q, (k, v, sums), positions, state, no_ids(call))
    elif options.unmasked:
        output = attend_causally(q, k, v, sums, window=options.window, scale=options.scale)
    else:
        output = _with_masks(options, q, k, v, sums, positions, state, call.arguments["final"])
        if options.window is None:
            beyond = positions.rank >= state.keys.shape[-3]
            output = jnp.where(beyond[:, :, None, None], jnp.nan, output)
    return output.astype(v.dtype)


def no_ids(call: Call) -> bool:
    """Return whether the caller of `attention` gave neither segment ids nor a mask; a mask that only hides the padding
    at a row's end does not count.
    """
    arguments = call.arguments
    no_rows = arguments["segment_ids"] is None and arguments["update_mask"] is None
    return call.options.unmasked or no_rows


def _with_masks(
    options: AttentionOptions,
    q,
    k,
    v,
    sums: GateSum | None,
    positions: TokenPositions,
    state: AttentionState,
    final: AttentionState,
) -> Array:
    """Return the output [B, T, H, V] of softmax attention to the tokens of the state and of the call; masks
    by document and rank select the keys, for one block of queries at a time. `final` is the state after the call.
    """
    key_positions, keys = positions, (k, v, sums)
    same = (state.keys.dtype, state.values.dtype) == (k.dtype, v.dtype)
    if k.shape[1] == 1 and same and not options.no_state:
        # One token attends to the rings in which it is stored: state and token one after the other would be a copy.
        key_positions, keys = in_rings(final)
        if state.count.ndim == 1:
            here = jnp.broadcast_to(positions.document, key_positions.document.shape)
            key_positions = key_positions._replace(document=here)
    elif not options.no_state:
        key_positions, keys = prepend_state(state, positions, keys)

    def keys_and_mask(document, rank):
        mask = key_positions.written[:, None] & (
            document[:, :, None] == key_positions.document[:, None]
        )
        distance = rank[:, :, None] - key_positions.rank[:, None]
        mask = mask & (distance >= 0)
        return keys, mask if options.window is None else mask & (distance < options.window)

    of_queries = (positions.document, positions.rank)
    return attend_in_blocks((q, sums), of_queries, keys_and_mask, options.scale)


def _in_shared_row(
    options: AttentionOptions,
    q,
    keys: tuple,
    positions: TokenPositions,
    state: AttentionState,
    without_ids: bool,
) -> Array:
    """Return the output of softmax attention for this device's queries q [B, T, H, K], where devices have
    consecutive parts of each row; `keys` (keys, values, sums of log forget gates) and `positions` are those
    of the complete row.
    """
    assert options.axis is not None
    sums, length = keys[2], positions.rank.shape[1]
    block, state_blocks = shared_rows.block_size(q.shape[1]), 0
    key_positions: Any = positions
    dtype, precision = checks.compute_dtype(q, *keys[:2]), checks.matmul_precision(q, *keys[:2])
    if not options.no_state:
        key_positions, keys = prepend_state(state, positions, keys)
        capacity = key_positions.rank.shape[1] - length
        state_blocks = -(-capacity // block)
        padding = (
            state_blocks * block - capacity
        )  # before the state's tokens; nothing is written there
        key_positions, keys = jax.tree.map(
            lambda x: jnp.pad(x, [(0, 0), (padding, 0)] + [(0, 0)] * (x.ndim - 2)),
            (key_positions, keys),
        )
    plan = shared_rows.Plan(
        block=block,
        state_blocks=state_blocks,
        window=options.window,
        one_document=options.unmasked and without_ids,
        scale=options.scale,
        dtype=dtype,
        precision=precision,
    )
    of_queries = (sums, positions.document, positions.rank)
    all_keys = shared_rows.Keys(*keys, *key_positions)
    return shared_rows.attend(options.axis, plan, q, of_queries, all_keys)
