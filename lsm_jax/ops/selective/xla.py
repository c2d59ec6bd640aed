"""Compute `selective_memory` by XLA in three forms: recurrent (token by token), by chunks, and by an
associative scan over all tokens.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lsm_jax.ops.core.chunk_scans import (
    associate_chunks,
    associative_scan,
    per_chunk,
    scan_tokens,
)
from lsm_jax.ops.core.segments import Tokens, cut_into_chunks, finish_output, read_tokens, select
from lsm_jax.ops.selective.state import SelectiveState


class SelectiveOptions(NamedTuple):
    """The options of `selective_memory` that are constant when a program is compiled.

    Attributes:
        discretization: how the step size scales a write: "zoh", "euler" or "none".
        form: "recurrent", "chunk" or "associative", how the op is computed.
        size: tokens in a chunk.
        dtype: the dtype of real states and of all sums.
        is_complex: whether the memory is complex.
    """

    discretization: str
    form: str
    size: int
    dtype: Any
    is_complex: bool


class _Inputs(NamedTuple):
    """Inputs of `selective_memory` that have an entry for each token.

    Attributes:
        u: [B, T, D], the inputs.
        delta: [B or 1, T, D], the step sizes.
        b: [B, T, N] or [B, T, D, N], the write vectors; None if they are constant in time.
        c: [B, T, N] or [B, T, D, N], the read vectors; None if they are constant in time.
        starts: [B, T], True where a document begins; None if no document can begin.
    """

    u: Array
    delta: Array
    b: Array | None
    c: Array | None
    starts: Array | None


def run_in_form(
    options: SelectiveOptions,
    u,
    state,
    segment_ids,
    update_mask,
    a,
    d,
    constant,
    delta=None,
    b=None,
    c=None,
) -> tuple[Array, SelectiveState]:
    """Compute `selective_memory` in the form that `options` says; return the output [B, T, D] in u's dtype and the
    state after the last token.

    The arrays have the names of the op's arguments in lower case; `constant` contains those of delta, b and c
    that are constant in time.
    """
    batch, length, channels = u.shape
    dtype = options.dtype
    num_segments = state.memory.shape[1] if state.memory.ndim == 4 else None
    tokens = read_tokens(segment_ids, update_mask, state.segment_id, num_segments)

    def widen(x) -> Any:
        if x is None:
            return None
        return x.astype(jnp.result_type(dtype, jnp.complex64) if jnp.iscomplexobj(x) else dtype)

    if "delta" in constant:
        # One row suffices, unless rows differ in which tokens write.
        rows = 1 if tokens.written is None and tokens.slot is None else batch
        delta = jnp.broadcast_to(constant["delta"], (rows, length, channels))
    inputs = _Inputs(
        u=select(tokens.written, widen(u)),
        delta=select(tokens.written, widen(delta)),
        b=None if b is None else select(tokens.written, widen(b)),
        c=None if c is None else select(tokens.real, widen(c)),
        starts=document_starts(tokens),
    )
    constant_b, constant_c = (widen(constant.get(name)) for name in ("b", "c"))
    update = functools.partial(
        _update, a=widen(a), constant_b=constant_b, discretization=options.discretization
    )
    read_memory = functools.partial(_read_memory, constant_c=constant_c)
    memory = widen(state.memory)

    if options.form == "recurrent":

        def step(memory, x):
            transition, write = update(x)
            memory = transition * memory + write
            return memory, read_memory(x, memory)

        output, memory = scan_tokens(step, inputs, memory, None, tokens.slot)
    else:
        in_chunks = _associative if options.form == "associative" else _chunked
        output, memory = in_chunks(options, tokens, inputs, memory, update, read_memory)

    if d is not None:
        output = output + widen(d) * select(tokens.real, widen(u))
    output = finish_output(tokens, output).astype(u.dtype)
    return output, SelectiveState(memory, tokens.last_id)


def _associative(
    options: SelectiveOptions, tokens: Tokens, inputs: _Inputs, memory: Array, update, read_memory
) -> tuple[Array, Array]:
    """Return the outputs and the final memory of `selective_memory`, computed by an associative scan over all tokens."""
    batch, length, _ = inputs.u.shape
    num_segments = memory.shape[1] if memory.ndim == 4 else None
    chunks = cut_into_chunks(tokens, length, 1, num_segments)

    def split(x):
        return chunks.split(jnp.broadcast_to(x, (batch, *x.shape[1:])))[:, :, 0]

    x = jax.tree.map(split, inputs)
    if (
        options.is_complex
    ):  # no order is causal to the bit: XLA rounds a complex product by its index in the array
        transition, write = update(x)
    else:  # computed in the order of the call: XLA may round `exp` differently at another index
        transition, write = map(split, update(inputs))
        has_token = split(jnp.ones((batch, length), bool))
        transition = jnp.where(has_token[:, :, None, None], transition, 1)
    entering, memory = associate_chunks(
        jnp.multiply, jnp.multiply, transition, write, memory, chunks
    )
    return chunks.join(read_memory(x, transition * entering + write)[:, :, None], length), memory


def _chunked(
    options: SelectiveOptions, tokens: Tokens, inputs: _Inputs, memory: Array, update, read_memory
) -> tuple[Array, Array]:
    """Return the outputs and the final memory of `selective_memory`, computed by an associative scan over the tokens of
    each chunk and a scan over the chunks.
    """
    length = inputs.u.shape[1]
    num_segments = memory.shape[1] if memory.ndim == 4 else None
    chunks = cut_into_chunks(tokens, length, options.size, num_segments)

    def step(memory, x):
        decays, sums = associative_scan(_compose, update(x))
        memories = decays * memory[:, None] + sums
        return memories[:, -1], read_memory(x, memories)

    output, memory = scan_tokens(
        jax.checkpoint(step, prevent_cse=False),
        jax.tree.map(chunks.split, inputs),
        memory,
        None,
        chunks.slot,
    )
    return chunks.join(output, length), memory


def document_starts(tokens: Tokens) -> Array | None:
    """Return whether each token begins a document, [B, T]; None if no document can begin in this call."""
    if tokens.run is None:
        return None
    return jnp.diff(tokens.run, axis=1, prepend=jnp.zeros_like(tokens.run[:, :1])) > 0


def _compose(earlier, later):
    """Compose two updates (transition, write) of a memory whose entries are independent into the one that applies
    `earlier` and then `later`.
    """
    return later[0] * earlier[0], later[0] * earlier[1] + later[1]


def _update(x: _Inputs, *, a, constant_b, discretization) -> tuple[Array, Array]:
    """Return the update of each token for a memory [..., D, N] whose entries are independent: the transition exp(Δ A)
    (0 where a document begins), and the write, the input u times B, scaled by the step size Δ as `discretization` says.
    """
    exponent = x.delta[..., None] * a
    transition = jnp.exp(exponent)
    if x.starts is not None:
        transition = jnp.where(per_chunk(x.starts, transition), 0, transition)
    if discretization == "none":
        write = x.u[..., None]
    else:
        write = (x.delta * x.u)[..., None]
    if discretization == "zoh":
        write = write * expm1_ratio(exponent)
    write = write * _by_channel(x, x.b, constant_b)
    return transition, write.astype(jnp.result_type(write, transition))


def _read_memory(x: _Inputs, memory: Array, *, constant_c) -> Array:
    """Return each channel's output [..., D] from the memory h [..., D, N]: the real part of the sum of C h over the N
    numbers of a channel, with the read vector C.
    """
    c = _by_channel(x, x.c, constant_c)
    products = jnp.real(c) * jnp.real(memory)
    if jnp.iscomplexobj(c) and jnp.iscomplexobj(memory):
        products = products - jnp.imag(c) * jnp.imag(memory)
    return jnp.sum(products, axis=-1)


def _by_channel(x: _Inputs, by_token, constant) -> Array:
    """Return the vector B or C of the selective memory with an axis of channels, [..., D or 1, N]: `constant`, or if
    given `by_token`, which may lack that axis.
    """
    if by_token is None:
        return constant
    return by_token if by_token.ndim == x.u.ndim + 1 else by_token[..., None, :]


def expm1_ratio(z: Array) -> Array:
    """Return `(exp(z) - 1) / z`, 1 at z = 0, by which a zero-order hold multiplies a token's write, for z = Δ A.

    Near 0 it is computed by its series, since the quotient's derivative would lose digits there.
    """
    near = jnp.abs(jnp.real(z)) + jnp.abs(jnp.imag(z)) < 0.5
    safe = jnp.where(near, 1, z)
    small = jnp.where(near, z, 0)
    series = jnp.ones_like(z)
    for n in range(14, 1, -1):  # 0.5^14 / 15! is below float64's rounding
        series = 1 + series * small / n
    return jnp.where(near, series, jnp.expm1(safe) / safe)
