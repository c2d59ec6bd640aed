"""Shard activations over a mesh: sharding constraints, and functions that are mapped over rows, tokens and
heads."""

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
    """Return the sizes, by name, of the axes of a mesh that have the axis type `kind`, such as `Auto`, for
    which XLA's partitioner divides arrays.
    """
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name: mesh.shape[name] for name, axis_type in types if axis_type == kind}


def constrain(x: jax.Array, logical_axes: Sequence[str | None]) -> jax.Array:
    """Constrain an activation `x` to be sharded over the mesh axes that belong to its logical axes, one
    name or None per dimension.

    Returns `x` unchanged if no mesh is set or an axis is not divisible by its devices. Mesh axes over which a
    caller's `jax.shard_map` maps (such as that of the pipeline stages) are not constrained.
    """
    axes = _axes(jax.sharding.get_abstract_mesh(), AxisType.Auto)
    named = [tuple(n for n in mesh_axes(logical) if n in axes) for logical in logical_axes]
    parts = [math.prod(axes[name] for name in names) for names in named]
    if math.prod(parts) == 1 or any(size % n for size, n in zip(x.shape, parts, strict=True)):
        return x
    spec = PartitionSpec(*(names or None for names in named))
    return jax.lax.with_sharding_constraint(x, spec)


def sequence_shards(length: int) -> int:
    """Return over how many devices the current mesh shards the tokens of a row of `length` tokens; 1 if the
    row has fewer tokens than these devices."""
    axes = _axes(jax.sharding.get_abstract_mesh(), AxisType.Auto)
    shards = math.prod(axes.get(name, 1) for name in mesh_axes("sequence"))
    return shards if length >= shards else 1


def _varying(x: jax.Array) -> frozenset[str]:
    """Return the names of the mesh axes over which the array `x` varies (has different values on different
    devices), inside a caller's `jax.shard_map` with checked replication.
    """
    return jax.typeof(x).manual_axis_type.varying


def over_batch(function: Callable[..., Any], batched: dict, shared: dict, *static: Hashable) -> Any:
    """Call `function` on each device with that device's rows, by `over_mesh`: arguments and outputs are all
    [B, ...] and are sharded over rows only."""
    return over_mesh(function, batched, shared, *static, axes={n: ("batch",) for n in batched})


def over_tokens(
    function: Callable[..., Any], batched: dict, shared: dict, *static: Hashable
) -> Any:
    """Call `function`, which treats each token alone, on each device with that device's rows and tokens, by
    `over_mesh`; arguments and outputs are [B, T, ...]."""
    token_axes = ("batch", "sequence")
    axes = {n: token_axes for n in batched}
    return over_mesh(
        function, batched, shared, *static, axes=axes, out_axes=token_axes, in_sequence=alone
    )


def alone(axis: str, function: Callable[..., Any], *static: Hashable, **arguments: Any) -> Any:
    """Call `function` with the tokens of this device only, without communication: the argument
    `in_sequence` of `over_mesh` for functions that treat each token alone."""
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
    """Call `function(*static, **batched, **shared)` on each device with that device's rows, tokens and heads.

    Without a mesh this is a plain call. A mesh axis of type `Explicit` becomes `Auto` for the call; the
    outputs are then sharded over rows like the batched arguments, and over nothing else. Inside a caller's
    `jax.shard_map` with checked replication the function is not mapped again, and all arguments are cast to
    vary over every axis over which one of them varies.

    If rows or heads are not divisible by their devices, every device computes all of them, and a warning is
    logged. A single head is never sharded, nor is a row of fewer tokens than devices. Other rows are padded
    to a multiple of the devices: with segment id 0 if there are `segment_ids`, otherwise with tokens that
    `update_mask` excludes. The outputs of padding are removed.

    Args:
        function: the function to call. It is part of a compilation key, so it must be neither a lambda nor a
            closure.
        batched: pytrees of arrays [B, ...] by name; None is passed on.
        shared: pytrees of arrays without rows, by name.
        static: hashable arguments that are not arrays.
        axes: the leading logical axes ("batch", "sequence", "heads" or None) of each argument, as a tuple or
            a pytree of tuples that is a prefix of the argument. Axes without a name are not sharded.
        out_axes: the same for the outputs. The name of an argument says that an output has that argument's
            axes and shapes.
        in_sequence: if tokens are sharded, `in_sequence(axis, function, *static, **arguments)` is called in
            place of `function`; `axis` is the mesh axis over which they are sharded. None never shards
            tokens.
        multiple: with sharded tokens, the number of tokens of a device is a multiple of this.
    """
    leaves = jax.tree.leaves((batched, shared))
    current = jax.sharding.get_abstract_mesh()
    layout = _Layout(function, static, axes, out_axes, in_sequence, multiple)
    # Explicit axes are part of an array's type, whether or not the mesh is set.
    for mesh in (current, *(jax.typeof(x).sharding.mesh for x in leaves)):
        if explicit := _axes(mesh, AxisType.Explicit):
            specs = (jax.typeof(x).sharding.spec for x in jax.tree.leaves(batched))
            rows = PartitionSpec(next((spec[0] for spec in specs if spec and spec[0]), None))
            with jax.sharding.use_abstract_mesh(mesh):
                return _on_explicit_axes(layout, tuple(explicit), rows, batched, shared)
    if current.empty:
        return function(*static, **batched, **shared)
    varying = frozenset().union(*(_varying(x) for x in leaves))
    if varying:
        # With one type for all arguments, the first carry of a scan has the type of the later ones.
        batched, shared = jax.tree.map(
            lambda x: jax.lax.pcast(x, tuple(varying - _varying(x)), to="varying"),
            (batched, shared),
        )
        return function(*static, **batched, **shared)  # the partitioner handles the other axes
    return _over_auto_axes(layout, _axes(current, AxisType.Auto), batched | shared)


