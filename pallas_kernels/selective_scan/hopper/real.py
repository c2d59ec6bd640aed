"""A selective scan on Mosaic GPU (Hopper): `h_t = continues_t e^{δ_t A} h_{t-1} + δ_t u_t B_t`, `y_t = Σ_n C_t h_t + D u_t`.

A warpgroup computes a chunk of tokens for some channels, whose memories are in its registers: a warp has a quarter of the channels,
a thread four numbers of each of two. The chunks of a row are computed in parallel, twice: from an empty memory, which gives what
each chunk writes to the memory (`chunk_writes`); and, once a scan over these has given the memory that enters each chunk (`scan`),
from that memory (`chunk_forward`). The backward pass does the same in reverse, and stores nothing for each token:
`chunk_backward` recomputes a few memories at a time from those that enter the chunks.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu, state_rows
from pallas_kernels.hopper.launch import launch
from pallas_kernels.requirements import Requirement, first_unmet

_F32 = jnp.float32
_WARPS, _ROWS = 4, 16
CHANNELS = _WARPS * _ROWS
"""The number of channels must be a multiple of this."""
CHUNK = 64
"""The number of tokens must be a multiple of this."""
STATES = (8, 16)
_MAX_GRID = 65535  # CUDA's largest size of a grid's second and third axes
_UNROLL, _AHEAD = 4, 6  # tokens of an unrolled step; chunks that `scan` loads ahead
_IN_REGISTERS = (
    64  # numbers of a channel's memories that `chunk_backward` has in registers at a time
)
_LOG2E = math.log2(math.e)


def grid_requirements(chunk: int) -> tuple[Requirement, ...]:
    """What CUDA's grids require of an `api.Call`, for chunks of `chunk` tokens."""
    return (
        Requirement(
            f"at most {_MAX_GRID:,} rows",
            lambda c: c.u.shape[0] <= _MAX_GRID,
            lambda c: f"{c.u.shape[0]:,}",
        ),
        Requirement(
            f"at most {_MAX_GRID:,} chunks of {chunk} tokens",
            lambda c: -(-c.u.shape[1] // chunk) <= _MAX_GRID,
            lambda c: f"{-(-c.u.shape[1] // chunk):,}",
        ),
    )


REQUIREMENTS = (
    Requirement(
        "u in bfloat16", lambda c: c.u.dtype == jnp.bfloat16, lambda c: jnp.dtype(c.u.dtype).name
    ),
    Requirement(
        f"a multiple of {CHANNELS} channels",
        lambda c: c.u.shape[2] % CHANNELS == 0,
        lambda c: str(c.u.shape[2]),
    ),
    Requirement(
        f"memories of {' or '.join(map(str, STATES))} numbers for each channel",
        lambda c: c.state_size in STATES,
        lambda c: str(c.state_size),
    ),
    *grid_requirements(CHUNK),
)


def unsupported(call) -> str | None:
    """Return the first of `REQUIREMENTS` that an `api.Call` does not meet, or None."""
    return first_unmet(REQUIREMENTS, call)


class Inputs(NamedTuple):
    """The inputs of all kernels. Attributes: u: [B, T, D] bfloat16; delta: [B, T, D]; a: [D, N]; b, c: [B, T, N]; d: [D]; continues:
    [B, T], 0 at the first token of a document and 1 elsewhere, or None. All but u are float32."""

    u: Any
    delta: Any
    a: Any
    b: Any
    c: Any
    d: Any
    continues: Any


def forward(x: Inputs, initial, *, save: bool, interpret: Any = False) -> tuple[Any, Any, Any]:
    """Return the output [B, T, D] bfloat16, the final memory [B, D, N], and the memories that enter each chunk, for `backward`."""
    del save  # they are computed in any case
    writes = chunk_writes(x, interpret=interpret)
    before, final = scan(x, writes, _by_row(initial), interpret=interpret)
    y = chunk_forward(x, before, interpret=interpret)
    return y, final.reshape(initial.shape), before


def backward(x: Inputs, before, dy, d_final, *, interpret: Any = False) -> tuple[Inputs, Any]:
    """Return the gradients of the inputs and of the initial memory."""
    writes = chunk_writes(x, dy, interpret=interpret)
    after, d_initial = scan(x, writes, _by_row(d_final), reverse=True, interpret=interpret)
    du, d_delta, da, db, dc = chunk_backward(x, dy, before, after, interpret=interpret)
    dd = jnp.sum(dy.astype(_F32) * x.u.astype(_F32), axis=(0, 1))
    d_continues = None if x.continues is None else jnp.zeros_like(x.continues)
    gradients = Inputs(du, d_delta, da, db, dc, dd, d_continues)
    return gradients, d_initial.reshape(d_final.shape)


class _Block:
    """The channels and the row of a warpgroup, and arrays in its registers: [warps, rows], or [warps, rows, states] for memories.

    Attributes:
        refs: references to global memory by name.
        smem: references to buffers in shared memory by name.
    """

    def __init__(self, refs: dict[str, Any], smem: dict[str, Any], states: int):
        self.refs, self.smem = refs, smem
        self.layout = state_rows(_ROWS, states)
        self.shape = (_WARPS, _ROWS, states)
        self.column, self.b = lax.axis_index("column"), lax.axis_index("row")
        self.channels = pl.ds(self.column * _WARPS, _WARPS)

    def zero(self):
        return plgpu.layout_cast(jnp.zeros(self.shape, _F32), self.layout)

    def load_memory(self, ref) -> Any:
        """[warps, rows, states]."""
        return plgpu.load(ref, layout=self.layout, optimized=False)

    def load_channels(self, ref) -> Any:
        """[warps, rows], in float32."""
        row = plgpu.load(ref, layout=self.layout.reduce(2), optimized=False)
        return row.astype(_F32)

    def load_states(self, ref) -> Any:
        """[states], spread over the channels."""
        row = plgpu.load(ref, layout=self.layout.reduce((0, 1)), optimized=False)
        return plgpu.layout_cast(lax.broadcast_in_dim(row, self.shape, [2]), self.layout)

    def spread(self, row) -> Any:
        """[warps, rows] -> [warps, rows, states]."""
        return plgpu.layout_cast(lax.broadcast_in_dim(row, self.shape, [0, 1]), self.layout)

    def sum_states(self, x) -> Any:
        """[warps, rows, states] -> [warps, rows]."""
        return plgpu.layout_cast(jnp.sum(x, axis=2), self.layout.reduce(2))

    def channels_of(self, name: str, t) -> Any:
        """An input's channels at the chunk's token t, from shared memory."""
        return self.load_channels(self.smem[name].at[t])

    def states_of(self, name: str, t) -> Any:
        """b or c at the chunk's token t, from shared memory."""
        return self.load_states(self.smem[name].at[t])

    def rates(self) -> Any:
        """`a`, for powers of two."""
        return self.load_memory(self.refs["a"].at[self.channels])

    def decay(self, delta, rates, t) -> Any:
        """The decay of the chunk's token t."""
        factor = jnp.exp2(self.spread(delta) * rates)
        return factor * self.smem["continues"][t] if "continues" in self.smem else factor

    def copy_tokens(self, start) -> None:
        """Copy the chunk's tokens of all inputs that have a buffer to shared memory, and wait."""
        tokens = pl.ds(start, CHUNK)
        for name, buffer in self.smem.items():
            if name in _BY_TOKEN:
                ref = self.refs[name].at[self.b, tokens]
                source = ref if name in _WITHOUT_CHANNELS else ref.at[:, self.channels]
                plgpu.copy_gmem_to_smem(source, buffer, self.smem["barrier"])
        plgpu.barrier_wait(self.smem["barrier"])


_BY_TOKEN = ("u", "delta", "b", "c", "dy", "continues")
_WITHOUT_CHANNELS = ("b", "c", "continues")


def for_tokens(count: int, step, carry, reverse: bool = False):
    """Return the carry after `step(token, carry)` for tokens 0 to count - 1, or in reverse order."""

    def unrolled(index, carry):
        for i in range(_UNROLL):
            at = index * _UNROLL + i
            carry = step(count - 1 - at if reverse else at, carry)
        return carry

    return lax.fori_loop(0, count // _UNROLL, unrolled, carry)


def _smem(x: Inputs, *names: str, **others: Any) -> dict[str, Any]:
    """Buffers for a chunk's tokens of the inputs `names` (and `continues` where there is one), then `others`, then the barrier of the
    copies."""
    shapes = {"b": (CHUNK, x.a.shape[1]), "c": (CHUNK, x.a.shape[1]), "continues": (CHUNK,)}
    names = names if x.continues is None else (*names, "continues")
    buffers = {
        name: plgpu.SMEM(
            shapes.get(name, (CHUNK, _WARPS, _ROWS)), jnp.bfloat16 if name in ("u", "dy") else _F32
        )
        for name in names
    }
    return buffers | others | dict(barrier=plgpu.Barrier(num_arrivals=len(names)))


def _by_row(memory) -> Any:
    """[B, D, N] -> [B, D / 16, 16, N]."""
    batch, channels, states = memory.shape
    return memory.reshape(batch, channels // _ROWS, _ROWS, states)


def _memory(states: int, *axes: int) -> Any:
    return jax.ShapeDtypeStruct((*axes, _ROWS, states), _F32)


def _named(x: Inputs, **others: Any) -> dict[str, Any]:
    """The inputs by name, with channels divided into rows, and `a` for powers of two; `others` are added."""

    def rows(a):
        return a.reshape(*a.shape[:-1], a.shape[-1] // _ROWS, _ROWS)

    dy = others.pop("dy", None)
    return dict(
        u=rows(x.u),
        delta=rows(x.delta),
        b=x.b,
        c=x.c,
        d=rows(x.d),
        continues=x.continues,
        a=(x.a * _LOG2E).reshape(-1, _ROWS, x.a.shape[1]),
        dy=None if dy is None else rows(dy),
        **others,
    )


class _Sizes(NamedTuple):
    """Sizes of a call. Attributes: batch: B; chunks: of a row; groups: D / 16; states: N."""

    batch: int
    chunks: int
    groups: int
    states: int

    @classmethod
    def of(cls, x: Inputs) -> _Sizes:
        batch, length, channels = x.u.shape
        return cls(batch, length // CHUNK, channels // _ROWS, x.a.shape[1])

    @property
    def columns(self) -> int:
        """Blocks of channels."""
        return self.groups // _WARPS

    @property
    def grid(self) -> dict[str, int]:
        """One block of the grid for each column, chunk and row."""
        return dict(column=self.columns, chunk=self.chunks, row=self.batch)


def chunk_writes(x: Inputs, dy=None, *, interpret: Any = False) -> tuple[Any, Any]:
    """Return what each chunk writes to the memory, [B, chunks, D/16, 16, N], and the sum of its δ, [B, chunks, D/16, 16].

    With `dy`, return what each chunk adds to the gradient of the memory that enters it.
    """
    sizes = _Sizes.of(x)
    names = ("delta", "u", "b") if dy is None else ("delta", "dy", "c")
    inputs = {n: a for n, a in _named(x, dy=dy).items() if n in (*names, "a", "continues")}

    def kernel(refs, smem):
        block = _Block(refs, smem, sizes.states)
        chunk = lax.axis_index("chunk")
        block.copy_tokens(chunk * CHUNK)
        rates = block.rates()

        def step(t, carry):
            memory, total = carry
            delta = block.channels_of("delta", t)
            decay = block.decay(delta, rates, t)
            if dy is None:
                write = delta * block.channels_of("u", t)
                memory = decay * memory + block.spread(write) * block.states_of("b", t)
            else:
                d_output = block.spread(block.channels_of("dy", t))
                memory = decay * (memory + d_output * block.states_of("c", t))
            return memory, total + delta

        zeros = block.sum_states(block.zero())
        memory, total = for_tokens(CHUNK, step, (block.zero(), zeros), reverse=dy is not None)
        refs["writes"].at[block.b, chunk, block.channels][...] = memory
        refs["total"].at[block.b, chunk, block.channels][...] = total

    chunks = (sizes.batch, sizes.chunks, sizes.groups)
    outputs = dict(
        writes=_memory(sizes.states, *chunks), total=jax.ShapeDtypeStruct((*chunks, _ROWS), _F32)
    )
    results = launch(
        kernel,
        inputs=inputs,
        outputs=outputs,
        grid=sizes.grid,
        scratch=_smem(x, *names),
        name="selective_scan_chunk_writes",
        interpret=interpret,
    )
    return results["writes"], results["total"]


def scan(
    x: Inputs, writes: tuple[Any, Any], initial, *, reverse: bool = False, interpret: Any = False
) -> tuple[Any, Any]:
    """Return the memories that enter each chunk, and the memory after the last chunk.

    With `reverse`, scan from the last chunk to the first, over gradients.

    Args:
        x: the inputs.
        writes: the results of `chunk_writes`.
        initial: [B, D/16, 16, N], the memory before the first chunk of the scan.
        reverse: whether the scan starts at the last chunk.
        interpret: parameters of the interpreter, or False.
    """
    sizes = _Sizes.of(x)
    chunks = sizes.chunks
    inputs = dict(writes=writes[0], total=writes[1], initial=initial, a=_named(x)["a"])
    if x.continues is not None:  # no memory crosses a chunk in which a document begins
        crossed = x.continues.reshape(sizes.batch, chunks, CHUNK)
        inputs["crossed"] = jnp.min(crossed, axis=2)

    def kernel(refs, smem):
        block = _Block(refs, smem, sizes.states)
        rates = block.rates()

        def chunk_at(index):
            index = jnp.minimum(index, chunks - 1)
            return chunks - 1 - index if reverse else index

        def load_chunks(index):
            loaded = []
            for i in range(_AHEAD):
                at = chunk_at(index + i)
                crossed = refs["crossed"][block.b, at] if "crossed" in refs else None
                write = block.load_memory(refs["writes"].at[block.b, at, block.channels])
                total = block.load_channels(refs["total"].at[block.b, at, block.channels])
                loaded.append((write, total, crossed))
            return loaded

        def step(index, carry):
            memory, loaded = carry
            following = load_chunks((index + 1) * _AHEAD)
            for i, (write, total, crossed) in enumerate(loaded):
                at = index * _AHEAD + i
                inside = at < chunks

                @pl.when(inside)
                def _(memory=memory, at=at):
                    refs["entering"].at[block.b, chunk_at(at), block.channels][...] = memory

                decay = jnp.exp2(block.spread(total) * rates)
                decay = decay if crossed is None else decay * crossed
                memory = jnp.where(inside, decay * memory + write, memory)
            return memory, following

        start = block.load_memory(refs["initial"].at[block.b, block.channels])
        steps = -(-chunks // _AHEAD)
        memory, _ = lax.fori_loop(0, steps, step, (start, load_chunks(0)))
        refs["final"].at[block.b, block.channels][...] = memory

    results = launch(
        kernel,
        inputs=inputs,
        outputs=dict(
            entering=_memory(sizes.states, sizes.batch, chunks, sizes.groups),
            final=_memory(sizes.states, sizes.batch, sizes.groups),
        ),
        grid=sizes.grid | dict(chunk=1),
        scratch=dict(barrier=plgpu.Barrier(num_arrivals=1)),  # not used
        name="selective_scan_scan",
        interpret=interpret,
    )
    return results["entering"], results["final"]


def chunk_forward(x: Inputs, before, *, interpret: Any = False) -> Any:
    """Return y [B, T, D] bfloat16, from the memories that enter each chunk."""
    sizes = _Sizes.of(x)

    def kernel(refs, smem):
        block = _Block(refs, smem, sizes.states)
        chunk = lax.axis_index("chunk")
        start = chunk * CHUNK
        memory = block.load_memory(refs["before"].at[block.b, chunk, block.channels])
        skip = block.load_channels(refs["d"].at[block.channels])
        block.copy_tokens(start)
        rates = block.rates()

        def step(t, memory):
            delta, u = (block.channels_of(n, t) for n in ("delta", "u"))
            write = block.spread(delta * u) * block.states_of("b", t)
            memory = block.decay(delta, rates, t) * memory + write
            y = block.sum_states(memory * block.states_of("c", t)) + skip * u
            refs["y"].at[block.b, start + t, block.channels][...] = y.astype(jnp.bfloat16)
            return memory

        for_tokens(CHUNK, step, memory)

    y = jax.ShapeDtypeStruct((*x.u.shape[:2], sizes.groups, _ROWS), jnp.bfloat16)
    results = launch(
        kernel,
        inputs=_named(x, before=before),
        outputs=dict(y=y),
        grid=sizes.grid,
        scratch=_smem(x, "delta", "u", "b", "c"),
        name="selective_scan_chunk_forward",
        interpret=interpret,
    )
    return results["y"].reshape(x.u.shape)


class _ChunkGradient:
    """The gradients of a chunk of tokens, from the last token to the first.

    The memories are recomputed: the chunk is divided into segments of `held` tokens, whose memories fit into registers; first the
    memories at which segments begin are stored in shared memory, then the segments are computed from the last to the first.

    Attributes:
        block: the channels and the row.
        rates: as in `_Block.rates`.
        skip: D, [warps, rows].
        start: the chunk's first token.
        held: tokens of a segment.
    """

    def __init__(self, block: _Block, rates, skip, start, held: int):
        self.block, self.rates, self.skip, self.start, self.held = block, rates, skip, start, held

    def load(self, t):
        """δ, u, b and the decay of the chunk's token t."""
        block = self.block
        delta, u = (block.channels_of(n, t) for n in ("delta", "u"))
        b = block.states_of("b", t)
        return delta, u, b, block.decay(delta, self.rates, t)

    def advance(self, delta, u, b, decay, memory):
        """The memory after one more token."""
        return decay * memory + self.block.spread(delta * u) * b

    def store_starts(self, memory) -> None:
        """Store the memories at which segments begin, given the one that enters the chunk."""
        starts = self.block.smem["starts"]

        def segment(index, memory):
            starts.at[index][...] = memory
            for i in range(self.held):
                memory = self.advance(*self.load(index * self.held + i), memory)
            return memory

        last = CHUNK // self.held - 1
        starts.at[last][...] = lax.fori_loop(0, last, segment, memory)

    def segment(self, first, offset: int, carry):
        """Compute the gradients of the tokens from `first + offset` on.

        Args:
            first: the first token of two segments whose gradients of b and c are summed together.
            offset: the segment's first token less `first`.
            carry: the gradient of the memory after the segment, and the sum of the gradients of `a`.
        """
        block, refs, sums = self.block, self.block.refs, self.block.smem["sums"]
        later, d_rates = carry
        memory = block.load_memory(block.smem["starts"].at[lax.div(first + offset, self.held)])
        tokens = []
        for i in range(self.held):
            loaded = self.load(first + offset + i)
            tokens.append((*loaded, memory))
            memory = self.advance(*loaded, memory)
        for i in reversed(range(self.held)):
            t = first + offset + i
            delta, u, b, decay, before = tokens[i]
            dy = block.channels_of("dy", t)
            d_output = block.spread(dy)
            sums.at[0, offset + i][...] = jnp.sum(d_output * memory, axis=1)
            g = later + d_output * block.states_of("c", t)
            sums.at[1, offset + i][...] = jnp.sum(block.spread(delta * u) * g, axis=1)
            d_write = block.sum_states(g * b)
            later = decay * g
            d_exponent = later * before
            d_delta = u * d_write + block.sum_states(d_exponent * self.rates) * (1 / _LOG2E)
            to = block.b, self.start + t, block.channels
            refs["du"].at[*to][...] = (delta * d_write + self.skip * dy).astype(jnp.bfloat16)
            refs["d_delta"].at[*to][...] = d_delta
            d_rates = d_rates + block.spread(delta) * d_exponent
            memory = before
        return later, d_rates

    def store_sums(self, first) -> None:
        """Write the gradients of b and c of two segments: the sums over this block's channels."""
        block, sums = self.block, self.block.smem["sums"]
        plgpu.commit_smem()
        tokens = pl.ds(self.start + first, 2 * self.held)
        for which, name in enumerate(("dc", "db")):
            parts = [plgpu.load(sums.at[which, :, w]) for w in range(_WARPS)]
            to = block.refs[name].at[block.b, block.column, tokens]
            to[...] = sum(parts[1:], parts[0])
        plgpu.commit_smem()


def chunk_backward(x: Inputs, dy, before, after, *, interpret: Any = False) -> tuple[Any, ...]:
    """Return the gradients of u, delta, a, b and c, from the memories that enter each chunk and the gradients of those that leave it."""
    sizes = _Sizes.of(x)
    held = _IN_REGISTERS // sizes.states

    def kernel(refs, smem):
        block = _Block(refs, smem, sizes.states)
        chunk = lax.axis_index("chunk")
        start = chunk * CHUNK
        place = block.b, chunk, block.channels
        memory = block.load_memory(refs["before"].at[*place])
        later = block.load_memory(refs["after"].at[*place])
        skip = block.load_channels(refs["d"].at[block.channels])
        block.copy_tokens(start)
        gradient = _ChunkGradient(block, block.rates(), skip, start, held)
        gradient.store_starts(memory)

        def two_segments(index, carry):
            first = CHUNK - (index + 1) * (2 * held)
            for offset in (held, 0):
                carry = gradient.segment(first, offset, carry)
            gradient.store_sums(first)
            return carry

        steps = CHUNK // (2 * held)
        _, d_rates = lax.fori_loop(0, steps, two_segments, (later, block.zero()))
        refs["da"].at[*place][...] = d_rates

    struct = jax.ShapeDtypeStruct
    by_channel = (*x.u.shape[:2], sizes.groups, _ROWS)
    by_token = struct((sizes.batch, sizes.columns, x.u.shape[1], sizes.states), _F32)
    outputs = dict(
        du=struct(by_channel, jnp.bfloat16),
        d_delta=struct(by_channel, _F32),
        da=_memory(sizes.states, sizes.batch, sizes.chunks, sizes.groups),
        db=by_token,
        dc=by_token,
    )
    starts = plgpu.SMEM((CHUNK // held, _WARPS, _ROWS, sizes.states), _F32)
    sums = plgpu.SMEM((2, 2 * held, _WARPS, sizes.states), _F32)
    results = launch(
        kernel,
        inputs=_named(x, dy=dy, before=before, after=after),
        outputs=outputs,
        grid=sizes.grid,
        scratch=_smem(x, "delta", "u", "b", "c", "dy", starts=starts, sums=sums),
        name="selective_scan_chunk_backward",
        interpret=interpret,
    )
    da = jnp.sum(results["da"], axis=(0, 1)).reshape(x.a.shape)
    db, dc = (jnp.sum(results[name], axis=1) for name in ("db", "dc"))
    return results["du"].reshape(x.u.shape), results["d_delta"].reshape(x.u.shape), da, db, dc
