"""The first phase of `channel_decay`, on Mosaic GPU (Hopper): what the scan needs of each chunk, computed for all chunks in parallel.

With b the inclusive sums of the log decay g over a chunk of 64 tokens (`tiles.channel_decay` has the mathematics), these are the
scores P, the queries and keys with their decay from and to the chunk's boundaries, and the decay of the whole chunk. A warpgroup
computes 64 key channels; scores are sums over key channels, so that the second warpgroup of K = 128 passes its sum to the first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.hopper.halving import (
    BLOCK,
    CHUNK,
    LEVELS,
    SQUARE,
    AllPairs,
    Documents,
    Halving,
    Level,
    left_operand,
    load,
    load_by_column,
    load_by_row,
    same_document,
)
from pallas_kernels.hopper.launch import launch, with_smem

_F32 = jnp.float32


class Chunks(NamedTuple):
    """The outputs for T tokens and h heads.

    Attributes:
        scores: [B, h, T, 64], P; None without queries.
        read: [B, T, h, K], scale q e^b; None without queries.
        written: [B, T, h, K], k e^(b_C - b).
        chunk_decay: [B, h, N * K] float32, e^(b_C).
    """

    scores: jax.Array | None
    read: jax.Array | None
    written: jax.Array
    chunk_decay: jax.Array


def chunk_forward(
    q, k, log_decay, documents: Documents | None, *, heads: int, scale: float, bonus=None,
    interpret: Any = False,
) -> Chunks:  # fmt: skip
    """Compute the `Chunks` of all chunks.

    Args:
        q: [B, T, *, K], with a number of heads that divides `heads`, as of k, log_decay and bonus. None returns no scores.
        k: [B, T, *, K]; may be float32 without q.
        log_decay: [B, T, *, K] float32.
        documents: None is one document per row.
        heads: number of heads of the output.
        scale: multiplies q.
        bonus: [*, K]; a token then reads before it writes.
        interpret: parameters of the interpreter, or False.
    """
    batch, length, _, depth = k.shape
    count, groups = length // CHUNK, depth // BLOCK
    total = batch * count * heads
    # As many warpgroups as leave each thread 128 registers.
    items = next(n for n in (4 // groups, 2 // groups, 1) if n and total % n == 0)
    inputs = dict(k=k, g=log_decay, q=q)
    inputs |= {} if documents is None else documents._asdict()
    inputs |= dict(bonus=bonus)
    struct: Any = jax.ShapeDtypeStruct
    wide = struct((batch, length, heads, depth), jnp.bfloat16)
    outputs = dict(written=wide, chunk_decay=struct((batch, heads, count * depth), _F32))
    if q is not None:
        outputs |= dict(scores=struct((batch, heads, length, CHUNK), jnp.bfloat16), read=wide)
    shapes = {name: x.shape for name, x in inputs.items() if x is not None}
    call = _Call(shapes, heads, count, depth, groups, items, scale, interpret)
    smem = _smem(call, k.dtype)

    def kernel(refs):
        position = _position(call)
        with_smem(
            lambda buffers: _Warpgroup(call, position, refs, buffers).compute(),
            smem,
            thread_name="warpgroup",
        )

    results = launch(
        kernel,
        inputs=inputs,
        outputs=outputs,
        grid=dict(block=total // items),
        num_threads=items * groups,
        thread_name="warpgroup",
        reduction_scratch_bytes=0,
        name="linear_attention_chunk_forward",
        interpret=interpret,
    )
    return Chunks(
        results.get("scores"), results.get("read"), results["written"], results["chunk_decay"]
    )


class _Call(NamedTuple):
    """Sizes and options of one call.

    Attributes:
        shapes: of the inputs, by name.
        heads: number of heads of the output.
        count: chunks of a row, N.
        depth: K.
        groups: warpgroups of a chunk and head, 64 key channels each.
        items: pairs of a chunk and a head that a thread block computes.
        scale: multiplies q.
        interpret: parameters of the interpreter, or False.
    """

    shapes: dict[str, tuple[int, ...]]
    heads: int
    count: int
    depth: int
    groups: int
    items: int
    scale: float
    interpret: Any

    @property
    def with_scores(self) -> bool:
        """Whether there are queries."""
        return "q" in self.shapes


class _Position(NamedTuple):
    """The part of the outputs that a warpgroup computes.

    Attributes:
        b: row of the batch.
        h: head.
        n: chunk.
        warpgroup: its index in the thread block.
        item: index of its chunk and head in the block.
        group: index of its 64 key channels.
        tokens: the slice of the chunk's tokens.
        channels: the slice of the key channels.
    """

    b: Any
    h: Any
    n: Any
    warpgroup: Any
    item: Any
    group: Any
    tokens: Any
    channels: Any


def _position(call: _Call) -> _Position:
    """The position of this warpgroup in the grid."""
    warpgroup = lax.axis_index("warpgroup")
    item, group = lax.div(warpgroup, call.groups), lax.rem(warpgroup, call.groups)
    channels = pl.ds(group * BLOCK, BLOCK)
    index = lax.axis_index("block") * call.items + item
    h, n = lax.rem(index, call.heads), lax.rem(lax.div(index, call.heads), call.count)
    b, tokens = lax.div(index, call.heads * call.count), pl.ds(n * CHUNK, CHUNK)
    return _Position(b, h, n, warpgroup, item, group, tokens, channels)


def _smem(call: _Call, key_dtype) -> dict[str, Any]:
    """The shared memory and barriers of a thread block: `sums` and `summed` for each item, the others for each warpgroup."""
    smem: Any = plgpu.SMEM
    each = call.items * call.groups

    def tiles(*shape, dtype=jnp.bfloat16):
        return smem(shape, dtype=dtype, transforms=wg.smem_transforms(dtype))

    return dict(
        q=tiles(each, *SQUARE),
        k=tiles(each, *SQUARE, dtype=key_dtype),
        parts=tiles(each, 2, *SQUARE),
        tile=tiles(each, *SQUARE),
        lowest=smem((each, 2, CHUNK), _F32),
        sums=tiles(call.items if call.groups > 1 else 1, *SQUARE, dtype=_F32),
        loaded=plgpu.Barrier(num_arrivals=2 if call.with_scores else 1, num_barriers=each),
        summed=plgpu.Barrier(num_barriers=call.items),
        left=tiles(each, *SQUARE) if call.interpret else None,
    )


class _Warpgroup:
    """The computation of one warpgroup: a method for each phase, in the order of `compute`."""

    def __init__(self, call: _Call, at: _Position, refs: dict[str, Any], smem: dict[str, Any]):
        """Bind references.

        Args:
            call: the call.
            at: what this warpgroup computes.
            refs: inputs and outputs in global memory.
            smem: buffers of `_smem`, of which it selects its part.
        """
        self.call, self.at, self.refs = call, at, refs
        index = dict(sums=at.item, summed=at.item)
        self.smem = {n: x.at[index.get(n, at.warpgroup)] for n, x in smem.items()}

    def compute(self) -> None:
        """Compute and store this warpgroup's part of all outputs."""
        call, at, smem = self.call, self.at, self.smem
        self.start_loads()
        self.left = left_operand(smem.get("left"), call.interpret)
        self.halving = Halving(
            smem["parts"], smem["tile"], self.left, "bonus" in call.shapes, call.interpret, smem["lowest"]
        )  # fmt: skip
        self.halving.split_decay(
            wg.load_global(self.refs["g"].at[at.b, at.tokens, self.input_head("g"), at.channels])
        )
        self.store_chunk_decay()
        plgpu.barrier_wait(smem["loaded"])
        scores: Any = self.scores() if call.with_scores else None
        # The sum is passed on first, so that the other warpgroup does not wait for it.
        if call.with_scores and call.groups > 1:
            pl.when(at.group == 1)(lambda: self.pass_scores(scores))
        if call.with_scores:
            self.store_decayed("read", "q", self.boundary_decay(True) * call.scale)
        self.store_decayed("written", "k", self.boundary_decay(False))
        if call.with_scores:
            pl.when(at.group == 0)(lambda: self.store_scores(scores))
        plgpu.wait_smem_to_gmem(0)

    def input_head(self, name: str):
        """The head of an input that this head of the outputs uses."""
        heads = self.call.shapes[name][0 if name == "bonus" else 2]
        return lax.div(self.at.h * heads, self.call.heads)

    def start_loads(self) -> None:
        """Start the copies of k and q into shared memory."""
        at = self.at
        for name in ("k", "q") if self.call.with_scores else ("k",):
            source = self.refs[name].at[at.b, at.tokens, self.input_head(name), at.channels]
            plgpu.copy_gmem_to_smem(source, self.smem[name], self.smem["loaded"])

    def store_chunk_decay(self) -> None:
        """Store e^(b_C)."""
        call, at = self.call, self.at
        chunk_decay = jnp.exp2(self.halving.column_sums())
        if "enters" in self.refs:
            chunk_decay *= self.refs["enters"].at[at.b][at.n * CHUNK + CHUNK - 1]
        channels = pl.ds(at.n * call.depth + at.group * BLOCK, BLOCK)
        self.refs["chunk_decay"].at[at.b, at.h, channels][...] = chunk_decay

    def scores(self):
        """The sum over this warpgroup's key channels of the chunk's scores, [64, 64]."""
        smem, halving = self.smem, self.halving
        sums, all_in_range = halving.check_range(smem["q"], smem["k"])

        def level(at, scores):
            return self.add_scores(Level(halving, at), scores, lambda: ~halving.pairs_in_range())

        scores = plgpu.layout_cast(jnp.zeros(SQUARE, _F32), wg.LAYOUT)
        scores = self.add_scores(AllPairs(halving, 0, sums), scores, halving.pairs_in_range)
        # In a loop: unrolled, the levels require more registers than there are.
        scores = lax.fori_loop(all_in_range * LEVELS, LEVELS, level, scores)
        i, j, diagonal = halving.i, halving.j, self.diagonal()
        scores = jnp.where(i > j, scores, jnp.where(i == j, diagonal, 0.0)) * self.call.scale
        if "run" in self.refs:
            same = same_document(self.refs["run"].at[self.at.b, self.at.tokens])
            scores = jnp.where(same, scores, 0.0)
        return scores

    def add_scores(self, step: Level | AllPairs, scores, served):
        """The scores plus those of one step, for the pairs of rows that `served()` [64, 64] selects."""
        q, k, tile = self.smem["q"], self.smem["k"], self.smem["tile"]
        rows = self.left(step.rows(load(q), load(k)).astype(tile.dtype))
        tile[...] = step.columns(load(q), load(k)).astype(tile.dtype)
        plgpu.commit_smem()
        (products,) = self.halving.accumulate(
            lambda out: plgpu.wgmma(out, rows, tile.transpose((1, 0)))
        )
        return scores + jnp.where(served(), step.mask(products), 0.0)

    def diagonal(self):
        """The products of each token's query and key, times the bonus, in all columns of [64, 64]."""
        products = load(self.smem["q"]).astype(_F32) * load(self.smem["k"]).astype(_F32)
        if "bonus" in self.refs:
            bonus = self.refs["bonus"].at[self.input_head("bonus"), self.at.channels]
            products *= load_by_column(bonus)
        return wg.spread_rows(jnp.sum(products, axis=1), SQUARE)

    def pass_scores(self, scores) -> None:
        """Pass the scores to the first warpgroup of the same chunk and head."""
        self.smem["sums"][...] = scores
        plgpu.barrier_arrive(self.smem["summed"])

    def store_scores(self, scores) -> None:
        """Add the other warpgroup's scores and start to store the sum."""
        at, smem = self.at, self.smem
        if self.call.groups > 1:
            plgpu.barrier_wait(smem["summed"])
            scores += load(smem["sums"])
        smem["tile"][...] = scores.astype(smem["tile"].dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem["tile"], self.refs["scores"].at[at.b, at.h, at.tokens])

    def boundary_decay(self, from_start: bool):
        """[64, 64], the decay from the chunk's start to each token, or from each token to the chunk's end; 0 across documents."""
        decay = self.halving.boundary_decay(from_start)
        name = "enters" if from_start else "stays"
        if name in self.refs:
            flags = self.refs[name].at[self.at.b, self.at.tokens]
            decay *= wg.spread_rows(load_by_row(flags), SQUARE)
        return decay

    def store_decayed(self, output: str, name: str, factor) -> None:
        """Start to store q or k times a factor [64, 64]."""
        at, source = self.at, self.smem[name]
        buffer = (
            source if self.call.with_scores else self.smem["q"]
        )  # without queries k may be float32
        buffer[...] = (load(source).astype(_F32) * factor).astype(buffer.dtype)
        plgpu.commit_smem()
        target = self.refs[output].at[at.b, at.tokens, at.h, at.channels]
        plgpu.copy_smem_to_gmem(buffer, target)