class _Layout:
    """The static arguments of a call of `over_mesh` as a hashable key of its compiled programs: calls with
    equal layouts share a program."""

    def __init__(self, function, static, axes, out_axes, in_sequence, multiple):
        self.function, self.static, self.in_sequence = function, static, in_sequence
        self.axes, self.out_axes, self.multiple = axes, out_axes, multiple
        leaves, tree = jax.tree.flatten((axes, out_axes), is_leaf=_is_axes)
        self._key = (function, static, in_sequence, multiple, tuple(leaves), tree)

    def __hash__(self):
        return hash(self._key)

    def __eq__(self, other):
        return isinstance(other, _Layout) and self._key == other._key


def _is_axes(x: Any) -> bool:
    """Return whether `x` is a tuple of logical axes (names or None) that belongs to one array, or to all
    arrays of a subtree."""
    return type(x) is tuple and all(a is None or isinstance(a, str) for a in x)


def _axes_of_leaves(axes: Any, tree: Any) -> list[tuple[str | None, ...]]:
    """Return the tuple of logical axes of each array in `tree`, in the order of its leaves; `axes` is a
    pytree of such tuples that is a prefix of `tree`."""
    repeated = jax.tree.map(
        lambda prefix, subtree: [prefix] * len(jax.tree.leaves(subtree)),
        axes,
        tree,
        is_leaf=_is_axes,
    )
    return jax.tree.leaves(repeated, is_leaf=_is_axes)


def _over_auto_axes(layout: _Layout, axes: dict[str, int], arguments: dict[str, Any]) -> Any:
    """Call the function that `layout` describes on each device, with that device's part of the arguments.
    Choose first which logical axes are sharded, and pad rows whose tokens are not divisible; remove the
    padding from the outputs.

    `axes` has the sizes of the mesh axes of type `Auto` by name.
    """
    sizes = _logical_sizes(layout, arguments)
    sharded = _sharded_axes(layout, axes, sizes)
    if not sharded:
        return layout.function(*layout.static, **arguments)

    length, padding = 0, 0
    if "sequence" in sharded:
        (length,) = sizes["sequence"]
        devices = math.prod(axes[name] for name in sharded["sequence"])
        padding = -length % (devices * layout.multiple)
    if padding:
        arguments = _padded(layout.axes, arguments, length, padding)

    specs = _argument_specs(layout, sharded, arguments)

    def out_spec(logical_axes):
        if isinstance(logical_axes, str):
            return specs[logical_axes]
        return PartitionSpec(*(sharded.get(axis) for axis in logical_axes))

    out_specs = jax.tree.map(out_spec, layout.out_axes, is_leaf=_is_axes)
    names = tuple(name for axis_names in sharded.values() for name in axis_names)
    static = layout.static
    function = layout.function
    if "sequence" in sharded:
        (axis,) = sharded["sequence"]
        function, static = layout.in_sequence, (axis, layout.function, *layout.static)
    in_specs, in_tree = jax.tree.flatten(specs)
    result = _mapped(function, static, names, (tuple(in_specs), in_tree), out_specs, arguments)
    if not padding:
        return result

    def without_padding(logical_axes, x):
        has_tokens = _is_axes(logical_axes) and "sequence" in logical_axes
        return jax.tree.map(lambda x: x[:, :length], x) if has_tokens else x

    return jax.tree.map(
        without_padding,
        layout.out_axes,
        result,
        is_leaf=lambda x: _is_axes(x) or isinstance(x, str),
    )


