"""Sums of a document's log forget gates, each a pair of numbers, so that their differences keep their digits at any length.

Forget-gated attention adds `F_i - F_j` to the score of query i and key j, F the sum of log gates up to and with a token. After
65,536 gates near 0.5 F is -45,000, where float32 numbers lie 0.004 apart: the difference of two would be wrong by as much. What
an addition rounds off is known exactly (D. Knuth, TAOCP 4.2.2), and kept beside the sum.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lsm_jax.ops.core.segments import Tokens, select
from lsm_jax.ops.core.states import associative_scan


class GateSum(NamedTuple):
    """A sum of log gates, `high + low`.

    Attributes:
        high: its nearest number.
        low: what that leaves over.
    """

    high: Float[Array, ...]
    low: Float[Array, ...]


@jax.custom_jvp
def add_sums(a: GateSum, b: GateSum) -> GateSum:
    """a + b; all of the derivative goes to `high`, since only `high + low` has a meaning."""
    rough = a.high + b.high
    of_b = rough - a.high
    left_over = (a.high - (rough - of_b)) + (b.high - of_b)
    low = left_over + (a.low + b.low)
    high = rough + low
    return GateSum(high, low - (high - rough))


@add_sums.defjvp
def _add_sums_jvp(primals, tangents):
    a, b = tangents
    change = (a.high + a.low) + (b.high + b.low)
    return add_sums(*primals), GateSum(change, jnp.zeros_like(change))


def gate_bias(queries: GateSum, keys: GateSum) -> Float[Array, "B N T S"]:
    """`F_i - F_j` for queries [B, T, N] and keys [B, S, N].

    The queries' side gets no derivative: it moves all scores of a row alike, and the softmax with them not at all, but what
    would be left of it by rounding adds up over the tokens before.
    """
    queries = jax.lax.stop_gradient(queries)
    high, low = (
        jnp.swapaxes(q, 1, 2)[..., None] - jnp.swapaxes(k, 1, 2)[:, :, None]
        for q, k in zip(queries, keys, strict=True)
    )
    return high + low


def sum_gates(log_forget: Float[Array, "B T N"], tokens: Tokens, initial: GateSum) -> GateSum:
    """The sum of its document's log gates up to and with each token, [B, T, N]; a token that is not written adds nothing.

    Args:
        log_forget: [B, T, N].
        tokens: which tokens write, and where documents begin.
        initial: [B, N], or [B, S, N] with one state a segment: the sum before the call.
    """
    gates = select(tokens.written, log_forget.astype(initial.high.dtype))
    if tokens.slot is not None:
        slots = jnp.arange(initial.high.shape[1])
        own = (tokens.slot[:, :, None] == slots)[..., None]
        gates = jnp.where(own, gates[:, :, None], 0)
    first = GateSum(gates[:, :1], jnp.zeros_like(gates[:, :1]))
    first = add_sums(jax.tree.map(lambda x: x[:, None], initial), first)
    rest = GateSum(gates[:, 1:], jnp.zeros_like(gates[:, 1:]))
    if tokens.run is None:
        begins = None
    else:
        before = jnp.concatenate([jnp.zeros_like(tokens.run[:, :1]), tokens.run[:, :-1]], axis=1)
        begins = (tokens.run > before)[..., None]
        first = GateSum(
            jnp.where(begins[:, :1], gates[:, :1], first.high),
            jnp.where(begins[:, :1], 0, first.low),
        )

    def combine(earlier, later):
        total = add_sums(earlier[0], later[0])
        if begins is None:
            return total, None
        total = jax.tree.map(lambda own, both: jnp.where(later[1], own, both), later[0], total)
        return total, earlier[1] | later[1]

    sums = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), first, rest)
    sums, _ = associative_scan(combine, (sums, begins))
    if tokens.slot is None:
        return sums
    index = tokens.slot[:, :, None, None]
    return jax.tree.map(lambda x: jnp.take_along_axis(x, index, axis=2)[:, :, 0], sums)
