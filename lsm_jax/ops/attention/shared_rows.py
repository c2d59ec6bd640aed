"""Softmax attention where devices have consecutive parts of a row: every device receives all keys, and does
an equal part of the work.

Keys, values and gates are gathered (LASP-2H, arXiv 2502.07563 section 3.5). In a causal row the first
queries attend to few keys and the last queries to many. The row is therefore split into two parts per
device (n devices): device r computes the outputs of part r and of part 2n - 1 - r. It receives their
queries, and sends their outputs back. Block i of the queries of the first part is computed together with
the i-th block from the end of the other part: all such pairs attend to the same number of blocks of keys,
on every device, and no block of scores is computed that is completely masked.
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
    """The constants of softmax attention over devices that share a row: block size, window, scale and dtypes; hashable.

    Attributes:
        block: tokens in a block of queries or keys.
        state_blocks: the number of blocks of keys that come from the state and precede those of the row; a
            query may attend to any of them.
        window: the number of keys that a query may attend to, its own among them; None for all earlier ones.
        one_document: whether all tokens are written and of one document, without a state, so that a window
            contains consecutive tokens.
        scale: multiplies the scores.
        dtype: the dtype in which scores and sums are computed.
        precision: the precision of matrix products.
    """

    block: int
    state_blocks: int
    window: int | None
    one_document: bool
    scale: float
    dtype: Any
    precision: jax.lax.Precision


class Keys(NamedTuple):
    """Keys, values and, for each of their tokens, its document, rank and sum of log forget gates.

    Attributes:
        k: [B, S, G, K].
        v: [B, S, G, V].
        sums: the sums of gates, [B, S, N], or None.
        document: [B, S], as in `TokenPositions`.
        rank: [B, S], the number of written tokens of its document before the key.
        written: [B, S], whether the token of each key is neither padding nor masked.
    """

    k: Array
    v: Array
    sums: GateSum | None
    document: Array
    rank: Array
    written: Array


class Queries(NamedTuple):
    """The queries of one device, in P pairs of blocks of C tokens, with the document and the rank of each
    query.

    Attributes:
        q: [P, 2, B, C, G, R, K], R query heads for each of G memories.
        sums: the sums of log forget gates up to each query, [P, 2, B, C, N], or None.
        document: [P, 2, B, C], the index of each query's document, as in `TokenPositions`.
        rank: [P, 2, B, C], the number of written tokens of its document before the query.
    """

    q: Array
    sums: GateSum | None
    document: Array
    rank: Array


def tokens_per_device(length: int, devices: int) -> int:
    """Return the number of which a device's number of tokens must be a multiple: the tokens of two blocks,
    which are small enough that padding rows of `length` tokens to that multiple adds little.
    """
    part = max(1, length // (2 * devices))
    return 2 * min(_LARGEST_BLOCK, max(1, (1 << (part.bit_length() - 1)) // 4))


def block_size(length: int) -> int:
    """Return the number of tokens in each block of queries or keys, on a device with `length` tokens of each row, an
    even number.
    """
    part = length // 2
    return min(_LARGEST_BLOCK, part & -part)


def gather_tokens(axis: str | None, tree: Any) -> Any:
    """Gather arrays [B, T, ...] of tokens (or [B, N, ...] of chunks) from all devices that share a row, concatenated in the
    order of time; their gradients are summed and scattered. Without an axis, a device has complete rows: return the arrays.
    """
    if axis is None:
        return tree
    return jax.tree.map(lambda x: gather_along(axis, 1, x), tree)


def part_of_device(axis: str | None, length: int, tree: Any) -> Any:
    """Return this device's `length` tokens of arrays of complete rows, [B, n T, ...] -> [B, T, ...]; the arrays themselves
    without an axis.
    """
    if axis is None:
        return tree
    start = jax.lax.axis_index(axis) * length
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, length, axis=1), tree)


def run_in_shared_row(axis: str, function: Any, static: Any, **arguments: Any) -> Any:
    """Call `function` for an op whose backends compute parts of rows if the option `axis` names the mesh axis over which
    rows are split: the argument `in_sequence` of `lsm_jax.parallel.over_mesh`.
    """
    static = static._replace(options=static.options._replace(axis=axis))
    return function(static, **arguments)


def attend(axis: str, plan: Plan, q: Array, of_queries: tuple, keys: Keys) -> Array:
    """Return softmax attention's outputs for the tokens of this device, [B, T, N, V], where devices have consecutive
    parts of each row.

    Args:
        axis: the mesh axis that rows are split over.
        plan: static options.
        q: [B, T, H, K], the queries of this device.
        of_queries: (sums of gates or None, document, rank) of the complete row, each [B, n T, ...].
        keys: `plan.state_blocks` blocks from the state, and then the complete row.
    """
    devices, device = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    part = q.shape[1] // 2
    q = checks.group_queries(q, keys.v.shape[2])
    parts = jnp.stack([device, 2 * devices - 1 - device])

    def parts_of_device(x):  # [B, n T, ...] -> [2, B, T / 2, ...]
        return jnp.stack(
            [jax.lax.dynamic_slice_in_dim(x, parts[i] * part, part, axis=1) for i in range(2)]
        )

    def pair_blocks(
        x,
    ):  # [2, B, T / 2, ...] -> [P, 2, B, C, ...], the blocks of the later part in reverse order
        x = x.reshape(2, x.shape[1], -1, plan.block, *x.shape[3:])
        return jnp.moveaxis(jnp.stack([x[0], x[1][:, ::-1]]), 2, 0)

    queries = Queries(_to_pairs(axis, devices, q), *jax.tree.map(parts_of_device, of_queries))
    output = _attend(plan, devices, jax.tree.map(pair_blocks, queries), keys, device)
    output = jnp.moveaxis(output, 0, 2)
    output = jnp.stack([output[0], output[1][:, ::-1]])
    output = output.reshape(2, output.shape[1], part, *output.shape[4:])
    output = _from_pairs(axis, devices, output)
    return output.reshape(*output.shape[:2], -1, output.shape[-1])


def attend_fused(axis: str, run: Callable[[Array, Array], Array], q: Array) -> Array:
    """Return softmax attention's outputs for this device's tokens, [B, T, N, V], computed by a kernel that is
    called on two parts of the row, one early and one late, so that the causal mask leaves all devices the
    same number of scores to compute.

    Args:
        axis: the mesh axis that rows are split over.
        run: called as `run(q, starts)`, where q contains the queries of two parts of the row, one after the
            other, which begin at the tokens `starts` [2] of the row; returns their outputs.
        q: [B, T, H, K], the queries of this device.
    """
    devices, device = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    starts = jnp.stack([device, 2 * devices - 1 - device]) * (q.shape[1] // 2)
    output = run(jnp.concatenate(list(_to_pairs(axis, devices, q)), axis=1), starts)
    return _from_pairs(axis, devices, jnp.stack(jnp.split(output, 2, axis=1)))


def _routes(devices: int) -> tuple[list, list]:
    """Return the pairs (source, target) of devices between which the first and the second halves of each device's
    tokens are exchanged.

    The halves of n devices are the 2n equal parts of the row; parts p and 2n - 1 - p go to device p.
    """
    routes = [
        [(source, min(p, 2 * devices - 1 - p)) for source, p in enumerate(range(i, 2 * devices, 2))]
        for i in range(2)
    ]
    return routes[0], routes[1]


def _to_pairs(axis: str, devices: int, x: Array) -> Array:
    """Send the tokens x [B, T, ...] of each device to the devices that compute them: on device r of n return
    [2, B, T / 2, ...], parts r and 2n - 1 - r of the row's 2n equal parts.
    """
    halves = jnp.split(x, 2, axis=1)
    first, second = (
        jax.lax.ppermute(half, axis, route)
        for half, route in zip(halves, _routes(devices), strict=True)
    )
    even = jax.lax.axis_index(axis) % 2 == 0  # part r is the first half of a device's tokens
    return jnp.stack([jnp.where(even, first, second), jnp.where(even, second, first)])


def _from_pairs(axis: str, devices: int, x: Array) -> Array:
    """Exchange x [2, B, T / 2, ...] between the devices that share a row, so that each has its own T consecutive tokens
    again: [B, T, ...].

    On device r of n, x holds parts r and 2n - 1 - r of the row's 2n equal parts, as `_to_pairs` returns them.
    """
    even = jax.lax.axis_index(axis) % 2 == 0
    halves = (jnp.where(even, x[0], x[1]), jnp.where(even, x[1], x[0]))
    returned = (
        jax.lax.ppermute(half, axis, [(target, source) for source, target in route])
        for half, route in zip(halves, _routes(devices), strict=True)
    )
    return jnp.concatenate(list(returned), axis=1)


def _steps(
    plan: Plan, devices: int, pairs: int, device: Array, pair: Array
) -> tuple[Array, Array, Array]:
    """Return which products of a block of queries and a block of keys are computed, one after another, for
    the pair of query blocks with index `pair` on this device.

    Returns:
        Three arrays with an entry for each of J products: the query block's index in the pair (0 or 1), the
        index of the block of keys, and whether that block exists (none lies before the row's start).
    """
    first = device * pairs + pair  # the indices of the pair's blocks in the row
    second = 2 * devices * pairs - 1 - first
    if plan.window is not None and plan.one_document:
        count = min((plan.window - 2) // plan.block + 2, 2 * devices * pairs)  # blocks in a window
        step = jnp.arange(2 * count)
        which = (step >= count).astype(jnp.int32)
        block = jnp.where(which == 1, second, first) - (count - 1) + step % count
        return which, jnp.maximum(block, 0), block >= 0
    ends = plan.state_blocks + first + 1
    step = jnp.arange(2 * plan.state_blocks + 2 * devices * pairs + 1)
    which = (step >= ends).astype(jnp.int32)
    return which, step - which * ends, jnp.ones_like(step, bool)


def _block_of_keys(plan: Plan, keys: Keys, index: Array) -> Keys:
    """Return block number `index` of `keys`, with all of their fields, such as values and documents:
    `plan.block` consecutive tokens of the arrays [B, T, ...].
    """
    return jax.tree.map(
        lambda x: jax.lax.dynamic_slice_in_dim(x, index * plan.block, plan.block, axis=1), keys
    )


def _scores(plan: Plan, queries: Queries, keys: Keys, exists: Array) -> tuple[Array, Array]:
    """Return the attention scores of a block of C queries and a block of S keys, [B, G, R, C, S], and a mask
    that is True where the query attends to the key.
    """
    q, k = queries.q.astype(plan.dtype), keys.k.astype(plan.dtype)
    scores = plan.scale * jnp.einsum("btgrk,bsgk->bgrts", q, k, precision=plan.precision)
    if queries.sums is not None and keys.sums is not None:
        scores = scores + gate_bias(queries.sums, keys.sums).reshape(scores.shape)
    distance = queries.rank[:, :, None] - keys.rank[:, None]
    mask = (distance >= 0) & (queries.document[:, :, None] == keys.document[:, None])
    mask = mask & keys.written[:, None] & exists
    if plan.window is not None:
        mask = mask & (distance < plan.window)
    return scores, mask[:, None, None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(plan: Plan, devices: int, queries: Queries, keys: Keys, device: Array) -> Array:
    """Return the attention outputs [P, 2, B, C, G, R, V] of a device's queries, which are P pairs of blocks
    of C queries, for the keys of the complete row; the backward pass computes the scores again.
    """
    return _forward(plan, devices, queries, keys, device)[0]


def _forward(plan, devices, queries, keys, device):
    """Return the attention outputs of this device's queries, computed by a softmax with a running maximum
    over blocks of keys, and the arrays that the backward pass requires: inputs, outputs, and the logarithm of
    each query's sum of weights.
    """
    # The barrier makes masks depend on the queries. Without it jax would compute the masks of all steps
    # before the scan and store them for rematerialisation.
    queries, keys, device = jax.lax.optimization_barrier((queries, keys, device))
    pairs, _, batch, size, heads, group, _ = queries.q.shape
    rows = (2, batch, heads, group, size)

    def attend_pair(_, x):
        pair_of_queries, pair = x
        step = functools.partial(_forward_step, plan, pair_of_queries, keys)
        start = (
            jnp.full(rows, -jnp.inf, plan.dtype),
            jnp.zeros(rows, plan.dtype),
            jnp.zeros((*rows, keys.v.shape[-1]), plan.dtype),
        )
        steps = _steps(plan, devices, pairs, device, pair)
        (top, total, output), _ = jax.lax.scan(step, start, steps)
        attends = total > 0
        total = jnp.where(attends, total, 1)
        output = jnp.moveaxis(output / total[..., None], 4, 2)
        return None, (output, jnp.where(attends, top, 0) + jnp.log(total))

    _, (output, log_total) = jax.lax.scan(attend_pair, None, (queries, jnp.arange(pairs)))
    return output, (queries, keys, device, output, log_total)


def _forward_step(plan, pair_of_queries: Queries, keys: Keys, carry, step):
    """Add one block of keys to the running softmax (largest score, sum of weights, sum of weighted values) of
    one of the pair's two blocks of queries; one step of the scan over blocks of keys.
    """
    which, index, exists = step
    queries = jax.tree.map(lambda x: x[which], pair_of_queries)
    block = _block_of_keys(plan, keys, index)
    scores, mask = _scores(plan, queries, block, exists)
    top, total, output = jax.tree.map(lambda x: x[which], carry)
    new_top = jnp.maximum(top, jnp.max(jnp.where(mask, scores, -jnp.inf), axis=-1))
    base = jnp.where(jnp.isfinite(new_top), new_top, 0)
    decay = jnp.exp(top - base)
    weights = jnp.where(mask, jnp.exp(jnp.where(mask, scores - base[..., None], 0)), 0)
    weighted_values = jnp.einsum(
        "bgrts,bsgv->bgrtv", weights, block.v.astype(plan.dtype), precision=plan.precision
    )
    after = (
        new_top,
        decay * total + jnp.sum(weights, axis=-1),
        decay[..., None] * output + weighted_values,
    )
    return jax.tree.map(lambda x, y: x.at[which].set(y), carry, after), None


def _backward(plan, devices, saved, d_output):
    """Return the gradients of one device's queries and of the complete row's keys, values and sums of log
    forget gates: the backward pass of softmax attention, which computes the weights again, block by block,
    from the saved logarithm of each query's sum of weights.
    """
    queries, keys, device, output, log_total = saved
    pairs = queries.q.shape[0]
    zeros_like = functools.partial(jnp.zeros_like, dtype=plan.dtype)

    def differentiate_pair(d_keys, x):
        pair_of_queries, pair, d_output, output, log_total = x
        # The weights of a query sum to 1, so that the mean of their gradients is subtracted.
        mean = jnp.moveaxis(jnp.sum(d_output * output, axis=-1), 2, -1)
        step = functools.partial(
            _backward_step, plan, pair_of_queries, keys, d_output, log_total, mean
        )
        steps = _steps(plan, devices, pairs, device, pair)
        (d_keys, d_q), _ = jax.lax.scan(step, (d_keys, zeros_like(pair_of_queries.q)), steps)
        return d_keys, d_q

    heads = queries.q.shape[4] * queries.q.shape[5]
    start = (
        zeros_like(keys.k),
        zeros_like(keys.v),
        jnp.zeros((*keys.k.shape[:2], heads), plan.dtype),
    )
    by_pair = (queries, jnp.arange(pairs), d_output, output, log_total)
    (d_k, d_v, d_sums), d_q = jax.lax.scan(differentiate_pair, start, by_pair)
    no_gradient: Any = None
    # The queries' sums of gates have no derivative; see `gate_bias`.
    d_q_sums = None if queries.sums is None else jax.tree.map(jnp.zeros_like, queries.sums)
    return (
        Queries(d_q.astype(queries.q.dtype), d_q_sums, no_gradient, no_gradient),
        Keys(
            d_k.astype(keys.k.dtype),
            d_v.astype(keys.v.dtype),
            None if keys.sums is None else GateSum(d_sums, d_sums),
            no_gradient,
            no_gradient,
            no_gradient,
        ),
        None,
    )


def _backward_step(
    plan, pair_of_queries: Queries, keys: Keys, d_output, log_total, mean, carry, step
):
    """Add the gradients that come from one block of attention scores to the gradients of keys, values and
    sums of log forget gates, and to that of a pair of query blocks; one step of the scan over blocks of keys.
    """
    (d_keys, d_q), (which, index, exists) = carry, step
    multiply = functools.partial(jnp.einsum, precision=plan.precision)
    queries = jax.tree.map(lambda x: x[which], pair_of_queries)
    block = _block_of_keys(plan, keys, index)
    scores, mask = _scores(plan, queries, block, exists)
    weights = jnp.where(mask, jnp.exp(jnp.where(mask, scores - log_total[which][..., None], 0)), 0)
    k, v, q = (x.astype(plan.dtype) for x in (block.k, block.v, queries.q))
    d_weights = multiply("btgrv,bsgv->bgrts", d_output[which], v)
    d_scores = weights * (d_weights - mean[which][..., None])
    d_block = (
        plan.scale * multiply("bgrts,btgrk->bsgk", d_scores, q),
        multiply("bgrts,btgrv->bsgv", weights, d_output[which]),
        -jnp.moveaxis(jnp.sum(d_scores, axis=-2), -1, 1).reshape(*k.shape[:2], -1),
    )
    start = index * plan.block

    def add(total, part):
        sums = jax.lax.dynamic_slice_in_dim(total, start, plan.block, axis=1) + part
        return jax.lax.dynamic_update_slice_in_dim(total, sums, start, axis=1)

    d_keys = jax.tree.map(add, d_keys, d_block)
    d_q_block = plan.scale * multiply("bgrts,bsgk->btgrk", d_scores, k)
    return (d_keys, d_q.at[which].add(d_q_block)), None


_attend.defvjp(_forward, _backward)
