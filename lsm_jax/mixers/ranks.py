"""Passes over the R values and outputs of a token of Mamba-3 (MIMO), which differ by a weight for each rank, head and channel.

The values of all ranks are products x ⊙ w_r. What a token writes of itself, what its ranks read and the gate are sums of such products
over ranks, so that x alone is stored. Each function has a gradient of its own: one pass for each result, and sums over tokens that are
computed before the other gradients are used. Where layers are compiled one after the other, XLA would join the sums of several layers at
the end of the step, and until then store what they sum.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def _wide(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Return the arrays in float32, or float64 if one of them is."""
    dtype = jnp.result_type(jnp.float32, *arrays)
    return tuple(x.astype(dtype) for x in arrays)


def _sum_ranks(x: jax.Array, weights: jax.Array) -> jax.Array:
    """Return the sum over ranks of x [B, T, R, H, P] times weights, [R, H, P] or [B, T, R, H, 1]; [B, T, H, P].

    The terms are added one by one, since a GPU's threads then load several channels at once; in a reduction they load one.
    """
    axis = weights.ndim - 3
    terms = [
        x[:, :, r] * jax.lax.index_in_dim(weights, r, axis, keepdims=False) for r in range(x.shape[2])
    ]  # fmt: skip
    return sum(terms[1:], terms[0])


def _over_tokens(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=(0, 1))


def values_of_ranks(x: jax.Array, factor: jax.Array, weights: jax.Array | None) -> jax.Array:
    """Return x [B, T, H, P] times a factor [B, T, H] and the weights [R, H, P] of each rank: [B, T, R, H, P], in the dtype of x. Without
    weights R is 1.
    """
    if weights is None:
        scaled, factor = _wide(x, factor)
        return (scaled * factor[..., None])[:, :, None].astype(x.dtype)
    return _values(x, factor, weights)


@jax.custom_vjp
def _values(x, factor, weights):
    scaled, factor, weights = _wide(x, factor, weights)
    return ((scaled * factor[..., None])[:, :, None] * weights).astype(x.dtype)


def _values_forward(x, factor, weights):
    return _values(x, factor, weights), (x, factor, weights)


def _values_backward(saved, d_values):
    x, factor, weights = _wide(*saved)
    (d_values,) = _wide(d_values)
    d_scaled = _sum_ranks(d_values, weights)
    d_factor = jnp.sum(d_scaled * x, axis=-1)
    d_weights = _over_tokens(d_values * (x * factor[..., None])[:, :, None])
    return _as(saved, d_scaled * factor[..., None], d_factor, d_weights)


_values.defvjp(_values_forward, _values_backward)


def add_own_writes(
    o: jax.Array, scores: jax.Array, x: jax.Array, weights: jax.Array | None
) -> jax.Array:
    """Return o [B, T, R, H, P] plus what each rank i reads from the token's own values: the sum over ranks j of scores [B, T, i, j, H]
    times the values x ⊙ w_j, for x [B, T, H, P] and the weights w [R, H, P]. Without weights R is
    1. The sum is one in float32; the result has the dtype of o.
    """
    if weights is None:
        wide, scores, x = _wide(o, scores, x)
        return (wide + scores[:, :, 0, ..., None] * x[:, :, None]).astype(o.dtype)
    return _add_own(o, scores, x, weights)


@jax.custom_vjp
def _add_own(o, scores, x, weights):
    wide, scores, x, weights = _wide(o, scores, x, weights)
    return (wide + x[:, :, None] * _mixed(scores, weights)).astype(o.dtype)


def _mixed(scores, weights):
    """Return the sum over ranks j of scores [B, T, ..., j, H] times the weights [j, H, P]: [B, T, ..., H, P]."""
    terms = [scores[..., j, :, None] * weights[j] for j in range(len(weights))]
    return sum(terms[1:], terms[0])


def _own_forward(o, scores, x, weights):
    return _add_own(o, scores, x, weights), (scores, x, weights)


def _own_backward(saved, d_o):
    scores, x, weights = _wide(*saved)
    (d_wide,) = _wide(d_o)
    # Sums over the ranks that read come first here and last below: with a sum in common XLA would store it, in float32 for each rank.
    terms = [d_wide[:, :, i] * _mixed(scores[:, :, i], weights) for i in range(len(weights))]
    d_x = sum(terms[1:], terms[0])
    d_scores = jnp.sum((d_wide * x[:, :, None])[:, :, :, None] * weights, axis=-1)
    d_values = (_sum_ranks(d_wide, scores[:, :, :, j, :, None]) for j in range(len(weights)))
    d_weights = jnp.stack([_over_tokens(x * d) for d in d_values])
    return d_o, *_as(saved, d_scores, d_x, d_weights)


_add_own.defvjp(_own_forward, _own_backward)


@jax.custom_vjp
def gate_ranks(
    o: jax.Array, z: jax.Array, gate_weights: jax.Array, weights: jax.Array
) -> jax.Array:
    """Return the sum over ranks of o [B, T, R, H, P] times silu(z ⊙ gate weights) and the weights, both [R, H, P], for z [B, T, H, P]:
    [B, T, H, P], in the dtype of o.
    """
    wide, z, gate_weights, weights = _wide(o, z, gate_weights, weights)
    return _sum_ranks(wide * jax.nn.silu(z[:, :, None] * gate_weights), weights).astype(o.dtype)


def _gate_forward(o, z, gate_weights, weights):
    return gate_ranks(o, z, gate_weights, weights), (o, z, gate_weights, weights)


def _gate_backward(saved, d_y):
    o, *others = saved
    # Without this XLA would store the output that it computes again in float32.
    o, z, gate_weights, weights = _wide(jax.lax.optimization_barrier(o), *others)
    (d_y,) = _wide(d_y)

    def d_gate(o, d_y, z, gate_weights, weights):
        gate = z * gate_weights
        share = jax.nn.sigmoid(gate)
        return d_y * o * weights * (share * (1 + gate * (1 - share)))

    # Rank by rank: with a product in common with the sums below XLA would store it in float32.
    terms = [
        d_gate(o[:, :, r], d_y, z, gate_weights[r], weights[r]) * gate_weights[r] for r in range(len(weights))
    ]  # fmt: skip
    d_z = sum(terms[1:], terms[0])
    d_y, z = d_y[:, :, None], z[:, :, None]
    d_gate_weights = _over_tokens(d_gate(o, d_y, z, gate_weights, weights) * z)
    activated = jax.nn.silu(z * gate_weights)
    d_weights = _over_tokens(d_y * o * activated)
    return _as(saved, d_y * weights * activated, d_z, d_gate_weights, d_weights)


gate_ranks.defvjp(_gate_forward, _gate_backward)


def _as(saved: tuple[jax.Array, ...], *gradients: jax.Array) -> tuple[jax.Array, ...]:
    """Return gradients in the dtypes of what they are gradients of, all of them computed before one is used."""
    cast = (g.astype(x.dtype) for g, x in zip(gradients, saved, strict=True))
    return tuple(jax.lax.optimization_barrier(tuple(cast)))
