"""The first phase of linear attention with a decay per key channel, on Mosaic GPU (Hopper).

It computes what the scan needs of each chunk, for all chunks in parallel.

With b the inclusive sums of the log decay g over a chunk of 64 tokens (`tiles.channel_decay` has the mathematics), these are the
decayed scores P of queries with keys, the queries and keys with their decay from and to the chunk's boundaries, and the decay of
the whole chunk. A warpgroup computes 64 key channels; scores are sums over key channels, so that the second warpgroup of K = 128
passes its sum to the first.
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
    """The arrays of linear attention with a decay per key channel that do not depend on the memory, for T tokens and h heads.

    b are the inclusive sums of the log decay over a chunk of C = 64 tokens, b_C the sum over the whole chunk.

    Attributes:
        scores: [B, h, T, 64], each token's row of its chunk's decayed scores of queries with keys; None without queries.
        read: [B, T, h, K], the queries decayed from the chunk's start, scale q e^b; None without queries.
        written: [B, T, h, K], the keys decayed to the chunk's end, k e^(b_C - b).
        chunk_decay: [B, h, N * K] float32, the decay of each key channel over each of the N chunks, e^(b_C).
    """

    scores: jax.Array | None
    read: jax.Array | None
    written: jax.Array
    chunk_decay: jax.Array


def chunk_forward(
    q, k, log_decay, documents: Documents | None, *, heads: int, scale: float, bonus=None,
    interpret: Any = False,
) -> Chunks:  # fmt: skip
    """Compute, for all chunks in parallel, the arrays of linear attention with a decay per key channel that do not depend on the
    memory.

    Return the decayed scores of each chunk, the queries and keys with their decay from and to the chunk's boundaries, and each
    chunk's decay, as `Chunks`.

    Args:
        q: [B, T, *, K] queries, with a number of heads that divides `heads`, as of k, log_decay and bonus. None returns no scores.
        k: [B, T, *, K] keys; they may be float32 if q is None.
        log_decay: [B, T, *, K] float32, the log decay of each key channel.
        documents: where documents begin, as `halving.Documents`; None is one document per row.
        heads: number of heads of the output.
        scale: the factor by which the queries q are multiplied.
        bonus: [*, K], RWKV6's weight of a token's own key and value, or None; with it, a token reads the memory before it writes.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.
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
    """Sizes and options of one call of `chunk_forward`, which computes the scores and decayed tokens of all chunks.

    Attributes:
        shapes: shapes of the inputs, by name.
        heads: number of heads of the output.
        count: number of chunks of a row, N.
        depth: number of key channels, K.
        groups: number of warpgroups that compute one chunk of one head, each 64 key channels.
        items: number of pairs of a chunk and a head that a thread block computes.
        scale: the factor by which the queries q are multiplied.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.
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
        """Whether queries are given, so that `chunk_forward` computes scores and decayed queries, and not only decayed keys."""
        return "q" in self.shapes


class _Position(NamedTuple):
    """The row, head, chunk and 64 key channels that one warpgroup of `chunk_forward` computes.

    Attributes:
        b: index of the row in the batch.
        h: index of the head.
        n: index of the chunk in the row.
        warpgroup: index of the warpgroup in its thread block.
        item: index, in the thread block, of the pair of a chunk and a head that the warpgroup computes.
        group: index of the 64 key channels among those of the head.
        tokens: the slice of the chunk's tokens in the row.
        channels: the slice of the 64 key channels.
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
    """Return the row, head, chunk and key channels that this warpgroup of `chunk_forward` computes, from its index in the grid."""
    warpgroup = lax.axis_index("warpgroup")
    item, group = lax.div(warpgroup, call.groups), lax.rem(warpgroup, call.groups)
    channels = pl.ds(group * BLOCK, BLOCK)
    index = lax.axis_index("block") * call.items + item
    h, n = lax.rem(index, call.heads), lax.rem(lax.div(index, call.heads), call.count)
    b, tokens = lax.div(index, call.heads * call.count), pl.ds(n * CHUNK, CHUNK)
    return _Position(b, h, n, warpgroup, item, group, tokens, channels)


