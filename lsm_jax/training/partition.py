"""Parameters that train and parameters that stand still, as two trees of one model.

What trains is float32, has optimizer state and is saved. What stands still is bfloat16 and is read again from where it came.
"""

from __future__ import annotations

import difflib
from typing import Any

import jax
import jax.numpy as jnp

FROZEN_DTYPE = jnp.bfloat16


def leaves_of(tree: Any) -> dict[str, Any]:
    """A tree's leaves by dotted path."""
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in flat}


def split(params: dict[str, Any], trainable: tuple[str, ...]) -> tuple[dict, dict]:
    """(what trains, what stands still) of nested dicts, each without the other's branches.

    Args:
        params: of a model; its leaves may be anything.
        trainable: names of modules or parameters: what has one of them in its path trains. None at all: everything trains.

    Raises:
        ValueError: a name that no parameter's path has.
    """
    if not trainable:
        return params, {}
    known = {part for path in leaves_of(jax.tree.map(lambda _: 0, params)) for part in path.split(".")}  # fmt: skip
    for name in trainable:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(
                f"trainable={trainable}: no parameter has {name!r} in its path{hint or '.'} Names there: "
                + ", ".join(sorted(part for part in known if not part.isdecimal()))
            )
    return _only(params, set(trainable), True), _only(params, set(trainable), False)


def _only(tree: Any, names: set[str], kept: bool) -> Any:
    """The branches under one of `names` (kept), or the others."""
    found = {}
    for key, value in tree.items():
        if str(key) in names:
            if kept:
                found[key] = value
        elif isinstance(value, dict):
            if inner := _only(value, names, kept):
                found[key] = inner
        elif not kept:
            found[key] = value
    return found


def join(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """One tree of the leaves of both; a leaf of `second` stands where both have one."""
    both = dict(first)
    for key, value in second.items():
        mine = both.get(key)
        both[key] = join(mine, value) if isinstance(mine, dict) and isinstance(value, dict) else value  # fmt: skip
    return both


def like(params: dict[str, Any], shape: dict[str, Any]) -> dict[str, Any]:
    """The branches of `params` that `shape` has too."""
    return {
        key: like(params[key], value) if isinstance(value, dict) else params[key]
        for key, value in shape.items()
        if key in params
    }


@jax.jit
def _digest(x: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).astype(
        jnp.uint32
    )
    for axis in range(x.ndim):  # odd weights by place, so that swapped rows show
        place = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        bits = bits * (2 * place * jnp.uint32(0x9E3779B1) + 1)
    return jnp.sum(bits, dtype=jnp.uint32)


def digests(params: dict[str, Any]) -> dict[str, int]:
    """A number for each leaf by path that tells other content, wherever it is read from and however it is sharded."""
    return {name: int(_digest(leaf)) for name, leaf in leaves_of(params).items()}


def targets(shapes: Any, shardings: Any, trainable: tuple[str, ...]) -> dict[str, Any]:
    """What to load a run's parameters into: the dtype of each by whether it trains, and where it lives."""
    whole = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )
    trained, still = split(whole, trainable)
    return join(trained, jax.tree.map(lambda x: x.update(dtype=FROZEN_DTYPE), still))
