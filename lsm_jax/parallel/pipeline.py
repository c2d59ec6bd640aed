"""Pipeline parallelism: each device computes a stage of the layers, and microbatches pass from stage to
stage.

With one round this is GPipe (arXiv 1811.06965). With R rounds it is the circular schedule (arXiv 2104.04473,
section 2.2, with all forward passes first): the layers are divided into R S groups for S stages, group g
belongs to stage g mod S, and each microbatch passes through the ring of stages R times. S microbatches at a
time complete all R rounds, so that the first stage receives a microbatch from the last one exactly when it
computes its next round, and no stage waits in between. The backward pass is the derivative of the scan: the
same ring in the opposite direction. With several rounds each turn is recomputed in it.

Parameters are stored in the order of layers, so checkpoints do not depend on the schedule: every step sends
each group to the device of its stage, and its gradient back. Stages that are not whole periods of the layers'
pattern differ from each other; their layers are sent as `stages` describes, in one round.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from lsm_jax.parallel.experts import shards_of
from lsm_jax.parallel.mesh import mesh_axes
from lsm_jax.parallel.stages import Stages, receive_layers, stage_spec
from lsm_jax.parallel.sums import gather_along, map_over, sum_and_scatter


def pipelined(
    stage: Callable[..., tuple[Any, Any]],
    layers: Any,
    carry: Any,
    rows: Any,
    constants: Any,
    *,
    microbatches: int,
    rounds: int = 1,
) -> tuple[Any, Any]:
    """Compute all layers of a model by a pipeline: the layers are divided into stages, one per device of
    the mesh axis "pipeline", and the rows of the batch into microbatches, which pass from stage to stage.

    With S stages, M microbatches and R rounds, each stage computes in R M of R M + S - 1 turns. Outside the
    pipeline the rows are sharded over the stages' devices, for embedding and loss: inputs are gathered once,
    and outputs are scattered once.

    Args:
        stage: function that computes n consecutive layers; it returns the `carry` after them, and a dict of statistics [n,
            ...] by name.
        layers: pytree of arrays whose first axis is that of layers, [L, ...].
        carry: pytree of arrays [B, ...] that layers pass on.
        rows: pytree of arrays [B, ...] that every layer reads.
        constants: pytree of arrays without rows that every layer reads.
        microbatches: M, a multiple of S.
        rounds: R, how often a microbatch passes through the ring of stages.

    Returns:
        The `carry` after all layers, and the statistics of each layer and microbatch, [L, M, ...].

    Raises:
        ValueError: rows, layers or microbatches are not divisible as required.
    """
    (axis,) = mesh_axes("layers")
    stages = shards_of("layers")
    length = jax.tree.leaves(layers)[0].shape[0]
    if length % (stages * rounds):
        raise ValueError(
            f"mesh.rounds={rounds}: {length} periods of layers are not divisible by {stages} pipeline stages x {rounds} rounds"
        )

    def collect(layers):
        return jax.tree.map(functools.partial(_groups_of_stage, axis, rounds), layers)

    return _run(
        stage, collect, PartitionSpec(axis), layers, carry, rows, constants, microbatches, rounds
    )


def pipelined_at_layers(
    stage: Callable[..., tuple[Any, Any]],
    stages: Stages,
    layers: dict[Any, list[jax.Array]],
    logical_axes: dict[Any, list[tuple[str | None, ...]]],
    carry: Any,
    rows: Any,
    constants: Any,
    *,
    microbatches: int,
) -> tuple[Any, Any]:
    """Compute all layers of a model by a pipeline in one round whose stages are not whole periods of the layers'
    pattern; otherwise it is `pipelined`.

    Args:
        stage: function (layers, carry, rows, constants) that computes the layers of a stage; it returns the `carry`
            after them, and a pytree of statistics by name, whose shapes are equal in all stages: [n, ...]. Its
            `layers` are the index of the stage's program (int32), and by kind a list of layers, one for each
            entry of the stage: (its parameters as a list of arrays, its index among all layers).
        stages: which kinds of layers there are, and which layers each stage computes.
        layers: by kind, the parameters of its n layers, arrays [n, ...].
        logical_axes: by kind, the logical axes of these arrays, of which the first is "layers".
        carry, rows, constants, microbatches: as in `pipelined`.

    Returns:
        The `carry` after all layers, and statistics [S n, M, ...]: those of each stage and microbatch.

    Raises:
        ValueError: rows or microbatches are not divisible as required.
    """
    (axis,) = mesh_axes("layers")
    specs = {
        kind: [
            stage_spec(axis, a, x.shape) for x, a in zip(arrays, logical_axes[kind], strict=True)
        ]
        for kind, arrays in layers.items()
    }

    def collect(layers):
        me = jax.lax.axis_index(axis)
        program = jnp.asarray(stages.program_of_stage())[me]
        received = {}
        for kind, arrays in layers.items():
            table, numbers = stages.table(kind), stages.layers_of(kind)
            given = zip(specs[kind], logical_axes[kind], arrays, strict=True)
            entries = [receive_layers(axis, spec, table, axes, x) for spec, axes, x in given]
            last = len(numbers) - 1  # the number of an entry without a layer is not used
            numbers = jnp.asarray(numbers[np.minimum(table, last)])[me]
            received[kind] = [
                ([x[entry] for x in entries], numbers[entry]) for entry in range(table.shape[1])
            ]
        return jax.tree.map(lambda x: x[None], (program, received))

    return _run(stage, collect, specs, layers, carry, rows, constants, microbatches, 1)


def _run(stage, collect, specs, layers, carry, rows, constants, microbatches, rounds):
    """Map the ring of stages over the mesh axis of the pipeline.

    `collect` is the function that returns this device's groups of layers, [R, ...], from its part of `layers`, which
    are sharded as `specs` says; the other arguments and the result are those of `pipelined`.
    """
    (axis,) = mesh_axes("layers")
    stages, batch = shards_of("layers"), jax.tree.leaves(carry)[0].shape[0]
    if microbatches % stages or batch % microbatches:
        raise ValueError(
            f"mesh.microbatches={microbatches}: accepted are multiples of the {stages} pipeline stages that divide the batch of "
            f"{batch} rows"
        )
    sharded, replicated = PartitionSpec(axis), PartitionSpec()
    run = map_over(
        {axis},
        functools.partial(_ring, stage, collect, axis, microbatches, rounds),
        (specs, sharded, sharded, replicated),
        (sharded, PartitionSpec(None, axis)),
    )
    carry, statistics = run(layers, carry, rows, constants)
    return carry, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), statistics)


def _groups_of_stage(axis: str, rounds: int, x: jax.Array) -> jax.Array:
    """Collect the parameters of the layers that this device computes as a stage of the pipeline: the n
    layers that it stores, [n, ...] -> its group of layers in each round, [rounds, n / rounds, ...].

    Device i stores layers i n to (i + 1) n, which are the groups i R to (i + 1) R. In round r, stage s
    requires group r S + s.
    """
    stages = jax.lax.axis_size(axis)
    stored = x.reshape(rounds, -1, *x.shape[1:])
    if rounds == 1:
        return stored

    def groups_of_round(r):
        # One permutation for each position p < R that a group has on the device that stores it. A device that
        # receives no group from it gets zeros.
        routes = [
            [
                ((r * stages + to) // rounds, to)
                for to in range(stages)
                if (r * stages + to) % rounds == position
            ]
            for position in range(rounds)
        ]
        received = [
            jax.lax.ppermute(stored[p], axis, route) for p, route in enumerate(routes) if route
        ]
        return functools.reduce(jnp.add, received)

    return jnp.stack([groups_of_round(r) for r in range(rounds)])


def _ring(stage, collect, axis, microbatches, rounds, layers, carry, rows, constants):
    """Compute one device's stage of the pipeline for all microbatches and rounds, as one scan over turns;
    in each turn every stage computes a group of layers and sends the result to the next stage.

    Its arguments are this device's: `layers`, from which `collect` returns its groups of layers [R, ...], and `carry`
    and `rows` [B / S, ...]. It returns the `carry` of its rows, and statistics [R, n, M, ...] of its n layers of a group.
    """
    stages, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    local = microbatches // stages

    def cut(x):
        # [B / S, ...] -> [M, B / M, ...]. Consecutive rows go to different microbatches, so that sharding of
        # the rows over other mesh axes is unchanged.
        x = jnp.moveaxis(x.reshape(-1, local, *x.shape[1:]), 1, 0)
        return gather_along(axis, 0, x)

    def join(x):
        # [M, B / M, ...] of the last stage -> [B / S, ...] of each device.
        x = jnp.where(me == stages - 1, x, 0)
        x = sum_and_scatter(axis, x)
        return jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:])

    layers = collect(layers)
    inputs, rows = jax.tree.map(cut, (carry, rows))

    def at(tree, index):
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), tree)

    # With one round, the layers are a constant of the scan. With several, the scan would save the layers of
    # each turn for the backward pass, so a turn is recomputed instead.
    first_group = at(layers, 0)

    def step(state, tick):
        received, totals = state
        # This stage's turn, 0 to R M - 1. Outside that range it computes some microbatch, and the result is
        # not used.
        turn = tick - me
        active = (turn >= 0) & (turn < rounds * microbatches)
        turn = jnp.clip(turn, 0, rounds * microbatches - 1)
        r = turn // stages % rounds
        microbatch = turn // (stages * rounds) * stages + turn % stages
        enters = (me == 0) & (r == 0)
        before = jax.tree.map(
            lambda a, b: jnp.where(enters, a, b), at(inputs, microbatch), received
        )
        after, statistics = stage(
            first_group if rounds == 1 else at(layers, r), before, at(rows, microbatch), constants
        )
        totals = jax.tree.map(
            lambda a, b: a.at[r, :, microbatch].add(jnp.where(active, b, 0)), totals, statistics
        )
        ring = [(device, (device + 1) % stages) for device in range(stages)]
        sent = jax.tree.map(lambda x: jax.lax.ppermute(x, axis, ring), after)
        return (sent, totals), after

    shapes = jax.eval_shape(stage, first_group, at(inputs, 0), at(rows, 0), constants)[1]
    zeros = jax.tree.map(
        lambda x: jnp.zeros((rounds, x.shape[0], microbatches, *x.shape[1:]), x.dtype), shapes
    )
    ticks = jnp.arange(rounds * microbatches + stages - 1)
    step = step if rounds == 1 else jax.checkpoint(step, prevent_cse=False)
    (_, totals), outputs = jax.lax.scan(step, (at(inputs, 0), zeros), ticks)

    def results(x):
        # From the last stage's turns, [R M, B / M, ...], select those of the last round: the microbatches in
        # order.
        x = x[stages - 1 :].reshape(-1, rounds, stages, *x.shape[1:])[:, -1]
        return join(x.reshape(-1, *x.shape[2:]))

    return jax.tree.map(results, outputs), totals
