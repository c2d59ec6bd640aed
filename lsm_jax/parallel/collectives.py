"""What runs on the mesh: constraints on activations, and functions mapped over rows, time and heads."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from lsm_jax.parallel.mesh import mesh_axes
from lsm_jax.parallel.sums import map_over

TOKENS = ("batch", "sequence", "heads")
"""Logical axes of an op's arrays [B, T, H, ...]."""


def _axes(mesh: AbstractMesh, kind: AxisType) -> dict[str, int]:
    """Sizes of the mesh's axes of one kind; `Auto` ones are still the partitioner's."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name: mesh.shape[name] for name, of in kinds if of == kind}


def constrain(x: jax.Array, logical_axes: Sequence[str | None]) -> jax.Array:
    """Pin `x` to the mesh by its logical axes; `x` itself where no mesh is set or an axis does not divide.

    Axes that a caller's `jax.shard_map` has taken, as pipeline stages do, are left out.
    """
    axes = _axes(jax.sharding.get_abstract_mesh(), AxisType.Auto)
    named = [tuple(n for n in mesh_axes(logical) if n in axes) for logical in logical_axes]
    parts = [math.prod(axes[name] for name in names) for names in named]
    if math.prod(parts) == 1 or any(size % n for size, n in zip(x.shape, parts, strict=True)):
        return x
    spec = PartitionSpec(*(names or None for names in named))
    return jax.lax.with_sharding_constraint(x, spec)


def sequence_shards(length: int) -> int:
    """In how many parts the present mesh cuts rows of `length` tokens; 1 where it has more devices than they have tokens."""
    axes = _axes(jax.sharding.get_abstract_mesh(), AxisType.Auto)
    shards = math.prod(axes.get(name, 1) for name in mesh_axes("sequence"))
    return shards if length >= shards else 1


def _varying(x: jax.Array) -> frozenset[str]:
    """The axes of a caller's checked `jax.shard_map` over which `x` differs."""
    return jax.typeof(x).manual_axis_type.varying


def over_batch(function: Callable[..., Any], batched: dict, shared: dict, *static: Hashable) -> Any:
    """`over_mesh` for what is [B, ...] and must have its other axes whole, outputs and all."""
    return over_mesh(function, batched, shared, *static, axes={n: ("batch",) for n in batched})


def over_tokens(
    function: Callable[..., Any], batched: dict, shared: dict, *static: Hashable
) -> Any:
    """`over_mesh` for what treats each token by itself: arrays and outputs are all [B, T, ...]."""
    axes = {n: ("batch", "sequence") for n in batched}
    return over_mesh(
        function, batched, shared, *static, axes=axes, out_axes=axes_of_token, in_sequence=alone
    )


axes_of_token = ("batch", "sequence")


def alone(axis: str, function: Callable[..., Any], *static: Hashable, **arguments: Any) -> Any:
    """For `over_mesh`'s `in_sequence`: `function` as it is, for a device needs nothing of the others."""
    return function(*static, **arguments)


