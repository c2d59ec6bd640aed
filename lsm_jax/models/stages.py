"""The layers of a decoder in pipeline stages that are not whole periods of its pattern."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lsm_jax.models.periods import name_stage_layer, rematerialized_stage
from lsm_jax.parallel import Stages, pipelined_at_layers, shards_of


class Kind(NamedTuple):
    """The layers of one kind: of equal structure and shapes, so that one program computes them.

    Attributes:
        places: the places of the period that have such a layer, in their order.
        structure: the pytree structure of a layer, to which its arrays are given.
        logical_axes: the logical axes of each array, of which the first is "layers".
    """

    places: tuple[int, ...]
    structure: Any
    logical_axes: list[tuple[str | None, ...]]


def kinds_of(blocks: Sequence[Any]) -> list[Kind]:
    """Return the kinds of the layers of a period, whose arrays are stacked over the periods."""
    found: dict[Any, list[int]] = {}
    for place, block in enumerate(blocks):
        leaves, structure = jax.tree.flatten(block)
        shapes = tuple((leaf.shape, jnp.dtype(leaf.dtype)) for leaf in leaves)
        found.setdefault((structure, shapes), []).append(place)
    kinds = []
    for (structure, _), places in found.items():
        variables = jax.tree.leaves(
            blocks[places[0]], is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
        )
        kinds.append(Kind(tuple(places), structure, [tuple(v.logical_axes) for v in variables]))
    return kinds


def apply_in_stages(
    layer: Callable,
    blocks: Sequence[Any],
    stages: int,
    remat: str,
    carry: tuple[jax.Array, dict[str, jax.Array]],
    rows: Any,
    constants: dict[str, jax.Array],
    *,
    microbatches: int,
) -> tuple[jax.Array, list[dict[str, jax.Array]]]:
    """Apply all layers of a decoder, without states, in pipeline stages that are not whole periods.

    Args:
        layer: the function that applies one layer, from `Decoder._layer_function`.
        blocks: the layers of the period, whose arrays are stacked over the periods.
        stages: S, the number of stages, which divides the number of layers.
        remat: the config's rematerialisation policy.
        carry: the residual stream x [B, T, D] before the first layer, and the values that travel from layer to layer
            and have one entry per row of the batch.
        rows: segment ids, positions and update mask, each [B, T] or None.
        constants: the values that every layer reads and no layer changes.
        microbatches: the number of parts into which the rows of the batch are divided.

    Returns:
        x after the layers, and the statistics of each layer of the period, stacked over the periods and over the
        microbatches.

    Raises:
        ValueError: the layers are not divisible by the stages, or the mesh shards the tokens of a row.
    """
    if (shards := shards_of("sequence")) > 1:  # docs/decisions.md: "Pipelines are cut at layers"
        raise ValueError(
            f"mesh.sequence={shards} with {stages} pipeline stages that are not whole periods: accepted is mesh.sequence=1"
        )
    kinds = kinds_of(blocks)
    periods = jax.tree.leaves(blocks[0])[0].shape[0]
    kind_at = {place: number for number, kind in enumerate(kinds) for place in kind.places}
    kind_of_layer = [kind_at[place] for place in range(len(blocks))] * periods
    cut = Stages(tuple(kind_of_layer), stages)
    names = tuple(carry[1])
    programs = [
        functools.partial(_run_stage, layer, kinds, cut, sequence, names)
        for sequence in cut.programs()
    ]

    def stage(layers, carry, rows, constants):
        program, entries = layers
        return jax.lax.switch(program, programs, entries, carry, rows, constants)

    (x, _), statistics = pipelined_at_layers(
        rematerialized_stage(stage, remat),
        cut,
        {number: _in_order(blocks, kind) for number, kind in enumerate(kinds)},
        {number: kind.logical_axes for number, kind in enumerate(kinds)},
        carry,
        rows,
        constants,
        microbatches=microbatches,
    )
    return x, [
        _of_place(statistics[kind_at[place]], cut, kind_at[place], place, len(blocks))
        for place in range(len(blocks))
    ]


def _in_order(blocks: Sequence[Any], kind: Kind) -> list[jax.Array]:
    """Return the parameters of all layers of a kind in the order of layers, [n, ...]."""

    def joined(*arrays):
        return jnp.stack(arrays, axis=1).reshape(-1, *arrays[0].shape[1:])

    leaves = (jax.tree.leaves(blocks[place]) for place in kind.places)
    return [
        arrays[0] if len(arrays) == 1 else joined(*arrays) for arrays in zip(*leaves, strict=True)
    ]


def _run_stage(layer, kinds, cut, sequence, names, entries, carry, rows, constants):
    """Apply the layers of one stage to a microbatch; the body of a branch of `jax.lax.switch`.

    Args:
        layer: the function that applies one layer.
        kinds: the kinds of layers.
        cut: the stages.
        sequence: the kind of each layer of the stage.
        names: the names of the values that travel from layer to layer and have one entry per row.
        entries: by kind, (parameters, index) of each layer of the stage, as in `pipelined_at_layers`.
        carry, rows, constants: as in `apply_in_stages`, of one microbatch.

    Returns:
        The carry, and by kind the statistics of its layers by name, [entries, ...], zeros for an entry without a layer.
    """
    x, shared = carry
    shared = shared | constants

    def apply(kind, entry, x, shared):
        arrays, index = entries[kind][entry]
        block = jax.tree.unflatten(kinds[kind].structure, arrays)
        x, shared, _, aux = layer(x, shared, block, None, index, *rows)
        return x, shared, {name: aux[name] for name in aux if "/tokens/" not in name}

    found: dict[int, list[dict[str, jax.Array]]] = {kind: [] for kind in entries}
    for number, kind in enumerate(sequence):
        if number:  # the input of the first layer is an argument of the stage, and so saved
            x = name_stage_layer(x)
        x, shared, aux = apply(kind, len(found[kind]), x, shared)
        found[kind].append(aux)
    statistics = {}
    for kind, several in found.items():
        if several:
            shapes = several[0]
        else:
            shapes = jax.eval_shape(functools.partial(apply, kind, 0), x, shared)[2]
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        several = several + [zeros] * (cut.entries(kind) - len(several))
        statistics[kind] = jax.tree.map(lambda *a: jnp.stack(a), *several)
    return (x, {name: shared[name] for name in names}), statistics


def _of_place(statistics, cut: Stages, kind: int, place: int, size: int):
    """Return the statistics of the layers at a place of the period, stacked over the periods, from those of all entries
    of the layer's kind, [S entries, M, ...]; `size` is the number of layers of a period.
    """
    table, numbers = cut.table(kind), cut.layers_of(kind)
    position = {int(numbers[i]): e for e, i in enumerate(table.reshape(-1)) if i < len(numbers)}
    index = np.array([position[layer] for layer in range(place, len(cut.kinds), size)])
    return jax.tree.map(lambda x: x[index], statistics)
