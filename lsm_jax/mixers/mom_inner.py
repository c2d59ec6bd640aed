"""The call of the inner mixer of a Mixture-of-Memories over tokens that are arranged by memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax.mixers.base import Mixer
from lsm_jax.mixers.context import Context
from lsm_jax.mixers.layers import Dense
from lsm_jax.mixers.mom_layout import Packed, PackedByDevice, Rows, arranged_product
from lsm_jax.mixers.mom_router import Route


class Part(NamedTuple):
    """The results of one call of the inner mixer for all memories of a layer, brought back to the order of the row's
    tokens.

    Attributes:
        output: [B, T, ...], the memories' outputs, summed with the router's weights.
        bypass: [B, T, ...] by name, the sums of `Context.bypass`.
        shared: [B, T, ...] by name, the means of `Context.shared` over each token's memories.
        memory: the op's state, for the rows of the call.
        tails: the states of short convolutions and token shifts by name, for the rows of the call.
    """

    output: jax.Array
    bypass: dict[str, jax.Array]
    shared: dict[str, jax.Array]
    memory: Any
    tails: dict[str, Any]


def run_inner(
    inner: Mixer,
    single_projections: bool,
    x: jax.Array,
    context: Context,
    layout: Rows | Packed | PackedByDevice,
    route: Route,
    segment_ids: jax.Array | None,
    update_mask: jax.Array | None,
    memory: Any,
    tails: dict[str, Any],
    contiguous: bool = False,
) -> Part:
    """Run the inner mixer over tokens that are arranged by memory, so that each memory is a row or a
    segment of its own; return the results in the order of the row's tokens.

    Args:
        inner: the inner mixer.
        single_projections: whether all memories have the same projections.
        x: [B, T, D], the layer's input.
        context: the context of the Mixture-of-Memories layer's call.
        layout: the arrangement of the tokens.
        route: the memories of each token, and their weights.
        segment_ids: the segment ids of the arranged tokens, or None.
        update_mask: the update mask of the arranged tokens, or None.
        memory: the op's state for the arranged rows, or None.
        tails: the states of short convolutions and token shifts for the arranged rows, by name.
        contiguous: as in `Context`, for the arranged rows.
    """
    rows = layout.tokens(x)
    by_token = inner.shared_by_token
    shared = {n: layout.tokens(s) if n in by_token else s for n, s in context.shared.items()}
    positions = context.positions
    if positions is not None:
        by_memory = inner.positions_in_memory
        positions = (layout.from_memories if by_memory else layout.tokens)(positions)
    arranged = Context(
        context.layer, shared, segment_ids, positions, update_mask, tails, contiguous=contiguous
    )
    o, memory, arranged = _arranged(inner, single_projections, layout, x).through_memory(
        rows, arranged, memory
    )
    routed, share = layout.from_memories(route.routed), layout.from_memories(route.weight)
    even = layout.from_memories(
        route.weight / jnp.maximum(jnp.sum(route.weight, axis=-1, keepdims=True), 1)
    )

    def mix(y, weight):
        extra = (1,) * (y.ndim - 2)
        wide = y.astype(jnp.promote_types(y.dtype, weight.dtype))
        y_weighted = jnp.where(routed.reshape(*routed.shape, *extra), wide, 0)
        y_weighted = y_weighted * weight.reshape(*weight.shape, *extra)
        return layout.total(y_weighted, y.dtype)

    return Part(
        mix(o, share),
        {name: mix(y, share) for name, y in arranged.bypass.items()},
        {name: mix(arranged.shared[name], even) for name in by_token if name in arranged.shared},
        memory,
        dict(arranged.tails),
    )


def _arranged(
    inner: Mixer, single_projections: bool, layout: Rows | Packed | PackedByDevice, x: jax.Array
) -> Mixer:
    """Return a copy of the inner mixer whose `Dense` layers multiply tokens that `layout` has arranged by
    memory; x [B, T, D] are the tokens before they were arranged.
    """
    inner = nnx.merge(*nnx.split(inner))
    by_memory = () if single_projections else inner.memory_parts
    for path, layer in list(nnx.iter_graph(inner)):
        if isinstance(layer, Dense):
            tokens = x if path[-1] in inner.token_parts and len(path) == 1 else None
            memories = path[0] in by_memory
            layer.product = arranged_product(layout, memories, tokens)
            if layer.lora is not None:
                within = arranged_product(layout, memories, None)
                layer.lora.products = (layer.product, within)
    return inner
