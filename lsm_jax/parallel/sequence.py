"""What devices tell each other when a row's tokens are spread over them, in order.

A memory's update is a monoid, so that each device composes its own tokens' into one, gathers those of all, and folds the
earlier ones into the state it starts from: LASP-2 (arXiv 2502.07563, Algorithm 2), for any update. What travels does not grow
with the number of tokens: one all-gather of updates forward, one of states' gradients backward, for each memory. Convolutions and
shifts of rows without gaps pass their last tokens on instead (`ops.shift`).

Everything here is called inside a `jax.shard_map` with unchecked replication over the axis, where the gradient of a value that
all devices hold is shared out evenly between them, and what they give back is summed.
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
"""The name of gathered updates in a checkpoint policy: kept, the backward pass need not gather them again."""


def _words(x: jax.Array) -> jax.Array:
    """The bits of `x` as a vector of 32-bit words."""
    if jnp.iscomplexobj(x):
        x = jnp.stack([jnp.real(x), jnp.imag(x)])
    if x.dtype.itemsize < 4:
        x = x.astype(jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32)
    return jax.lax.bitcast_convert_type(x, jnp.uint32).reshape(-1)


def _from_words(words: jax.Array, like: Any) -> jax.Array:
    """`_words` of n arrays shaped as `like`, [n, P] -> [n, ...]."""
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
    """Every device's `tree`, [n, ...] a leaf, by one all-gather."""
    leaves, treedef = jax.tree.flatten(tree)
    if not leaves:
        return tree
    words = [_words(x) for x in leaves]
    everyone = jax.lax.all_gather(jnp.concatenate(words), axis)
    ends = [sum(w.size for w in words[:i]) for i in range(len(words) + 1)]
    parts = [everyone[:, begin:end] for begin, end in zip(ends, ends[1:], strict=False)]
    return treedef.unflatten([_from_words(p, x) for p, x in zip(parts, leaves, strict=True)])


def _floats(tree: Any) -> list[jax.Array]:
    """The leaves that have gradients."""
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]


def _with_floats(tree: Any, floats: list[Any], other: Callable[[Any], Any] = lambda x: x) -> Any:
    """`tree` with its floating leaves replaced, and `other` of the rest."""
    rest = iter(floats)
    return jax.tree.map(
        lambda x: next(rest) if jnp.issubdtype(x.dtype, jnp.inexact) else other(x), tree
    )


def _fold(advance, updates, initial) -> tuple[Any, Any]:
    """The state ahead of each update, [n, ...], and the one after all."""
    final, entering = jax.lax.scan(lambda s, u: (advance(s, u), s), initial, updates)
    return entering, final


def _own(axis: str, tree: Any) -> Any:
    """[n, ...] -> this device's."""
    here = jax.lax.axis_index(axis)
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, here, keepdims=False), tree)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def exchange(
    axis: str, advance: Callable[[Any, Any], Any], update: Any, initial: Any
) -> tuple[Any, Any]:
    """The state that this device's tokens start from, and the one after all devices' tokens.

    Backward, the gradients of the states that devices start from are gathered, and each device takes those of all the later
    ones back to its own update.

    Args:
        axis: mesh axis the devices stand along, in the tokens' order.
        advance: (state, update) -> the state after it; a function defined once.
        update: all of this device's tokens as one, a pytree of arrays.
        initial: the state ahead of the first device's tokens, the same on all devices.
    """
    return _forward(axis, advance, update, initial)[0]


def _forward(axis, advance, update, initial):
    """`exchange`, and what its backward pass needs."""
    updates = jax.tree.map(lambda x: checkpoint_name(x, GATHERED), gather(axis, update))
    entering, final = _fold(advance, updates, initial)
    return (_own(axis, entering), final), (updates, initial)


