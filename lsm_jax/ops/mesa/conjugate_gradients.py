"""Solve symmetric positive definite systems by a fixed number of steps of conjugate gradients."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array


def solve(
    matvec: Callable[[Array], Array],
    b: Array,
    start: Array | None,
    *,
    steps: int,
    epsilon: float,
    implicit: bool,
) -> Array:
    """Return x with `matvec(x) = b` after `steps` steps of conjugate gradients, for each vector along the last axis.

    Args:
        matvec: the product with the matrices; linear, symmetric and positive definite.
        b: [..., K], the right sides.
        start: [..., K], the factors by which b is multiplied for the first x; None starts from 0.
        steps: the number of steps.
        epsilon: added to the denominator of each step's length and direction.
        implicit: whether the gradient is that of the solution, which one more solve computes, with the same number of
            steps and no stored step; otherwise it is that of the steps.
    """

    def iterate(matvec, b):
        x = jnp.zeros_like(b) if start is None else start * b
        residual = b if start is None else b - matvec(x)

        def step(carry, _):
            x, residual, direction, square = carry
            product = matvec(direction)
            along = jnp.sum(direction * product, axis=-1, keepdims=True)
            length = _ratio(square, along + epsilon)
            x, residual = x + length * direction, residual - length * product
            after = jnp.sum(residual * residual, axis=-1, keepdims=True)
            direction = residual + _ratio(after, square + epsilon) * direction
            return (x, residual, direction, after), None

        square = jnp.sum(residual * residual, axis=-1, keepdims=True)
        (x, *_), _ = jax.lax.scan(step, (x, residual, residual, square), length=steps)
        return x

    if not implicit:
        return iterate(matvec, b)
    return jax.lax.custom_linear_solve(matvec, b, iterate, symmetric=True)


def _ratio(a: Array, b: Array) -> Array:
    """Return a / b, and 0 where b is 0: nothing is left to solve."""
    return jnp.where(b > 0, a / jnp.where(b > 0, b, 1), 0)
