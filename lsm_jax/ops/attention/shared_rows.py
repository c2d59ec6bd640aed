"""Softmax attention where devices hold consecutive parts of a row: keys and values of all, the work shared out evenly.

Keys, values and gates are gathered (LASP-2H, arXiv 2502.07563 section 3.5). A causal row's first queries see few keys and its
last ones many, so that the row is cut into two parts a device, and device r attends for part r and for part 2n - 1 - r: those
queries come to it, and their outputs go back. Block i of the one part's queries is worked on together with the last but i of
the other's: all such pairs see equally many blocks of keys, on every device, and no block that is masked as a whole is computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lsm_jax.ops.attention.forget_gates import GateSum, gate_bias
from lsm_jax.ops.core import checks
from lsm_jax.parallel import gather_along

_LARGEST_BLOCK = 512


class Plan(NamedTuple):
    """What is known ahead of the call; hashable.

    Attributes:
        block: tokens in a block of queries or keys.
        held: blocks of keys ahead of the row's own, any of which a query may see.
        window: that of `attention`.
        whole: whether all tokens are written and of one document, none held, so that a window is one of places.
        scale: multiplies the scores.
        dtype: of scores and sums.
        precision: of products.
    """

    block: int
    held: int
    window: int | None
    whole: bool
    scale: float
    dtype: Any
    precision: jax.lax.Precision


class Keys(NamedTuple):
    """What queries meet: k [B, S, G, K], v [B, S, G, V], gates' sums [B, S, N] or None; document, rank, written [B, S]."""

    k: Array
    v: Array
    sums: GateSum | None
    document: Array
    rank: Array
    written: Array


class Queries(NamedTuple):
    """Queries in pairs of blocks: q [P, 2, B, C, G, R, K], gates' sums [P, 2, B, C, N] or None; document, rank [P, 2, B, C]."""

    q: Array
    sums: GateSum | None
    document: Array
    rank: Array


