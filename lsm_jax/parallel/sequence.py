"""Communicate between devices that share rows: the tokens of a row are sharded over a mesh axis, in order.

A memory's update is a monoid. Each device therefore composes the updates of its tokens into one, gathers
those of all devices, and folds the updates of earlier devices into the state that its own tokens start from:
LASP-2 (arXiv 2502.07563, Algorithm 2), for any update. The bytes sent do not depend on the number of tokens:
per memory one all-gather of updates in the forward pass, and one of the states' gradients in the backward
pass. Convolutions and token shifts of rows without gaps send their last tokens to the next device instead
(`lsm_jax.ops.convolution.shared_rows`).

All functions must be called inside a `jax.shard_map` over the axis, with unchecked replication. There the
gradient of a replicated value is divided evenly between the devices, and the gradients that the devices
return for it are summed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from lsm_jax.parallel.sums import sum_along

GATHERED = "sequence_updates"
"""The name of gathered updates in checkpoint policies; if they are saved, the backward pass does not gather
them again."""


def _words(x: jax.Array) -> jax.Array:
    """Return the bits of an array as a vector of 32-bit words, so that arrays of different dtypes can be
    gathered together; dtypes of less than 32 bits are first converted to 32 bits."""
    if jnp.iscomplexobj(x):
        x = jnp.stack([jnp.real(x), jnp.imag(x)])
    if x.dtype.itemsize < 4:
        x = x.astype(jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32)
    return jax.lax.bitcast_convert_type(x, jnp.uint32).reshape(-1)


def _from_words(words: jax.Array, like: Any) -> jax.Array:
    """Convert the gathered words of n devices, [n, P], back to n arrays of the shape and dtype of `like`,
    [n, ...]: the inverse of `_words`."""
    dtype = jnp.dtype(like.dtype)
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    real = jnp.finfo(dtype).dtype if is_complex else dtype
    wide = real
    if real.itemsize < 4:
        wide = jnp.float32 if jnp.issubdtype(real, jnp.floating) else jnp.int32
    shape = (len(words), *(2,) * is_complex, *like.shape)
    pairs = (2,) * (jnp.dtype(wide).itemsize == 8)
    x = jax.lax.bitcast_convert_type(words.reshape(*shape, *pairs), wide).astype(real)
    return jax.lax.complex(x[:, 0], x[:, 1]) if is_complex else x


def gather(axis: str, tree: Any) -> Any:
    """Gather the pytrees of all n devices along a mesh axis by one all-gather, on every device: leaves
    [...] -> [n, ...]."""
    leaves, treedef = jax.tree.flatten(tree)
    if not leaves:
        return tree
    words = [_words(x) for x in leaves]
    gathered = jax.lax.all_gather(jnp.concatenate(words), axis)
    ends = [sum(w.size for w in words[:i]) for i in range(len(words) + 1)]
    parts = [gathered[:, begin:end] for begin, end in zip(ends, ends[1:], strict=False)]
    return treedef.unflatten([_from_words(p, x) for p, x in zip(parts, leaves, strict=True)])


def _floats(tree: Any) -> list[jax.Array]:
    """Return the floating-point and complex arrays among the leaves of a pytree, which are those that have
    gradients."""
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]


def _with_floats(tree: Any, floats: list[Any], other: Callable[[Any], Any] = lambda x: x) -> Any:
    """Return the pytree with its floating-point and complex leaves replaced by the arrays in `floats`, in
    order, and every other leaf x by `other(x)`."""
    rest = iter(floats)
    return jax.tree.map(
        lambda x: next(rest) if jnp.issubdtype(x.dtype, jnp.inexact) else other(x), tree
    )


def _fold(advance, updates, initial) -> tuple[Any, Any]:
    """Apply the composed updates of n devices (leaves [n, ...]) in order to the memory's state `initial`;
    return the states before each update, [n, ...], and the final state."""
    final, before = jax.lax.scan(lambda s, u: (advance(s, u), s), initial, updates)
    return before, final


def _local(axis: str, tree: Any) -> Any:
    """Return this device's entry of a pytree that was gathered from the n devices of a mesh axis, leaves
    [n, ...] -> [...]."""
    device = jax.lax.axis_index(axis)
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, device, keepdims=False), tree)


def exchange(
    axis: str, advance: Callable[[Any, Any], Any], update: Any, initial: Any
) -> tuple[Any, Any]:
    """Exchange the updates of memories between the devices that share a row: return the state before this
    device's tokens, and the state after the tokens of all devices.

    In the backward pass every device gathers the gradients of all devices' start states, and computes from
    them the gradient of its update, which affects the start states of all later devices.

    Args:
        axis: name of the mesh axis along which the devices have the parts of a row, in the tokens' order.
        advance: (state, update) -> the state after the update; it must be the same function object in every
            call, so no lambda.
        update: the composed update of all tokens of this device, a pytree of arrays.
        initial: the state before the first device's tokens, the same on all devices.
    """
    return exchange_while(axis, advance, update, initial, None)[:2]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def exchange_while(
    axis: str, advance: Callable[[Any, Any], Any], update: Any, initial: Any, output: Any
) -> tuple[Any, Any, Any]:
    """Return what `exchange` returns (the state before this device's tokens, and the state after all tokens)
    and the array `output` unchanged, in an order that lets `output` be computed while devices send their
    updates.

    Forward, the received updates are read only after `output` is computed. Backward, the gradient of the
    state before this device's tokens is computed before the gradient of `output` is used.
    """
    return _exchange_forward(axis, advance, update, initial, output)[0]


def _exchange_forward(axis, advance, update, initial, output):
    """Compute the forward pass of `exchange_while`. Return its results (the state before this device's
    tokens, the state after all devices' tokens, and `output` unchanged), and the residuals (the updates of
    all devices, and the state `initial` before the first device's tokens).
    """
    updates = jax.tree.map(lambda x: checkpoint_name(x, GATHERED), gather(axis, update))
    after_output = updates
    if output is not None:
        after_output, output = jax.lax.optimization_barrier((updates, output))
    before, final = _fold(advance, after_output, initial)
    return (_local(axis, before), final, output), (updates, initial)


def _exchange_backward(axis, advance, residuals, grads):
    """Compute the backward pass of `exchange_while`: return the gradients of this device's `update`, of the
    state `initial` (nonzero only on the first device, since the devices' gradients are summed), and of
    `output`.
    """
    updates, initial = residuals
    *grads, grad_output = grads
    # The gradients of integers have no values: select the floating-point leaves by the dtypes of the state.
    grad_before, grad_final = (
        [
            g
            for x, g in zip(jax.tree.leaves(initial), jax.tree.leaves(of), strict=True)
            if jnp.issubdtype(x.dtype, jnp.inexact)
        ]
        for of in grads
    )

    def fold(float_updates, float_initial):
        before, final = _fold(
            advance, _with_floats(updates, float_updates), _with_floats(initial, float_initial)
        )
        return _floats(before), _floats(final)

    if grad_output is not None:
        grad_before, grad_output = jax.lax.optimization_barrier((grad_before, grad_output))
    _, pull = jax.vjp(fold, _floats(updates), _floats(initial))
    devices = jax.lax.axis_size(axis)
    # `grad_final` is this device's even part of the gradient of a replicated value: multiply to get all of
    # it.
    grad_updates, grad_initial = pull(
        (gather(axis, grad_before), [devices * g for g in grad_final])
    )
    # The gradients that devices return for a replicated argument are summed: one device returns it, the
    # others 0.
    is_first = jax.lax.axis_index(axis) == 0
    grad_initial = [jnp.where(is_first, g, 0) for g in grad_initial]
    return (
        _with_floats(updates, _local(axis, grad_updates), lambda _: None),
        _with_floats(initial, grad_initial, lambda _: None),
        grad_output,
    )


exchange_while.defvjp(_exchange_forward, _exchange_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def run_in_turn(
    axis: str, run: Callable[[Any, Any], tuple[Any, Any]], arguments: Any, initial: Any
) -> tuple[Any, Any]:
    """Call `run(arguments, state) -> (output, next state)` on one device after the other, each with the
    previous device's state.

    For memories whose updates do not compose. At any time one device computes and the others wait. The
    backward pass runs in the opposite order; each device recomputes its tokens from its start state, the only
    array that is saved for it.

    Args:
        axis: name of the mesh axis along which the devices have the parts of a row, in the tokens' order.
        run: a function without collectives; its outputs are floating-point arrays.
        arguments: the arguments of this device's tokens, a pytree of arrays.
        initial: the state before the first device's tokens, the same on all devices.

    Returns:
        This device's output, and the state after the last device's tokens.
    """
    return _in_turn_forward(axis, run, arguments, initial)[0]


def _broadcast(axis: str, device: int, tree: Any) -> Any:
    """Return the pytree `tree` of the device with the index `device` along a mesh axis, on all devices of
    that axis.
    """
    is_source = jax.lax.axis_index(axis) == device
    return jax.tree.map(lambda x: sum_along(axis, jnp.where(is_source, x, 0)), tree)


def _in_turn_forward(axis, run, arguments, initial):
    """Forward pass of `run_in_turn`: return this device's output and the state after the last device's
    tokens, and the residuals (arguments, the state before this device's tokens)."""
    devices, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    to_next = [(i, (i + 1) % devices) for i in range(devices)]
    output = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(run, arguments, initial)[0]
    )

    def turn(carry, device):
        state, before, output = carry
        is_my_turn = me == device
        before = jax.tree.map(lambda new, old: jnp.where(is_my_turn, new, old), state, before)
        output, after = jax.lax.cond(
            is_my_turn, lambda s, _: run(arguments, s), lambda s, o: (o, s), state, output
        )
        return (jax.lax.ppermute(after, axis, to_next), before, output), None

    start = (initial, initial, output)
    (final, before, output), _ = jax.lax.scan(turn, start, jnp.arange(devices))
    before = jax.tree.map(lambda x: checkpoint_name(x, GATHERED), before)
    # After n turns the last device's state has been sent on to device 0.
    return (output, _broadcast(axis, 0, final)), (arguments, before)


def _in_turn_backward(axis, run, residuals, grads):
    """Compute the backward pass of `run_in_turn`: return the gradients of this device's `arguments` and of
    the state `initial`. The devices compute one after another, from the last to the first.
    """
    arguments, before = residuals
    grad_output, grad_final = grads
    devices, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    to_previous = [((i + 1) % devices, i) for i in range(devices)]

    def run_floats(float_arguments, float_state):
        output, after = run(
            _with_floats(arguments, float_arguments), _with_floats(before, float_state)
        )
        return output, _floats(after)

    def pull(grad_after, _):
        _, pullback = jax.vjp(run_floats, _floats(arguments), _floats(before))
        return pullback((grad_output, grad_after))

    def turn(carry, device):
        grad_after, grad_arguments = carry
        grad_arguments, grad_before = jax.lax.cond(
            me == device, pull, lambda g, a: (a, g), grad_after, grad_arguments
        )
        return (jax.lax.ppermute(grad_before, axis, to_previous), grad_arguments), None

    grad_last = [
        devices * g
        for x, g in zip(jax.tree.leaves(before), jax.tree.leaves(grad_final), strict=True)
        if jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    start = (grad_last, [jnp.zeros_like(x) for x in _floats(arguments)])
    turns = jnp.arange(devices)[::-1]
    (grad_initial, grad_arguments), _ = jax.lax.scan(turn, start, turns)
    # After n turns the first device's gradient has been sent on to the last device.
    grad_initial = [jnp.where(me == devices - 1, g, 0) for g in grad_initial]
    return (
        _with_floats(arguments, grad_arguments, lambda _: None),
        _with_floats(before, grad_initial, lambda _: None),
    )


run_in_turn.defvjp(_in_turn_forward, _in_turn_backward)
