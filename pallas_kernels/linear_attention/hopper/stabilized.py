"""Memories with exponential input gates and a normaliser (mLSTM) on Mosaic GPU (Hopper), by exact scans of a scalar decay.

With the stabiliser m, which the caller computes, the stored memory M = e^-m C and its normaliser n = e^-m sum of decayed keys follow

    M_t = e^d_t M_{t-1} + e^w_t k_tᵀ v_t,    d_t = log f_t + m_{t-1} - m_t <= 0,    w_t = log i_t - m_t <= 0,

(both up to the rounding of m), which is what `scalar_scan` computes with factors of writes; n is the memory of values that are 1 in one of 64
columns. The output is h = q M / (max(|q n|, e^-m) + eps) (xLSTM, arXiv 2405.04517 Eqs. 15 and 19-21). It divides by what q n cancels to, so that
a rounding of weights or memories would be amplified: the scans are exact (`scalar_columns`), and inputs are the only numbers of bfloat16. Operands
have two terms, and those of q n three: where q n is a 2,500th of its terms, two leave an error of 3e-3 in h.

In the backward pass the gradient of q M is g = dh / (max(|q n|, e^-m) + eps), rounded to bfloat16, and that of q n, -(h . g) sign(q n), is
computed from the rounded g, so that what a change of M and n in proportion does to h is 0, as it must be; but see `_share_of_rounding`. The
product h . g has three terms of bfloat16 in three columns, whose values are 1. The gradients of the gates hold C fixed rather than M: e^m C does not depend on m, so that the
gradient of m itself is only that of eps, and of the final memories.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper import row_layout
from pallas_kernels.linear_attention.hopper.exact_decays import exact_decays
from pallas_kernels.linear_attention.hopper.scalar_decay import (
    CHUNK,
    SIZES,
    interval_ends,
    rows_decay_gradient,
)
from pallas_kernels.linear_attention.hopper.scalar_plan import BLOCK, Decays
from pallas_kernels.linear_attention.hopper.scalar_scan import scalar_scan
from pallas_kernels.memory_calls import in_bfloat16, key_dims, value_dims

__all__ = ["CHUNK", "NEVER", "REQUIREMENTS", "Initial", "Residuals", "backward", "forward"]

NEVER = -1e30
"""The logarithm of a closed gate: finite, so that differences are finite."""
_MOST = 2.0**-8  # the largest logarithm of a factor: what rounding of the stabiliser adds to 0
REQUIREMENTS = in_bfloat16("q", "k", "v"), key_dims(*SIZES), value_dims(*SIZES)
_NORMALIZER_TERMS = 3  # of bfloat16 in the operands of the scan that computes q n
_F32 = jnp.float32


class Initial(NamedTuple):
    """The state before the first token: the memory [B, G, K, V] and the normaliser [B, G, K], both divided by the exponential of the stabiliser
    [B, G]; in float32."""

    memory: jax.Array
    normalizer: jax.Array
    stabilizer: jax.Array


class Residuals(NamedTuple):
    """The arrays that `forward` saves for `backward`.

    Attributes:
        decay: the decays of all tokens and chunks, with factors of writes.
        h: [B, T, H, V] float32, the output.
        product: [B, T, H] float32, each query's product with the normaliser.
        ends: [B, H, K, V] float32, the final memory of each head.
        normalizer_ends: [B, H, K] float32, its normaliser.
    """

    decay: Decays
    h: jax.Array
    product: jax.Array
    ends: jax.Array
    normalizer_ends: jax.Array


def forward(
    q, k, v, log_decay, log_input_gate, m, run, initial: Initial | None, *, scale: float, eps: float, interpret: Any = False
) -> tuple[jax.Array, jax.Array, jax.Array, Residuals]:  # fmt: skip
    """Compute memories with exponential input gates. Return the output [B, T, H, V] in float32, the final memories [B, G, K, V] and normalisers
    [B, G, K], and the residuals.

    The arguments are those of `stabilized_attention`, with T a multiple of `CHUNK`.
    """
    heads, memories = max(q.shape[2], v.shape[2]), v.shape[2]
    kept, written = _factors(log_decay, log_input_gate, m, run, initial)
    decay = exact_decays(kept, written, run)
    options: dict[str, Any] = dict(
        decay=decay, heads=heads, read_scale=scale, terms=2, interpret=interpret
    )
    starts, normalizer_starts = _starts(initial, heads)
    if normalizer_starts is not None:
        normalizer_starts = _in_columns(normalizer_starts[..., None])
    output, ends = scalar_scan(q, k, v, initial=starts, **options)
    ones = _in_columns(jnp.ones((*v.shape[:2], 1, 1), v.dtype))
    options |= dict(terms=_NORMALIZER_TERMS)
    product, normalizer_ends = scalar_scan(q, k, ones, initial=normalizer_starts, **options)
    product, normalizer_ends = product[..., 0], normalizer_ends[..., 0]
    factor, _ = _divisors(product, m, eps)
    h = output * factor[..., None]
    final = ends[:, :: heads // memories], normalizer_ends[:, :: heads // memories]
    return h, *final, Residuals(decay, h, product, ends, normalizer_ends)


def backward(
    q, k, v, log_decay, log_input_gate, m, run, initial: Initial | None, residuals: Residuals, d_output, d_memory, d_normalizer, *,
    scale: float, eps: float, interpret: Any = False,
):  # fmt: skip
    """Return the gradients of q, k, v, log_decay, log_input_gate, m and initial.

    The arguments are those of `forward`, its residuals, and the gradients of the output, the final memories and the final normalisers, of which
    None are 0.
    """
    decay, h, product, ends, normalizer_ends = residuals
    batch, length, memories, _ = v.shape
    heads = h.shape[2]
    factor, above = _divisors(product, m, eps)
    unrounded = d_output.astype(_F32) * factor[..., None]
    g = unrounded.astype(q.dtype)
    along = jnp.sum(h * unrounded, axis=-1)  # h . g
    added = jnp.sum(h * (g.astype(_F32) - unrounded), axis=-1) * _share_of_rounding(h, v)
    d_product = jnp.where(above, -(along + added) * jnp.sign(product), 0)
    d_product = _in_columns(_three_terms(d_product))
    ones = _in_columns(jnp.ones((batch, length, 1, 3), v.dtype))

    starts, normalizer_starts = _starts(initial, heads)
    d_ends = _by_head(d_memory, heads)
    d_normalizer_ends = _by_head(d_normalizer, heads)
    at_end = jnp.zeros((batch, heads), _F32)
    if d_ends is not None:
        at_end += jnp.sum(ends * d_ends, (-1, -2))
    if d_normalizer_ends is not None:
        at_end += jnp.sum(normalizer_ends * d_normalizer_ends, -1)
        d_normalizer_ends = _in_columns(d_normalizer_ends[..., None])
    if normalizer_starts is not None:
        normalizer_starts = _in_columns(jnp.repeat(normalizer_starts[..., None], 3, axis=-1))

    options: dict[str, Any] = dict(decay=decay, heads=heads, terms=2, interpret=interpret)
    later: dict[str, Any] = options | dict(write_scale=scale, reverse=True)
    options |= dict(read_scale=scale, partner=q, save_states=True)
    dq, _, q_dots, states = scalar_scan(g, v, k, initial=_transposed(starts), **options)
    more, _, more_dots, normalizers = scalar_scan(
        d_product, ones, k, initial=_transposed(normalizer_starts), **options
    )
    dq, q_dots = dq + more, _added(q_dots, more_dots)
    dv, d_starts = scalar_scan(k, q, g, initial=d_ends, **later)
    later |= dict(partner=k)
    dk, _, k_dots, products = scalar_scan(
        v, g, q, initial=_transposed(d_ends), states=states, **later
    )
    more, d_normalizer_starts, more_dots, more_products = scalar_scan(
        ones, d_product, q, initial=_transposed(d_normalizer_ends), states=normalizers, **later
    )
    dk, k_dots = dk + more, _added(k_dots, more_dots)
    products = jnp.sum(products, (2, -1)) + jnp.sum(more_products, (2, -1))

    def by_memory(x):  # [B, heads, *] -> [B, G, *]
        return row_layout.sum_heads(x, memories, axis=1)

    at_ends = interval_ends(at_end[..., None], products, None)
    d_decay = rows_decay_gradient(by_memory(q_dots - k_dots), by_memory(at_ends), run)
    if run is not None:  # the first token of a document decays nothing
        d_decay = jnp.where(_begins(run)[..., None], 0, d_decay)
    d_gate = jnp.moveaxis(by_memory(k_dots), 1, 2)
    d_m = row_layout.sum_heads(-eps * along, memories)
    d_m = d_m.at[:, -1].add(-by_memory(at_end))
    d_initial = None
    if initial is not None:
        d_memory = by_memory(d_starts)
        d_normalizer = by_memory(jnp.sum(d_normalizer_starts[:, :, :3], axis=2))
        d_stabilizer = jnp.sum(d_memory * initial.memory, (-1, -2))
        d_stabilizer += jnp.sum(d_normalizer * initial.normalizer, -1)
        d_initial = Initial(d_memory, d_normalizer, d_stabilizer)
    of_tokens = (
        row_layout.sum_heads(d, x.shape[2]).astype(x.dtype) for d, x in ((dq, q), (dk, k), (dv, v))
    )
    return *of_tokens, d_decay, d_gate, d_m, d_initial


def _factors(log_decay, log_input_gate, m, run, initial: Initial | None):
    """Return the logarithms of the factors by which the stored memory decays before each token, and by which the token writes, [B, T, G].

    Where m is rounded, a logarithm may be above 0 by as much: a limit of 0 would keep only the errors below it, which then add up over tokens.
    An m of more than 2^15, whose steps are above 2^-8, is no sum of gates but a decay that empties the memory: there the limit prevents an overflow.
    """
    first = jnp.zeros_like(m[:, 0]) if initial is None else initial.stabilizer
    before = jnp.concatenate([first[:, None], m[:, :-1]], axis=1)
    if run is not None:
        before = jnp.where(_begins(run)[..., None], 0, before)
    return jnp.minimum(log_decay + (before - m), _MOST), jnp.minimum(log_input_gate - m, _MOST)


def _begins(run):
    """Return which tokens are the first of a document that begins in this call, [B, T]."""
    return jnp.diff(run, axis=1, prepend=jnp.zeros_like(run[:, :1])) > 0


def _divisors(product, m, eps: float):
    """Return the factor of q M in the output, 1 / (max(|q n|, e^-m) + eps), and whether |q n| is the larger of the two, [B, T, H], from q n
    [B, T, H] and m [B, T, G]. If m < 0, numerator and denominator are multiplied by e^m, so that nothing overflows.
    """
    m = jnp.repeat(m, product.shape[2] // m.shape[2], axis=2)
    factor, floor = jnp.exp(jnp.minimum(m, 0)), jnp.exp(-jnp.maximum(m, 0))
    size = factor * jnp.abs(product)
    return factor / (jnp.maximum(size, floor) + eps * factor), size > floor


def _share_of_rounding(h, v):
    """Return, for each row of h [B, T, H, V], the share [B, T, H] of the rounding error of g that the gradient of q n is to have, too.

    A rounding error e of g changes the gradients of k and q by sums of e . (v_j - h): with the same share in both, what v_j and h have in common
    cancels. So it is 1 where h can be a mean of values; where |h| is larger than all |v|, since q n cancels, e . h would be the larger error.
    """
    longest = jnp.max(jnp.sum(jnp.square(v.astype(_F32)), axis=-1), axis=1, keepdims=True)
    longest = jnp.repeat(longest, h.shape[2] // v.shape[2], axis=2)
    length = jnp.sum(jnp.square(h), axis=-1)
    return jnp.where(length > longest, longest / jnp.maximum(length, longest), 1)


def _in_columns(x):
    """Return x [..., n] with columns of zeros appended, [..., 64]."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, BLOCK - x.shape[-1])])


