"""`selective_memory` with parameters that are constant in time, computed as a convolution in blocks.

The result equals that of `selective_memory` with constant delta, B and C on one document from an empty
state. Inside a block the tokens are convolved by a matrix product; the tokens before the block enter
through the memory at the block's start. For finite u no bit of an output depends on a later token; a NaN in
u also spoils the outputs of earlier tokens of its block.
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
_LARGEST_BLOCK = 64  # tokens
_GROUP = 8  # consecutive blocks whose memories are computed one after another


def diagonal_kernel(
    exponent: Inexact[Array, "D N"], weight: Inexact[Array, "D N"], length: int
) -> Float[Array, "D T"]:
    """Return the convolution kernel of a memory that is constant in time, `Re Σ_n weight[n] exp(exponent[n] t)` for t =
    0, ..., length - 1.

    t is split into the index of a block of about sqrt(length) and the index inside the block. The powers of
    both are small arrays, and the kernel is their matrix product; an array [D, N, length] is never formed.
    """
    size = _block_size(length)
    blocks = -(-length // size)
    inside = jnp.exp(exponent[..., None] * jnp.arange(size))
    across = weight[..., None] * jnp.exp(exponent[..., None] * (size * jnp.arange(blocks)))
    kernel = jnp.einsum(
        "dni,dnj->dij",
        *(_real_and_imaginary(x, axis=1) for x in (across, jnp.conj(inside))),
        precision=_HIGHEST,
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
    """Compute `selective_memory` with `discretization="zoh"`, parameters that are constant in time and an
    empty state by a convolution.

    The arguments, the output and the state are those of `selective_memory`, which is called instead if rows
    are split over devices, since it exchanges states between devices. Differentiable in reverse mode.

    Raises:
        ValueError: shapes do not match, or u, delta or D is complex.
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
    empty = selective_state(batch, channels, A.shape[1], is_complex=is_complex, dtype=dtype)
    return output.astype(u.dtype), empty._replace(memory=memory.astype(empty.memory.dtype))


def _convolve(u: Array, exponent: Array, gain: Array, weight: Array) -> tuple[Array, Array]:
    """Return the convolution of the inputs u [B, T, D] with the kernel that a memory constant in time has, and the
    memory [B, D, N] after the last token.
    """
    batch, length, channels = u.shape
    size = min(_LARGEST_BLOCK, 1 << (length - 1).bit_length())
    blocks = _split_into_blocks(u, size)
    memories = _memories_after(blocks, exponent, gain)
    inside = _toeplitz(diagonal_kernel(exponent, weight * gain, size))
    y = jnp.einsum("dbni,dij->dbnj", blocks, inside, precision=_HIGHEST)
    query = weight[..., None] * jnp.exp(exponent[..., None] * jnp.arange(1, size + 1))
    # The read is Re(query h): the conjugate's parts times those of h, or Re(query) h if h is real.
    is_complex = jnp.iscomplexobj(memories)
    query = jnp.conj(query).astype(memories.dtype) if is_complex else jnp.real(query)
    entering, query = _as_real(_shift_by_one(memories), axis=-1), _as_real(query, axis=1)
    y = y + jnp.einsum("dbnk,dkj->dbnj", entering, query, precision=_HIGHEST)
    y = jnp.moveaxis(y.reshape(channels, batch, -1), 0, 2)
    return y[:, -length:], jnp.moveaxis(memories[:, :, -1], 0, 1)


def _split_into_blocks(u: Array, size: int) -> Array:
    """Cut the op's inputs u [B, T, D] into blocks of C consecutive tokens, [D, B, T / C, C].

    Zeros are added before the first token: they leave the empty memory empty.
    """
    u = jnp.pad(u, [(0, 0), (-u.shape[1] % size, 0), (0, 0)])
    return jnp.moveaxis(u, 2, 0).reshape(u.shape[2], len(u), -1, size)


def _memories_after(blocks: Array, exponent: Array, gain: Array) -> Array:
    """Return the memory after each of n blocks of C tokens, [D, B, n, N], where `blocks` [D, B, n, C] contains the op's
    inputs u of the tokens.
    """
    size = blocks.shape[-1]
    powers = gain[..., None] * jnp.exp(exponent[..., None] * jnp.arange(size - 1, -1, -1))
    written = jnp.einsum("dbnj,dkj->dbnk", blocks, _as_real(powers, axis=1), precision=_HIGHEST)
    if jnp.iscomplexobj(powers):
        written = jax.lax.complex(*jnp.split(written, 2, axis=-1))
    return _accumulate((exponent * size).astype(written.dtype), written)


