"""Linear attention with a scalar decay on Mosaic GPU (Hopper), the scan by roles: the warpgroups of a thread block do different parts of a
chunk, each some chunks ahead of the next.

It computes what `scalar_scan` does, for the calls that only read and write memories. Of each chunk

- one warpgroup weighs: it computes the scores x yᵀ and their decays, and the values times their decays, z',
- one carries the memory: it rounds S and stores it in shared memory, then S <- chunk_decay S + yᵀ z',
- one reads: out = read_decay x S + weights z,
- and one loads x, y, z and the decays.

They hand tiles on by buffers in shared memory. So the chain from one chunk to the next is only that of the memory: round, store, one
product. In `scalar_scan` a warpgroup does all four of a chunk's products, one after another, and both of a thread block compute the
same scores and exponentials.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.hopper.launch import launch, with_smem
from pallas_kernels.hopper.row_layout import CHUNK
from pallas_kernels.linear_attention.hopper.scalar_plan import BLOCK, Call
from pallas_kernels.linear_attention.hopper.scalar_weights import SQUARE, times_rows, token_weights

_ROLES = ("carry", "read", "weigh", "load")
_REGISTERS = dict(carry=208, read=144, weigh=120, load=40)  # of a thread; 512 in all
_EQUAL = 128  # the registers with which each of 512 threads begins
_SMEM = (
    226 * 1024
)  # bytes of shared memory for the tiles of a thread block, of 227 KiB; barriers need less than the rest
_F32 = jnp.float32


class Plan(NamedTuple):
    """The numbers of buffers in shared memory: of the loaded inputs, of weights, and of each of memories, written values and outputs."""

    loaded: int
    weights: int
    others: int


# The best first. A third buffer of inputs is worth most: an input arrives a microsecond after another one is released.
_PLANS = Plan(3, 2, 2), Plan(3, 2, 1), Plan(3, 1, 1), Plan(2, 2, 2), Plan(2, 2, 1), Plan(2, 1, 1)


def supports(call: Call) -> bool:
    """Return whether `roles_scan` computes a call of `scalar_scan`: one with an output that returns nothing but it and the last memories, and
    whose tiles have room in shared memory.
    """
    more = "partner" in call.shapes or "states" in call.shapes or call.save_states
    return "x" in call.streams and not more and _plan(call) is not None


def roles_scan(call: Call, inputs: dict[str, jax.Array], dtype: Any) -> dict[str, jax.Array]:
    """Return the output [B, T, heads * slices, V] of `dtype` and the last memories [B * S, heads, D, V] float32 of a call of `scalar_scan`, by
    the names "out" and "last". `inputs` are the arrays of `call.shapes`; of paired heads, z has two in one.
    """
    batch, length, _, all_rows = inputs["y"].shape
    width = call.blocks * BLOCK
    bounds = inputs.get("chunk_bounds")
    rows = batch * (1 if bounds is None else bounds.shape[1] - 1)
    smem = _smem(call, dtype)

    def kernel(refs):
        at = _position(call, refs)
        with_smem(lambda buffers: _Block(call, at, refs, buffers).run(), smem)

    struct = jax.ShapeDtypeStruct
    return launch(
        kernel,
        inputs=inputs,
        outputs=dict(
            out=struct((batch, length, call.heads * call.slices, width), dtype),
            last=struct((rows, call.heads, all_rows, width), _F32),
        ),
        grid=dict(
            row=rows * call.heads // (2 if call.paired else 1),
            slice=call.slices,
            column=1 if call.paired else call.blocks // call.groups,
        ),
        num_threads=len(_ROLES),
        reduction_scratch_bytes=0,
        name="linear_attention_scalar_roles",
        interpret=call.interpret,
    )


def _tiles(call: Call) -> tuple[int, int]:
    """Return into how many tiles a thread block divides its columns, and the columns of each: one tile, or that of each of two heads."""
    return (2, BLOCK) if call.paired else (1, call.groups * BLOCK)


def _scaled(call: Call) -> bool:
    """Return whether the values that are written are not z itself."""
    return call.write_scale != 1 or "cum" in call.streams or "write_decay" in call.streams


def _plan(call: Call) -> Plan | None:
    """Return the best plan for which shared memory has room; None if it has none."""
    count, width = _tiles(call)
    columns, itemsize = count * width, 2
    vectors = len(call.streams) - 3
    loaded = itemsize * CHUNK * (2 * call.depth + columns) + 4 * CHUNK * vectors * count
    weights = itemsize * CHUNK * CHUNK * count
    others = itemsize * columns * (call.depth + CHUNK * (1 + _scaled(call)))

    def size(plan: Plan) -> int:
        return plan.loaded * loaded + plan.weights * weights + plan.others * others

    return next((plan for plan in _PLANS if size(plan) <= _SMEM), None)


def _smem(call: Call, dtype: Any) -> dict[str, Any]:
    """Return the types of a thread block's buffers and barriers in shared memory, by name."""
    plan = _plan(call)
    assert plan is not None
    stages, others = plan.loaded, plan.others
    count, width = _tiles(call)
    smem: Any = plgpu.SMEM
    tiles = functools.partial(smem, dtype=dtype, transforms=wg.TILED)
    shapes = dict(x=(CHUNK, call.depth), y=(CHUNK, call.depth), z=(CHUNK, count * width))
    vector = (2, CHUNK) if call.paired else (CHUNK,)
    found: dict[str, Any] = {}
    for name in call.streams:
        if name in shapes:
            found[name] = tiles((stages, *shapes[name]))
        else:
            found[name] = smem((stages, *((CHUNK,) if name == "run" else vector)), _F32)
    if "run" in call.streams:
        found["run"] = smem((stages, CHUNK), jnp.int32)
    found |= dict(
        loaded=plgpu.Barrier(num_arrivals=len(call.streams), num_barriers=stages),
        used=plgpu.Barrier(num_arrivals=3, num_barriers=stages),
        out=tiles((others, count, CHUNK, width)),
    )
    handed = dict(memory=(others, call.depth), weights=(plan.weights, CHUNK))
    if _scaled(call):
        handed["written"] = others, CHUNK
    for name, (number, rows) in handed.items():
        columns = CHUNK if name == "weights" else width
        found |= {
            name: tiles((number, count, rows, columns)),
            f"{name} ready": plgpu.Barrier(num_barriers=number),
            f"{name} used": plgpu.Barrier(num_barriers=number),
        }
    return found


