"""A selective scan, `h_t = keep_t e^{δ_t A} h_{t-1} + δ_t u_t B_t`, `y_t = Σ_n C_t h_t + D u_t`, on Mosaic GPU (Hopper).

A warpgroup has some channels of a chunk of tokens, whose memories are in its registers: a warp has a quarter of the channels, a
thread four numbers of each of two. A row's chunks are walked side by side, twice: from nothing, which leaves what each adds to the
memory; and, once these are put together, from the memory that enters it. The backward pass goes the same way against time and keeps
nothing by token: it makes a few memories again at a time, from those that entered.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu, state_rows

_F32 = jnp.float32
_WARPS, ROWS = 4, 16
CHANNELS = _WARPS * ROWS
"""What the number of channels is a multiple of."""
CHUNK = 64
"""What the number of tokens is a multiple of."""
STATES = (8, 16)
_SIDE_BY_SIDE = 65535  # by CUDA
_UNROLL, _AHEAD = 4, 6
_HELD = 64  # numbers of a channel that are held at a time
_LOG2E = math.log2(math.e)


def reason(u, state_size: int) -> str | None:
    """What this backend takes in place of these arguments (arrays or their shapes), or None."""
    if u.dtype != jnp.bfloat16:
        return f"u in bfloat16, not {u.dtype}"
    if u.shape[2] % CHANNELS:
        return f"multiples of {CHANNELS} channels, not {u.shape[2]}"
    if state_size not in STATES:
        return f"{' or '.join(map(str, STATES))} numbers a channel, not {state_size}"
    return too_many(u, CHUNK)


def too_many(u, chunk: int) -> str | None:
    """What CUDA's grids take in place of u's rows and chunks, or None."""
    for name, count in (
        ("rows", u.shape[0]),
        (f"chunks of {chunk} tokens", -(-u.shape[1] // chunk)),
    ):
        if count > _SIDE_BY_SIDE:
            return f"at most {_SIDE_BY_SIDE:,} {name}, not {count:,}"
    return None


class Inputs(NamedTuple):
    """What every kernel reads. Attributes: u: [B, T, D] bfloat16; delta: [B, T, D]; a: [D, N]; b, c: [B, T, N]; d: [D]; keep: [B, T],
    0 where a document begins, or None. All but u are float32."""

    u: Any
    delta: Any
    a: Any
    b: Any
    c: Any
    d: Any
    keep: Any


class _Block:
    """A warpgroup's place, and arrays of its channels in registers: [warps, rows], spread to [warps, rows, states]."""

    def __init__(self, refs: dict[str, Any], states: int):
        self.refs = refs
        self.layout = state_rows(ROWS, states)
        self.shape = (_WARPS, ROWS, states)
        self.column, self.b = lax.axis_index("column"), lax.axis_index("row")
        self.channels = pl.ds(self.column * _WARPS, _WARPS)

    def zero(self):
        return plgpu.layout_cast(jnp.zeros(self.shape, _F32), self.layout)

    def load(self, ref) -> Any:
        """The memories of a reference."""
        return plgpu.load(ref, layout=self.layout, optimized=False)

    def by_channel(self, ref) -> Any:
        row = plgpu.load(ref, layout=self.layout.reduce(2), optimized=False)
        return row.astype(_F32)

    def spread(self, row) -> Any:
        """[warps, rows] -> [warps, rows, states]."""
        return plgpu.layout_cast(lax.broadcast_in_dim(row, self.shape, [0, 1]), self.layout)

    def by_state(self, ref) -> Any:
        """[states], to all channels."""
        row = plgpu.load(ref, layout=self.layout.reduce((0, 1)), optimized=False)
        return plgpu.layout_cast(lax.broadcast_in_dim(row, self.shape, [2]), self.layout)

    def over_states(self, x) -> Any:
        return plgpu.layout_cast(jnp.sum(x, axis=2), self.layout.reduce(2))

    def rates(self) -> Any:
        return self.load(self.refs["a"].at[self.channels])

    def decay(self, delta, rates, rooms, t) -> Any:
        """Of the chunk's t-th token; `rates` in powers of two."""
        factor = jnp.exp2(self.spread(delta) * rates)
        return factor * rooms["keep"][t] if "keep" in rooms else factor


