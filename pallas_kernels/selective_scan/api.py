"""Scans of memories whose entries do not depend on each other, computed by chunks: Mamba's
(`selective_scan`), and memories of one complex number for each channel (`complex_scan`).
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.residuals import behind_barrier, name_residuals

_BACKENDS = {"mosaic_gpu": "hopper", "mosaic_tpu": "tpu", "triton": "triton"}
_COMPLEX = ("mosaic_gpu", "mosaic_tpu")  # those that have a kernel of complex memories


class Call(NamedTuple):
    """The arguments of a call of `selective_scan` or `complex_scan` by which a backend decides whether it
    supports the call.

    Attributes:
        u: the inputs of the scan, [B, T, D], or their shape and dtype.
        state_size: N, the number of entries of each channel's memory.
    """

    u: Any
    state_size: int


def _backend(implementation: str, kind: str) -> Any:
    # Imported on first use: a backend that is never used costs nothing.
    module = f"pallas_kernels.selective_scan.{_BACKENDS[implementation]}.{kind}"
    return importlib.import_module(module)


def unsupported(implementation: str, u, state_size: int) -> str | None:
    """Return the first requirement that a call of `selective_scan` with inputs u [B, T, D] (an array or its
    shape and dtype) and `state_size` numbers in each channel's memory does not meet, or None if the backend
    supports it.
    """
    return _backend(implementation, "real").unsupported(Call(u, state_size))


def complex_unsupported(implementation: str, u) -> str | None:
    """Return the first requirement that a call of `complex_scan` with inputs u [B, T, D] (an array or its
    shape and dtype) does not meet, or None if the backend supports it.
    """
    return _backend(implementation, "complex").unsupported(Call(u, 1))


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
    """Compute Mamba's selective scan, in which each of D channels has a memory h of N numbers: `h_t =
    exp(delta_t a) h_{t-1} + delta_t u_t b_t`, with the output `y_t = Σ_n c_t h_t + d u_t` (arXiv 2312.00752,
    algorithm 2). Differentiable once, in reverse mode.

    Args:
        u: [B, T, D], the input of each channel; the `REQUIREMENTS` of `hopper.real` and `tpu.real` list the
            dtypes and sizes that they require.
        delta: [B, T, D], the step sizes; `delta a` is the natural logarithm of the decay, at most 0.
        a: [D, N], the rates of decay of the memories' entries.
        b: [B, T, N], the factors by which a token writes to each entry of a memory.
        c: [B, T, N], the factors by which a token reads each entry.
        d: [D], the factor of u in the output; None is 0.
        initial: [B, D, N], the memory before the first token.
        begin: [B, T], True at the first token of each document, where the memory before the token is replaced
            by 0; None is nowhere.
        implementation: "mosaic_gpu" (Hopper), "mosaic_tpu" or "triton" (NVIDIA cards of compute capability 8.0 or
            more).
        interpret: parameters of the backend's interpreter, to run on a CPU.

    Returns:
        The output y [B, T, D] in u's dtype, and the memory after the last token, [B, D, N] float32.

    Raises:
        NotImplementedError: the arrays given to `selective_scan` do not meet a requirement of the kernel's
        backend; the message says which.
        ValueError: `implementation` is not the name of a backend of `selective_scan`.
    """
    _check("selective_scan", implementation, tuple(_BACKENDS), unsupported, u, a.shape[1])
    backend = _backend(implementation, "real")
    length = u.shape[1]
    delta, a, b, c, initial = (x.astype(jnp.float32) for x in (delta, a, b, c, initial))
    d = jnp.zeros(u.shape[2], jnp.float32) if d is None else d.astype(jnp.float32)
    continues = None if begin is None else 1 - begin.astype(jnp.float32)
    # Padding has delta = 0, and does not change the memory.
    u, delta, b, c = (_pad(x, backend.CHUNK) for x in (u, delta, b, c))
    continues = None if continues is None else _pad(continues, backend.CHUNK, 1)
    inputs = backend.Inputs(u, delta, a, b, c, d, continues)
    y, final = _scan(backend, interpret, inputs, initial)
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
    """Compute a scan in which each channel's memory h is one complex number, with complex decays a: `h_t =
    a_t h_{t-1} + u_t`, with the output `y_t = c_t Re h_t` (GateLoop, arXiv 2311.01927, with heads of one
    channel). Differentiable once, in reverse mode.

    Args:
        u: [B, T, D], the numbers that are added to the memories; the `REQUIREMENTS` of `hopper.complex` and
            `tpu.complex` list the dtypes and sizes that they require.
        c: [B, T, D], the factors of the outputs, converted to u's dtype.
        real: [B, T, D], the real part of a; a is 0 at the first token of a document.
        imag: [B, T, D], the imaginary part of a.
        initial: [B, 2, D], real and imaginary part of the memory before the first token.
        implementation: "mosaic_gpu" (Hopper) or "mosaic_tpu".
        interpret: parameters of the backend's interpreter, to run on a CPU.

    Returns:
        y [B, T, D] in u's dtype, and the memory after the last token, [B, 2, D] float32.

    Raises:
        NotImplementedError: the arrays given to `complex_scan` do not meet a requirement of the kernel's
        backend; the message says which.
        ValueError: `implementation` is not the name of a backend of `complex_scan`.
    """
    _check("complex_scan", implementation, _COMPLEX, complex_unsupported, u)
    backend = _backend(implementation, "complex")
    length = u.shape[1]
    real, imag, initial = (x.astype(jnp.float32) for x in (real, imag, initial))
    # Padding has a = 1 and u = 0, and does not change the memory.
    u, c, imag = (_pad(x, backend.CHUNK) for x in (u, c.astype(u.dtype), imag))
    real = _pad(real, backend.CHUNK, 1)
    y, final = _scan(backend, interpret, backend.Inputs(u, c, real, imag), initial)
    return y[:, :length], final


def _check(op: str, implementation: str, accepted: tuple[str, ...], unsupported, *arguments: Any) -> None:  # fmt: skip
    if implementation not in accepted:
        raise ValueError(f"{op}: implementation={implementation!r}; accepted are {accepted}")
    if (requirement := unsupported(implementation, *arguments)) is not None:
        raise NotImplementedError(f"{op}: implementation={implementation!r} requires {requirement}")


def _pad(x: Any, multiple: int, value: float = 0) -> Any:
    """Append tokens with the entries `value` to x [B, T, ...], so that T becomes a multiple of `multiple`."""
    pads = [(0, 0), (0, -x.shape[1] % multiple)] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, pads, constant_values=value)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _scan(backend, interpret, x, initial):
    """Return the output y [B, T, D] of a real or complex scan, and the memory after its last token, computed
    by the module `backend` from its `Inputs` x and the memory `initial` before the first token.
    """
    y, final, _ = backend.forward(x, initial, save=False, interpret=interpret)
    return y, final


def _scan_forward(backend, interpret, x, initial):
    y, final, entering = backend.forward(x, initial, save=True, interpret=interpret)
    return behind_barrier((y, final)), (x, name_residuals(entering))


def _scan_backward(backend, interpret, saved, cotangents):
    x, entering = saved
    dy, d_final = cotangents
    return backend.backward(x, entering, dy, d_final, interpret=interpret)


_scan.defvjp(_scan_forward, _scan_backward)