class _Position(NamedTuple):
    """Which memories, and which of their rows and columns, a thread block of `roles_scan` computes.

    Attributes:
        row: index of the memory in [B * S], b * S + s.
        first: index of the first head.
        b: index of the row in the batch.
        steps: number of chunks.
        chunk: function from n to the index, in the row, of the n-th chunk to be computed.
        slice: index of the slice of the memory's rows (key channels).
        rows: that slice.
        columns: slice of the memory's columns (value channels).
    """

    row: Any
    first: Any
    b: Any
    steps: Any
    chunk: Callable[[Any], Any]
    slice: Any
    rows: Any
    columns: Any


def _position(call: Call, refs: dict[str, Any]) -> _Position:
    """Return what this thread block computes, from its index in the grid."""
    heads = call.heads // 2 if call.paired else call.heads
    row, h = lax.div(lax.axis_index("row"), heads), lax.rem(lax.axis_index("row"), heads)
    b, steps, chunk = wg.chunks_of_row(refs.get("chunk_bounds"), row, call.count, call.reverse)
    index, width = lax.axis_index("slice"), _tiles(call)[1]
    return _Position(
        row, 2 * h if call.paired else h, b, steps, chunk, index, pl.ds(index * call.depth, call.depth),
        pl.ds(lax.axis_index("column") * width, width),
    )  # fmt: skip


