"""`attention` in XLA, by blocks of queries."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lsm_jax.ops.attention import shared_rows
from lsm_jax.ops.attention.forget_gates import GateSum
from lsm_jax.ops.attention.places import Places, after_held
from lsm_jax.ops.attention.query_blocks import attend_causally, attend_in_blocks
from lsm_jax.ops.attention.state import AttentionState
from lsm_jax.ops.backends.registry import Call
from lsm_jax.ops.core import checks


class AttentionOptions(NamedTuple):
    """Static options of `attention`.

    Attributes:
        window: as the op's argument.
        scale: multiplies the scores.
        prune: as the op's argument.
        fresh: whether the caller gave no state.
        plain: whether the caller gave neither a state nor ids nor a mask.
        axis: the mesh axis along which devices hold parts of each row; None if a device has whole rows.
    """

    window: int | None
    scale: float
    prune: bool
    fresh: bool
    plain: bool
    axis: str | None = None


def run_xla(call: Call) -> Array:
    """The output as XLA computes it, in v's dtype."""
    given, options = call.arguments, call.options
    q, k, v, sums, places, state = (given[n] for n in ("q", "k", "v", "sums", "places", "state"))
    if options.axis is not None:
        output = _in_blocks(options.axis, options, q, (k, v, sums), places, state, no_ids(call))
    elif options.plain:
        output = attend_causally(q, k, v, sums, window=options.window, scale=options.scale)
    else:
        output = _with_state(options, q, k, v, sums, places, state)
        if options.window is None:
            beyond = places.rank >= state.keys.shape[-3]
            output = jnp.where(beyond[:, :, None, None], jnp.nan, output)
    return output.astype(v.dtype)


def no_ids(call: Call) -> bool:
    """Whether the caller gave neither segment ids nor a mask, but for a mask of the padding at a row's end."""
    given = call.arguments
    return call.options.plain or (given["segment_ids"] is None and given["update_mask"] is None)


def _with_state(
    options: AttentionOptions, q, k, v, sums: GateSum | None, places: Places, state: AttentionState
) -> Array:
    """Attend to what the state holds and to the call's own tokens, [B, T, H, V]."""
    there, kept = places, (k, v, sums)
    if not options.fresh:
        there, kept = after_held(state, places, kept)

    def sees(document, rank):
        seen = there.written[:, None] & (document[:, :, None] == there.document[:, None])
        distance = rank[:, :, None] - there.rank[:, None]
        seen = seen & (distance >= 0)
        return seen if options.window is None else seen & (distance < options.window)

    where = (places.document, places.rank)
    return attend_in_blocks((q, sums), where, lambda *w: (kept, sees(*w)), options.scale)


def _in_blocks(
    axis: str,
    options: AttentionOptions,
    q,
    kept: tuple,
    places: Places,
    state: AttentionState,
    whole,
) -> Array:
    """`_in_sequence` in XLA: this device's outputs, `kept` and `places` those of the whole row."""
    sums, length = kept[2], places.rank.shape[1]
    block, held = shared_rows.block_size(q.shape[1]), 0
    there: Any = places
    dtype, precision = checks.compute_dtype(q, *kept[:2]), checks.matmul_precision(q, *kept[:2])
    if not options.fresh:
        there, kept = after_held(state, places, kept)
        held = -(-(there.rank.shape[1] - length) // block)
        ahead = (
            held * block + length - there.rank.shape[1]
        )  # places to fill, where nothing is written
        there, kept = jax.tree.map(
            lambda x: jnp.pad(x, [(0, 0), (ahead, 0)] + [(0, 0)] * (x.ndim - 2)), (there, kept)
        )
    plan = shared_rows.Plan(
        block=block,
        held=held,
        window=options.window,
        whole=options.plain and whole,
        scale=options.scale,
        dtype=dtype,
        precision=precision,
    )
    keys = shared_rows.Keys(*kept, *there)
    where = (sums, places.document, places.rank)
    return shared_rows.attend(axis, plan, q, where, keys)