def _backward(axis, advance, saved, grads):
    """Gradients of update and initial state; the first device gives the latter's."""
    updates, initial = saved
    # Integers' gradients are empty: which leaves are real numbers is read off the state.
    grad_entering, grad_final = (
        [
            g
            for x, g in zip(jax.tree.leaves(initial), jax.tree.leaves(of), strict=True)
            if jnp.issubdtype(x.dtype, jnp.inexact)
        ]
        for of in grads
    )

    def fold(of_updates, of_initial):
        entering, final = _fold(
            advance, _with_floats(updates, of_updates), _with_floats(initial, of_initial)
        )
        return _floats(entering), _floats(final)

    _, pull = jax.vjp(fold, _floats(updates), _floats(initial))
    devices = jax.lax.axis_size(axis)
    grad_updates, grad_initial = pull(
        (gather(axis, grad_entering), [devices * g for g in grad_final])
    )
    first = jax.lax.axis_index(axis) == 0
    grad_initial = [jnp.where(first, g, 0) for g in grad_initial]
    return (
        _with_floats(updates, _own(axis, grad_updates), lambda _: None),
        _with_floats(initial, grad_initial, lambda _: None),
    )


exchange.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def hand_on(
    axis: str, run: Callable[[Any, Any], tuple[Any, Any]], arguments: Any, initial: Any
) -> tuple[Any, Any]:
    """`run(arguments, state) -> (output, state after)` on one device after the other, each from the state of the one before.

    For what no update composes: all devices but one wait at any time. Backward the order is the other way round, and each
    device runs its tokens again from the state it started from, which is all that is kept.

    Args:
        axis: mesh axis the devices stand along, in the tokens' order.
        run: without collectives; its outputs are real numbers.
        arguments: this device's, a pytree of arrays.
        initial: the state ahead of the first device's tokens, the same on all devices.

    Returns:
        This device's output, and the last device's state after.
    """
    return _hand_on_forward(axis, run, arguments, initial)[0]


def _broadcast(axis: str, device: int, tree: Any) -> Any:
    """One device's `tree`, on all."""
    own = jax.lax.axis_index(axis) == device
    return jax.tree.map(lambda x: sum_along(axis, jnp.where(own, x, 0)), tree)


def _hand_on_forward(axis, run, arguments, initial):
    """`hand_on`, and what its backward pass needs."""
    devices, here = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    onwards = [(i, (i + 1) % devices) for i in range(devices)]
    output = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(run, arguments, initial)[0]
    )

    def turn(carry, device):
        state, entering, output = carry
        mine = here == device
        entering = jax.tree.map(lambda new, old: jnp.where(mine, new, old), state, entering)
        output, after = jax.lax.cond(
            mine, lambda s, _: run(arguments, s), lambda s, o: (o, s), state, output
        )
        return (jax.lax.ppermute(after, axis, onwards), entering, output), None

    start = (initial, initial, output)
    (final, entering, output), _ = jax.lax.scan(turn, start, jnp.arange(devices))
    entering = jax.tree.map(lambda x: checkpoint_name(x, GATHERED), entering)
    return (output, _broadcast(axis, 0, final)), (arguments, entering)


def _hand_on_backward(axis, run, saved, grads):
    """Gradients of arguments and initial state, the last device's turn first."""
    arguments, entering = saved
    grad_output, grad_final = grads
    devices, here = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    back = [((i + 1) % devices, i) for i in range(devices)]

    def of_floats(of_arguments, of_state):
        output, after = run(_with_floats(arguments, of_arguments), _with_floats(entering, of_state))
        return output, _floats(after)

    def pull(grad_after, _):
        _, pullback = jax.vjp(of_floats, _floats(arguments), _floats(entering))
        return pullback((grad_output, grad_after))

    def turn(carry, device):
        grad_after, of_arguments = carry
        of_arguments, grad_before = jax.lax.cond(
            here == device, pull, lambda g, a: (a, g), grad_after, of_arguments
        )
        return (jax.lax.ppermute(grad_before, axis, back), of_arguments), None

    last = [
        devices * g
        for x, g in zip(jax.tree.leaves(entering), jax.tree.leaves(grad_final), strict=True)
        if jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    start = (last, [jnp.zeros_like(x) for x in _floats(arguments)])
    turns = jnp.arange(devices)[::-1]
    (before, of_arguments), _ = jax.lax.scan(turn, start, turns)
    # What the first device gives back has gone round to the last one.
    before = [jnp.where(here == devices - 1, g, 0) for g in before]
    return (
        _with_floats(arguments, of_arguments, lambda _: None),
        _with_floats(entering, before, lambda _: None),
    )


hand_on.defvjp(_hand_on_forward, _hand_on_backward)
