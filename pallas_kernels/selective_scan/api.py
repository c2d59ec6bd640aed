"""Scans of memories whose entries stand alone, by chunks that are walked side by side: Mamba's and complex ones of one number a channel."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.residuals import apart, keep
from pallas_kernels.selective_scan import hopper, hopper_complex

_IMPLEMENTATIONS = ("mosaic_gpu",)


def reason(u, state_size: int) -> str | None:
    """What `selective_scan` takes in place of these arguments (arrays or their shapes), or None if it serves them."""
    return hopper.reason(u, state_size)


def complex_reason(u) -> str | None:
    """What `complex_scan` takes in place of this argument (an array or its shape), or None if it serves it."""
    return hopper_complex.reason(u)


def selective_scan(
    u: Float[Array, "B T D"],
    delta: Float[Array, "B T D"],
    a: Float[Array, "D N"],
    b: Float[Array, "B T N"],
    c: Float[Array, "B T N"],
    d: Float[Array, " D"] | None = None,
    *,
    initial: Float[Array, "B D N"],
    begin: Bool[Array, "B T"] | None = None,
    implementation: str = "mosaic_gpu",
    interpret: Any = False,
) -> tuple[Float[Array, "B T D"], Float[Array, "B D N"]]:
    """`h_t = exp(delta_t a) h_{t-1} + delta_t u_t b_t`, `y_t = Σ_n c_t h_t + d u_t` (Mamba, arXiv 2312.00752, algorithm 2); differentiable
    once, in reverse.

    Args:
        u: [B, T, D] bfloat16, D a multiple of 64.
        delta: [B, T, D]; `delta a` is the natural logarithm of the decay, at most 0.
        a: [D, N], N of 8 or 16.
        b: [B, T, N].
        c: [B, T, N].
        d: [D]; None is 0.
        initial: [B, D, N], the memory before the first token.
        begin: [B, T], True where nothing is left of the memory before the token; None is nowhere.
        implementation: "mosaic_gpu" (Hopper).
        interpret: parameters of the backend's interpreter, to run on a CPU.

    Returns:
        y [B, T, D] bfloat16, and the memory after the last token in float32.

    Raises:
        NotImplementedError: the kernel does not serve these arguments; the message says why.
        ValueError: an implementation that does not exist.
    """
    _check("selective_scan", implementation, reason(u, a.shape[1]))
    length = u.shape[1]
    delta, a, b, c, initial = (x.astype(jnp.float32) for x in (delta, a, b, c, initial))
    d = jnp.zeros(u.shape[2], jnp.float32) if d is None else d.astype(jnp.float32)
    kept = None if begin is None else 1 - begin.astype(jnp.float32)
    u, delta, b, c = (_pad(x, hopper.CHUNK) for x in (u, delta, b, c))
    kept = None if kept is None else _pad(kept, hopper.CHUNK, 1)
    y, final = _real(interpret, hopper.Inputs(u, delta, a, b, c, d, kept), initial)
    return y[:, :length], final


def complex_scan(
    u: Float[Array, "B T D"],
    c: Float[Array, "B T D"],
    real: Float[Array, "B T D"],
    imag: Float[Array, "B T D"],
    *,
    initial: Float[Array, "B 2 D"],
    implementation: str = "mosaic_gpu",
    interpret: Any = False,
) -> tuple[Float[Array, "B T D"], Float[Array, "B 2 D"]]:
    """`h_t = a_t h_{t-1} + u_t`, `y_t = c_t Re h_t` with complex a and h (GateLoop, arXiv 2311.01927, of one channel a head); differentiable
    once, in reverse.

    Args:
        u: [B, T, D] bfloat16, D a multiple of 128.
        c: [B, T, D] bfloat16.
        real: [B, T, D], of a; 0 in both where nothing is left of the memory before the token.
        imag: [B, T, D], of a.
        initial: [B, 2, D], real and imaginary part of the memory before the first token.
        implementation: "mosaic_gpu" (Hopper).
        interpret: parameters of the backend's interpreter, to run on a CPU.

    Returns:
        y [B, T, D] bfloat16, and the memory after the last token, [B, 2, D] float32.

    Raises:
        NotImplementedError: the kernel does not serve these arguments; the message says why.
        ValueError: an implementation that does not exist.
    """
    _check("complex_scan", implementation, complex_reason(u))
    length = u.shape[1]
    real, imag, initial = (x.astype(jnp.float32) for x in (real, imag, initial))
    u, c, imag = (_pad(x, hopper_complex.CHUNK) for x in (u, c.astype(u.dtype), imag))
    real = _pad(real, hopper_complex.CHUNK, 1)
    inputs = hopper_complex.Inputs(u, c, real, imag)
    y, final = _complex(interpret, inputs, initial)
    return y[:, :length], final


def _check(op: str, implementation: str, why: str | None) -> None:
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(
            f"{op}: implementation={implementation!r}; accepted are {_IMPLEMENTATIONS}"
        )
    if why is not None:
        raise NotImplementedError(f"{op}: implementation={implementation!r} takes {why}")


def _pad(x: Any, multiple: int, value: float = 0) -> Any:
    """With tokens at the end that leave the memory as it is."""
    pads = [(0, 0), (0, -x.shape[1] % multiple)] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, pads, constant_values=value)


def _rows(memory: Any) -> Any:
    """[B, D, N] as the kernels have it."""
    batch, channels, states = memory.shape
    return memory.reshape(batch, channels // hopper.ROWS, hopper.ROWS, states)


def _scan(backend, interpret, x, initial):
    found = backend.added(x, interpret=interpret)
    before, final = backend.entering(x, found, initial, interpret=interpret)
    return backend.outputs(x, before, interpret=interpret), final, before


def _against_time(backend, interpret, x, before, dy, d_final):
    """Gradients of what `gradients` knows, and of the first memory."""
    dy = dy.astype(jnp.bfloat16)
    found = backend.added(x, dy, interpret=interpret)
    after, d_initial = backend.entering(x, found, d_final, reverse=True, interpret=interpret)
    return backend.gradients(x, dy, before, after, interpret=interpret), d_initial


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _real(interpret, x: hopper.Inputs, initial):
    y, final, _ = _scan(hopper, interpret, x, _rows(initial))
    return y, final.reshape(initial.shape)


def _real_forward(interpret, x, initial):
    y, final, before = _scan(hopper, interpret, x, _rows(initial))
    return apart((y, final.reshape(initial.shape))), (x, keep(before))


def _real_backward(interpret, saved, cotangents):
    x, before = saved
    dy, d_final = cotangents
    found = _against_time(hopper, interpret, x, before, dy, _rows(d_final))
    (du, d_delta, da, db, dc), d_initial = found
    dd = jnp.sum(dy.astype(jnp.float32) * x.u.astype(jnp.float32), axis=(0, 1))
    kept = None if x.keep is None else jnp.zeros_like(x.keep)
    gradients = hopper.Inputs(du, d_delta, da, db, dc, dd, kept)
    return gradients, d_initial.reshape(d_final.shape)


_real.defvjp(_real_forward, _real_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _complex(interpret, x: hopper_complex.Inputs, initial):
    return _scan(hopper_complex, interpret, x, initial)[:2]


def _complex_forward(interpret, x, initial):
    y, final, before = _scan(hopper_complex, interpret, x, initial)
    return apart((y, final)), (x, keep(before))


def _complex_backward(interpret, saved, cotangents):
    x, before = saved
    return _against_time(hopper_complex, interpret, x, before, *cotangents)


_complex.defvjp(_complex_forward, _complex_backward)
