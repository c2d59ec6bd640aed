"""Rotations of pairs of key channels by angles of each token, and their gradient (Mamba-3, arXiv 2603.15569).

Products of queries and keys do not depend on the order of channels. Inside a layer the first channels of all pairs that turn come
first, then the second ones, then the channels that do not turn: `pairs_first`. Neighbours in an array of pairs would be turned
by transposes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

_BITS = 14  # of a cosine's fraction in 16 bits, of which 1 takes another and the sign one


def _series(function, degree: int) -> list[float]:
    """Return the coefficients of a polynomial that is `function` on [0, 1], from that of x ** degree to the constant."""
    series = np.polynomial.Chebyshev.interpolate(function, degree, domain=[0, 1])
    return series.convert(kind=np.polynomial.Polynomial).coef[::-1].tolist()


# In u = (angle / π)²: cosine, and sine divided by angle / π; exact to 2e-6, a thirtieth of 2^-14.
_COS = _series(lambda u: np.cos(np.pi * np.sqrt(u)), 5)
_SIN = _series(lambda u: np.pi * np.sinc(np.sqrt(u)), 5)


def pairs_first(x: jax.Array, pairs: int, halves: bool) -> jax.Array:
    """Return x [..., N] with the first channel of each of its first `pairs` pairs, then the second ones, then the rest.

    A pair is the channels 2 i and 2 i + 1, or with `halves` i and i + N / 2.
    """
    if halves:
        middle = x.shape[-1] // 2
        edges = [pairs, middle, middle + pairs]
        first, rest, second, last = jnp.split(x, edges, axis=-1)
        return jnp.concatenate([first, second, rest, last], axis=-1)
    turned, rest = jnp.split(x, [2 * pairs], axis=-1)
    return jnp.concatenate([turned[..., ::2], turned[..., 1::2], rest], axis=-1)


def pairs_in_place(x: jax.Array, pairs: int, halves: bool) -> jax.Array:
    """Return x [..., N] in the order that it had before `pairs_first`."""
    if halves:
        edges = [pairs, 2 * pairs, pairs + x.shape[-1] // 2]
        first, second, rest, last = jnp.split(x, edges, axis=-1)
        return jnp.concatenate([first, rest, second, last], axis=-1)
    first, second, rest = jnp.split(x, [pairs, 2 * pairs], axis=-1)
    turned = jnp.stack([first, second], axis=-1).reshape(*first.shape[:-1], 2 * pairs)
    return jnp.concatenate([turned, rest], axis=-1)


def turn_pairs(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn x [..., N], in the order of `pairs_first`, by angles with this cosine and sine [..., S]."""
    pairs = cos.shape[-1]
    first, second, rest = jnp.split(x, [pairs, 2 * pairs], axis=-1)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin, rest.astype(cos.dtype)], axis=-1
    )


def turn(x: jax.Array, angle: jax.Array, *, halves: bool) -> jax.Array:
    """Turn pairs of channels of x [..., N] by `angle` [..., S], in radians; the channels beyond 2 S are not turned. `halves` says
    which channels are pairs, as in `pairs_first`.
    """
    pairs = angle.shape[-1]
    turned = turn_pairs(pairs_first(x, pairs, halves), jnp.cos(angle), jnp.sin(angle))
    return pairs_in_place(turned, pairs, halves)


def _polynomial(coefficients: list[float], x: jax.Array) -> jax.Array:
    """Return the value at x of the polynomial with these coefficients, the one of the highest power first."""
    value = jnp.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * x + coefficient
    return value


def waves(angle: jax.Array, dtype) -> tuple[jax.Array, jax.Array]:
    """Return cosine and sine of angles [B, T, H, S] for turning arrays of `dtype`, without a gradient. They are
    stored, since queries and keys, and their gradients, need both for each channel of a pair; for bfloat16, which rounds
    to 2e-3, as integers of 16 bits, multiples of 2^-14, and come from polynomials, with fewer instructions than a sine.
    """
    angle = jax.lax.stop_gradient(angle)
    if dtype == jnp.bfloat16:
        part = angle * (1 / (2 * np.pi))
        part = 2 * (part - jnp.round(part))  # of half a turn, from -1 to 1
        cos, sin = _polynomial(_COS, part * part), part * _polynomial(_SIN, part * part)
        cos, sin = (jnp.round(wave * 2.0**_BITS).astype(jnp.int16) for wave in (cos, sin))
    else:
        cos, sin = jnp.cos(angle), jnp.sin(angle)
    cos, sin = jax.lax.optimization_barrier((cos, sin))
    return cos, sin


