"""The scan over the repetitions of a decoder's period of layers: its body, its rematerialization, and the
statistics of its layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from lsm_jax.models.unstack import unstack
from lsm_jax.ops import CONVOLVED, INPUTS, KEPT
from lsm_jax.ops.core.saved import is_saved_attention, memories_saved
from lsm_jax.parallel import GATHERED

_STAGE_LAYER = "stage_layer"


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
    policy "full" all, with "dots" all but products with weights and the results of this package's kernels and of cuDNN's
    attention, with "dots_and_convolutions" all but these and the results of short convolutions and of RWKV7's gates,
    with "dots_and_inputs" all but these and the elementwise results that products with weights read, with "dots_and_states" all but
    these and the memories before all chunks of the kernels that can store them (`memories_saved`). With "none" the function is returned
    unchanged, and kernels compute these memories again.

    The states that devices exchange along a row are always saved. `in_loop` says that the function is called in the
    body of a scan, which requires no barrier against common-subexpression elimination: forward and backward pass are
    two loops.
    """
    if policy == "none":
        return function
    # This policy alone changes what kernels return: they are told while the function is traced.
    function = memories_saved(policy == "dots_and_states")(function)
    return jax.checkpoint(function, policy=_saveable(policy), prevent_cse=not in_loop)


def rematerialized_stage(function: Any, policy: str) -> Any:
    """Return `function`, which computes the layers of a pipeline stage by `jax.lax.switch`, wrapped so that its
    backward pass is that of layers that are rematerialized by the policy: the input of each layer
    (`name_stage_layer`) and what the policy says is saved.

    Without it the branches would return all parameters as residuals, and the scan over microbatches would store a
    copy of them for each: a `jax.checkpoint` saves none of its inputs a second time.
    """
    return jax.checkpoint(function, policy=_saveable(policy, _STAGE_LAYER), prevent_cse=False)


def name_stage_layer(x: jax.Array) -> jax.Array:
    """Return the input x [B, T, D] of a layer of a pipeline stage, marked as saved for the backward pass."""
    return checkpoint_name(x, _STAGE_LAYER)


def _saveable(policy: str, *names: str) -> Any:
    """Return the policy of `jax.checkpoint` for a config's `remat`, which also saves the arrays of these names."""
    policies = jax.checkpoint_policies
    if policy == "none":
        return policies.everything_saveable
    if policy == "full":
        return policies.save_only_these_names(GATHERED, *names)
    if policy in ("dots_and_convolutions", "dots_and_inputs", "dots_and_states"):
        names = CONVOLVED, *names
    if policy in ("dots_and_inputs", "dots_and_states"):
        names = INPUTS, *names
    kept = policies.save_only_these_names(GATHERED, KEPT, *names)
    dots = policies.dots_with_no_batch_dims_saveable
    return policies.save_from_both_policies(
        kept, policies.save_from_both_policies(dots, is_saved_attention)
    )


def run_period(layer: Callable, rows, carry, inputs):
    """Apply the layers of one period (one repetition of the layers' pattern) to the residual stream; the body of the
    scan over periods.

    Args:
        layer: the function that applies one layer, from `Decoder._layer_function`.
        rows: segment ids, positions and update mask, each [B, T] or None.
        carry: the residual stream x [B, T, D] (or two arrays whose sum it is), and the values that travel from layer to layer.
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


def run_unrolled(scanned: Callable, carry, periods, count: int):
    """Apply `count` periods of layers one after the other, without states, as a scan that is unrolled does; but the gradients of stacked
    parameters are written in place (`unstack`).

    Args:
        scanned: `run_period` with a layer function and rows.
        carry: the residual stream x [B, T, D] (or two arrays whose sum it is), and the values that travel from layer to layer.
        periods: the period whose parameters are stacked.
        count: the number of periods.

    Returns:
        The residual stream after the layers, as one array or two, as it was given; and the statistics of each layer of the period, stacked
        over the periods.
    """

    @jax.jit  # traced once, not for each period
    def layers(carry, period, index):
        carry, (_, statistics) = scanned(carry, (period, None, index))
        return carry, statistics

    every = []
    for index, period in enumerate(unstack(periods, count)):
        carry, statistics = layers(carry, period, jnp.asarray(index))
        every.append(statistics)
    return carry[0], jax.tree.map(lambda *each: jnp.stack(each), *every)


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
