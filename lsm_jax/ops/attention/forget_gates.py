"""Sums of a document's log forget gates, each stored as two numbers, so that their differences are exact at
any length.

Forgetting attention adds `F_i - F_j` to the score of query i and key j, where F is the inclusive sum of log
gates. After 65,536 gates near 0.5, F is -45,000, where adjacent float32 numbers differ by 0.004: the
difference of two sums would have an error of that size. The rounding error of an addition can be computed
exactly (D. Knuth, TAOCP 4.2.2), and is stored with the sum.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lsm_jax.ops.core.chunk_scans import associative_scan
from lsm_jax.ops.core.segments import Tokens, select


class GateSum(NamedTuple):
    """A sum of log forget gates along a document, stored as `high + low` so that long sums lose no precision.

    Attributes:
        high: the sum, rounded.
        low: the rounding error.
    """

    high: Float[Array, ...]
    low: Float[Array, ...]


@jax.custom_jvp
def add_sums(a: GateSum, b: GateSum) -> GateSum:
    """Add two sums of log forget gates, each stored as a rounded number `high` and its rounding error `low`.

    The derivative is that of `high` alone, since only `high + low` has a meaning.
    """
    rounded = a.high + b.high
    added = rounded - a.high  # the part of b.high that the rounded sum contains
    error = (a.high - (rounded - added)) + (b.high - added)
    low = error + (a.low + b.low)
    high = rounded + low
    return GateSum(high, low - (high - rounded))


@add_sums.defjvp
def _add_sums_jvp(primals, tangents):
    a, b = tangents
    change = (a.high + a.low) + (b.high + b.low)
    return add_sums(*primals), GateSum(change, jnp.zeros_like(change))


def gate_bias(queries: GateSum, keys: GateSum) -> Float[Array, "B N T S"]:
    """Return what forget gates add to the attention scores, `F_i - F_j`: the sum of log gates after key j up to query
    i, for queries [B, T, N] and keys [B, S, N].

    The queries' sums have no derivative. They change all scores of a query by the same number, so that the
    exact derivative of the softmax is 0; the rounding errors of a computed one would accumulate over all
    earlier tokens.
    """
    queries = jax.lax.stop_gradient(queries)
    high, low = (
        jnp.swapaxes(q, 1, 2)[..., None] - jnp.swapaxes(k, 1, 2)[:, :, None]
        for q, k in zip(queries, keys, strict=True)
    )
    return high + low


def sum_gates(log_forget: Float[Array, "B T N"], tokens: Tokens, initial: GateSum) -> GateSum:
    """Return the sum of the log forget gates of each token's document up to the token itself, [B, T, N]; a
    token that is not written adds 0.

    Args:
        log_forget: [B, T, N], the logarithm of each forget gate.
        tokens: which tokens write, and where documents begin.
        initial: [B, N], or [B, S, N] with one state per segment: the sum over the document's tokens before
            the call.
    """
    gates = select(tokens.written, log_forget.astype(initial.high.dtype))
    if tokens.slot is not None:
        slots = jnp.arange(initial.high.shape[1])
        member = (tokens.slot[:, :, None] == slots)[..., None]
        gates = jnp.where(member, gates[:, :, None], 0)
    first = GateSum(gates[:, :1], jnp.zeros_like(gates[:, :1]))
    first = add_sums(jax.tree.map(lambda x: x[:, None], initial), first)
    rest = GateSum(gates[:, 1:], jnp.zeros_like(gates[:, 1:]))
    if tokens.run is None:
        starts = None
    else:
        before = jnp.concatenate([jnp.zeros_like(tokens.run[:, :1]), tokens.run[:, :-1]], axis=1)
        starts = (tokens.run > before)[..., None]
        first = GateSum(
            jnp.where(starts[:, :1], gates[:, :1], first.high),
            jnp.where(starts[:, :1], 0, first.low),
        )

    def combine(earlier, later):
        total = add_sums(earlier[0], later[0])
        if starts is None:
            return total, None
        total = jax.tree.map(lambda a, b: jnp.where(later[1], a, b), later[0], total)
        return total, earlier[1] | later[1]

    sums = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), first, rest)
    sums, _ = associative_scan(combine, (sums, starts))
    if tokens.slot is None:
        return sums
    index = tokens.slot[:, :, None, None]
    return jax.tree.map(lambda x: jnp.take_along_axis(x, index, axis=2)[:, :, 0], sums)