def _three_terms(x):
    """Return x [..., ] float32 as the sum of three numbers of bfloat16, [..., 3]."""
    terms = []
    for _ in range(3):
        terms.append(lax.reduce_precision(x, 8, 7))
        x = x - terms[-1]
    return jnp.stack(terms, axis=-1).astype(jnp.bfloat16)


def _starts(initial: Initial | None, heads: int):
    """Return the initial memory and normaliser of each head, of which several may read one memory; None for None."""
    if initial is None:
        return None, None
    sharing = heads // initial.memory.shape[1]
    return tuple(jnp.repeat(x, sharing, axis=1) for x in (initial.memory, initial.normalizer))


def _by_head(d_final, heads: int):
    """Return the gradient of the final memories or normalisers [B, G, ...] of each head: the first of those that share one has it."""
    if d_final is None:
        return None
    shape = d_final.shape
    by_head = row_layout.gradient_by_head(d_final.reshape(*shape[:3], -1), heads)
    return by_head.reshape(shape[0], heads, *shape[2:])


def _transposed(memories):
    """Return memories [..., K, V] as [..., V, K]; None for None."""
    return None if memories is None else jnp.swapaxes(memories, -1, -2)


def _added(*dots):
    """Return the sum of the terms [B, heads, *, T] of inner products, [B, heads, T]."""
    return sum(jnp.sum(x, axis=2) for x in dots)
