"""A scan of complex numbers, `h_t = a_t h_{t-1} + u_t`, `y_t = c_t Re h_t`, one a channel, on Mosaic GPU (Hopper).

A thread has a channel of a chunk of tokens; chunks are walked as in `hopper`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu
from pallas_kernels.selective_scan.hopper import loop, too_many

_F32, _BF16 = jnp.float32, jnp.bfloat16
CHANNELS, CHUNK = 128, 32
_AHEAD = 16


def reason(u) -> str | None:
    """What this backend takes in place of this argument (an array or its shape), or None."""
    if u.dtype != _BF16:
        return f"u in bfloat16, not {u.dtype}"
    if u.shape[2] % CHANNELS:
        return f"multiples of {CHANNELS} channels of one complex number, not {u.shape[2]}"
    return too_many(u, CHUNK)


class Inputs(NamedTuple):
    """What every kernel reads, [B, T, D]. Attributes: u, c: bfloat16; real, imag: a's parts, float32."""

    u: Any
    c: Any
    real: Any
    imag: Any


class _Pair(NamedTuple):
    """A complex number a thread."""

    real: Any
    imag: Any

    def times(self, other: _Pair) -> _Pair:
        real = self.real * other.real - self.imag * other.imag
        return _Pair(real, self.real * other.imag + self.imag * other.real)

    def plus(self, other: _Pair) -> _Pair:
        return _Pair(self.real + other.real, self.imag + other.imag)

    def turned(self) -> _Pair:
        """The conjugate."""
        return _Pair(self.real, -self.imag)


class _Block:
    """A warpgroup's place, and how its channels' numbers are read and written."""

    def __init__(self, refs: dict[str, Any], chunk):
        self.refs, self.chunk = refs, chunk
        self.b = lax.axis_index("row")
        self.channels = pl.ds(lax.axis_index("column") * CHANNELS, CHANNELS)

    def fetch(self, rooms: dict[str, Any], barrier) -> None:
        """Bring the chunk's tokens of each of `rooms` to shared memory."""
        tokens = pl.ds(self.chunk * CHUNK, CHUNK)
        for name, room in rooms.items():
            source = self.refs[name].at[self.b, tokens, self.channels]
            plgpu.copy_gmem_to_smem(source, room, barrier)
        plgpu.barrier_wait(barrier)

    def pair(self, name: str, *at: Any) -> _Pair:
        """Of `refs[name]`, [B, ..., 2, D]."""
        ref = self.refs[name].at[self.b, *at]
        return _Pair(*(plgpu.load(ref.at[part, self.channels]) for part in range(2)))

    def write(self, x: _Pair, name: str, *at: Any) -> None:
        for part in range(2):
            self.refs[name].at[self.b, *at, part, self.channels][...] = x[part]

    def token(self, name: str, at, x) -> None:
        to = self.refs[name].at[self.b, self.chunk * CHUNK + at, self.channels]
        to[...] = x.astype(to.dtype)


def _row(room, at) -> Any:
    return plgpu.load(room.at[at]).astype(_F32)


def _decay(rooms, at) -> _Pair:
    return _Pair(_row(rooms["real"], at), _row(rooms["imag"], at))


def _constant(value: float) -> Any:
    return plgpu.layout_cast(
        jnp.full(CHANNELS, value, _F32), plgpu.Layout.WG_STRIDED((CHANNELS,), vec_size=1)
    )


