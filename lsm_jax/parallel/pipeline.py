"""Pipeline parallelism: stages of a stack of layers on devices of their own, microbatches passing from one to the next (GPipe,
arXiv 1811.06965), once or in several rounds (the circular schedule: arXiv 2104.04473, section 2.2, all forward passes first).
The backward pass is the derivative: the same ring run backwards.

In several rounds each device has as many groups of layers, that are not neighbours: of S devices the first has groups 0, S, 2S.
S microbatches at a time go all rounds, so that what comes back to the first device is what it needs next, and none waits.
Parameters are stored in the layers' order, so that checkpoints know no schedule; a step sends each group to the device that
works on it, and its gradient back. A turn is run again in the backward pass.
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
from lsm_jax.parallel.sums import gather_along, map_over, sum_and_scatter


def pipelined(
    stage: Callable[..., tuple[Any, Any]],
    layers: Any,
    carry: Any,
    rows: Any,
    whole: Any,
    *,
    microbatches: int,
    rounds: int = 1,
) -> tuple[Any, Any]:
    """`stage(layers, carry, rows, whole) -> (carry, statistics)`, its layers cut into stages and its rows into microbatches.

    Of S stages with M microbatches in R rounds each works R M of R M + S - 1 steps. Embedding and loss are shared out over the stages by rows:
    what comes in is gathered once, and what comes out is scattered once.

    Args:
        stage: `carry` after some of the layers, n of them, and dicts of statistics by name, arrays [n, ...].
        layers: pytree of arrays that lead with the layers' axis.
        carry: pytree of arrays [B, ...], from layer to layer.
        rows: pytree of arrays [B, ...] that every layer reads.
        whole: pytree of arrays that every layer reads, not by rows.
        microbatches: M, a multiple of the number of stages.
        rounds: R, times that a microbatch goes round the stages.

    Returns:
        `carry` after all layers, and the statistics stacked over them: means over the microbatches, sums for names in `_count`.

    Raises:
        ValueError: rows, layers or microbatches that do not divide.
    """
    (axis,) = mesh_axes("layers")
    stages, batch = shards_of("layers"), jax.tree.leaves(carry)[0].shape[0]
    if microbatches % stages or batch % microbatches:
        raise ValueError(
            f"mesh.microbatches={microbatches}: a batch of {batch} rows over {stages} pipeline stages takes a multiple of "
            f"{stages} that divides {batch}"
        )
    length = jax.tree.leaves(layers)[0].shape[0]
    if length % (stages * rounds):
        raise ValueError(
            f"mesh.rounds={rounds}: {length} layers do not divide over {stages} pipeline stages x {rounds} rounds"
        )
    over, every = PartitionSpec(axis), PartitionSpec()
    run = map_over(
        {axis},
        functools.partial(_ring, stage, axis, microbatches, rounds),
        (over, over, over, every),
        (over, PartitionSpec(None, axis)),
    )
    carry, statistics = run(layers, carry, rows, whole)
    return carry, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), statistics)


def _dealt(axis: str, rounds: int, x: jax.Array) -> jax.Array:
    """Layers stored in order -> this device's of each round, [n, ...] -> [rounds, n / rounds, ...]: group g goes to g mod S."""
    stages = jax.lax.axis_size(axis)
    stored = x.reshape(rounds, -1, *x.shape[1:])
    if rounds == 1:
        return stored

    def of_round(r):
        # Groups that lie in the same place of their devices travel together; who gets none of them gets zeros.
        routes = [
            [((r * stages + to) // rounds, to) for to in range(stages) if (r * stages + to) % rounds == place]
            for place in range(rounds)
        ]  # fmt: skip
        sent = [jax.lax.ppermute(stored[p], axis, route) for p, route in enumerate(routes) if route]
        return functools.reduce(jnp.add, sent)

    return jnp.stack([of_round(r) for r in range(rounds)])


def _ring(stage, axis, microbatches, rounds, layers, carry, rows, whole):
    """One device's part; its rows come first in microbatches of their own."""
    stages, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    own = microbatches // stages

    # [B / S, ...] -> [M, B / M, ...]; a row in `own`, so that other axes of the batch keep theirs.
    def cut(x):
        x = jnp.moveaxis(x.reshape(-1, own, *x.shape[1:]), 1, 0)
        return gather_along(axis, 0, x)

    def join(x):  # the last stage's [M, B / M, ...] -> [B / S, ...]
        x = jnp.where(me == stages - 1, x, 0)
        x = sum_and_scatter(axis, x)
        return jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:])

    layers = jax.tree.map(functools.partial(_dealt, axis, rounds), layers)
    firsts, rows = jax.tree.map(cut, (carry, rows))

    def at(tree, index):
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), tree)

    # Of one round the layers are the scan's constant; of several each turn's would be kept, so a turn is run again instead.
    only = at(layers, 0)

    def step(state, tick):
        received, totals = state
        # Its turn, of R M; a stage that has none works on a microbatch whose result nobody takes.
        turn = tick - me
        live = (turn >= 0) & (turn < rounds * microbatches)
        turn = jnp.clip(turn, 0, rounds * microbatches - 1)
        r = turn // stages % rounds
        index = turn // (stages * rounds) * stages + turn % stages
        enters = (me == 0) & (r == 0)
        given = jax.tree.map(lambda a, b: jnp.where(enters, a, b), at(firsts, index), received)
        after, statistics = stage(
            only if rounds == 1 else at(layers, r), given, at(rows, index), whole
        )
        totals = jax.tree.map(lambda a, b: a.at[r].add(jnp.where(live, b, 0)), totals, statistics)
        ring = [(place, (place + 1) % stages) for place in range(stages)]
        passed = jax.tree.map(lambda x: jax.lax.ppermute(x, axis, ring), after)
        return (passed, totals), after

    shapes = jax.eval_shape(stage, only, at(firsts, 0), at(rows, 0), whole)[1]
    zeros = jax.tree.map(lambda x: jnp.zeros((rounds, *x.shape), x.dtype), shapes)
    ticks = jnp.arange(rounds * microbatches + stages - 1)
    turn_of = step if rounds == 1 else jax.checkpoint(step, prevent_cse=False)
    (_, totals), outputs = jax.lax.scan(turn_of, (at(firsts, 0), zeros), ticks)

    def leaves(x):
        # Of the last stage's turns those of the last round, in the order of microbatches.
        x = x[stages - 1 :].reshape(-1, rounds, stages, *x.shape[1:])[:, -1]
        return join(x.reshape(-1, *x.shape[2:]))

    carry = jax.tree.map(leaves, outputs)

    def mean(path, x):
        return x if path[-1].key.endswith("_count") else x / microbatches

    return carry, jax.tree_util.tree_map_with_path(mean, totals)
