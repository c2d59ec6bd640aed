"""Pipeline parallelism: stages of a stack of layers on devices of their own, microbatches passing from one to the next (GPipe,
arXiv 1811.06965). The backward pass is the derivative: the same ring run backwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from lsm_jax.parallel.experts import shards_of
from lsm_jax.parallel.mesh import mesh_axes


def pipelined(
    stage: Callable[..., tuple[Any, Any]],
    layers: Any,
    carry: Any,
    rows: Any,
    whole: Any,
    *,
    microbatches: int,
) -> tuple[Any, Any]:
    """`stage(layers, carry, rows, whole) -> (carry, statistics)`, its layers cut into stages and its rows into microbatches.

    Of S stages with M microbatches each works M of M + S - 1 steps. Embedding and loss are shared out over the stages by rows:
    what comes in is gathered once, and what comes out is scattered once.

    Args:
        stage: `carry` after some of the layers, n of them, and dicts of statistics by name, arrays [n, ...].
        layers: pytree of arrays that lead with the layers' axis.
        carry: pytree of arrays [B, ...], from layer to layer.
        rows: pytree of arrays [B, ...] that every layer reads.
        whole: pytree of arrays that every layer reads, not by rows.
        microbatches: M, a multiple of the number of stages.

    Returns:
        `carry` after all layers, and the statistics stacked over them: means over the microbatches, sums for names in `_count`.

    Raises:
        ValueError: rows, or microbatches, that do not divide.
    """
    (axis,) = mesh_axes("layers")
    stages, batch = shards_of("layers"), jax.tree.leaves(carry)[0].shape[0]
    if microbatches % stages or batch % microbatches:
        raise ValueError(
            f"mesh.microbatches={microbatches}: a batch of {batch} rows over {stages} pipeline stages takes a multiple of "
            f"{stages} that divides {batch}"
        )
    over, every = PartitionSpec(axis), PartitionSpec()
    run = jax.shard_map(
        functools.partial(_ring, stage, axis, microbatches),
        in_specs=(over, over, over, every),
        out_specs=(over, over),
        axis_names={axis},
        check_vma=False,
    )
    return run(layers, carry, rows, whole)


def _ring(stage, axis, microbatches, layers, carry, rows, whole):
    """One device's part; its rows come first in microbatches of their own."""
    stages, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    own = microbatches // stages

    # [B / S, ...] -> [M, B / M, ...]; a row in `own`, so that other axes of the batch keep theirs.
    def cut(x):
        x = jnp.moveaxis(x.reshape(-1, own, *x.shape[1:]), 1, 0)
        return jax.lax.all_gather(x, axis, tiled=True)

    def join(x):  # the last stage's [M, B / M, ...] -> [B / S, ...]
        x = jnp.where(me == stages - 1, x, 0)
        x = jax.lax.psum_scatter(x, axis, scatter_dimension=0, tiled=True)
        return jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:])

    firsts, rows = jax.tree.map(cut, (carry, rows))

    def at(tree, index):
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), tree)

    def step(state, tick):
        received, totals = state
        # Of the microbatch; a stage that has none works on one whose result nobody takes.
        index = tick - me
        first = at(firsts, jnp.clip(tick, 0, microbatches - 1))
        given = jax.tree.map(lambda a, b: jnp.where(me == 0, a, b), first, received)
        after, statistics = stage(
            layers, given, at(rows, jnp.clip(index, 0, microbatches - 1)), whole
        )
        live = (index >= 0) & (index < microbatches)
        totals = jax.tree.map(lambda a, b: a + jnp.where(live, b, 0), totals, statistics)
        ring = [(place, (place + 1) % stages) for place in range(stages)]
        passed = jax.tree.map(lambda x: jax.lax.ppermute(x, axis, ring), after)
        return (passed, totals), after

    shapes = jax.eval_shape(stage, layers, at(firsts, 0), at(rows, 0), whole)[1]
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    ticks = jnp.arange(microbatches + stages - 1)
    (_, totals), outputs = jax.lax.scan(step, (at(firsts, 0), zeros), ticks)
    carry = jax.tree.map(lambda x: join(x[stages - 1 :]), outputs)

    def mean(path, x):
        return x if path[-1].key.endswith("_count") else x / microbatches

    return carry, jax.tree_util.tree_map_with_path(mean, totals)
