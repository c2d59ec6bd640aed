"""Split the parameters of one model into trained and frozen ones, as two trees, and join them again.

Trained parameters are float32, have optimizer state and are saved in checkpoints. Frozen parameters have the dtype that the
config's `frozen_dtype` says; they are loaded again, whenever a run is opened, from the run or pretrained model that has them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from lsm_jax.names import did_you_mean

FROZEN_DTYPES = ("bfloat16", "bfloat16_matrices", "float32")
"""The values of `TrainConfig.frozen_dtype`."""


def leaves_of(tree: Any) -> dict[str, Any]:
    """Return the arrays of a tree of parameters as a dict by their dotted path."""
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in flat}


def split(
    params: dict[str, Any], trainable: tuple[str, ...], field: str = "trainable"
) -> tuple[dict, dict]:
    """Split a tree of parameters (nested dicts) into (the tree of trained parameters, the tree of frozen
    ones).

    Args:
        params: the parameters of a model, or a tree of the same structure with any leaves.
        trainable: names of modules or parameters; a parameter is trained if its path has one of them. If
            empty, all are trained.
        field: the name of the config's field that contains `trainable`, for error messages.

    Raises:
        ValueError: one of the names is in no parameter's path.
    """
    if not trainable:
        return params, {}
    known = {
        part for path in leaves_of(jax.tree.map(lambda _: 0, params)) for part in path.split(".")
    }
    for name in trainable:
        if name not in known:
            hint = did_you_mean(name, sorted(known)) or "."
            raise ValueError(
                f"{field}={trainable}: no parameter has {name!r} in its path{hint} Names there: "
                + ", ".join(sorted(part for part in known if not part.isdecimal()))
            )
    return _only(params, set(trainable), True), _only(params, set(trainable), False)


def _only(tree: Any, names: set[str], included: bool) -> Any:
    """Return a part of a tree of parameters (nested dicts): if `included`, the parameters with one of `names`
    (of modules or parameters) in their path; otherwise all other parameters."""
    selected = {}
    for key, value in tree.items():
        if str(key) in names:
            if included:
                selected[key] = value
        elif isinstance(value, dict):
            if inner := _only(value, names, included):
                selected[key] = inner
        elif not included:
            selected[key] = value
    return selected


def join(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Merge two trees of parameters, such as frozen and trained ones; where both have a leaf, the result
    has that of `second`."""
    merged = dict(first)
    for key, value in second.items():
        old = merged.get(key)
        merged[key] = (
            join(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
        )
    return merged


def like(params: dict[str, Any], shape: dict[str, Any]) -> dict[str, Any]:
    """Return the tree of parameters `params` (nested dicts) without the parameters whose path does not occur in
    the tree `shape`."""
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
    for axis in range(x.ndim):  # odd weights by position, so that exchanged rows change the sum
        position = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        bits = bits * (2 * position * jnp.uint32(0x9E3779B1) + 1)
    return jnp.sum(bits, dtype=jnp.uint32)


def digests(params: dict[str, Any]) -> dict[str, int]:
    """Return a digest of the content of each parameter, by its path, which shows whether frozen parameters
    have changed; it does not depend on where they were loaded from or on their sharding."""
    return {name: int(_digest(leaf)) for name, leaf in leaves_of(params).items()}


def is_matrix(path: str) -> bool:
    """Return whether a parameter, given its dotted path, is a kernel, an embedding or the matrices of experts."""
    name = path.rpartition(".")[2]
    return name in ("kernel", "embedding") or name.endswith("_proj")


def in_frozen_dtype(frozen: dict[str, Any], frozen_dtype: str) -> dict[str, Any]:
    """Return abstract arrays of frozen parameters in their dtypes.

    Args:
        frozen: a tree of abstract arrays.
        frozen_dtype: "bfloat16"; "float32"; or "bfloat16_matrices", in which kernels, embeddings and experts are bfloat16, and
            all other parameters (norms, biases, decay rates, convolutions) float32.
    """

    def convert(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        matrix = is_matrix(jax.tree_util.keystr(path, simple=True, separator="."))
        narrow = frozen_dtype == "bfloat16" or (frozen_dtype == "bfloat16_matrices" and matrix)
        return leaf.update(dtype=jnp.bfloat16 if narrow else jnp.float32)

    return jax.tree_util.tree_map_with_path(convert, frozen)


def targets(
    shapes: Any, shardings: Any, trainable: tuple[str, ...], frozen_dtype: str = FROZEN_DTYPES[0]
) -> dict[str, Any]:
    """Return a tree of abstract arrays that describes how a run's parameters are loaded: their shapes,
    shardings, and dtypes (as in `shapes` if trained, those of `frozen_dtype` if frozen).

    Args:
        shapes: arrays or shapes of all parameters of the run's model.
        shardings: the sharding of each parameter, as a tree of the same structure.
        trainable: names of the modules or parameters that are trained; if empty, all are.
        frozen_dtype: the dtypes of frozen parameters, one of `FROZEN_DTYPES`.
    """
    all_params = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )
    trained, frozen = split(all_params, trainable)
    return join(trained, in_frozen_dtype(frozen, frozen_dtype))
