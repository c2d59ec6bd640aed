"""Rows sorted by expert: the order, and gathers by it whose gradients are gathers, too, and never scatters.

N rows are placed into M places. The rows of one expert are consecutive, and its number of places is a
multiple of `block`; places without a row are empty.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp


def places_by_expert(
    expert: jax.Array, count: int, block: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the place of each row when rows are sorted by their expert, and the rows of each expert are padded to a
    multiple of `block`.

    Args:
        expert: int32 [N], the expert of each row; `count` or more for rows without one.
        count: number of experts.
        block: the number of places of each expert is a multiple of this.

    Returns:
        int32 [N], the place of each row, M for rows without an expert; int32 [M], the row at each place, N
        for empty places; and int32 [count], the number of places of each expert.
    """
    num_rows = expert.shape[0]
    num_places = (num_rows + min(count, num_rows) * (block - 1)) // block * block
    rows = jnp.sum(expert[:, None] == jnp.arange(count), axis=0, dtype=jnp.int32)  # of each expert
    places = (rows + block - 1) // block * block
    empty_before = jnp.cumsum(places - rows) - (places - rows)
    order = jnp.argsort(expert, stable=True)
    sorted_expert = expert[order]
    sorted_place = jnp.arange(num_rows, dtype=jnp.int32)
    sorted_place += empty_before[jnp.minimum(sorted_expert, count - 1)]
    sorted_place = jnp.where(sorted_expert < count, sorted_place, num_places)
    place = jnp.zeros(num_rows, jnp.int32).at[order].set(sorted_place, unique_indices=True)
    source = jnp.full(num_places, num_rows, jnp.int32).at[sorted_place].set(order, mode="drop")
    return place, source, places


def take_rows(x: jax.Array, index: jax.Array, fill: int | bool = 0) -> jax.Array:
    """Return the rows x[index] of an array, with `fill` where an index is beyond x's rows, as for the empty places of
    an expert's group.
    """
    return x.at[index].get(mode="fill", fill_value=fill)


@jax.custom_vjp
def permute(rows: jax.Array, source: jax.Array, place: jax.Array) -> jax.Array:
    """Move rows [N, D] to their places among the rows sorted by expert, [M, D]; empty places are 0. `place`
    [N] is the place of each row, and `source` [M] the row at each place; with the two exchanged the function
    is its inverse.
    """
    return take_rows(rows, source)


permute.defvjp(
    lambda rows, source, place: (take_rows(rows, source), place),
    lambda place, dy: (take_rows(dy, place), None, None),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def rows_of_tokens(top_k: int, x: jax.Array, source: jax.Array, place: jax.Array) -> jax.Array:
    """Copy each token's row of x [N / k, D] to the k places of its choices among the experts' rows, [M, D], in the
    order of experts; choice i of the N choices is that of token `floor(i / k)`.
    """
    return take_rows(x, source // top_k)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def sum_by_token(top_k: int, rows: jax.Array, source: jax.Array, place: jax.Array) -> jax.Array:
    """Sum, for each token, the experts' outputs for its k choices, which lie in `rows` [M, D] in the order of experts:
    [N / k, D] in float32. It is the transpose of `rows_of_tokens`.
    """
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    return jnp.sum(take_rows(rows, place).reshape(-1, top_k, rows.shape[-1]), axis=1, dtype=wide)


# `x[:0]` and `rows[:0]` save only a dtype.
rows_of_tokens.defvjp(
    lambda top_k, x, source, place: (
        rows_of_tokens(top_k, x, source, place),
        (x[:0], source, place),
    ),
    lambda top_k, saved, dy: (
        sum_by_token(top_k, dy, *saved[1:]).astype(saved[0].dtype),
        None,
        None,
    ),
)
sum_by_token.defvjp(
    lambda top_k, rows, source, place: (
        sum_by_token(top_k, rows, source, place),
        (rows[:0], source, place),
    ),
    lambda top_k, saved, dy: (
        rows_of_tokens(top_k, dy.astype(saved[0].dtype), *saved[1:]),
        None,
        None,
    ),
)