def _logical_sizes(layout: _Layout, arguments: dict[str, Any]) -> dict[str, set[int]]:
    """Return the set of sizes that each logical axis, such as "batch" or "heads", has in the arrays of the
    arguments, by name."""
    sizes: dict[str, set[int]] = {}
    for name, tree in arguments.items():
        if tree is None:
            continue
        leaves = jax.tree.leaves(tree)
        leaf_axes = _axes_of_leaves(layout.axes.get(name, ()), tree)
        for logical_axes, x in zip(leaf_axes, leaves, strict=True):
            for axis, size in zip(logical_axes, x.shape, strict=False):
                if axis is not None:
                    sizes.setdefault(axis, set()).add(size)
    return sizes


def _sharded_axes(
    layout: _Layout, axes: dict[str, int], sizes: dict[str, set[int]]
) -> dict[str, tuple[str, ...]]:
    """Return, for each logical axis that can be sharded, the names of the mesh axes over which it is; log a
    warning for one whose size in the arguments is not divisible by the devices."""
    sharded: dict[str, tuple[str, ...]] = {}
    for axis, lengths in sizes.items():
        names = tuple(name for name in mesh_axes(axis) if axes.get(name, 1) > 1)
        shards = math.prod(axes[name] for name in names)
        if axis == "sequence":
            fits = layout.in_sequence is not None and min(lengths) >= shards
        else:
            lengths = {size for size in lengths if axis != "heads" or size > 1}
            fits = all(size % shards == 0 for size in lengths) and bool(lengths)
            if names and lengths and not fits:
                logging.log_first_n(
                    logging.WARNING,
                    "axis %s of size %s is not divisible by %d devices: every device computes all of it",
                    4,
                    axis,
                    " and ".join(map(str, sorted(lengths))),
                    shards,
                )
        if names and fits:
            sharded[axis] = names
    return sharded


def _argument_specs(
    layout: _Layout, sharded: dict[str, tuple[str, ...]], arguments: dict[str, Any]
) -> dict[str, Any]:
    """Return the partition spec of each array in the arguments of a call over the mesh, by name, as pytrees
    of the arguments' structure."""

    def spec(logical_axes: tuple[str | None, ...], x: Any) -> PartitionSpec:
        names = [
            None if axis is None or (axis == "heads" and size == 1) else sharded.get(axis)
            for axis, size in zip(logical_axes, x.shape, strict=False)
        ]
        return PartitionSpec(*names)

    specs = {}
    for name, tree in arguments.items():
        leaves, treedef = jax.tree.flatten(tree)
        leaf_axes = _axes_of_leaves(layout.axes.get(name, ()), tree)
        specs[name] = treedef.unflatten(
            [spec(logical_axes, x) for logical_axes, x in zip(leaf_axes, leaves, strict=True)]
        )
    return specs


def _padded(axes: dict, arguments: dict, length: int, padding: int) -> dict:
    """Return the arguments [B, T, ...] with `padding` more tokens at the end of each row, which change no
    state: their segment ids or their `update_mask` are 0."""
    if arguments.get("segment_ids") is None and "update_mask" in arguments:
        if arguments["update_mask"] is None:
            batch = next(
                x.shape[0]
                for name, x in arguments.items()
                if axes.get(name, ())[1:2] == ("sequence",) and x is not None
            )
            arguments = arguments | {"update_mask": jnp.ones((batch, length), bool)}

    def pad(logical_axes, tree):
        if logical_axes[1:2] != ("sequence",):
            return tree
        return jax.tree.map(
            lambda x: jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2)), tree
        )

    return {
        name: tree
        if tree is None
        else jax.tree.map(pad, axes.get(name, ()), tree, is_leaf=_is_axes)
        for name, tree in arguments.items()
    }


# Compiled, because outside `jax.jit` jax cannot map over some axes of a mesh and leave others to the
# partitioner.
@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _mapped(function, static, names, in_specs, out_specs, arguments):
    """Call `function` with its part of the arguments on each device, in a `jax.shard_map` over the mesh
    axes `names`; `in_specs` and `out_specs` are the partition specs of arguments and outputs."""
    leaves, tree = in_specs
    run = map_over(
        names,
        lambda arguments: function(*static, **arguments),
        (tree.unflatten(leaves),),
        out_specs,
    )
    return run(arguments)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _on_explicit_axes(layout, axes, rows, batched, shared):
    """Call `over_mesh` on a mesh that has axes of type `Explicit`: those named in `axes` become `Auto` for
    the call, and the outputs get the sharding `rows`."""
    run: Any = jax.sharding.auto_axes(
        lambda batched, shared: over_mesh(
            layout.function,
            batched,
            shared,
            *layout.static,
            axes=layout.axes,
            out_axes=layout.out_axes,
            in_sequence=layout.in_sequence,
            multiple=layout.multiple,
        ),
        axes=axes,
        out_sharding=rows,
    )
    return run(batched, shared)
