"""The constants of attention to blocks, which rows and memories are computed at a time, and the products of tiles of queries and
keys.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lsm_jax.ops.blocks.tiles import Spans, take

# Numbers of one array, 512 MiB in float32. The tiles of one row and memory may have more, since they are computed together.
_NUMBERS = 1 << 27
_FEW = 8  # largest numbers that are cheaper to find one after another than by sorting


class Plan(NamedTuple):
    """The constants of attention to selected blocks, or to a window; hashable.

    Attributes:
        block_size: tokens in a block; of a window, consecutive queries whose keys are read together.
        earlier: the number of earlier blocks that a query attends to; 0 for a window.
        tile: in a tile, the queries of one head, or the tokens of heads that select together.
        together: the number of query heads that select the same blocks: 1, or all of a memory.
        window: how many written tokens a query attends to, its own among them; None for its own block and the selected ones.
        scale: multiplies the scores.
        dtype: the dtype of all sums.
        operand: the dtype of the factors of matrix products, and of the output.
        precision: the precision of matrix products.
    """

    block_size: int
    earlier: int
    tile: int
    together: int
    window: int | None
    scale: float
    dtype: Any
    operand: Any
    precision: jax.lax.Precision

    @property
    def before(self) -> int:
        """How many blocks before its own may contain tokens of a query's window or, if documents begin anywhere, of its own
        block.
        """
        return -(-((self.window or self.block_size) - 1) // self.block_size)


def fits(numbers: int) -> bool:
    """Return whether one array may have so many numbers."""
    return numbers <= _NUMBERS


def queries_at_a_time(queries: int, numbers: int) -> int:
    """Return for how many queries at a time `numbers` numbers of each are computed: all, or parts of nearly equal size."""
    most = max(1, _NUMBERS // numbers)
    return -(-queries // -(-queries // most))


def map_units(function, numbers: int, *arrays) -> Any:
    """Return `function` of each row and memory, arrays [U, ...]: of as many at a time as have `_NUMBERS` numbers, if each has
    `numbers`, and of at least one.
    """
    units = len(arrays[0])
    most = max(1, _NUMBERS // numbers)
    step = next(n for n in range(min(units, most), 0, -1) if units % n == 0)
    function, arguments = jax.vmap(function), arrays
    if step == units:
        return function(*arguments)
    split = jax.tree.map(lambda x: x.reshape(units // step, step, *x.shape[1:]), arguments)
    result = jax.lax.map(lambda x: function(*x), split)
    return jax.tree.map(lambda x: x.reshape(units, *x.shape[2:]), result)


def largest(x: Array, count: int) -> tuple[Array, Array]:
    """Return the `count` largest entries of each row of x [T, N] and their indices, [T, count]; of equal ones the first."""
    if count > _FEW:
        return jax.lax.top_k(x, count)
    values, indices = [], []
    for _ in range(count):
        indices.append(jnp.argmax(x, axis=1))
        values.append(jnp.max(x, axis=1))
        x = jnp.where(jnp.arange(x.shape[1]) == indices[-1][:, None], -jnp.inf, x)
    return jnp.stack(values, axis=1), jnp.stack(indices, axis=1)


def read_blocks(plan: Plan, spans: Spans | None, x: Array) -> Array:
    """Return keys or values [S, ...] in spans [N, J, ...]: in consecutive blocks if `spans` is None."""
    return in_blocks(plan.block_size, x) if spans is None else take(x, spans.token)


def in_blocks(size: int, x: Array) -> Array:
    """Return x [T, ...] in blocks [N, size, ...], the last of which may end with zeros."""
    x = jnp.pad(x, [(0, -len(x) % size)] + [(0, 0)] * (x.ndim - 1))
    return x.reshape(-1, size, *x.shape[1:])


class Mask(NamedTuple):
    """Which keys of a tile its queries attend to.

    Attributes:
        seen: [M or 1, C, J], True for those.
        outside: -inf, the score of others, from `outside_of`.
    """

    seen: Array
    outside: Array


def outside_of(dtype: Any, *arrays: Array) -> tuple[Array, ...]:
    """Return -inf, and the arrays, the last of which depends on the row: none is a constant, of which a mask or an array of all scores
    would be made ahead of a loop over rows, to be read in each step.
    """
    return jax.lax.optimization_barrier((jnp.full((), -jnp.inf, dtype), *arrays))


def softmax(plan: Plan, q: Array, keys: Array, values: Array, mask: Mask | None):
    """Return sums [M, C, V] of values, with the weights of queries [M, C, K] and keys, where the mask, if any, lets them attend; the
    sum of the weights and the largest score, [M, C]. Keys and values are [M, J, ...]. A weight is the exponential of a score less
    the largest one; sums are 0 and the largest score is -inf where nothing is seen.
    """
    scores = _scores(plan, q, keys, mask)
    top = jnp.max(scores, axis=-1)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0)[..., None])
    return _multiply(plan, "mcj,mjv->mcv", weights, values), jnp.sum(weights, axis=-1), top


def gradients(plan: Plan, keys, values, mask: Mask | None, q, d_output, log_total, mean):
    """Return the gradients of queries [M, C, K], keys and values [M, J, ...] by the scores of a tile's queries and keys.

    Args:
        plan: the constants.
        keys, values, mask, q: as in `softmax`.
        d_output: [M, C, V], the gradient of the queries' outputs.
        log_total: [M, C], the logarithm of the sum of all weights of a query, also of other tiles.
        mean: [M, C], the sum of `d_output` times the output.
    """
    multiply = functools.partial(_multiply, plan)
    weights = jnp.exp(_scores(plan, q, keys, mask) - log_total[..., None])
    d_weights = multiply("mcv,mjv->mcj", d_output, values)
    d_scores = plan.scale * weights * (d_weights - mean[..., None])
    return (
        multiply("mcj,mjk->mck", d_scores, keys),
        multiply("mcj,mck->mjk", d_scores, q),
        multiply("mcj,mcv->mjv", weights, d_output),
    )


def _scores(plan: Plan, q: Array, keys: Array, mask: Mask | None) -> Array:
    """Return the scores [M, C, J] of queries and keys, -inf where the mask does not let a query attend."""
    scores = plan.scale * _multiply(plan, "mck,mjk->mcj", q, keys)
    return scores if mask is None else jnp.where(mask.seen, scores, mask.outside)


def _multiply(plan: Plan, equation: str, x: Array, y: Array) -> Array:
    """Return a product of factors in `plan.operand`, summed in `plan.dtype`."""
    x, y = x.astype(plan.operand), y.astype(plan.operand)
    return jnp.einsum(equation, x, y, precision=plan.precision, preferred_element_type=plan.dtype)