def tokens_a_device(length: int, devices: int) -> int:
    """What the number of a device's tokens must be a multiple of: two blocks, small enough that few are added to fill up."""
    part = max(1, length // (2 * devices))
    return 2 * min(_LARGEST_BLOCK, max(1, (1 << (part.bit_length() - 1)) // 4))


def block_size(length: int) -> int:
    """Tokens in a block, where a device has `length`, an even number."""
    part = length // 2
    return min(_LARGEST_BLOCK, part & -part)


def gather_tokens(axis: str, tree: Any) -> Any:
    """Arrays [B, T, ...] of all devices one after another; their gradients are summed and scattered."""
    return jax.tree.map(lambda x: gather_along(axis, 1, x), tree)


def attend(axis: str, plan: Plan, q: Array, where: tuple, keys: Keys) -> Array:
    """This device's outputs, [B, T, N, V].

    Args:
        axis: mesh axis the devices stand along.
        plan: the call.
        q: [B, T, H, K] of this device.
        where: of the whole row, [B, n T, ...]: gates' sums or None, document, rank.
        keys: `plan.held` blocks, and then the whole row.
    """
    devices, here = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    part = q.shape[1] // 2
    q = checks.group_queries(q, keys.v.shape[2])
    pair = jnp.stack([here, 2 * devices - 1 - here])

    def own(x):  # [B, n T, ...] -> [2, B, T / 2, ...]
        return jnp.stack(
            [jax.lax.dynamic_slice_in_dim(x, pair[i] * part, part, axis=1) for i in range(2)]
        )

    def cut(x):  # [2, B, T / 2, ...] -> [P, 2, B, C, ...], the later part's blocks from its end
        x = x.reshape(2, x.shape[1], -1, plan.block, *x.shape[3:])
        return jnp.moveaxis(jnp.stack([x[0], x[1][:, ::-1]]), 2, 0)

    queries = Queries(_to_pairs(axis, devices, q), *jax.tree.map(own, where))
    output = _attend(plan, devices, jax.tree.map(cut, queries), keys, here)
    output = jnp.moveaxis(output, 0, 2)
    output = jnp.stack([output[0], output[1][:, ::-1]])
    output = output.reshape(2, output.shape[1], part, *output.shape[4:])
    output = _from_pairs(axis, devices, output)
    return output.reshape(*output.shape[:2], -1, output.shape[-1])


def attend_fused(axis: str, run: Callable[[Array, Array], Array], q: Array) -> Array:
    """This device's outputs, [B, T, N, V], by a kernel: `run(q, places)` attends for two parts of the row, one after the other in q,
    that begin at tokens `places` [2]."""
    devices, here = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    places = jnp.stack([here, 2 * devices - 1 - here]) * (q.shape[1] // 2)
    output = run(jnp.concatenate(list(_to_pairs(axis, devices, q)), axis=1), places)
    return _from_pairs(axis, devices, jnp.stack(jnp.split(output, 2, axis=1)))


def _routes(devices: int) -> tuple[list, list]:
    """(from, to) of the first and of the second half of each device's tokens: of parts p and 2n - 1 - p, to device p."""
    both = [
        [(r, min(p, 2 * devices - 1 - p)) for r, p in enumerate(range(i, 2 * devices, 2))]
        for i in range(2)
    ]
    return both[0], both[1]


def _to_pairs(axis: str, devices: int, x: Array) -> Array:
    """[B, T, ...] -> [2, B, T / 2, ...]: parts r and 2n - 1 - r of the row, on device r."""
    halves = jnp.split(x, 2, axis=1)
    first, second = (
        jax.lax.ppermute(half, axis, route)
        for half, route in zip(halves, _routes(devices), strict=True)
    )
    even = jax.lax.axis_index(axis) % 2 == 0  # part r is a first half
    return jnp.stack([jnp.where(even, first, second), jnp.where(even, second, first)])


def _from_pairs(axis: str, devices: int, x: Array) -> Array:
    """The inverse of `_to_pairs`."""
    even = jax.lax.axis_index(axis) % 2 == 0
    halves = (jnp.where(even, x[0], x[1]), jnp.where(even, x[1], x[0]))
    back = (
        jax.lax.ppermute(half, axis, [(to, of) for of, to in route])
        for half, route in zip(halves, _routes(devices), strict=True)
    )
    return jnp.concatenate(list(back), axis=1)


def _steps(plan: Plan, devices: int, pairs: int, here: Array, pair: Array) -> Any:
    """Which of two blocks of queries meets which block of keys, [J] each: (which, block of keys, whether there is one)."""
    first = here * pairs + pair  # the blocks' numbers in the row
    second = 2 * devices * pairs - 1 - first
    if plan.window is not None and plan.whole:
        reach = min((plan.window - 2) // plan.block + 2, 2 * devices * pairs)
        step = jnp.arange(2 * reach)
        which = (step >= reach).astype(jnp.int32)
        block = jnp.where(which == 1, second, first) - (reach - 1) + step % reach
        return which, jnp.maximum(block, 0), block >= 0
    ends = plan.held + first + 1
    step = jnp.arange(2 * plan.held + 2 * devices * pairs + 1)
    which = (step >= ends).astype(jnp.int32)
    return which, step - which * ends, jnp.ones_like(step, bool)


def _block(plan: Plan, keys: Keys, index: Array) -> Keys:
    """The block of keys of that number."""
    return jax.tree.map(
        lambda x: jax.lax.dynamic_slice_in_dim(x, index * plan.block, plan.block, axis=1), keys
    )


def _scores(plan: Plan, queries: Queries, keys: Keys, there: Array) -> tuple[Array, Array]:
    """Scores of a block of queries (its two leading axes gone) with one of keys, and which are seen: [B, G, R, C, S]."""
    q, k = queries.q.astype(plan.dtype), keys.k.astype(plan.dtype)
    scores = plan.scale * jnp.einsum("btgrk,bsgk->bgrts", q, k, precision=plan.precision)
    if queries.sums is not None and keys.sums is not None:
        scores = scores + gate_bias(queries.sums, keys.sums).reshape(scores.shape)
    distance = queries.rank[:, :, None] - keys.rank[:, None]
    seen = (distance >= 0) & (queries.document[:, :, None] == keys.document[:, None])
    seen = seen & keys.written[:, None] & there
    if plan.window is not None:
        seen = seen & (distance < plan.window)
    return scores, seen[:, None, None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(plan: Plan, devices: int, queries: Queries, keys: Keys, here: Array) -> Array:
    """Pairs of blocks of queries -> their outputs [P, 2, B, C, G, R, V]; the scores are computed again backward."""
    return _forward(plan, devices, queries, keys, here)[0]


def _forward(plan, devices, queries, keys, here):
    """`_attend` with a running maximum, and what its backward pass needs."""
    # As one: masks need no queries, and jax would make those of all steps ahead and keep them for rematerialisation.
    queries, keys, here = jax.lax.optimization_barrier((queries, keys, here))
    pairs, _, batch, size, heads, group, _ = queries.q.shape
    rows = (2, batch, heads, group, size)

    def of_pair(_, x):
        both, pair = x

        def meet(carry, step):
            which, index, there = step
            asked, met = jax.tree.map(lambda x: x[which], both), _block(plan, keys, index)
            scores, seen = _scores(plan, asked, met, there)
            top, total, output = jax.tree.map(lambda x: x[which], carry)
            new = jnp.maximum(top, jnp.max(jnp.where(seen, scores, -jnp.inf), axis=-1))
            base = jnp.where(jnp.isfinite(new), new, 0)
            shrink = jnp.exp(top - base)
            weights = jnp.where(seen, jnp.exp(jnp.where(seen, scores - base[..., None], 0)), 0)
            read = jnp.einsum(
                "bgrts,bsgv->bgrtv", weights, met.v.astype(plan.dtype), precision=plan.precision
            )
            after = (
                new,
                shrink * total + jnp.sum(weights, axis=-1),
                shrink[..., None] * output + read,
            )
            return jax.tree.map(lambda x, y: x.at[which].set(y), carry, after), None

        start = (
            jnp.full(rows, -jnp.inf, plan.dtype),
            jnp.zeros(rows, plan.dtype),
            jnp.zeros((*rows, keys.v.shape[-1]), plan.dtype),
        )
        steps = _steps(plan, devices, pairs, here, pair)
        (top, total, output), _ = jax.lax.scan(meet, start, steps)
        some = total > 0
        total = jnp.where(some, total, 1)
        output = jnp.moveaxis(output / total[..., None], 4, 2)
        return None, (output, jnp.where(some, top, 0) + jnp.log(total))

    _, (output, log_total) = jax.lax.scan(of_pair, None, (queries, jnp.arange(pairs)))
    return output, (queries, keys, here, output, log_total)


def _backward(plan, devices, saved, grad):
    """Gradients of queries and keys, block by block, from the saved logarithm of each row's total."""
    queries, keys, here, output, log_total = saved
    pairs = queries.q.shape[0]
    wide = functools.partial(jnp.zeros_like, dtype=plan.dtype)
    multiply = functools.partial(jnp.einsum, precision=plan.precision)

    def of_pair(of_keys, x):
        both, pair, grad, output, log_total = x
        # A row's weights sum to one, so that what all scores would move by alike is left out.
        common = jnp.moveaxis(jnp.sum(grad * output, axis=-1), 2, -1)

        def meet(carry, step):
            of_keys, of_queries = carry
            which, index, there = step
            asked, met = jax.tree.map(lambda x: x[which], both), _block(plan, keys, index)
            scores, seen = _scores(plan, asked, met, there)
            weights = jnp.where(
                seen, jnp.exp(jnp.where(seen, scores - log_total[which][..., None], 0)), 0
            )
            k, v, q = (x.astype(plan.dtype) for x in (met.k, met.v, asked.q))
            of_weights = multiply("btgrv,bsgv->bgrts", grad[which], v)
            of_scores = weights * (of_weights - common[which][..., None])
            of_block = (
                plan.scale * multiply("bgrts,btgrk->bsgk", of_scores, q),
                multiply("bgrts,btgrv->bsgv", weights, grad[which]),
                -jnp.moveaxis(jnp.sum(of_scores, axis=-2), -1, 1).reshape(*k.shape[:2], -1),
            )
            start = index * plan.block

            def add(total, part):
                own = jax.lax.dynamic_slice_in_dim(total, start, plan.block, axis=1)
                return jax.lax.dynamic_update_slice_in_dim(total, own + part, start, axis=1)

            of_keys = jax.tree.map(add, of_keys, of_block)
            more = plan.scale * multiply("bgrts,bsgk->btgrk", of_scores, k)
            return (of_keys, of_queries.at[which].add(more)), None

        steps = _steps(plan, devices, pairs, here, pair)
        (of_keys, of_queries), _ = jax.lax.scan(meet, (of_keys, wide(both.q)), steps)
        return of_keys, of_queries

    heads = queries.q.shape[4] * queries.q.shape[5]
    start = (wide(keys.k), wide(keys.v), jnp.zeros((*keys.k.shape[:2], heads), plan.dtype))
    given = (queries, jnp.arange(pairs), grad, output, log_total)
    (of_k, of_v, of_sums), of_q = jax.lax.scan(of_pair, start, given)
    no_grad: Any = None
    sums = None if keys.sums is None else GateSum(of_sums, of_sums)
    # The queries' gates have no derivative; see `gate_bias`.
    none = None if queries.sums is None else jax.tree.map(jnp.zeros_like, queries.sums)
    return (
        Queries(of_q.astype(queries.q.dtype), none, no_grad, no_grad),
        Keys(of_k.astype(keys.k.dtype), of_v.astype(keys.v.dtype), sums, no_grad, no_grad, no_grad),
        None,
    )


_attend.defvjp(_forward, _backward)
