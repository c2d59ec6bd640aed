"""Softmax attention to one set of keys after another, whose sums are rescaled to the largest score so far."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array


class Weighed(NamedTuple):
    """The sums over the keys that queries have attended to so far.

    Attributes:
        top: [..., C, 1], the largest score, -inf before any.
        total: [..., C, 1], the sum of exp(score - top).
        values: [..., C, V], the sum of the values weighed by exp(score - top).
    """

    top: Array
    total: Array
    values: Array


def nothing(q: Array, value_dim: int) -> Weighed:
    """Return the sums of queries q [..., C, K] that have attended to no key."""
    zeros = jnp.zeros((*q.shape[:-1], 1), q.dtype)
    return Weighed(zeros - jnp.inf, zeros, jnp.zeros((*q.shape[:-1], value_dim), q.dtype))


def meet(before: Weighed, scores: Array, mask: Array, values: Array, precision) -> Weighed:
    """Return what queries have attended to after further keys.

    Args:
        before: the sums before.
        scores: [B, N, G, R, C, S], which may have any value where the mask is False.
        mask: broadcasts to the scores; whether a query attends to a key.
        values: [B, N or 1, G, S, V].
        precision: the precision of the matrix product.
    """
    top = jnp.max(jnp.where(mask, scores, -jnp.inf), axis=-1, keepdims=True)
    top = jax.lax.stop_gradient(jnp.maximum(before.top, top))
    finite = jnp.where(jnp.isfinite(top), top, 0)
    kept = jnp.exp(jnp.where(jnp.isfinite(before.top), before.top - finite, -jnp.inf))
    weights = jnp.where(mask, jnp.exp(jnp.where(mask, scores - finite, 0)), 0)
    added = jnp.matmul(weights, values[:, :, :, None], precision=precision)
    total = kept * before.total + jnp.sum(weights, axis=-1, keepdims=True)
    return Weighed(top, total, kept * before.values + added)


def finish(result: Weighed) -> Array:
    """Return the weighed means of values [..., C, V], 0 for queries that attend to no key."""
    return result.values / jnp.where(result.total > 0, result.total, 1)
