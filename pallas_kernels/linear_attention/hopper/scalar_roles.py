"""Linear attention with a scalar decay on Mosaic GPU (Hopper), the scan by roles: the warpgroups of a thread block do different parts of a
chunk, each some chunks ahead of the next.

It computes what `scalar_scan` does. Of each chunk

- one warpgroup weighs: it computes the scores x yᵀ and their decays, and the values times their decays, z',
- one carries the memory: it rounds S and stores it in shared memory, then S <- chunk_decay S + yᵀ z',
- one reads: out = read_decay x S + weights z (a scan of writes only has no such warpgroup, and no scores),
- and one loads x, y, z and the decays, or loads log decays and adds them.

They hand tiles on by buffers in shared memory. So the chain from one chunk to the next is only that of the memory: round, store, one
product. In `scalar_scan` a warpgroup does all four of a chunk's products, one after another, and both of a thread block compute the
same scores and exponentials.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.hopper.launch import launch, with_smem
from pallas_kernels.hopper.row_layout import CHUNK
from pallas_kernels.linear_attention.hopper.decay_sums import load_log_decays, sums_of_chunk
from pallas_kernels.linear_attention.hopper.scalar_plan import BLOCK, Call
from pallas_kernels.linear_attention.hopper.scalar_roles_plan import (
    Scan,
    plan_of,
    scaled,
    share_smem,
    tiles_of,
)
from pallas_kernels.linear_attention.hopper.scalar_weights import SQUARE, times_rows, token_weights

_REGISTERS = dict(carry=200, read=160, weigh=112, load=40)  # of a thread; 512 in all, as an SM has
_WITH_SUMS = dict(carry=176, read=160, weigh=112, load=64)  # where the one that loads adds decays
_F32 = jnp.float32


def supports(call: Call) -> bool:
    """Return whether shared memory has room for the tiles with which `roles_scan` computes a call of `scalar_scan`."""
    return plan_of(call) is not None


def _roles(call: Call) -> list[str]:
    """Return the names of the parts of the computation, one for each warpgroup."""
    return [name for name in _REGISTERS if name != "read" or "x" in call.streams]


def roles_scans(*scans: Scan) -> list[dict[str, jax.Array]]:
    """Compute calls of `scalar_scan` in one launch, with more than one those that `fit_together`; return the outputs of each by name."""
    first, (smem_types, places) = scans[0], share_smem(scans)

    def numbered(arrays: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {f"{x} {n}": a for n, named in enumerate(arrays) for x, a in named.items()}

    def of_scan(n: int, arrays: dict[str, Any]) -> dict[str, Any]:
        names = (name.split() for name in arrays)
        return {x: arrays[f"{x} {i}"] for x, i in names if int(i) == n}

    def kernel(refs):
        def run(buffers):
            for n, scan in enumerate(scans):
                own, smem = of_scan(n, refs), {x: buffers[y] for x, y in places[n].items()}
                block = _Block(scan.call, _position(scan.call, own), own, smem)
                if len(scans) == 1:
                    block.run()
                else:
                    pl.when(lax.axis_index("scan") == n)(block.run)

        with_smem(run, smem_types)

    results = launch(
        kernel,
        inputs=numbered([x.inputs for x in scans]),
        outputs=numbered([x.outputs for x in scans]),
        grid=(dict(scan=len(scans)) if len(scans) > 1 else {}) | first.grid,
        num_threads=len(_roles(first.call)),
        reduction_scratch_bytes=0,
        name="linear_attention_scalar_roles",
        interpret=first.call.interpret,
    )
    return [of_scan(n, results) for n in range(len(scans))]


class _Position(NamedTuple):
    """The memories, and their rows and columns, that a thread block of `roles_scan` computes.

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
    index, width = lax.axis_index("slice"), tiles_of(call)[1]
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
        smem: buffers and barriers in shared memory, as `smem_of` returns them, by name.
    """

    call: Call
    at: _Position
    refs: dict[str, Any]
    smem: dict[str, Any]

    def run(self) -> None:
        """Do the part of the computation that this warpgroup has."""
        roles = _roles(self.call)
        at_first = 512 // len(roles)  # registers of a thread when the kernel begins

        def run_role(name: str) -> None:
            registers = (_WITH_SUMS if self.call.sums else _REGISTERS)[name]
            action: Any = "increase" if registers > at_first else "decrease"
            plgpu.set_max_registers(registers, action=action)
            getattr(self, name)()

        for index, name in enumerate(roles):
            pl.when(lax.axis_index("group") == index)(functools.partial(run_role, name))

    @property
    def heads(self) -> list[Any]:
        """The index of the head of each tile."""
        return [self.at.first + i for i in range(tiles_of(self.call)[0])]

    def tile(self, x, i: int):
        """Return a reference to the columns of tile i in a reference to values [64, *]."""
        count, width = tiles_of(self.call)
        return x if count == 1 else x.at[:, pl.ds(i * width, width)]

    def blocks(self) -> list[tuple[Any, slice, Any]]:
        """Return, for each 64 columns of a tile, their index in the memory, and their places in the tile and in the memory."""
        count = tiles_of(self.call)[1] // BLOCK
        first = lax.axis_index("column") * count
        return [
            (first + j, slice(j * BLOCK, (j + 1) * BLOCK), pl.ds((first + j) * BLOCK, BLOCK))
            for j in range(count)
        ]

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
        sources = {name: self.source(name) for name in call.loads}
        stages = self.smem["y"].shape[0]

        def log_decays(n):
            if not call.sums:
                return None
            tokens = pl.ds(at.chunk(n) * CHUNK, CHUNK)
            return load_log_decays(self.refs["log_decay"], at.b, tokens, at.first)

        def step(n, decays):
            slot, tokens = self.slot("y", n), pl.ds(at.chunk(n) * CHUNK, CHUNK)
            pl.when(n >= stages)(lambda: plgpu.barrier_wait(self.smem["used"].at[slot]))
            for name, source in sources.items():
                part = source.at[:, tokens] if self.by_head(name) else source.at[tokens]
                plgpu.copy_gmem_to_smem(
                    part, self.smem[name].at[slot], self.smem["loaded"].at[slot]
                )
            if not call.sums:
                return None
            ahead = log_decays(jnp.minimum(n + 1, at.steps - 1))
            self.add_decays(slot, tokens, decays)
            return ahead

        lax.fori_loop(0, at.steps, step, log_decays(0))
        self.wait_used("used", "y")

    def add_decays(self, slot, tokens, log_decays) -> None:
        """Store the sums of a chunk's log decays up to each token, and the exponentials of those after it, in the buffers of index `slot`, and
        as results if they are wanted.
        """
        up_to, after = (self.smem[name].at[slot] for name in self.call.sums)
        sums, decays = sums_of_chunk(log_decays, self.at.first, buffer=after)
        up_to[...] = sums
        plgpu.commit_smem()  # all threads have read the buffer
        after[...] = decays
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.smem["loaded"].at[slot])
        for name, x in (("stored_cum", sums), ("stored_decay", decays)):
            if name in self.refs:
                self.refs[name].at[self.at.b, self.at.first, tokens][...] = x

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
        tiles = range(tiles_of(call)[0])

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

            if "x" in call.streams:
                pl.run_scoped(scores, plgpu.ACC(SQUARE, _F32))
                self.hand_on("weights", n)
            if scaled(call):
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
        if "x" in call.streams:
            self.wait_used("weights used", "weights")
        if scaled(call):
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
        count, width = tiles_of(call)
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
            # As in `scalar_scan`: a constant would let loads that depend on it run before the products.
            starts: Any = True
            if call.interval > 1:
                starts = lax.rem(at.chunk(n), call.interval) == 0
            elif decays:
                starts = decays[0] >= 0.0
            if "x" in call.streams or call.save_states:
                self.hand_on_memories(n, memories, starts)
            else:
                plgpu.commit_smem()  # the fence between reading a decay and the next load
            if decays:
                memories = [S * d for S, d in zip(memories, decays, strict=True)]
            written = [c["z"] for c in chunks]
            if scaled(call):
                received = self.receive("written", n)
                written = [received.at[i] for i in tiles]
            y = chunks[0]["y"].transpose((1, 0))

            def products(*refs):
                for S, writes in zip(refs, written, strict=True):
                    plgpu.wgmma(S, y, writes)

            memories = list(wg.accumulate(products, *memories, interpret=call.interpret))
            if scaled(call):
                self.give_back("written", n)
            self.release(n)
            if "states" in self.refs:
                pl.when(starts)(lambda: self.store_products(at.chunk(n), memories))
            return memories, ahead

        memories, _ = lax.fori_loop(0, at.steps, step, (memories, ahead))
        for S, place in zip(memories, places, strict=True):
            self.refs["last"].at[place][...] = S
        if "x" in call.streams or call.save_states:
            plgpu.wait_smem_to_gmem(0)
        if "x" in call.streams:
            self.wait_used("memory used", "memory")

    def hand_on_memories(self, n, memories, starts) -> None:
        """Hand on the memories before the n-th chunk, and, if `starts`, start to store them for the backward pass if that is requested."""
        at, saves, read = self.at, self.call.save_states, "x" in self.call.streams
        tiles = self.smem["memory"]
        buffers = self.begin("memory", n) if read else tiles.at[self.slot("memory", n)]
        if saves:  # if nobody reads them, each chunk has a copy, and only that which began with this buffer must end
            assert read or self.call.interval == 1
            plgpu.wait_smem_to_gmem(0 if read else tiles.shape[0] - 1, wait_read_only=True)
        for i, S in enumerate(memories):
            buffers.at[i][...] = S.astype(buffers.dtype)
        self.hand_on("memory", n) if read else plgpu.commit_smem()

        def save():
            interval = lax.div(at.chunk(n), self.call.interval)
            for i, h in enumerate(self.heads):
                target = self.refs["saved"].at[at.b, h, interval, at.rows, at.columns]
                plgpu.copy_smem_to_gmem(buffers.at[i], target)

        if saves:
            pl.when(starts)(save)

    def store_products(self, n, memories) -> None:
        """Store, for each row of the memories' gradients, its inner product with the same row of the memory that another scan has saved at
        the start of chunk n.
        """
        at, interval = self.at, lax.div(n, self.call.interval)
        for S, h in zip(memories, self.heads, strict=True):
            for index, part, columns in self.blocks():
                state = wg.load_global(self.refs["states"].at[at.b, h, interval, at.rows, columns])
                products = jnp.sum(S[:, part] * state.astype(_F32), axis=1)
                self.refs["products"].at[at.b, h, index, interval, at.rows][...] = products

    def read(self) -> None:
        """Compute and store the output of all chunks."""
        call, at = self.call, self.at
        count, width = tiles_of(call)
        tiles, number = range(count), self.smem["out"].shape[0]
        skips = [self.skip(h) for h in self.heads] if "skip" in self.refs else []

        def step(n, _):
            tokens = pl.ds(at.chunk(n) * CHUNK, CHUNK)
            partners = self.partners(tokens)  # loads that are long on their way
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
            self.store_dots("dots", tokens, outs, partners)
            if skips:
                values = [plgpu.load(c["z"], layout=wg.LAYOUT).astype(_F32) for c in chunks]
                self.store_dots("skip_dots", tokens, values, partners)
                outs = [out + d * z for out, d, z in zip(outs, skips, values, strict=True)]
            plgpu.wait_smem_to_gmem(number - 1, wait_read_only=True)
            buffers = self.smem["out"].at[lax.rem(n, number)]
            for i, out in enumerate(outs):
                buffers.at[i][...] = out.astype(buffers.dtype)
            plgpu.commit_smem()
            # After the fence, which also orders this warpgroup's reads of decays before the next load.
            self.release(n)
            for i, h in enumerate(self.heads):
                target = self.refs["out"].at[at.b, tokens, h * call.slices + at.slice, at.columns]
                plgpu.copy_smem_to_gmem(buffers.at[i], target, commit_group=i == count - 1)

        lax.fori_loop(0, at.steps, step, None)
        plgpu.wait_smem_to_gmem(0)

    def partners(self, tokens) -> list[list[Any]]:
        """Load the chunk's rows of `partner` for each tile, in blocks of 64 columns; without it, there are none."""
        if "partner" not in self.refs:
            return []
        at, name = self.at, "partner"
        rows = [self.refs[name].at[at.b, tokens, self.call.input_head(name, h)] for h in self.heads]
        return [[wg.load_global(x.at[:, columns]) for *_, columns in self.blocks()] for x in rows]

    def store_dots(self, name: str, tokens, tiles, partners) -> None:
        """Store each token's inner products of 64 columns of the tiles with `partners`, if there are any, as the output `name`."""
        for tile, blocks, h in zip(tiles, partners, self.heads, strict=bool(partners)):
            for (index, part, _), partner in zip(self.blocks(), blocks, strict=True):
                dots = jnp.sum(tile[:, part] * partner.astype(_F32), axis=1)
                index += self.at.slice * self.call.blocks
                self.refs[name].at[self.at.b, h, index, tokens][...] = dots

    def skip(self, h):
        """Return the factor of z in the output of head h."""
        skip = self.refs["skip"][h]
        # The outputs of all slices are added.
        return skip if self.call.slices == 1 else jnp.where(self.at.slice == 0, skip, 0.0)
