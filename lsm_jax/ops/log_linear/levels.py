"""Levels: which memory of `log_linear_memory` contains a token, from the positions of tokens in their documents."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from lsm_jax.ops.core.segments import Tokens


def level_between(a: Array, b: Array, levels: int) -> Array:
    """Return the level at which a memory read at position `a` contains the token at position `b`, for b <= a.

    It is 0 if both are equal, else 1 + the place of the highest bit in which they differ, and `levels` - 1 if that is
    more. Positions below 0, those of memories without tokens, count as 0.
    """
    differing = jnp.maximum(a, 0) ^ jnp.maximum(b, 0)
    return jnp.minimum(32 - jax.lax.clz(differing), levels - 1)


def levels_of_rows(length: int, levels: int) -> int:
    """Return how many of `levels` levels can contain tokens in rows of `length` tokens that begin at position 0."""
    return min(levels, (length - 1).bit_length() + 1)


def merge_levels(memory: Array, level: Array, axis: int) -> Array:
    """Add all memories of lower levels to that of `level`, and empty them.

    Args:
        memory: an array with one entry for each level along `axis`.
        level: the level of each memory, with as many axes as `memory` and size 1 along `axis`; 0 changes nothing.
        axis: the axis of levels, counted from the end (negative).
    """
    index = jnp.arange(memory.shape[axis]).reshape(-1, *(1,) * (-axis - 1))
    total = jnp.sum(jnp.where(index <= level, memory, 0), axis=axis, keepdims=True)
    return jnp.where(index == level, total, jnp.where(index > level, memory, 0))


def positions_of(
    tokens: Tokens, batch: int, length: int, count: Int[Array, ...]
) -> tuple[Array, Array, Array]:
    """Return the positions of the tokens of a call, of which only written tokens count.

    Args:
        tokens: which tokens are written, and their documents and segments.
        batch, length: B and T.
        count: [B], or [B, S] with one state per segment: how many tokens the state's document has had.

    Returns:
        [B, T], the position of the last written token before each token, -1 if there is none (any number where a
        document begins); [B, T], the position of the last written token up to and with each token; and the count
        after the call, in the shape of `count`.
    """
    written = jnp.ones((batch, length), jnp.int32)
    # Not by `cumsum`, which XLA would compute as it compiles, in seconds for each layer.
    seen = jnp.broadcast_to(jnp.arange(1, length + 1, dtype=jnp.int32), (batch, length))
    if tokens.written is not None:
        written = tokens.written.astype(jnp.int32)
        seen = jnp.cumsum(written, axis=1, dtype=jnp.int32)
    if tokens.slot is not None:
        member = tokens.slot[:, :, None] == jnp.arange(count.shape[1])
        of_state = count[:, None] + jnp.cumsum(
            member * written[:, :, None], axis=1, dtype=jnp.int32
        )
        after = jnp.take_along_axis(of_state, tokens.slot[:, :, None], axis=2)[..., 0] - 1
        return after - written, after, of_state[:, -1]
    start: Any = -count[:, None]
    if tokens.run is not None:
        begins = jnp.diff(tokens.run, axis=1, prepend=jnp.zeros_like(tokens.run[:, :1])) > 0
        latest = jax.lax.cummax(jnp.where(begins, seen - written, 0), axis=1)
        start = jnp.where(tokens.run > 0, latest, start)
    after = seen - start - 1
    return after - written, after, after[:, -1] + 1
