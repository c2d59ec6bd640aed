"""Decayed products inside a chunk, exact for decays of any strength and causal to the bit.

A chunk is halved repeatedly, down to single tokens. For two neighbouring blocks A and B of tokens, the score
of token i of B and token j of A is decayed by `exp(decay from j to the end of A) * exp(decay from the start
of B to i)`. Both factors are at most 1, so that nothing overflows; both are sums of non-positive numbers, so
that nothing cancels; and neither depends on a token after i.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lsm_jax.ops.core.segments import Tokens


def forget(memory: Array, log_decay: Array) -> Array:
    """Return the decayed memory, `exp(log_decay) * memory`, computed as `memory + expm1(log_decay) * memory`
    if the decay is slow.

    `exp` of a number near 0 keeps few of its digits: a constant decay would be rounded to another decay, the
    same at every step.
    """
    slow = memory + jnp.expm1(log_decay) * memory
    return jnp.where(log_decay > -0.5, slow, jnp.exp(log_decay) * memory)


class Halving(NamedTuple):
    """Partial sums of a chunk's log decay [..., C, K] over halves, quarters and so on, from which the decays between
    its tokens are computed.

    Attributes:
        levels: for blocks of n = 1, 2, 4, ... tokens, a pair of arrays [..., C / (2n), n, K]: the sums from
            the start of each right block to each of its tokens, and the sums after each token of a left block
            to the block's end.
        prefix: [..., C, K], the sums from the chunk's start to each token (without the token itself if
            `exclusive`).
        suffix: [..., C, K], the sums after each token to the chunk's end.
        total: [..., K], the sum over the chunk.
    """

    levels: tuple[tuple[Array, Array], ...]
    prefix: Array
    suffix: Array
    total: Array


def pair_blocks(x: Array) -> tuple[Array, Array]:
    """Return the left and the right blocks of all pairs of neighbouring blocks, each [..., M / 2, n, *], for
    M blocks of n tokens in x [..., M, n, *].
    """
    x = x.reshape(*x.shape[:-3], x.shape[-3] // 2, 2, *x.shape[-2:])
    return x[..., 0, :, :], x[..., 1, :, :]


def _join_pairs(left: Array, right: Array) -> Array:
    return jnp.concatenate([left, right], axis=-2)


def halve(log_decay: Float[Array, "... C K"], *, exclusive: bool = False) -> Halving:
    """Return the sums of a chunk's log decay over its halves, quarters, and so on, at every level of the halving, from
    which all decays between its tokens are computed. The chunk's C is a power of two.
    """
    total = log_decay[..., None, :]  # [..., C, 1, K]: blocks of one row
    suffix = jnp.zeros_like(total)
    prefix = suffix if exclusive else total
    levels = []
    while prefix.shape[-3] > 1:
        prefix_left, prefix_right = pair_blocks(prefix)
        suffix_left, suffix_right = pair_blocks(suffix)
        total_left, total_right = pair_blocks(total)
        levels.append((prefix_right, suffix_left))
        prefix = _join_pairs(prefix_left, prefix_right + total_left)
        suffix = _join_pairs(suffix_left + total_right, suffix_right)
        total = total_left + total_right
    return Halving(tuple(levels), prefix[..., 0, :, :], suffix[..., 0, :, :], total[..., 0, 0, :])


def blocks_of(x: Array, size: int) -> Array:
    """Cut the C tokens of a chunk [..., C, K] into blocks of `size` consecutive tokens, [..., C / size, size, K]."""
    return x.reshape(*x.shape[:-2], -1, size, x.shape[-1])


def channel_scores(q: Array, k: Array, halving: Halving, diagonal: Array, precision) -> Array:
    """Return the decayed scores of a chunk's queries and keys, [..., C, C]: at (i, j) `sum_c q_ic k_jc
    exp(decay_c from j to i)` for j < i, `diagonal` [..., C] at (i, i), and 0 above. `halving` contains the
    sums of the log decay of each key channel.
    """

    def meet(level: int, prefix: Array, suffix: Array) -> Array:
        _, q_right = pair_blocks(blocks_of(q, 2**level))
        k_left, _ = pair_blocks(blocks_of(k, 2**level))
        later, earlier = q_right * jnp.exp(prefix), k_left * jnp.exp(suffix)
        return jnp.einsum("...ic,...jc->...ij", later, earlier, precision=precision)

    return _assemble(halving, diagonal, meet)


def pairwise_decay(halving: Halving, *, exclusive: bool = False) -> Array:
    """Return the decay between every two tokens of a chunk, [..., C, C]: at (i, j) the exponential of the sum
    of the log decays after token j up to token i if j < i; 0 above the diagonal, and 1 on it (0 if
    `exclusive`).

    Args:
        halving: the sums of the log decay of one channel (K = 1), from `halve`.
        exclusive: whether these sums exclude token i's own log decay, as with `halve(..., exclusive=True)`.
    """
    diagonal = jnp.full(halving.prefix.shape[:-1], 0.0 if exclusive else 1.0, halving.prefix.dtype)

    def meet(_, prefix: Array, suffix: Array) -> Array:
        return jnp.exp(prefix) * jnp.swapaxes(jnp.exp(suffix), -1, -2)

    return _assemble(halving, diagonal, meet)


def pairwise_log_decay(halving: Halving) -> Array:
    """Return the log decay between every two tokens of a chunk, [..., C, C]: at (i, j) the sum of the log
    decays after token j up to token i if j < i, else 0. `halving` contains the sums of one channel (K = 1),
    from `halve`.
    """

    def meet(_, prefix: Array, suffix: Array) -> Array:
        return prefix + jnp.swapaxes(suffix, -1, -2)

    return _assemble(halving, jnp.zeros_like(halving.prefix[..., 0]), meet)


def _assemble(halving: Halving, diagonal: Array, meet) -> Array:
    """Assemble a lower-triangular matrix [..., C, C] of the pairs of a chunk's tokens from its `diagonal`
    [..., C] and the blocks below it. `meet` returns the blocks of one level of the halving, from the level's
    index and its sums of log decay.
    """
    lower = diagonal[..., None, None]
    for level, (prefix, suffix) in enumerate(halving.levels):
        off = meet(level, prefix, suffix)
        left, right = pair_blocks(lower)
        top = jnp.concatenate([left, jnp.zeros_like(left)], axis=-1)
        off = jnp.broadcast_to(off, right.shape)
        lower = jnp.concatenate([top, jnp.concatenate([off, right], axis=-1)], axis=-2)
    return lower[..., 0, :, :]


@jax.custom_vjp
def inverse_unit_lower(lower: Float[Array, "... C C"]) -> Float[Array, "... C C"]:
    """Return the inverse of I + L for strictly lower triangular matrices L [..., C, C], computed by blocks of
    doubling size; C is a power of two.

    Two blocks are joined by `[[A, 0], [X, B]]^-1 = [[A^-1, 0], [-B^-1 X A^-1, B^-1]]`. A Neumann series would
    sum powers of L, which grow without bound for correlated keys.
    """
    size = lower.shape[-1]
    inverse = jnp.ones((*lower.shape[:-1], 1, 1), lower.dtype)
    block = 1
    while block < size:
        pairs = size // (2 * block)
        tiles = lower.reshape(*lower.shape[:-2], pairs, 2, block, pairs, 2, block)
        tiles = jnp.diagonal(tiles[..., :, 1, :, :, 0, :], axis1=-4, axis2=-2)
        off = jnp.moveaxis(tiles, -1, -3)
        left, right = pair_blocks(inverse)
        corner = -jnp.matmul(
            right,
            jnp.matmul(off, left, precision=jax.lax.Precision.HIGHEST),
            precision=jax.lax.Precision.HIGHEST,
        )
        top = jnp.concatenate([left, jnp.zeros_like(corner)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([corner, right], axis=-1)], axis=-2)
        block *= 2
    return inverse[..., 0, :, :]


def _inverse_forward(lower):
    inverse = inverse_unit_lower(lower)
    return inverse, inverse


def _inverse_backward(inverse, grad):
    transposed = jnp.swapaxes(inverse, -1, -2)
    highest = jax.lax.Precision.HIGHEST
    grad = jnp.matmul(
        transposed, jnp.matmul(grad, transposed, precision=highest), precision=highest
    )
    return (-jnp.tril(grad, -1),)


inverse_unit_lower.defvjp(_inverse_forward, _inverse_backward)


def split_constant(log_decay: Array | None) -> tuple[Array | None, Array | None]:
    """Sort a log decay by whether it changes with the token: return (log decay of each token, None) or (None, constant
    log decay of each memory [G]).
    """
    constant = log_decay is not None and jnp.ndim(log_decay) == 1
    return (None, log_decay) if constant else (log_decay, None)


def spread_constant(
    log_decay: Array | None, constant: Array | None, tokens: Tokens, v: Array, dtype: Any
) -> Any:
    """Return the log decay of each token, [B or 1, T, G, ...], from the two results of `split_constant`: the
    log decay that changes with the token, or the constant one [G] repeated for all tokens; None if both are
    None.
    """
    if constant is None:
        return log_decay
    # One row is enough, unless rows differ in which tokens write.
    rows = 1 if tokens.written is None and tokens.slot is None else v.shape[0]
    return jnp.broadcast_to(constant.astype(dtype), (rows, *v.shape[1:3]))