def _smem(call: _Call, key_dtype) -> dict[str, Any]:
    """Return the types of the buffers and barriers in shared memory that a thread block of `chunk_forward` uses, by name.

    `sums` and `summed` have an entry for each pair of a chunk and a head that the thread block computes, the others one for each
    of the thread block's warpgroups.
    """
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
    """The computation of `chunk_forward` by one warpgroup, for 64 key channels of one chunk and head.

    Each method is one step of it; `compute` calls them in order.
    """

    def __init__(self, call: _Call, at: _Position, refs: dict[str, Any], smem: dict[str, Any]):
        """Select, of the thread block's buffers in shared memory, those that this warpgroup uses.

        Args:
            call: sizes and options of `chunk_forward`.
            at: the row, head, chunk and key channels that this warpgroup computes.
            refs: references to inputs and outputs in global memory, by name.
            smem: the thread block's buffers and barriers in shared memory by name, as `_smem` returns them; the warpgroup uses
                one entry of each.
        """
        self.call, self.at, self.refs = call, at, refs
        index = dict(sums=at.item, summed=at.item)
        self.smem = {n: x.at[index.get(n, at.warpgroup)] for n, x in smem.items()}

    def compute(self) -> None:
        """Compute and store, for one chunk and 64 key channels, the decayed queries and keys, the chunk's decay and, summed over
        channels, the scores.
        """
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
        """Return the index of the head of the input `name` (such as "q") that belongs to this warpgroup's head of the output;
        several heads of the output may share it.
        """
        heads = self.call.shapes[name][0 if name == "bonus" else 2]
        return lax.div(self.at.h * heads, self.call.heads)

    def start_loads(self) -> None:
        """Start to copy the chunk's keys and queries [64, 64], in this warpgroup's channels, from global to shared memory."""
        at = self.at
        for name in ("k", "q") if self.call.with_scores else ("k",):
            source = self.refs[name].at[at.b, at.tokens, self.input_head(name), at.channels]
            plgpu.copy_gmem_to_smem(source, self.smem[name], self.smem["loaded"])

    def store_chunk_decay(self) -> None:
        """Store the decay of the memory over the whole chunk, for this warpgroup's 64 key channels; 0 if a document begins in the
        chunk.
        """
        call, at = self.call, self.at
        chunk_decay = jnp.exp2(self.halving.column_sums())
        if "enters" in self.refs:
            chunk_decay *= self.refs["enters"].at[at.b][at.n * CHUNK + CHUNK - 1]
        channels = pl.ds(at.n * call.depth + at.group * BLOCK, BLOCK)
        self.refs["chunk_decay"].at[at.b, at.h, channels][...] = chunk_decay

    def scores(self):
        """Return the sum over this warpgroup's 64 key channels of the chunk's decayed scores of queries with keys, [64, 64]
        float32.
        """
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
        """Return `scores` [64, 64], decayed scores of a chunk's queries with its keys, plus those that one step computes.

        `step` is a level of the halving, or `AllPairs`. Of its pairs of tokens, those are added at which the mask `served()` [64,
        64] is True: for `AllPairs` the pairs whose decays are in float32's range, for a level the others.
        """
        q, k, tile = self.smem["q"], self.smem["k"], self.smem["tile"]
        rows = self.left(step.rows(load(q), load(k)).astype(tile.dtype))
        tile[...] = step.columns(load(q), load(k)).astype(tile.dtype)
        plgpu.commit_smem()
        (products,) = self.halving.accumulate(
            lambda out: plgpu.wgmma(out, rows, tile.transpose((1, 0)))
        )
        return scores + jnp.where(served(), step.mask(products), 0.0)

    def diagonal(self):
        """Return the inner product of each token's query and key, times the bonus if there is one, repeated in all columns of [64,
        64].
        """
        products = load(self.smem["q"]).astype(_F32) * load(self.smem["k"]).astype(_F32)
        if "bonus" in self.refs:
            bonus = self.refs["bonus"].at[self.input_head("bonus"), self.at.channels]
            products *= load_by_column(bonus)
        return wg.spread_rows(jnp.sum(products, axis=1), SQUARE)

    def pass_scores(self, scores) -> None:
        """Pass this warpgroup's scores [64, 64], sums over its 64 key channels, through shared memory to the first warpgroup of
        the same chunk and head, which adds them to its own.
        """
        self.smem["sums"][...] = scores
        plgpu.barrier_arrive(self.smem["summed"])

    def store_scores(self, scores) -> None:
        """Add to this warpgroup's scores [64, 64], sums over its 64 key channels, those of the chunk's second warpgroup, if there
        is one, and start to store the sum in global memory.
        """
        at, smem = self.at, self.smem
        if self.call.groups > 1:
            plgpu.barrier_wait(smem["summed"])
            scores += load(smem["sums"])
        smem["tile"][...] = scores.astype(smem["tile"].dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem["tile"], self.refs["scores"].at[at.b, at.h, at.tokens])

    def boundary_decay(self, from_start: bool):
        """Return the decay from the chunk's start to each token, or from each token to the chunk's end, [64 tokens, 64 key
        channels].

        It is 0 where the token and the boundary are in different documents.
        """
        decay = self.halving.boundary_decay(from_start)
        name = "enters" if from_start else "stays"
        if name in self.refs:
            flags = self.refs[name].at[self.at.b, self.at.tokens]
            decay *= wg.spread_rows(load_by_row(flags), SQUARE)
        return decay

    def store_decayed(self, output: str, name: str, factor) -> None:
        """Start to store, as the output called `output`, the chunk's queries or keys (`name` is "q" or "k") times a decay,
        `factor` [64 tokens, 64 key channels].
        """
        at, source = self.at, self.smem[name]
        buffer = (
            source if self.call.with_scores else self.smem["q"]
        )  # without queries k may be float32
        buffer[...] = (load(source).astype(_F32) * factor).astype(buffer.dtype)
        plgpu.commit_smem()
        target = self.refs[output].at[at.b, at.tokens, at.h, at.channels]
        plgpu.copy_smem_to_gmem(buffer, target)