def over_mesh(
    function: Callable[..., Any],
    batched: dict,
    shared: dict,
    *static: Hashable,
    axes: dict[str, Any],
    out_axes: Any = ("batch",),
    in_sequence: Callable[..., Any] | None = None,
    multiple: int = 1,
) -> Any:
    """`function(*static, **batched, **shared)`, each device on its own rows, heads and tokens where a mesh shards them.

    Under a mesh with explicit axes these are the partitioner's inside, and what comes out is sharded as the batch that went
    in, its other axes whole. Inside a caller's own checked `jax.shard_map` every argument varies over whatever one of them
    varies over, and nothing is mapped again.

    Rows and heads that do not divide over their devices are left whole, with a warning; so are single heads, and rows of fewer
    tokens than devices. Other rows are filled up with padding: id 0 where there are `segment_ids`, else tokens that
    `update_mask` masks, whose outputs are cut off again.

    Args:
        function: it is the compiler's key for a mesh, so no lambda or closure.
        batched: pytrees of arrays [B, ...] by name; Nones pass through.
        shared: pytrees of arrays without rows, by name.
        static: what is no array, hashable.
        axes: the leading logical axes ("batch", "sequence", "heads" or None) of each argument, as a tuple, or a pytree of
            tuples over the argument's. Those that are not named are whole on every device.
        out_axes: likewise of the outputs; the name of an argument, where an output is of that argument's axes and shapes.
        in_sequence: called as `in_sequence(axis, function, *static, **arguments)` in place of `function` where time is
            sharded, with the mesh axis that devices talk along. None keeps time whole.
        multiple: what the number of a device's tokens must be a multiple of, there.
    """
    leaves = jax.tree.leaves((batched, shared))
    current = jax.sharding.get_abstract_mesh()
    how = _How(function, static, axes, out_axes, in_sequence, multiple)
    # Explicit axes are part of an array's type, with the mesh set or not.
    for mesh in (current, *(jax.typeof(x).sharding.mesh for x in leaves)):
        if explicit := _axes(mesh, AxisType.Explicit):
            specs = (jax.typeof(x).sharding.spec for x in jax.tree.leaves(batched))
            rows = PartitionSpec(next((spec[0] for spec in specs if spec and spec[0]), None))
            with jax.sharding.use_abstract_mesh(mesh):
                return _on_explicit_axes(how, tuple(explicit), rows, batched, shared)
    if current.empty:
        return function(*static, **batched, **shared)
    varying = frozenset().union(*(_varying(x) for x in leaves))
    if varying:  # so that a scan's first carry has the type of the next ones
        batched, shared = jax.tree.map(
            lambda x: jax.lax.pcast(x, tuple(varying - _varying(x)), to="varying"),
            (batched, shared),
        )
        return function(*static, **batched, **shared)  # an axis that is left is the partitioner's
    return _over_auto_axes(how, _axes(current, AxisType.Auto), batched | shared)


class _How:
    """A call's function and layout. One that is equal to an earlier one is that one's compiled program."""

    def __init__(self, function, static, axes, out_axes, in_sequence, multiple):
        self.function, self.static, self.in_sequence = function, static, in_sequence
        self.axes, self.out_axes, self.multiple = axes, out_axes, multiple
        leaves, tree = jax.tree.flatten((axes, out_axes), is_leaf=_is_axes)
        self._key = (function, static, in_sequence, multiple, tuple(leaves), tree)

    def __hash__(self):
        return hash(self._key)

    def __eq__(self, other):
        return isinstance(other, _How) and self._key == other._key


def _is_axes(x: Any) -> bool:
    """Whether `x` names the axes of one array (or of all in a tree)."""
    return type(x) is tuple and all(a is None or isinstance(a, str) for a in x)


def _axes_of_leaves(axes: Any, tree: Any) -> list[tuple[str | None, ...]]:
    """The axes of each array of `tree`."""
    spread = jax.tree.map(
        lambda own, part: [own] * len(jax.tree.leaves(part)), axes, tree, is_leaf=_is_axes
    )
    return jax.tree.leaves(spread, is_leaf=_is_axes)


