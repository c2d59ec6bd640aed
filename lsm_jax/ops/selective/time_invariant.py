"""Memories whose updates are the same at every token, as a convolution by blocks.

They equal `selective_memory` with constant delta, B and C on one document from an empty state, causal to the bit for finite u: a
block's own tokens are convolved by a matrix (where a NaN reaches the tokens before it), those before it come in through the memory
at its border.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact

from lsm_jax.ops.backends.select import note
from lsm_jax.ops.core import checks
from lsm_jax.ops.selective.selective_memory import check_real, selective_memory
from lsm_jax.ops.selective.state import SelectiveState, selective_state
from lsm_jax.ops.selective.xla import expm1_ratio
from lsm_jax.parallel import over_batch, sequence_shards

_HIGHEST = jax.lax.Precision.HIGHEST
_BLOCK = 64  # at most
_GROUP = 8  # borders that the memory is carried over one by one


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

    Arguments, output and state are `selective_memory`'s. Where time is spread over devices it is `selective_memory`, which hands
    the state on. Differentiable in reverse.

    Raises:
        ValueError: shapes that do not fit; complex u, delta or D.
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
    check_real(op, u=u, delta=delta, D=D)
    if sequence_shards(length) > 1:
        return selective_memory(u, delta, A, B, C, D=D, discretization="zoh")
    note("selective_memory", "xla, convolution by blocks")
    dtype = checks.compute_dtype(u, delta, A, B, C, D)
    is_complex = any(jnp.iscomplexobj(x) for x in (A, B))

    exponent = _widen(delta, dtype)[:, None] * _widen(A, dtype)
    gain = _widen(delta, dtype)[:, None] * expm1_ratio(exponent) * _widen(B, dtype)
    wide, weight = u.astype(dtype), _widen(C, dtype)
    shared = dict(exponent=exponent, gain=gain, weight=weight)
    output, memory = over_batch(_convolve, dict(u=wide), shared)
    if D is not None:
        output = output + D.astype(dtype) * wide
    fresh = selective_state(batch, channels, A.shape[1], is_complex=is_complex, dtype=dtype)
    return output.astype(u.dtype), fresh._replace(memory=memory.astype(fresh.memory.dtype))


def _convolve(u: Array, exponent: Array, gain: Array, weight: Array) -> tuple[Array, Array]:
    """The convolution of u [B, T, D] and the final memory [B, D, N]."""
    batch, length, channels = u.shape
    size = min(_BLOCK, 1 << (length - 1).bit_length())
    x = _cut(u, size)
    states = _borders(x, exponent, gain)
    own = _toeplitz(diagonal_kernel(exponent, weight * gain, size))
    y = jnp.einsum("dbni,dij->dbnj", x, own, precision=_HIGHEST)
    read = weight[..., None] * jnp.exp(exponent[..., None] * jnp.arange(1, size + 1))
    # Re(R h), and where h is real Re(R) h.
    read = jnp.conj(read).astype(states.dtype) if jnp.iscomplexobj(states) else jnp.real(read)
    entering, read = _pairs(_later(states), axis=-1), _pairs(read, axis=1)
    y = y + jnp.einsum("dbnk,dkj->dbnj", entering, read, precision=_HIGHEST)
    y = jnp.moveaxis(y.reshape(channels, batch, -1), 0, 2)
    return y[:, -length:], jnp.moveaxis(states[:, :, -1], 0, 1)


def _cut(u: Array, size: int) -> Array:
    """u [B, T, D] in blocks [D, B, T / C, C], what is missing filled with 0 ahead: it leaves the memory empty."""
    u = jnp.pad(u, [(0, 0), (-u.shape[1] % size, 0), (0, 0)])
    return jnp.moveaxis(u, 2, 0).reshape(u.shape[2], len(u), -1, size)


def _borders(u: Array, exponent: Array, gain: Array) -> Array:
    """The memory after each block of u [D, B, n, C], [D, B, n, N]."""
    size = u.shape[-1]
    powers = gain[..., None] * jnp.exp(exponent[..., None] * jnp.arange(size - 1, -1, -1))
    written = jnp.einsum("dbnj,dkj->dbnk", u, _pairs(powers, axis=1), precision=_HIGHEST)
    if jnp.iscomplexobj(powers):
        written = jax.lax.complex(*jnp.split(written, 2, axis=-1))
    return _carry((exponent * size).astype(written.dtype), written)


@jax.custom_vjp
def _carry(log_decay: Array, written: Array) -> Array:
    """`h_i = exp(log_decay) h_{i-1} + written_i` of blocks [D, B, n, N], from 0; its gradient is the same against time."""
    return _sums(log_decay, written)


def _carry_forward(log_decay: Array, written: Array) -> tuple[Array, tuple[Array, Array]]:
    states = _carry(log_decay, written)
    return states, (log_decay, states)


def _carry_backward(saved: tuple[Array, Array], d_states: Array) -> tuple[Array, Array]:
    log_decay, states = saved
    d_written = jnp.flip(_sums(log_decay, jnp.flip(d_states, 2)), 2)
    d_decay = jnp.sum(d_written * _later(states), axis=(1, 2))
    return d_decay * jnp.exp(log_decay), d_written


_carry.defvjp(_carry_forward, _carry_backward)


def _sums(log_decay: Array, x: Array) -> Array:
    """The states of `_carry`: within groups of blocks, then from group to group likewise."""
    channels, batch, count, size = x.shape
    group = min(_GROUP, count)
    grouped = jnp.pad(x, [(0, 0), (0, 0), (0, -count % group), (0, 0)])
    grouped = grouped.reshape(channels, batch, -1, group, size)
    over = [jnp.exp(log_decay * (i + 1))[:, None, None] for i in range(group)]
    sums = [grouped[:, :, :, 0]]
    for i in range(1, group):
        sums.append(over[0] * sums[-1] + grouped[:, :, :, i])
    if count > group:
        before = _later(_sums(log_decay * group, sums[-1]))
        sums = [own + decay * before for own, decay in zip(sums, over, strict=True)]
    return jnp.stack(sums, axis=3).reshape(channels, batch, -1, size)[:, :, :count]


def _later(x: Array) -> Array:
    """Blocks [D, B, n, N] moved on by one, the first from 0."""
    return jnp.pad(x[:, :, :-1], [(0, 0), (0, 0), (1, 0), (0, 0)])


def _toeplitz(kernel: Array) -> Array:
    """kernel [D, C] -> [D, C, C], `kernel[j - i]` at (i, j), 0 where j < i; by shapes alone, for its gradient's sake."""
    channels, size = kernel.shape
    turns = jnp.broadcast_to(
        jnp.pad(kernel, [(0, 0), (0, size)])[:, None], (channels, size, 2 * size)
    )
    # A row shorter by one than what it holds: each begins one later.
    rows = turns.reshape(channels, -1)[:, : size * (2 * size - 1)].reshape(channels, size, -1)
    return rows[..., :size]


def _block_size(length: int) -> int:
    """A power of two near sqrt(length)."""
    return 1 << (length.bit_length() // 2)


def _parts(x: Array, axis: int) -> Array:
    """Real and imaginary parts one after the other along `axis`."""
    return jnp.concatenate([jnp.real(x), jnp.imag(x)], axis=axis)


def _pairs(x: Array, axis: int) -> Array:
    """`_parts` of what has two."""
    return _parts(x, axis) if jnp.iscomplexobj(x) else x


def _widen(x: Array, dtype) -> Array:
    return x.astype(jnp.result_type(dtype, jnp.complex64) if jnp.iscomplexobj(x) else dtype)