def waves_before(cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the `waves` of the token before each token, and before the first those of angle 0."""
    first = [(0, 0), (1, 0), (0, 0), (0, 0)]
    one = 1 if jnp.issubdtype(cos.dtype, jnp.floating) else 2**_BITS
    return jnp.pad(cos[:, :-1], first, constant_values=one), jnp.pad(sin[:, :-1], first)


def _read_waves(cos: jax.Array, sin: jax.Array, dtype) -> tuple[jax.Array, jax.Array]:
    """Return the numbers [B, T, 1, H, S] that `waves` stores."""
    scale = 1 if jnp.issubdtype(cos.dtype, jnp.floating) else 2.0**-_BITS
    cos, sin = (wave[:, :, None].astype(dtype) * scale for wave in (cos, sin))
    return cos, sin


def _of_heads(x: jax.Array, bias: jax.Array, dtype) -> jax.Array:
    """Return x [B, T, R, G, N] for each of the H heads of its groups, with the heads' bias [R, H, N]."""
    x = jnp.repeat(x, bias.shape[1] // x.shape[3], axis=3)
    return x.astype(dtype) + bias.astype(x.dtype).astype(dtype)


@jax.custom_vjp
def turned_heads(
    x: jax.Array, bias: jax.Array, angle: jax.Array, cos: jax.Array, sin: jax.Array
) -> jax.Array:
    """Return x [B, T, R, G, N] with the bias [R, H, N] of each head, turned by the angles [B, T, H, S], in the dtype of x.

    The channels have the order of `pairs_first`. `cos` and `sin` are those of `angle`, from `waves`; they have no gradient,
    the angles have one.
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    cos, sin = _read_waves(cos, sin, wide)
    return turn_pairs(_of_heads(x, bias, wide), cos, sin).astype(x.dtype)


def _turned_heads_forward(x, bias, angle, cos, sin):
    return turned_heads(x, bias, angle, cos, sin), (x, bias, cos, sin)


def _turned_heads_backward(saved, d_turned):
    """Return the gradients of x, bias and angles, from the gradient turned back, which is stored once for the three of them."""
    x, bias, cos, sin = saved
    groups, pairs, wide = x.shape[3], cos.shape[-1], jnp.promote_types(x.dtype, jnp.float32)
    cos, sin = _read_waves(cos, sin, wide)
    d_turned = jax.lax.optimization_barrier(
        d_turned
    )  # a sum with several ranks, of which parts would be stored
    d_heads = turn_pairs(d_turned.astype(wide), cos, -sin)
    d_heads = jax.lax.optimization_barrier(d_heads.astype(x.dtype))
    first, second, _ = jnp.split(_of_heads(x, bias, wide), [pairs, 2 * pairs], axis=-1)
    d_first, d_second, _ = jnp.split(d_heads.astype(wide), [pairs, 2 * pairs], axis=-1)
    d_angle = jnp.sum(first * d_second - second * d_first, axis=2)
    d_bias = jnp.sum(d_heads.astype(wide), axis=(0, 1))
    return _sum_of_heads(d_heads, groups), d_bias.astype(bias.dtype), d_angle, None, None


turned_heads.defvjp(_turned_heads_forward, _turned_heads_backward)


def _sum_of_heads(x: jax.Array, groups: int) -> jax.Array:
    """Return the sum of x [B, T, R, H, N] over the heads of each of `groups` groups, in x's dtype.

    In bfloat16 it is a product with unit matrices, which is as exact: GPUs multiply faster than they reduce a middle axis.
    """
    *rows, heads, size = x.shape
    several = heads // groups
    if several == 1:
        return x
    wide = jnp.promote_types(x.dtype, jnp.float32)
    if x.dtype != jnp.bfloat16:
        return jnp.sum(x.reshape(*rows, groups, several, size), axis=-2)
    units = jnp.tile(jnp.eye(size, dtype=x.dtype), (several, 1))
    x = x.reshape(*rows, groups, several * size)
    sums = jnp.matmul(x, units, precision="default", preferred_element_type=wide)
    return sums.astype(jnp.bfloat16)


def scores_of_heads(
    q: jax.Array, q_bias: jax.Array, k: jax.Array, k_bias: jax.Array, dtype
) -> jax.Array:
    """Return the products of the queries and keys of a token, [B, T, I, J, H] in `dtype`: those of q [B, T, I, G, N] with the bias
    [I, H, N] of each head, and k [B, T, J, G, N] with its bias [J, H, N].

    They are computed as the sum of products of groups and biases, without arrays of all heads' channels; each product has the layout of the
    sum, or XLA would store it, and all that is computed of it, with the tokens last.
    """
    groups, size = q.shape[3], q.shape[-1]

    def of_groups(bias):  # [I, H, N] to [I, G, H / G, N]
        return bias.astype(q.dtype).reshape(bias.shape[0], groups, -1, size)

    def products(x, bias):  # [B, T, I, G, N] and [J, G, M, N] to [B, T, I, J, G, M]
        rows = jnp.moveaxis(x, 3, 0).reshape(groups, -1, size)
        columns = jnp.moveaxis(bias, 1, 0).reshape(groups, -1, size).swapaxes(1, 2)
        product = jnp.matmul(rows, columns, precision="highest", preferred_element_type=dtype)
        product = product.reshape(groups, *x.shape[:3], bias.shape[0], bias.shape[2])
        return jnp.moveaxis(product, 0, -2)

    q_bias, k_bias = of_groups(q_bias), of_groups(k_bias)
    of_group = jnp.sum(q[:, :, :, None].astype(dtype) * k[:, :, None].astype(dtype), axis=-1)
    of_bias = jnp.sum(q_bias[:, None].astype(dtype) * k_bias[None].astype(dtype), axis=-1)
    scores = of_group[..., None] + products(q, k_bias) + of_bias
    scores += products(k, q_bias).swapaxes(2, 3)
    return scores.reshape(*scores.shape[:-2], -1)
