"""Causal convolutions of each channel over the last W tokens x of a document, `y_t = normalize(silu(Σ_d
weight[W - 1 - d] x_{t-d} + bias))`, in float32; silu and the normalisation of heads are optional.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.residuals import behind_barrier
from pallas_kernels.short_convolution import hopper, triton

_BACKENDS = {"mosaic_gpu": hopper, "triton": triton}


class Call(NamedTuple):
    """The arguments of a call of `short_convolution` by which the backend decides whether it supports the
    call: the tokens x and the weight (arrays, or their shapes and dtypes), the number of channels of a
    normalised head, or None, and whether tokens are computed in an order of their own, with padding last.
    """

    x: Any
    weight: Any
    head_dim: int | None
    ordered: bool = False


def unsupported(
    x,
    weight,
    head_dim: int | None,
    implementation: str = "mosaic_gpu",
    *,
    ordered: bool = False,
) -> str | None:
    """Return the first requirement that a call of `short_convolution` with tokens x, this weight (arrays, or
    their shapes and dtypes) and normalised heads of `head_dim` channels (or None) does not meet, or None if
    the kernel supports it. `ordered`: whether the call has documents (`run`) and is not `contiguous`.
    """
    return _BACKENDS[implementation].unsupported(Call(x, weight, head_dim, ordered))


def short_convolution(
    x: Float[Array, "B T D"],
    weight: Float[Array, "W D"],
    bias: Float[Array, " D"] | None = None,
    *,
    initial: Float[Array, "B W-1 D"],
    run: Int[Array, "B T"] | None = None,
    real: Bool[Array, "B T"] | None = None,
    contiguous: bool = False,
    silu: bool = False,
    head_dim: int | None = None,
    implementation: str = "mosaic_gpu",
    interpret: Any = False,
) -> Float[Array, "B T D"]:
    """Convolve each channel over the last W tokens of its document, and apply SiLU and a normalisation of
    heads if asked; return the result, [B, T, D]. Differentiable once, in reverse mode.

    Args:
        x: [B, T, D], the tokens; `REQUIREMENTS` of `hopper` and of `triton` list what each kernel requires.
        weight: [W, D], the convolution's weight; the last row multiplies the current token.
        bias: [D], added to the convolution; None is 0.
        initial: [B, W - 1, D], the W - 1 tokens before the first, oldest first; converted to x's dtype.
        run: [B, T], the index of each token's document in its row, not decreasing along T: a token sees the
            tokens of its document; document 0 continues `initial`. None is one document.
        real: [B, T], False on padding, which no token sees and whose output is 0; requires `run`.
        contiguous: the caller's assurance that no padding is between two tokens of one document (nor between `initial` and a token
            of document 0); Hopper's kernels then compute tokens where they are.
        silu: whether `z * sigmoid(z)` is applied after the convolution.
        head_dim: channels of a head; each head z is divided by `sqrt(sum(z²) + 1e-6)` at the end. None does
            not normalise.
        implementation: "mosaic_gpu" (Hopper) or "triton" (NVIDIA cards of compute capability 8.0 or more).
        interpret: parameters of the backend's interpreter, to run on a CPU.

    Returns:
        The convolution's output y, [B, T, D] in x's dtype.

    Raises:
        NotImplementedError: the arrays given to `short_convolution` do not meet a requirement of the kernel's
        backend; the message says which.
        ValueError: `implementation` is not the name of a backend of `short_convolution`.
    """
    if implementation not in _BACKENDS:
        accepted = tuple(_BACKENDS)
        raise ValueError(
            f"short_convolution: implementation={implementation!r}; accepted are {accepted}"
        )
    backend = _BACKENDS[implementation]
    ordered = run is not None and not (contiguous and backend.COMPUTES_IN_PLACE)
    if (
        requirement := unsupported(x, weight, head_dim, implementation, ordered=ordered)
    ) is not None:
        raise NotImplementedError(
            f"short_convolution: implementation={implementation!r} requires {requirement}"
        )
    length = x.shape[1]
    padding = -length % backend.MULTIPLE
    order: Any = None
    if run is not None:
        real = jnp.ones(run.shape, bool) if real is None else real
        run = jnp.where(real, run, -1)
        if ordered:
            order = _padding_last(real)
            run = jnp.take_along_axis(run, order, axis=1)
    if padding:
        x = jnp.pad(x, [(0, 0), (0, padding), (0, 0)])
        if run is not None:
            run = jnp.pad(run, [(0, 0), (0, padding)], constant_values=-1)
        if ordered:
            added = jnp.arange(length, length + padding, dtype=jnp.int32)
            added = jnp.broadcast_to(added, (x.shape[0], padding))
            order = jnp.concatenate([order, added], axis=1)
    options = _Options(implementation, silu, head_dim, interpret)
    y = _convolve(options, x, weight, bias, initial.astype(x.dtype), order, run)
    return y[:, :length]


def _padding_last(real: Bool[Array, "B T"]) -> Int[Array, "B T"]:
    """Return, for each row, the positions of its tokens in an order in which padding (where `real` is False)
    comes last and the other tokens keep their order, [B, T] int32.

    In this order, the W - 1 tokens before a token are those that its convolution sums, as far as they belong
    to its document.
    """
    length = real.shape[1]
    rank = jnp.where(real, 0, jnp.sum(real, axis=1, keepdims=True))
    rank += jnp.where(real, jnp.cumsum(real, axis=1), jnp.cumsum(~real, axis=1)) - 1
    order = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), real.shape)
    return jax.vmap(lambda to, at: to.at[at].set(to, unique_indices=True))(order, rank)


class _Options(NamedTuple):
    """The arguments of a call of `short_convolution` that are not arrays: the backend's name, whether SiLU is
    applied, the channels of a normalised head, and the interpreter.
    """

    implementation: str
    silu: bool
    head_dim: int | None
    interpret: Any

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of the backend's `forward` and `backward`."""
        return dict(silu=self.silu, head_dim=self.head_dim, interpret=self.interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _convolve(options: _Options, *inputs):
    return _BACKENDS[options.implementation].forward(*inputs, **options.keywords)


def _convolve_forward(options, *inputs):
    return behind_barrier(_convolve(options, *inputs)), inputs


def _convolve_backward(options, inputs, dy):
    backend = _BACKENDS[options.implementation]
    return *backend.backward(*inputs, dy=dy, **options.keywords), None, None


_convolve.defvjp(_convolve_forward, _convolve_backward)
