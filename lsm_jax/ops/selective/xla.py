"""`selective_memory` in XLA: the recurrent, the chunkwise and the associative form."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lsm_jax.ops.core.segments import Tokens, cut_into_chunks, finish_output, read_tokens, select
from lsm_jax.ops.core.states import associate_chunks, associative_scan, per_chunk, scan_tokens
from lsm_jax.ops.selective.state import SelectiveState


class SelectiveOptions(NamedTuple):
    """Static options of `selective_memory`.

    Attributes:
        discretization: as the op's argument.
        form: as the op's argument.
        size: tokens in a chunk.
        dtype: of real states and of all sums.
        is_complex: whether the memory is complex.
    """

    discretization: str
    form: str
    size: int
    dtype: Any
    is_complex: bool


class _Inputs(NamedTuple):
    """Arrays by token: u, delta [B, T, D]; b, c [B, T, N] or [B, T, D, N], None where constant; begin [B, T] or None."""

    u: Array
    delta: Array
    b: Array | None
    c: Array | None
    begin: Array | None


def by_xla(
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
    """The output in u's dtype and the final state, in `options.form`.

    Arrays are named as the op's arguments, in lower case; `constant` holds those of delta, b and c that are the same at every
    token.
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
        # One row is enough, unless some rows write where others do not.
        rows = 1 if tokens.written is None and tokens.slot is None else batch
        delta = jnp.broadcast_to(constant["delta"], (rows, length, channels))
    inputs = _Inputs(
        u=select(tokens.written, widen(u)),
        delta=select(tokens.written, widen(delta)),
        b=None if b is None else select(tokens.written, widen(b)),
        c=None if c is None else select(tokens.real, widen(c)),
        begin=document_starts(tokens),
    )
    constant_b, constant_c = (widen(constant.get(name)) for name in ("b", "c"))
    update = functools.partial(
        _update, a=widen(a), constant_b=constant_b, discretization=options.discretization
    )
    read = functools.partial(_read, constant_c=constant_c)
    memory = widen(state.memory)

    if options.form == "associative":
        chunks = cut_into_chunks(tokens, length, 1, num_segments)

        def split(x):
            return chunks.split(jnp.broadcast_to(x, (batch, *x.shape[1:])))[:, :, 0]

        x = jax.tree.map(split, inputs)
        if options.is_complex:  # XLA rounds products by lane then
            transition, write = update(x)
        else:  # made where the tokens stand: in another lane XLA may round `exp` another way
            transition, write = map(split, update(inputs))
            taken = split(jnp.ones((batch, length), bool))
            transition = jnp.where(taken[:, :, None, None], transition, 1)
        entering, memory = associate_chunks(
            jnp.multiply, jnp.multiply, transition, write, memory, chunks
        )
        output = chunks.join(read(x, transition * entering + write)[:, :, None], length)
    elif options.form == "recurrent":

        def step(memory, x):
            transition, write = update(x)
            memory = transition * memory + write
            return memory, read(x, memory)

        output, memory = scan_tokens(step, inputs, memory, None, tokens.slot)
    else:
        chunks = cut_into_chunks(tokens, length, options.size, num_segments)

        def step(memory, x):
            held, after = associative_scan(_compose, update(x))
            held = held * memory[:, None] + after
            return held[:, -1], read(x, held)

        output, memory = scan_tokens(
            jax.checkpoint(step, prevent_cse=False),
            jax.tree.map(chunks.split, inputs),
            memory,
            None,
            chunks.slot,
        )
        output = chunks.join(output, length)

    if d is not None:
        output = output + widen(d) * select(tokens.real, widen(u))
    output = finish_output(tokens, output).astype(u.dtype)
    return output, SelectiveState(memory, tokens.last_id)


def document_starts(tokens: Tokens) -> Array | None:
    """[B, T], True where a document begins, or None."""
    if tokens.run is None:
        return None
    return jnp.diff(tokens.run, axis=1, prepend=jnp.zeros_like(tokens.run[:, :1])) > 0


def _compose(earlier, later):
    return later[0] * earlier[0], later[0] * earlier[1] + later[1]


def _update(x: _Inputs, *, a, constant_b, discretization) -> tuple[Array, Array]:
    """Each token's update as what multiplies the memory and what is added, [..., D, N]."""
    exponent = x.delta[..., None] * a
    transition = jnp.exp(exponent)
    if x.begin is not None:
        transition = jnp.where(per_chunk(x.begin, transition), 0, transition)
    if discretization == "none":
        write = x.u[..., None]
    else:
        write = (x.delta * x.u)[..., None]
    if discretization == "zoh":
        write = write * expm1_ratio(exponent)
    write = write * _by_channel(x, x.b, constant_b)
    return transition, write.astype(jnp.result_type(write, transition))


def _read(x: _Inputs, memory: Array, *, constant_c) -> Array:
    """Re(sum of c h): memory [..., D, N] -> [..., D]."""
    c = _by_channel(x, x.c, constant_c)
    products = jnp.real(c) * jnp.real(memory)
    if jnp.iscomplexobj(c) and jnp.iscomplexobj(memory):
        products = products - jnp.imag(c) * jnp.imag(memory)
    return jnp.sum(products, axis=-1)


def _by_channel(x: _Inputs, given, constant) -> Array:
    """B or C with an axis of channels."""
    if given is None:
        return constant
    return given if given.ndim == x.u.ndim + 1 else given[..., None, :]


def expm1_ratio(z: Array) -> Array:
    """`(exp(z) - 1) / z`, 1 at 0; by its series near 0, where the quotient's derivative would cancel."""
    near = jnp.abs(jnp.real(z)) + jnp.abs(jnp.imag(z)) < 0.5
    safe = jnp.where(near, 1, z)
    small = jnp.where(near, z, 0)
    series = jnp.ones_like(z)
    for n in range(14, 1, -1):  # 0.5^14 / 15! is below float64's rounding
        series = 1 + series * small / n
    return jnp.where(near, series, jnp.expm1(safe) / safe)
