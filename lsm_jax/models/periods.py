"""The scan over the repetitions of a decoder's period of layers: its body, its rematerialization, and the
statistics of its layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lsm_jax.ops import KEPT
from lsm_jax.parallel import GATHERED


@jax.custom_vjp
def together(tree: Any) -> Any:
    """Return the pytree `tree` unchanged; in the backward pass, the gradients of all its arrays are computed
    before any of them is used.

    Otherwise, with several layers in the body of a scan, XLA computes the gradients of all layers' parameters
    last, and stores the arrays that they are computed from until then. This is faster, but requires more
    memory.
    """
    return tree


together.defvjp(lambda tree: (tree, None), lambda _, grads: (jax.lax.optimization_barrier(grads),))


def rematerialized(function: Any, policy: str, *, in_loop: bool = True) -> Any:
    """Return `function`, wrapped so that the backward pass computes its intermediate arrays again: with the
    policy "full" all, with "dots" all but products with weights and the results of this package's kernels.
    With "none" the function is returned unchanged.

    The states that devices exchange along a row are always saved. `in_loop` says that the function is called in the
    body of a scan, which requires no barrier against common-subexpression elimination: forward and backward pass are
    two loops.
    """
    if policy == "none":
        return function
    policies = jax.checkpoint_policies
    saveable = policies.save_only_these_names(GATHERED)
    if policy == "dots":
        names = policies.save_only_these_names(GATHERED, KEPT)
        saveable = policies.save_from_both_policies(names, policies.dots_with_no_batch_dims_saveable)  # fmt: skip
    return jax.checkpoint(function, policy=saveable, prevent_cse=not in_loop)


def run_period(layer: Callable, rows, carry, inputs):
    """Apply the layers of one period (one repetition of the layers' pattern) to the residual stream; the body of the
    scan over periods.

    Args:
        layer: the function that applies one layer, from `Decoder._layer_function`.
        rows: segment ids, positions and update mask, each [B, T] or None.
        carry: the residual stream x [B, T, D], and the values that travel from layer to layer.
        inputs: the period, its layers' states (or None), and its index.

    Returns:
        The carry after the period; and its layers' states (None without states) with the statistics of each
        layer.
    """
    x, shared = carry
    period, states, index = inputs
    size = len(period.blocks)
    after, statistics = [], []
    for place, block in enumerate(period.blocks):
        state = None if states is None else states[place]
        x, shared, state, aux = layer(x, shared, block, state, index * size + place, *rows)
        after.append(state)
        statistics.append(aux)
    return (x, shared), (None if states is None else tuple(after), statistics)


def entries_by_row(init_shared: Any, x: jax.Array) -> set[str]:
    """Return the names of the values that travel from layer to layer and whose shape depends on the number of
    rows of the batch. `init_shared` returns these values by name, given the tokens' embedding x [B, T, D].
    """
    shapes = (jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) for rows in (1, 2))
    one, two = (jax.eval_shape(init_shared, shape) for shape in shapes)
    return {name for name in one if one[name].shape != two[name].shape}


def gather_statistics(statistics: list[dict[str, jax.Array]]) -> dict[str, jax.Array]:
    """Return the statistics of all layers by name: losses and counts summed over layers, others in the order
    of layers.

    Args:
        statistics: for each layer of the period, arrays by name that are stacked over the periods. Where the
            shapes of a name differ from layer to layer, as with different numbers of experts, the result has
            an entry `name/place` for each layer, with its place in the period.
    """
    gathered = {}
    for name in sorted({name for aux in statistics for name in aux}):
        found = {place: aux[name] for place, aux in enumerate(statistics) if name in aux}
        if len({value.shape for value in found.values()}) > 1:
            gathered |= {f"{name}/{place}": value for place, value in found.items()}
            continue
        stacked = jnp.stack(list(found.values()), axis=1)
        flat = stacked.reshape(-1, *stacked.shape[2:])
        summed = name.endswith(("_loss", "_count"))
        gathered[name] = jnp.sum(flat, axis=0) if summed else flat
    return gathered
