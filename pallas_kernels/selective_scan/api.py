"""Scans of memories whose entries stand alone, by chunks: Mamba's, and complex ones of one number a channel."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.residuals import apart, keep

_BACKENDS = {"mosaic_gpu": "hopper", "mosaic_tpu": "tpu"}


def _backend(implementation: str, kind: str = "") -> Any:
    # Imported where it is used: a backend that is never asked for costs nothing.
    return importlib.import_module(
        f"pallas_kernels.selective_scan.{_BACKENDS[implementation]}{kind}"
    )


def reason(implementation: str, u, state_size: int) -> str | None:
    """What `selective_scan` takes in place of these arguments (arrays or their shapes), or None if it serves them."""
    return _backend(implementation).reason(u, state_size)


def complex_reason(implementation: str, u) -> str | None:
    """What `complex_scan` takes in place of this argument (an array or its shape), or None if it serves it."""
    return _backend(implementation, "_complex").reason(u)


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
        u: [B, T, D] bfloat16, D a multiple of 64; for "mosaic_tpu" bfloat16 or float32, D a multiple of 128.
        delta: [B, T, D]; `delta a` is the natural logarithm of the decay, at most 0.
        a: [D, N], N of 8 or 16; for "mosaic_tpu" of 8, 16, 24 or 32.
        b: [B, T, N].
        c: [B, T, N].
        d: [D]; None is 0.
        initial: [B, D, N], the memory before the first token.
        begin: [B, T], True where nothing is left of the memory before the token; None is nowhere.
        implementation: "mosaic_gpu" (Hopper) or "mosaic_tpu".
        interpret: parameters of the backend's interpreter, to run on a CPU.

    Returns:
        y [B, T, D] in u's dtype, and the memory after the last token in float32.

    Raises:
        NotImplementedError: the kernel does not serve these arguments; the message says why.
        ValueError: an implementation that does not exist.
    """
    _check("selective_scan", implementation, reason, u, a.shape[1])
    backend = _backend(implementation)
    length = u.shape[1]
    delta, a, b, c, initial = (x.astype(jnp.float32) for x in (delta, a, b, c, initial))
    d = jnp.zeros(u.shape[2], jnp.float32) if d is None else d.astype(jnp.float32)
    kept = None if begin is None else 1 - begin.astype(jnp.float32)
    u, delta, b, c = (_pad(x, backend.CHUNK) for x in (u, delta, b, c))
    kept = None if kept is None else _pad(kept, backend.CHUNK, 1)
    inputs = backend.Inputs(u, delta, a, b, c, d, kept)
    if implementation == "mosaic_tpu":
        y, final = _scan(backend, interpret, inputs, jnp.swapaxes(initial, 1, 2))
        return y[:, :length], jnp.swapaxes(final, 1, 2)
    batch, channels, states = initial.shape
    rows = initial.reshape(batch, channels // backend.ROWS, backend.ROWS, states)
    y, final = _scan(backend, interpret, inputs, rows)
    return y[:, :length], final.reshape(initial.shape)


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
        u: [B, T, D] bfloat16, or for "mosaic_tpu" also float32; D a multiple of 128.
        c: [B, T, D], taken in u's dtype.
        real: [B, T, D], of a; 0 in both where nothing is left of the memory before the token.
        imag: [B, T, D], of a.
        initial: [B, 2, D], real and imaginary part of the memory before the first token.
        implementation: "mosaic_gpu" (Hopper) or "mosaic_tpu".
        interpret: parameters of the backend's interpreter, to run on a CPU.

    Returns:
        y [B, T, D] in u's dtype, and the memory after the last token, [B, 2, D] float32.

    Raises:
        NotImplementedError: the kernel does not serve these arguments; the message says why.
        ValueError: an implementation that does not exist.
    """
    _check("complex_scan", implementation, complex_reason, u)
    backend = _backend(implementation, "_complex")
    length = u.shape[1]
    real, imag, initial = (x.astype(jnp.float32) for x in (real, imag, initial))
    u, c, imag = (_pad(x, backend.CHUNK) for x in (u, c.astype(u.dtype), imag))
    real = _pad(real, backend.CHUNK, 1)
    y, final = _scan(backend, interpret, backend.Inputs(u, c, real, imag), initial)
    return y[:, :length], final


def _check(op: str, implementation: str, reason, *arguments: Any) -> None:
    if implementation not in _BACKENDS:
        raise ValueError(
            f"{op}: implementation={implementation!r}; accepted are {tuple(_BACKENDS)}"
        )
    if (why := reason(implementation, *arguments)) is not None:
        raise NotImplementedError(f"{op}: implementation={implementation!r} takes {why}")


def _pad(x: Any, multiple: int, value: float = 0) -> Any:
    """With tokens at the end that leave the memory as it is."""
    pads = [(0, 0), (0, -x.shape[1] % multiple)] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, pads, constant_values=value)


def _forward(backend, interpret, x, initial, *, save: bool) -> tuple[Any, Any, Any]:
    """Output, final memory, and the memories that enter each chunk."""
    if hasattr(backend, "forward"):
        return backend.forward(x, initial, save=save, interpret=interpret)
    # Chunks side by side: what each adds, put together, read.
    found = backend.added(x, interpret=interpret)
    before, final = backend.entering(x, found, initial, interpret=interpret)
    return backend.outputs(x, before, interpret=interpret), final, before


def _backward(backend, interpret, x, before, dy, d_final) -> tuple[Any, Any]:
    """Gradients of the inputs and of the first memory."""
    if hasattr(backend, "backward"):
        return backend.backward(x, before, dy, d_final, interpret=interpret)
    found = backend.added(x, dy, interpret=interpret)
    after, d_initial = backend.entering(x, found, d_final, reverse=True, interpret=interpret)
    gradients = backend.gradients(x, dy, before, after, interpret=interpret)
    if not isinstance(gradients, type(x)):  # those of what the kernel knows
        dd = jnp.sum(dy.astype(jnp.float32) * x.u.astype(jnp.float32), axis=(0, 1))
        kept = None if x.keep is None else jnp.zeros_like(x.keep)
        gradients = type(x)(*gradients, dd, kept)
    return gradients, d_initial


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _scan(backend, interpret, x, initial):
    """Output and final memory, by a backend's module and its `Inputs`."""
    return _forward(backend, interpret, x, initial, save=False)[:2]


def _scan_forward(backend, interpret, x, initial):
    y, final, before = _forward(backend, interpret, x, initial, save=True)
    return apart((y, final)), (x, keep(before))


def _scan_backward(backend, interpret, saved, cotangents):
    return _backward(backend, interpret, *saved, *cotangents)


_scan.defvjp(_scan_forward, _scan_backward)