def _launch(kernel, named, out, names, chunks, fetched, rooms, interpret):
    """Run `kernel(block, fetched rooms, other rooms, barrier)` on the arrays `named`, in blocks by (column, chunk, row)."""
    batch, channels = named[next(iter(named))].shape[0], named[next(iter(named))].shape[-1]

    def body(*refs):
        count = len(named) + len(names)
        given = dict(zip([*named, *names], refs[:count], strict=True))
        *rest, barrier = refs[count:]
        block = _Block(given, lax.axis_index("chunk"))
        kernel(block, dict(zip(fetched, rest, strict=False)), rest[len(fetched) :], barrier)

    smem = [plgpu.SMEM((CHUNK, CHANNELS), named[name].dtype) for name in fetched]
    return plgpu.kernel(
        body,
        out_type=out,
        grid=(channels // CHANNELS, chunks, batch),
        grid_names=("column", "chunk", "row"),
        scratch_types=[*smem, *rooms, plgpu.Barrier(num_arrivals=max(1, len(fetched)))],
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
    )(*named.values())


def _memories(x: Inputs, *first: int) -> Any:
    batch, _, channels = x.u.shape
    return jax.ShapeDtypeStruct((batch, *first, 2, channels), _F32)


def added(x: Inputs, dy=None, *, interpret: Any = False) -> tuple[Any, Any]:
    """What each chunk adds to the memory, and what it multiplies it by, [B, N, 2, D].

    With `dy`: what it adds to the gradient of the memory that enters it.
    """
    chunks = x.u.shape[1] // CHUNK
    fetched = ("real", "imag", "u") if dy is None else ("real", "imag", "c", "dy")
    given = x._asdict() | dict(dy=dy)
    named = {name: given[name] for name in fetched}

    def kernel(block, rooms, _, barrier):
        block.fetch(rooms, barrier)
        zero = _constant(0.0)

        def step(t, carry):
            memory, factor = carry
            decay = _decay(rooms, t)
            if dy is None:
                memory = decay.times(memory).plus(_Pair(_row(rooms["u"], t), 0.0))
            else:
                share = _row(rooms["c"], t) * _row(rooms["dy"], t)
                memory = decay.turned().times(memory.plus(_Pair(share, 0.0)))
            return memory, decay.times(factor)

        start = _Pair(zero, zero), _Pair(_constant(1.0), zero)
        memory, factor = loop(CHUNK, step, start, reverse=dy is not None)
        block.write(memory, "added", block.chunk)
        block.write(factor, "factor", block.chunk)

    out = (_memories(x, chunks),) * 2
    return _launch(kernel, named, out, ("added", "factor"), chunks, fetched, [], interpret)


def entering(
    x: Inputs, found: tuple[Any, Any], first, *, reverse: bool = False, interpret: Any = False
) -> tuple[Any, Any]:
    """The memories that enter each chunk, and the one after the last, from the first, [B, 2, D]; `reverse` against time, of gradients."""
    chunks = found[0].shape[1]
    named = dict(added=found[0], factor=found[1], first=first)

    def kernel(block, *_):
        def place(index):
            index = jnp.minimum(index, chunks - 1)
            return chunks - 1 - index if reverse else index

        def ask(index):
            return [
                (block.pair("added", place(index + i)), block.pair("factor", place(index + i)))
                for i in range(_AHEAD)
            ]

        def step(index, carry):
            memory, asked = carry
            following = ask((index + 1) * _AHEAD)
            for i, (own, factor) in enumerate(asked):
                at = index * _AHEAD + i

                @pl.when(at < chunks)
                def _(memory=memory, at=at):
                    block.write(memory, "entering", place(at))

                factor = factor.turned() if reverse else factor
                after = factor.times(memory).plus(own)
                memory = _Pair(
                    *(jnp.where(at < chunks, a, m) for a, m in zip(after, memory, strict=True))
                )
            return memory, following

        memory, _ = lax.fori_loop(0, -(-chunks // _AHEAD), step, (block.pair("first"), ask(0)))
        block.write(memory, "last")

    out = _memories(x, chunks), _memories(x)
    return _launch(kernel, named, out, ("entering", "last"), 1, (), [], interpret)


def outputs(x: Inputs, before, *, interpret: Any = False) -> Any:
    """y [B, T, D] bfloat16, from the memories that enter each chunk."""
    named = x._asdict() | dict(before=before)

    def kernel(block, rooms, _, barrier):
        memory = block.pair("before", block.chunk)
        block.fetch(rooms, barrier)

        def step(t, memory):
            memory = _decay(rooms, t).times(memory).plus(_Pair(_row(rooms["u"], t), 0.0))
            block.token("y", t, _row(rooms["c"], t) * memory.real)
            return memory

        loop(CHUNK, step, memory)

    out = jax.ShapeDtypeStruct(x.u.shape, _BF16)
    chunks = x.u.shape[1] // CHUNK
    return _launch(kernel, named, out, ("y",), chunks, x._fields, [], interpret)


def gradients(x: Inputs, dy, before, after, *, interpret: Any = False) -> Inputs:
    """Gradients of the inputs, from the memories that enter each chunk and the gradients of those that leave it."""
    named = x._asdict() | dict(dy=dy, before=before, after=after)

    def kernel(block, rooms, held, barrier):
        memory = block.pair("before", block.chunk)
        later = block.pair("after", block.chunk)
        block.fetch(rooms, barrier)

        def forward(t, memory):
            for part, room in zip(memory, held, strict=True):
                room.at[t][...] = part
            return _decay(rooms, t).times(memory).plus(_Pair(_row(rooms["u"], t), 0.0))

        def back(t, carry):
            later, after = carry
            dy = _row(rooms["dy"], t)
            block.token("dc", t, dy * after.real)
            g = later.plus(_Pair(_row(rooms["c"], t) * dy, 0.0))
            block.token("du", t, g.real)
            before = _Pair(*(plgpu.load(room.at[t]) for room in held))
            of_decay = before.turned().times(g)
            block.token("d_real", t, of_decay.real)
            block.token("d_imag", t, of_decay.imag)
            return _decay(rooms, t).turned().times(g), before

        memory = loop(CHUNK, forward, memory)
        loop(CHUNK, back, (later, memory), reverse=True)

    out = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in x)
    held = [plgpu.SMEM((CHUNK, CHANNELS), _F32)] * 2
    names = ("du", "dc", "d_real", "d_imag")
    chunks = x.u.shape[1] // CHUNK
    found = _launch(kernel, named, out, names, chunks, (*x._fields, "dy"), held, interpret)
    return Inputs(*found)