class _Block(NamedTuple):
    """The computation of one thread block of `roles_scan`.

    Attributes:
        call: sizes and options of the scan.
        at: which memories, and which chunks, the thread block computes.
        refs: inputs and outputs in global memory, by name.
        smem: buffers and barriers in shared memory, as `_smem` returns them, by name.
    """

    call: Call
    at: _Position
    refs: dict[str, Any]
    smem: dict[str, Any]

    def run(self) -> None:
        """Do the part of the computation that this warpgroup has."""
        group = lax.axis_index("group")
        for index, name in enumerate(_ROLES):

            def role(name=name):
                registers = _REGISTERS[name]
                action: Any = "increase" if registers > _EQUAL else "decrease"
                plgpu.set_max_registers(registers, action=action)
                getattr(self, name)()

            pl.when(group == index)(role)

    @property
    def heads(self) -> list[Any]:
        """The index of the head of each tile."""
        return [self.at.first + i for i in range(_tiles(self.call)[0])]

    def tile(self, x, i: int):
        """Return a reference to the columns of tile i in a reference to values [64, *]."""
        count, width = _tiles(self.call)
        return x if count == 1 else x.at[:, pl.ds(i * width, width)]

    def slot(self, name: str, n):
        """Return the index of the buffer of chunk n among those of `name`, which is an input or what one role hands on to another."""
        return lax.rem(n, self.smem[name].shape[0])

    def chunk(self, n, i: int) -> dict[str, Any]:
        """Return references to the loaded inputs of chunk n and tile i, by name."""
        slot = self.slot("y", n)
        loaded = {name: self.smem[name].at[slot] for name in self.call.streams}
        if self.call.paired:
            loaded |= {m: a.at[i] for m, a in loaded.items() if m not in ("x", "y", "z", "run")}
        return loaded | dict(z=self.tile(loaded["z"], i))

    def wait_loaded(self, n) -> None:
        plgpu.barrier_wait(self.smem["loaded"].at[self.slot("y", n)])

    def release(self, n) -> None:
        """Signal that this warpgroup has used the loaded inputs of chunk n."""
        plgpu.barrier_arrive(self.smem["used"].at[self.slot("y", n)])

    def begin(self, name: str, n):
        """Return the tiles [tiles, *, *] of `name` for chunk n, after waiting until those that were in this buffer before have been used."""
        slot = self.slot(name, n)
        used = self.smem[f"{name} used"].at[slot]
        pl.when(n >= self.smem[name].shape[0])(lambda: plgpu.barrier_wait(used))
        return self.smem[name].at[slot]

    def hand_on(self, name: str, n) -> None:
        """Signal that the tiles of `name` for chunk n are in shared memory."""
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.smem[f"{name} ready"].at[self.slot(name, n)])

    def receive(self, name: str, n):
        """Return the tiles [tiles, *, *] of `name` for chunk n, after waiting until they have been handed on."""
        slot = self.slot(name, n)
        plgpu.barrier_wait(self.smem[f"{name} ready"].at[slot])
        return self.smem[name].at[slot]

    def give_back(self, name: str, n) -> None:
        """Signal that the tiles of `name` for chunk n have been used."""
        plgpu.barrier_arrive(self.smem[f"{name} used"].at[self.slot(name, n)])

    def wait_used(self, barrier: str, buffer: str) -> None:
        """Wait until the last tiles of a buffer have been used."""
        number, steps = self.smem[buffer].shape[0], self.at.steps

        def wait(n, _):
            plgpu.barrier_wait(self.smem[barrier].at[lax.rem(n, number)])

        lax.fori_loop(jnp.maximum(steps - number, 0), steps, wait, None)

    def load(self) -> None:
        """Load the inputs of all chunks, each when its buffers are free."""
        at, call = self.at, self.call
        sources = {name: self.source(name) for name in call.streams}
        stages = self.smem["y"].shape[0]

        def step(n, _):
            slot, tokens = self.slot("y", n), pl.ds(at.chunk(n) * CHUNK, CHUNK)
            pl.when(n >= stages)(lambda: plgpu.barrier_wait(self.smem["used"].at[slot]))
            for name, source in sources.items():
                part = source.at[:, tokens] if self.by_head(name) else source.at[tokens]
                plgpu.copy_gmem_to_smem(
                    part, self.smem[name].at[slot], self.smem["loaded"].at[slot]
                )

        lax.fori_loop(0, at.steps, step, None)
        self.wait_used("used", "y")

    def by_head(self, name: str) -> bool:
        """Return whether an input has one vector for each of two heads."""
        return self.call.paired and name not in ("x", "y", "z", "run")

    def source(self, name: str):
        """Return a reference to the row, head and channels of an input in global memory that this thread block uses."""
        at, call, source = self.at, self.call, self.refs[name]
        if name == "run":
            return source.at[at.b]
        if self.by_head(name):
            return source.at[at.b, pl.ds(at.first, 2)]
        head = call.input_head(name, at.first)
        if name == "z":
            if call.paired:
                return source.at[at.b, :, lax.div(at.first, 2)]
            return source.at[at.b, :, head, at.columns]
        return source.at[at.b, :, head, at.rows] if name in ("x", "y") else source.at[at.b, head]

    def weigh(self) -> None:
        """Compute the decayed scores and the decayed values of all chunks."""
        call = self.call
        scale = call.read_scale * call.write_scale
        tiles = range(_tiles(call)[0])

        def step(n, _):
            self.wait_loaded(n)
            chunks = [self.chunk(n, i) for i in tiles]

            def scores(product):
                plgpu.wgmma(product, chunks[0]["x"], chunks[0]["y"].transpose((1, 0)))
                factor = token_weights(chunks[0], call.reverse, scale, call.rank)
                # The compiler moves exponentials past the wait for products, but not past a branch, which this wait has.
                buffers = self.begin("weights", n)
                product = product[...]
                for i, chunk in enumerate(chunks):
                    if i > 0:  # not before: registers have no room for both
                        factor = token_weights(chunk, call.reverse, scale, call.rank)
                    buffers.at[i][...] = (product * factor).astype(buffers.dtype)

            pl.run_scoped(scores, plgpu.ACC(SQUARE, _F32))
            self.hand_on("weights", n)
            if _scaled(call):
                values = [plgpu.load(c["z"], layout=wg.LAYOUT).astype(_F32) for c in chunks]
                writes = [
                    times_rows(z, c, "write_decay", call.write_scale).astype(c["z"].dtype)
                    for z, c in zip(values, chunks, strict=True)
                ]
                buffers = self.begin("written", n)
                for i, x in enumerate(writes):
                    buffers.at[i][...] = x
                self.hand_on("written", n)
            self.release(n)

        lax.fori_loop(0, self.at.steps, step, None)
        self.wait_used("weights used", "weights")
        if _scaled(call):
            self.wait_used("written used", "written")

    def chunk_decays(self) -> list[Any] | None:
        """Return references to the decays of each tile's memory over each of the row's chunks, or None if they are exponentials of `cum`."""
        if "chunk_decay" not in self.refs:
            return None
        decays, name = self.refs["chunk_decay"], "chunk_decay"
        return [decays.at[self.at.b, self.call.input_head(name, h)] for h in self.heads]

    def carry(self) -> None:
        """Carry the memories from their initial values (or 0) through all chunks, hand on what each was before a chunk, and store the last."""
        call, at = self.call, self.at
        count, width = _tiles(call)
        tiles = range(count)
        places = [(at.row, h, at.rows, at.columns) for h in self.heads]
        if "initial" in self.refs:
            memories = [wg.load_global(self.refs["initial"].at[place]) for place in places]
        else:
            zeros = jnp.zeros((call.depth, width), _F32)
            memories = [plgpu.layout_cast(zeros, wg.LAYOUT) for _ in tiles]
        by_chunk = self.chunk_decays()
        # Loading a scalar from global memory is slow, so that it is loaded a chunk ahead.
        ahead = [decays[at.chunk(0)] for decays in by_chunk or ()]

        def step(n, carry):
            memories, decays = carry
            self.wait_loaded(n)
            chunks = [self.chunk(n, i) for i in tiles]
            ahead = [d[at.chunk(jnp.minimum(n + 1, at.steps - 1))] for d in by_chunk or ()]
            if by_chunk is None and "cum" in call.streams:
                decays = [jnp.exp(c["cum"][CHUNK - 1]) for c in chunks]
            buffers = self.begin("memory", n)
            for i, S in enumerate(memories):
                buffers.at[i][...] = S.astype(buffers.dtype)
            self.hand_on("memory", n)
            if decays:
                memories = [S * d for S, d in zip(memories, decays, strict=True)]
            written = [c["z"] for c in chunks]
            if _scaled(call):
                received = self.receive("written", n)
                written = [received.at[i] for i in tiles]
            y = chunks[0]["y"].transpose((1, 0))

            def products(*refs):
                for S, writes in zip(refs, written, strict=True):
                    plgpu.wgmma(S, y, writes)

            memories = list(wg.accumulate(products, *memories, interpret=call.interpret))
            if _scaled(call):
                self.give_back("written", n)
            self.release(n)
            return memories, ahead

        memories, _ = lax.fori_loop(0, at.steps, step, (memories, ahead))
        for S, place in zip(memories, places, strict=True):
            self.refs["last"].at[place][...] = S
        self.wait_used("memory used", "memory")

    def read(self) -> None:
        """Compute and store the output of all chunks."""
        call, at = self.call, self.at
        count, width = _tiles(call)
        tiles, number = range(count), self.smem["out"].shape[0]
        skips = [self.skip(h) for h in self.heads] if "skip" in self.refs else []

        def step(n, _):
            self.wait_loaded(n)
            chunks, x = [self.chunk(n, i) for i in tiles], self.chunk(n, 0)["x"]
            memory = self.receive("memory", n)

            def carried(*refs):
                for i, ref in enumerate(refs):
                    plgpu.wgmma(ref, x, memory.at[i])

            sums = wg.products_from_zero(carried, *((CHUNK, width) for _ in tiles))
            self.give_back("memory", n)
            sums = [
                times_rows(total, c, "read_decay", call.read_scale)
                for total, c in zip(sums, chunks, strict=True)
            ]
            weights = self.receive("weights", n)

            def add(*refs):
                for i, ref in enumerate(refs):
                    plgpu.wgmma(ref, weights.at[i], chunks[i]["z"])

            outs = wg.accumulate(add, *sums, interpret=call.interpret)
            self.give_back("weights", n)
            if skips:
                values = [plgpu.load(c["z"], layout=wg.LAYOUT).astype(_F32) for c in chunks]
                outs = [out + d * z for out, d, z in zip(outs, skips, values, strict=True)]
            plgpu.wait_smem_to_gmem(number - 1, wait_read_only=True)
            buffers = self.smem["out"].at[lax.rem(n, number)]
            for i, out in enumerate(outs):
                buffers.at[i][...] = out.astype(buffers.dtype)
            plgpu.commit_smem()
            self.release(
                n
            )  # after the fence, which also orders this warpgroup's reads of decays before the next load
            tokens = pl.ds(at.chunk(n) * CHUNK, CHUNK)
            for i, h in enumerate(self.heads):
                target = self.refs["out"].at[at.b, tokens, h * call.slices + at.slice, at.columns]
                plgpu.copy_smem_to_gmem(buffers.at[i], target, commit_group=i == count - 1)

        lax.fori_loop(0, at.steps, step, None)
        plgpu.wait_smem_to_gmem(0)

    def skip(self, h):
        """Return the factor of z in the output of head h."""
        skip = self.refs["skip"][h]
        # The outputs of all slices are added.
        return skip if self.call.slices == 1 else jnp.where(self.at.slice == 0, skip, 0.0)