def _over_auto_axes(how: _How, axes: dict[str, int], arguments: dict[str, Any]) -> Any:
    """`over_mesh` on a mesh whose axes of these sizes are the partitioner's."""
    given = [(name, x) for name, x in arguments.items() if x is not None]
    named = [
        (axis, x.shape[place])
        for name, tree in given
        for own, x in zip(
            _axes_of_leaves(how.axes.get(name, ()), tree), jax.tree.leaves(tree), strict=True
        )
        for place, axis in enumerate(own)
        if axis is not None and place < x.ndim
    ]
    sizes = {axis: {size for of, size in named if of == axis} for axis, _ in named}
    split: dict[str, tuple[str, ...]] = {}
    for axis, found in sizes.items():
        names = tuple(name for name in mesh_axes(axis) if axes.get(name, 1) > 1)
        shards = math.prod(axes[name] for name in names)
        if axis == "sequence":
            fits = how.in_sequence is not None and min(found) >= shards
        else:
            wide = {size for size in found if axis != "heads" or size > 1}
            fits = all(size % shards == 0 for size in wide) and bool(wide)
            if names and wide and not fits:
                logging.log_first_n(
                    logging.WARNING, "%s of %s does not divide over %d devices; every device computes it whole", 4,
                    axis, sorted(wide), shards,
                )  # fmt: skip
        if names and fits:
            split[axis] = names
    if not split:
        return how.function(*how.static, **arguments)

    length, short = 0, 0
    if "sequence" in split:
        (length,) = sizes["sequence"]
        devices = math.prod(axes[name] for name in split["sequence"])
        short = -length % (devices * how.multiple)
    if short:
        arguments = _padded(how.axes, arguments, length, short)

    def spec(own: tuple[str | None, ...], x: Any = None) -> PartitionSpec:
        names = [split.get(axis) if axis is not None else None for axis in own]
        if x is not None:  # one head is whole on every device
            names = [
                None if axis == "heads" and x.shape[place] == 1 else name
                for place, (axis, name) in enumerate(zip(own, names, strict=True))
                if place < x.ndim
            ]
        return PartitionSpec(*names)

    specs = {}
    for name, tree in arguments.items():
        leaves, treedef = jax.tree.flatten(tree)
        own = _axes_of_leaves(how.axes.get(name, ()), tree)
        specs[name] = treedef.unflatten([spec(a, x) for a, x in zip(own, leaves, strict=True)])

    def out(own):
        return specs[own] if isinstance(own, str) else spec(own)

    out_specs = jax.tree.map(out, how.out_axes, is_leaf=_is_axes)
    names = tuple(name for of in split.values() for name in of)
    static = how.static
    function = how.function
    if "sequence" in split:
        (axis,) = split["sequence"]
        function, static = how.in_sequence, (axis, how.function, *how.static)
    in_specs, in_tree = jax.tree.flatten(specs)
    result = _mapped(function, static, names, (tuple(in_specs), in_tree), out_specs, arguments)
    if not short:
        return result

    def cut(own, x):
        timed = _is_axes(own) and "sequence" in own
        return jax.tree.map(lambda x: x[:, :length], x) if timed else x

    return jax.tree.map(
        cut, how.out_axes, result, is_leaf=lambda x: _is_axes(x) or isinstance(x, str)
    )


def _padded(axes: dict, arguments: dict, length: int, short: int) -> dict:
    """The arguments with `short` more tokens that change nothing."""
    if arguments.get("segment_ids") is None and "update_mask" in arguments:
        if arguments["update_mask"] is None:
            batch = next(
                x.shape[0]
                for name, x in arguments.items()
                if axes.get(name, ())[1:2] == ("sequence",) and x is not None
            )
            arguments = arguments | {"update_mask": jnp.ones((batch, length), bool)}

    def pad(own, x):
        if own[1:2] != ("sequence",):
            return x
        return jax.tree.map(lambda x: jnp.pad(x, [(0, 0), (0, short)] + [(0, 0)] * (x.ndim - 2)), x)

    return {
        name: tree
        if tree is None
        else jax.tree.map(pad, axes.get(name, ()), tree, is_leaf=_is_axes)
        for name, tree in arguments.items()
    }


# Compiled, since outside `jax.jit` jax cannot map over some axes of a mesh and leave others to the partitioner.
@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _mapped(function, static, names, in_specs, out_specs, arguments):
    """`function` inside a `jax.shard_map` over the axes `names`."""
    leaves, tree = in_specs
    run = map_over(
        names,
        lambda arguments: function(*static, **arguments),
        (tree.unflatten(leaves),),
        out_specs,
    )
    return run(arguments)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _on_explicit_axes(how, axes, rows, batched, shared):
    """`over_mesh` with the explicit axes given to the partitioner."""
    run: Any = jax.sharding.auto_axes(
        lambda batched, shared: over_mesh(
            how.function, batched, shared, *how.static,
            axes=how.axes, out_axes=how.out_axes, in_sequence=how.in_sequence,
            multiple=how.multiple,
        ),
        axes=axes,
        out_sharding=rows,
    )  # fmt: skip
    return run(batched, shared)
