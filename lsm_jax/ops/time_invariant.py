"""Memories whose updates are the same at every token, as one long convolution computed by Fourier transforms.

They equal `selective_memory` with constant delta, B and C on one document from an empty state, but a transform mixes all
tokens: an output depends on later tokens by rounding, below 1e-6 of the largest output in float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact

from lsm_jax.ops import checks, chosen
from lsm_jax.ops.selective_memory import (
    SelectiveState,
    expm1_ratio,
    selective_memory,
    selective_state,
)
from lsm_jax.parallel import over_batch, sequence_shards

_HIGHEST = jax.lax.Precision.HIGHEST


def time_invariant_convolution(
    u: Float[Array, "B T D"], kernel: Float[Array, "D T"]
) -> Float[Array, "B T D"]:
    """Causal convolution of each channel, `y_t = Σ_s kernel[s] u_{t-s}`, by transforms of 2T points.

    Args:
        u: [B, T, D].
        kernel: [D, T], the response after 0, 1, 2, ... tokens.

    Returns:
        [B, T, D] in u's dtype; computed in float32 (float64 if an input is).

    Raises:
        ValueError: shapes that do not fit.
    """
    op = "time_invariant_convolution"
    _, length, channels = checks.check_row_channels(op, "u", u)
    checks.check_shape(op, "kernel", kernel, (channels, length), "D, T")
    dtype = checks.compute_dtype(u, kernel)
    return over_batch(_convolve, dict(u=u), dict(kernel=kernel), dtype)


def _convolve(dtype, u: Array, kernel: Array) -> Array:
    length = u.shape[1]
    points = 2 * length  # so that nothing wraps around
    x = jnp.moveaxis(u.astype(dtype), 1, 2)
    product = jnp.fft.rfft(x, points) * jnp.fft.rfft(kernel.astype(dtype), points)
    y = jnp.fft.irfft(product, points)[..., :length]
    return jnp.moveaxis(y, 2, 1).astype(u.dtype)


def diagonal_kernel(
    exponent: Inexact[Array, "D N"], weight: Inexact[Array, "D N"], length: int
) -> Float[Array, "D T"]:
    """`Re Σ_n weight[n] exp(exponent[n] t)` for t = 0, ..., length - 1.

    t counts blocks of about sqrt(length) and tokens in a block, so that the powers of both are small and their product is a
    matrix product; [D, N, length] is never formed.
    """
    size = _block_size(length)
    blocks = -(-length // size)
    inside = jnp.exp(exponent[..., None] * jnp.arange(size))
    across = weight[..., None] * jnp.exp(exponent[..., None] * (size * jnp.arange(blocks)))
    kernel = jnp.einsum(
        "dni,dnj->dij", *(_parts(x, axis=1) for x in (across, jnp.conj(inside))), precision=_HIGHEST
    )
    return kernel.reshape(kernel.shape[0], -1)[:, :length]


def time_invariant_memory(
    u: Float[Array, "B T D"],
    delta: Float[Array, " D"],
    A: Inexact[Array, "D N"],
    B: Inexact[Array, "D N"],
    C: Inexact[Array, "D N"],
    *,
    D: Float[Array, " D"] | None = None,
) -> tuple[Float[Array, "B T D"], SelectiveState]:
    """`selective_memory` with `discretization="zoh"`, constant arguments and an empty state, by convolution.

    Arguments, output and state are `selective_memory`'s. The state costs a second pass over u, left out by the compiler
    where it is not used. Where time is spread over devices it is `selective_memory`: a transform needs the whole row.

    Raises:
        ValueError: shapes that do not fit.
    """
    op = "time_invariant_memory"
    batch, length, channels = checks.check_row_channels(op, "u", u)
    checks.check_shape(op, "A", A, (channels, None), "D, N")
    checks.check_filled(op, "A", A)
    for name, x in (("B", B), ("C", C)):
        checks.check_shape(op, name, x, jnp.shape(A), "D, N")
    for name, x in (("delta", delta), ("D", D)):
        if x is not None:
            checks.check_shape(op, name, x, (channels,), "D")
    if sequence_shards(length) > 1:
        return selective_memory(u, delta, A, B, C, D=D, discretization="zoh")
    chosen.note(
        "selective_memory", "xla, convolution by Fourier transforms (causal up to rounding)"
    )
    dtype = checks.compute_dtype(u, delta, A, B, C, D)
    is_complex = any(jnp.iscomplexobj(x) for x in (A, B))

    exponent = _widen(delta, dtype)[:, None] * _widen(A, dtype)
    gain = _widen(delta, dtype)[:, None] * expm1_ratio(exponent) * _widen(B, dtype)
    kernel = diagonal_kernel(exponent, _widen(C, dtype) * gain, length)
    wide = u.astype(dtype)
    output = time_invariant_convolution(wide, kernel)
    if D is not None:
        output = output + D.astype(dtype) * wide
    shared = dict(exponent=exponent, gain=gain)
    memory = over_batch(_final_memory, dict(u=wide), shared)
    fresh = selective_state(batch, channels, A.shape[1], is_complex=is_complex, dtype=dtype)
    return output.astype(u.dtype), fresh._replace(memory=memory.astype(fresh.memory.dtype))


def _final_memory(u: Array, exponent: Array, gain: Array) -> Array:
    """`Σ_t exp(exponent (T - 1 - t)) gain u_t`, [B, D, N], block by block."""
    batch, length, channels = u.shape
    size = _block_size(length)
    u = jnp.pad(u, [(0, 0), (-length % size, 0), (0, 0)])
    u = jnp.moveaxis(u.reshape(batch, -1, size, channels), 1, 0)
    powers = gain[..., None] * jnp.exp(exponent[..., None] * jnp.arange(size - 1, -1, -1))
    over_block = jnp.exp(exponent * size)

    def step(memory, block):
        parts = [
            jnp.einsum("btd,dnt->bdn", block, part(powers), precision=_HIGHEST)
            for part in ((jnp.real, jnp.imag) if jnp.iscomplexobj(powers) else (jnp.real,))
        ]
        return over_block * memory + (
            jax.lax.complex(*parts) if len(parts) == 2 else parts[0]
        ), None

    start = jnp.zeros_like(over_block * u[0, :, 0, :, None])
    return jax.lax.scan(step, start, u)[0]


def _block_size(length: int) -> int:
    """A power of two near sqrt(length)."""
    return 1 << (length.bit_length() // 2)


def _parts(x: Array, axis: int) -> Array:
    """Real and imaginary parts one after the other along `axis`."""
    return jnp.concatenate([jnp.real(x), jnp.imag(x)], axis=axis)


def _widen(x: Array, dtype) -> Array:
    return x.astype(jnp.result_type(dtype, jnp.complex64) if jnp.iscomplexobj(x) else dtype)