def loop(count: int, step, carry, reverse: bool = False):
    """`step(token, carry)` for tokens 0 to count - 1, or against time."""

    def some(index, carry):
        for i in range(_UNROLL):
            at = index * _UNROLL + i
            carry = step(count - 1 - at if reverse else at, carry)
        return carry

    return lax.fori_loop(0, count // _UNROLL, some, carry)


def _fetch(block: _Block, rooms: dict[str, Any], start, barrier) -> None:
    """Bring a chunk's tokens of each of `rooms` to shared memory."""
    tokens = pl.ds(start, CHUNK)
    for name, room in rooms.items():
        ref = block.refs[name].at[block.b, tokens]
        source = ref if name in ("b", "c", "keep") else ref.at[:, block.channels]
        plgpu.copy_gmem_to_smem(source, room, barrier)
    plgpu.barrier_wait(barrier)


def _rooms(x: Inputs, *names: str) -> dict[str, Any]:
    """Room for a chunk's tokens of each, and of `keep` where there is one."""
    shapes = {"b": (CHUNK, x.a.shape[1]), "c": (CHUNK, x.a.shape[1]), "keep": (CHUNK,)}
    names = names if x.keep is None else (*names, "keep")
    return {
        name: plgpu.SMEM(
            shapes.get(name, (CHUNK, _WARPS, ROWS)), jnp.bfloat16 if name in ("u", "dy") else _F32
        )
        for name in names
    }


def _memory(states: int, *first: int) -> Any:
    return jax.ShapeDtypeStruct((*first, ROWS, states), _F32)


def _launch(kernel, named, out, names, grid, rooms, interpret):
    """Run `kernel(refs, rooms, barrier)` on the arrays `named`, in blocks by (column, chunk, row)."""
    asked = list(rooms)

    def body(*refs):
        given = dict(zip([*named, *names], refs, strict=False))
        rest = refs[len(given) :]
        kernel(given, dict(zip(asked, rest, strict=False)), *rest[len(asked) :])

    body.__name__ = f"selective_scan_{kernel.__name__.removesuffix('_kernel')}"
    scratch = list(rooms.values())
    scratch.append(plgpu.Barrier(num_arrivals=max(1, sum(n in _FETCHED for n in asked))))
    return plgpu.kernel(
        body,
        out_type=out,
        grid=grid,
        grid_names=("column", "chunk", "row"),
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
    )(*named.values())


_FETCHED = ("u", "delta", "b", "c", "dy", "keep")


def _named(x: Inputs, **more: Any) -> dict[str, Any]:
    """The inputs by name, channels cut into rows; `a` in powers of two. Those that are None are left out."""

    def rows(a):
        return a.reshape(*a.shape[:-1], a.shape[-1] // ROWS, ROWS)

    named = dict(u=rows(x.u), delta=rows(x.delta), b=x.b, c=x.c, d=rows(x.d), keep=x.keep)
    named["a"] = (x.a * _LOG2E).reshape(-1, ROWS, x.a.shape[1])
    named = {n: a for n, a in (named | more).items() if a is not None}
    return named | ({"dy": rows(named["dy"])} if "dy" in named else {})


def _sizes(x: Inputs) -> tuple[int, int, int, int]:
    """Rows, chunks, channels over ROWS, states."""
    batch, length, channels = x.u.shape
    return batch, length // CHUNK, channels // ROWS, x.a.shape[1]


def _grid(x: Inputs) -> tuple[int, int, int]:
    batch, chunks, groups, _ = _sizes(x)
    return groups // _WARPS, chunks, batch


def added(x: Inputs, dy=None, *, interpret: Any = False) -> tuple[Any, Any]:
    """What each chunk adds to the memory: [B, N, D/16, 16, states], and the sum of its δ, [B, N, D/16, 16].

    With `dy`: what it adds to the gradient of the memory that enters it.
    """
    batch, chunks, groups, states = _sizes(x)
    named = _named(x, dy=dy)
    fetched = ("delta", "u", "b") if dy is None else ("delta", "dy", "c")
    named = {n: a for n, a in named.items() if n in (*fetched, "a", "keep")}

    def added_kernel(refs, rooms, barrier):
        block = _Block(refs, states)
        chunk = lax.axis_index("chunk")
        start = chunk * CHUNK
        _fetch(block, rooms, start, barrier)
        rates = block.rates()

        def step(t, carry):
            memory, total = carry
            delta = block.by_channel(rooms["delta"].at[t])
            decay = block.decay(delta, rates, rooms, t)
            if dy is None:
                write = delta * block.by_channel(rooms["u"].at[t])
                memory = decay * memory + block.spread(write) * block.by_state(rooms["b"].at[t])
            else:
                given = block.spread(block.by_channel(rooms["dy"].at[t]))
                memory = decay * (memory + given * block.by_state(rooms["c"].at[t]))
            return memory, total + delta

        none = block.over_states(block.zero())
        memory, total = loop(CHUNK, step, (block.zero(), none), reverse=dy is not None)
        refs["added"].at[block.b, chunk, block.channels][...] = memory
        refs["total"].at[block.b, chunk, block.channels][...] = total

    out = (
        _memory(states, batch, chunks, groups),
        jax.ShapeDtypeStruct((batch, chunks, groups, ROWS), _F32),
    )
    rooms = _rooms(x, *fetched)
    return _launch(added_kernel, named, out, ("added", "total"), _grid(x), rooms, interpret)


def entering(
    x: Inputs, found: tuple[Any, Any], first, *, reverse: bool = False, interpret: Any = False
) -> tuple[Any, Any]:
    """The memories that enter each chunk, and the one after the last, from the first; `reverse` against time, of gradients."""
    batch, chunks, groups, states = _sizes(x)
    named = dict(added=found[0], total=found[1], first=first, a=_named(x)["a"])
    if x.keep is not None:  # nothing crosses a chunk in which a document begins
        named["crossed"] = jnp.min(x.keep.reshape(batch, chunks, CHUNK), axis=2)

    def entering_kernel(refs, rooms, barrier):
        del rooms, barrier
        block = _Block(refs, states)
        rates = block.rates()

        def place(index):
            index = jnp.minimum(index, chunks - 1)
            return chunks - 1 - index if reverse else index

        def ask(index):
            asked = []
            for i in range(_AHEAD):
                at = place(index + i)
                crossed = refs["crossed"][block.b, at] if "crossed" in refs else None
                of = lambda name, at=at: refs[name].at[block.b, at, block.channels]  # noqa: E731
                asked.append((block.load(of("added")), block.by_channel(of("total")), crossed))
            return asked

        def step(index, carry):
            memory, asked = carry
            following = ask((index + 1) * _AHEAD)
            for i, (own, total, crossed) in enumerate(asked):
                at = index * _AHEAD + i
                inside = at < chunks

                @pl.when(inside)
                def _(memory=memory, at=at):
                    to = refs["entering"].at[block.b, place(at), block.channels]
                    to[...] = memory

                decay = jnp.exp2(block.spread(total) * rates)
                decay = decay if crossed is None else decay * crossed
                memory = jnp.where(inside, decay * memory + own, memory)
            return memory, following

        start = block.load(refs["first"].at[block.b, block.channels])
        steps = -(-chunks // _AHEAD)
        memory, _ = lax.fori_loop(0, steps, step, (start, ask(0)))
        refs["last"].at[block.b, block.channels][...] = memory

    out = _memory(states, batch, chunks, groups), _memory(states, batch, groups)
    grid = (groups // _WARPS, 1, batch)
    return _launch(entering_kernel, named, out, ("entering", "last"), grid, {}, interpret)


def outputs(x: Inputs, before, *, interpret: Any = False) -> Any:
    """y [B, T, D] bfloat16, from the memories that enter each chunk."""
    batch, chunks, groups, states = _sizes(x)
    named = _named(x, before=before)

    def outputs_kernel(refs, rooms, barrier):
        block = _Block(refs, states)
        chunk = lax.axis_index("chunk")
        start = chunk * CHUNK
        memory = block.load(refs["before"].at[block.b, chunk, block.channels])
        skip = block.by_channel(refs["d"].at[block.channels])
        _fetch(block, rooms, start, barrier)
        rates = block.rates()

        def step(t, memory):
            delta, u = (block.by_channel(rooms[n].at[t]) for n in ("delta", "u"))
            write = block.spread(delta * u) * block.by_state(rooms["b"].at[t])
            memory = block.decay(delta, rates, rooms, t) * memory + write
            y = block.over_states(memory * block.by_state(rooms["c"].at[t])) + skip * u
            refs["y"].at[block.b, start + t, block.channels][...] = y.astype(jnp.bfloat16)
            return memory

        loop(CHUNK, step, memory)

    out = jax.ShapeDtypeStruct((batch, chunks * CHUNK, groups, ROWS), jnp.bfloat16)
    rooms = _rooms(x, "delta", "u", "b", "c")
    y = _launch(outputs_kernel, named, out, ("y",), _grid(x), rooms, interpret)
    return y.reshape(x.u.shape)


def gradients(x: Inputs, dy, before, after, *, interpret: Any = False) -> tuple[Any, ...]:
    """Gradients of u, delta, a, b and c, from the memories that enter each chunk and the gradients of those that leave it."""
    batch, chunks, groups, states = _sizes(x)
    columns = groups // _WARPS
    named = _named(x, dy=dy, before=before, after=after)
    piece = _HELD // states  # tokens whose memories are held at a time
    group = 2 * piece  # and whose gradients of b and c are put together

    def gradients_kernel(refs, rooms, barrier):
        block = _Block(refs, states)
        chunk = lax.axis_index("chunk")
        start = chunk * CHUNK
        place = block.b, chunk, block.channels
        memory = block.load(refs["before"].at[*place])
        later = block.load(refs["after"].at[*place])
        skip = block.by_channel(refs["d"].at[block.channels])
        fetched = {n: room for n, room in rooms.items() if n in _FETCHED}
        _fetch(block, fetched, start, barrier)
        rates = block.rates()
        starts, sums = rooms["starts"], rooms["sums"]

        def read(t):
            delta, u = (block.by_channel(rooms[n].at[t]) for n in ("delta", "u"))
            b = block.by_state(rooms["b"].at[t])
            return delta, u, b, block.decay(delta, rates, rooms, t)

        def forward(delta, u, b, decay, memory):
            return decay * memory + block.spread(delta * u) * b

        def remember(p, memory):
            starts.at[p][...] = memory
            for i in range(piece):
                memory = forward(*read(p * piece + i), memory)
            return memory

        last = CHUNK // piece - 1
        starts.at[last][...] = lax.fori_loop(0, last, remember, memory)

        def back(index, carry):
            first = CHUNK - (index + 1) * group
            for half in (1, 0):
                carry = through(first, half * piece, carry)
            plgpu.commit_smem()
            tokens = pl.ds(start + first, group)
            for which, name in enumerate(("dc", "db")):
                parts = [plgpu.load(sums.at[which, :, w]) for w in range(_WARPS)]
                refs[name].at[block.b, block.column, tokens][...] = sum(parts[1:], parts[0])
            plgpu.commit_smem()
            return carry

        def through(first, offset, carry):
            """A piece's tokens, with time and back."""
            later, d_rates = carry
            memory = block.load(starts.at[lax.div(first + offset, piece)])
            held = []
            for i in range(piece):
                given = read(first + offset + i)
                held.append((*given, memory))
                memory = forward(*given, memory)
            for i in reversed(range(piece)):
                t = first + offset + i
                delta, u, b, decay, before = held[i]
                dy = block.by_channel(rooms["dy"].at[t])
                given = block.spread(dy)
                sums.at[0, offset + i][...] = jnp.sum(given * memory, axis=1)
                g = later + given * block.by_state(rooms["c"].at[t])
                sums.at[1, offset + i][...] = jnp.sum(block.spread(delta * u) * g, axis=1)
                of_write = block.over_states(g * b)
                later = decay * g
                of_decay = later * before
                d_delta = u * of_write + block.over_states(of_decay * rates) * (1 / _LOG2E)
                to = block.b, start + t, block.channels
                refs["du"].at[*to][...] = (delta * of_write + skip * dy).astype(jnp.bfloat16)
                refs["d_delta"].at[*to][...] = d_delta
                d_rates = d_rates + block.spread(delta) * of_decay
                memory = before
            return later, d_rates

        _, d_rates = lax.fori_loop(0, CHUNK // group, back, (later, block.zero()))
        refs["da"].at[*place][...] = d_rates

    struct = jax.ShapeDtypeStruct
    length = chunks * CHUNK
    by_token = struct((batch, columns, length, states), _F32)
    out = (
        struct((batch, length, groups, ROWS), jnp.bfloat16),
        struct((batch, length, groups, ROWS), _F32),
        _memory(states, batch, chunks, groups),
        by_token,
        by_token,
    )
    rooms = _rooms(x, "delta", "u", "b", "c", "dy")
    rooms["starts"] = plgpu.SMEM((CHUNK // piece, _WARPS, ROWS, states), _F32)
    rooms["sums"] = plgpu.SMEM((2, group, _WARPS, states), _F32)
    names = ("du", "d_delta", "da", "db", "dc")
    du, d_delta, da, db, dc = _launch(
        gradients_kernel, named, out, names, _grid(x), rooms, interpret
    )
    shape = x.u.shape
    da = jnp.sum(da, axis=(0, 1)).reshape(x.a.shape)
    db, dc = (jnp.sum(part, axis=1) for part in (db, dc))
    return du.reshape(shape), d_delta.reshape(shape), da, db, dc