@jax.custom_vjp
def _accumulate(log_decay: Array, written: Array) -> Array:
    """Return the memory after each block of tokens, [D, B, n, N]: `h_i = exp(log_decay) h_{i-1} + written_i`,
    with h = 0 before the first block.

    `written` [D, B, n, N] is the memory after each block if it starts from 0. The gradient is the same sum in
    reverse order.
    """
    return _decayed_sums(log_decay, written)


def _accumulate_forward(log_decay: Array, written: Array) -> tuple[Array, tuple[Array, Array]]:
    memories = _accumulate(log_decay, written)
    return memories, (log_decay, memories)


def _accumulate_backward(saved: tuple[Array, Array], d_memories: Array) -> tuple[Array, Array]:
    log_decay, memories = saved
    d_written = jnp.flip(_decayed_sums(log_decay, jnp.flip(d_memories, 2)), 2)
    d_decay = jnp.sum(d_written * _shift_by_one(memories), axis=(1, 2))
    return d_decay * jnp.exp(log_decay), d_written


_accumulate.defvjp(_accumulate_forward, _accumulate_backward)


def _decayed_sums(log_decay: Array, x: Array) -> Array:
    """Return the memory after each block of tokens, [D, B, n, N]: `h_i = exp(log_decay) h_{i-1} + x_i` with h
    = 0 before the first block, computed inside groups of blocks, and then over the groups in the same way.
    """
    channels, batch, count, size = x.shape
    group = min(_GROUP, count)
    grouped = jnp.pad(x, [(0, 0), (0, 0), (0, -count % group), (0, 0)])
    grouped = grouped.reshape(channels, batch, -1, group, size)
    decays = [jnp.exp(log_decay * (i + 1))[:, None, None] for i in range(group)]
    sums = [grouped[:, :, :, 0]]
    for i in range(1, group):
        sums.append(decays[0] * sums[-1] + grouped[:, :, :, i])
    if count > group:
        before = _shift_by_one(_decayed_sums(log_decay * group, sums[-1]))
        sums = [inside + decay * before for inside, decay in zip(sums, decays, strict=True)]
    return jnp.stack(sums, axis=3).reshape(channels, batch, -1, size)[:, :, :count]


def _shift_by_one(x: Array) -> Array:
    """Return the memory before each block of tokens, given the memory after each block, [D, B, n, N]; it is 0
    before the first.
    """
    return jnp.pad(x[:, :, :-1], [(0, 0), (0, 0), (1, 0), (0, 0)])


def _toeplitz(kernel: Array) -> Array:
    """Return the matrix [D, C, C] by which a block of C tokens is convolved with a kernel [D, C]: `kernel[j - i]` at
    (i, j), 0 where j < i. It is made by reshapes, whose gradient is cheap.
    """
    channels, size = kernel.shape
    repeated = jnp.broadcast_to(
        jnp.pad(kernel, [(0, 0), (0, size)])[:, None], (channels, size, 2 * size)
    )
    # Rows that are one entry shorter than the repeated kernel: the kernel begins one entry later in each
    # row.
    rows = repeated.reshape(channels, -1)[:, : size * (2 * size - 1)].reshape(channels, size, -1)
    return rows[..., :size]


def _block_size(length: int) -> int:
    """Return the number of tokens in a block of a convolution by blocks: a power of two near the square root of the
    row's length, which balances the work inside blocks and between them.
    """
    return 1 << (length.bit_length() // 2)


def _real_and_imaginary(x: Array, axis: int) -> Array:
    """Return the real and the imaginary parts of a complex array x, concatenated along `axis`, so that real products
    can be used.
    """
    return jnp.concatenate([jnp.real(x), jnp.imag(x)], axis=axis)


def _as_real(x: Array, axis: int) -> Array:
    """Return a real array unchanged, and for a complex array its real and imaginary parts, concatenated along
    `axis`.
    """
    return _real_and_imaginary(x, axis) if jnp.iscomplexobj(x) else x


def _widen(x: Array, dtype) -> Array:
    """Convert x to the float dtype `dtype`, or, if x is complex, to a complex dtype whose parts have at least that
    precision.
    """
    return x.astype(jnp.result_type(dtype, jnp.complex64) if jnp.iscomplexobj(x) else dtype)
