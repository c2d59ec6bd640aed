"""Compute the memory that each chunk of a row starts from, and store nothing else for the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def entering_memories(
    update: Callable[[Array, Any, Any], Array], initial: Array, arrays: Any, indices: Any
) -> Array:
    """Return the memory that each of N chunks starts from, [N, ...], by the updates of the first N - 1 chunks in order.

    The backward pass computes each update again from the memory before it. A `jax.lax.scan` gathers its results in an
    array that starts as zeros; XLA on GPUs writes those of all layers of an unrolled model by one kernel when a step
    begins, so that they are in memory for the whole step, two for each layer. The arrays here depend on the layer's
    inputs and are freed with it. It has no derivative in forward mode (`jax.jvp`).

    Args:
        update: a function of the memory [...] before a chunk and the chunk's entries of `arrays` and `indices`, which
            returns the memory after it. It must not close over traced arrays.
        initial: the memory before the first chunk, [...].
        arrays: a pytree of floating-point arrays [N - 1, ...].
        indices: a pytree of integer arrays [N - 1, ...], with at least one array.
    """
    count = jax.tree.leaves(indices)[0].shape[0] + 1

    def body(n, carry):
        memory, memories = carry
        return update(memory, *_at((arrays, indices), n)), _put(memories, memory, n)

    memories = _filled_later((count, *initial.shape), initial)
    memory, memories = jax.lax.fori_loop(0, count - 1, body, (initial, memories))
    return _put(memories, memory, count - 1)


def _forward(update, initial, arrays, indices):
    memories = entering_memories(update, initial, arrays, indices)
    return memories, (memories, arrays, indices)


def _backward(update, residuals, grads):
    memories, arrays, indices = residuals
    count = grads.shape[0]

    def body(step, carry):
        grad, written = carry
        n = count - 2 - step
        memory, x, index = _at((memories, arrays, indices), n)
        _, pull = jax.vjp(lambda m, x: update(m, x, index), memory, x)
        before, of_arrays = pull(grad)
        return before + _at(grads, n), jax.tree.map(lambda a, g: _put(a, g, n), written, of_arrays)

    written = jax.tree.map(lambda x: _filled_later(x.shape, grads).astype(x.dtype), arrays)
    grad, written = jax.lax.fori_loop(0, count - 1, body, (grads[-1], written))
    return grad, written, None


entering_memories.defvjp(_forward, _backward)


def _at(tree: Any, n: Any) -> Any:
    """Return entry n of each array of `tree`."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, n, keepdims=False), tree)


def _put(array: Array, x: Array, n: Any) -> Array:
    """Return `array` with x as its entry n."""
    return jax.lax.dynamic_update_index_in_dim(array, x, n, 0)


def _filled_later(shape: tuple[int, ...], source: Array) -> Array:
    """Return an array of this shape, of which every entry is to be overwritten; it is no constant, but repeats one of the
    numbers of `source`.
    """
    return jnp.broadcast_to(source[(0,) * source.ndim], shape)
