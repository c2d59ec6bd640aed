"""`y_t = unit(silu(Σ_d weight[W - 1 - d] x_{t-d} + bias))` over the tokens of a document, float32 inside."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.residuals import apart
from pallas_kernels.short_convolution import hopper

_IMPLEMENTATIONS = ("mosaic_gpu",)


def reason(x, weight, head_dim: int | None) -> str | None:
    """What the kernel takes in place of these arguments (arrays or their shapes), or None if it serves them."""
    return hopper.reason(x, weight, head_dim)


def short_convolution(
    x: Float[Array, "B T D"],
    weight: Float[Array, "W D"],
    bias: Float[Array, " D"] | None = None,
    *,
    initial: Float[Array, "B W-1 D"],
    run: Int[Array, "B T"] | None = None,
    real: Bool[Array, "B T"] | None = None,
    silu: bool = False,
    head_dim: int | None = None,
    implementation: str = "mosaic_gpu",
    interpret: Any = False,
) -> Float[Array, "B T D"]:
    """Convolve the tokens of each document; differentiable once, in reverse.

    Args:
        x: [B, T, D] bfloat16, D a multiple of 256.
        weight: [W, D], W of 2 to 4; the last row multiplies the current token.
        bias: [D].
        initial: [B, W - 1, D] in x's dtype, the tokens before the first, oldest first.
        run: [B, T], growing along T: a token sees those of its own run; run 0 goes on from `initial`. None is one run.
        real: [B, T], False on padding, which the others look past and whose output is 0; given with `run`.
        silu: whether `z * sigmoid(z)` follows.
        head_dim: channels of a head, whose norm is made 1 at the end (`z / sqrt(sum(z²) + 1e-6)`); None leaves it.
        implementation: "mosaic_gpu" (Hopper).
        interpret: parameters of the backend's interpreter, to run on a CPU.

    Returns:
        [B, T, D] in x's dtype.

    Raises:
        NotImplementedError: the kernel does not serve these arguments; the message says why.
        ValueError: an implementation that does not exist.
    """
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(
            f"short_convolution: implementation={implementation!r}; accepted are {_IMPLEMENTATIONS}"
        )
    if (why := reason(x, weight, head_dim)) is not None:
        raise NotImplementedError(f"short_convolution: implementation='mosaic_gpu' takes {why}")
    length = x.shape[1]
    padding = -length % hopper.MULTIPLE
    order: Any = None
    if run is not None:
        real = jnp.ones(run.shape, bool) if real is None else real
        run = jnp.where(real, run, -1)
        # Padding last, so that a token's neighbours are those it sees.
        place = jnp.where(real, 0, jnp.sum(real, axis=1, keepdims=True))
        place += jnp.where(real, jnp.cumsum(real, axis=1), jnp.cumsum(~real, axis=1)) - 1
        order = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), run.shape)
        order = jax.vmap(lambda to, at: to.at[at].set(to, unique_indices=True))(order, place)
        run = jnp.take_along_axis(run, order, axis=1)
    if padding:
        x = jnp.pad(x, [(0, 0), (0, padding), (0, 0)])
        if run is not None:
            run = jnp.pad(run, [(0, 0), (0, padding)], constant_values=-1)
            more = jnp.arange(length, length + padding, dtype=jnp.int32)
            more = jnp.broadcast_to(more, (x.shape[0], padding))
            order = jnp.concatenate([order, more], axis=1)
    y = _run(silu, head_dim, interpret, x, weight, bias, initial.astype(x.dtype), order, run)
    return y[:, :length]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _run(silu, head_dim, interpret, *inputs):
    return hopper.forward(*inputs, silu=silu, head_dim=head_dim, interpret=interpret)


def _forward(silu, head_dim, interpret, *inputs):
    return apart(_run(silu, head_dim, interpret, *inputs)), inputs


def _backward(silu, head_dim, interpret, inputs, dy):
    options: Any = dict(silu=silu, head_dim=head_dim, interpret=interpret)
    return *hopper.backward(*inputs, dy=dy, **options), None, None


_run.defvjp(_forward, _backward)
