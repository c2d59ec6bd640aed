"""The gradients of linear attention with a scalar decay for two heads that share q and k, on Mosaic GPU (Hopper).

A warpgroup has the transpose [64, 128] of one head's memory S (or of the memory's gradient) in registers, and a thread block has two heads
that share q and k. From the first chunk to the last (j <= i)

    dq_i = Σ_heads read_decay_i S dO_i + Σ_j W_ij (dO_i . v_j) k_j,          S <- chunk_decay S + Σ_j k_jᵀ (write_decay_j v_j)

and from the last to the first (i >= j), with S the gradient of the memory after the chunk,

    dk_j = Σ_heads write_decay_j S v_j + Σ_i W_ij (v_j . dO_i) q_i,          S <- chunk_decay S + Σ_i q_iᵀ (read_decay_i dO_i)
    dv_j = write_decay_j k_j S + Σ_i W_ij (k_j . q_i) dO_i + skip dO_j

where W_ij = exp(cum_i - write_cum_j) times the scale of q. The second scan reads v, dO, q and k once for both gradients and carries S once.
Each warpgroup computes the decayed scores of its own head, and then, from those of both heads, 64 of the 128 key channels of the sum over
the two heads: the halves of a product by columns, so that no sum leaves the registers.

The gradient of the log decay requires q . dq and k . dk of each head, which are summed before the heads are added. k . dk is v . dv
without the skip, the gradient of a write's logarithm, but not to rounding: both q . dq and k . dk contain the same rounded products of dO
and v, whose errors cancel.

The second scan has just as many registers as it requires. Products start late and inner products are stored early for this: each tile
of 64 x 64 that is in use at the same time is 32 registers of a thread.
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
from pallas_kernels.linear_attention.hopper.scalar_plan import Decays, chunks_of_interval, pairs
from pallas_kernels.linear_attention.hopper.scalar_weights import token_weights

_WIDTH = 64  # value channels of a head
_DEPTH = 128  # key channels of a head
_HALF = _DEPTH // 2  # key channels of a gradient that a warpgroup computes
_STAGES = 2  # chunks that are loaded or in use at once
_SQUARE = (CHUNK, CHUNK)
_F32 = jnp.float32


def supports(q, k, v, heads: int) -> bool:
    """Return whether `query_gradient` and `key_gradients` compute these arrays: pairs of `heads` heads share q and k, and a head has 128
    key channels and 64 value channels.
    """
    return q.shape[3] == _DEPTH and pairs(q, k, v, heads)


def query_gradient(q, k, v, d_output, decay: Decays, initial, *, scale: float, chunk_bounds=None, interpret: Any = False):  # fmt: skip
    """Return the gradient of q, the inner products of q with it, and memories for `key_gradients`.

    Args:
        q: [B, T, *, 128] the queries; each two consecutive heads share one head of them.
        k: [B, T, *, 128] the keys, shared likewise.
        v: [B, T, heads, 64] the values.
        d_output: [B, T, heads, 64] the gradient of the output.
        decay: the decays of the heads, and the tokens' documents.
        initial: [B * S, heads, 128, 64] float32, the memory before the first chunk; None is 0.
        scale: the factor of q.
        chunk_bounds: as for `scalar_scan`.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.

    Returns:
        The gradient of q, [B, T, heads / 2, 128], summed over each pair of heads; the inner products, [B, heads, T]; the transposes of the
        memories at the start of each interval of chunks, [B, heads, intervals, 64, 128].
    """
    dq, dots, saved = _scan(
        dict(x=d_output, y=v, z=k, own=q), decay, initial, read_scale=scale, chunk_bounds=chunk_bounds, interpret=interpret,
    )  # fmt: skip
    return dq, _by_head(jnp.sum(dots, axis=3)), saved


def key_gradients(
    q, k, v, d_output, decay: Decays, d_final, states, skip, *, scale: float, chunk_bounds=None, interpret: Any = False
):  # fmt: skip
    """Return the gradients of k, v and the initial memory, and inner products.

    Args:
        q: the queries, and the next three arrays, as for `query_gradient`.
        k: the keys.
        v: the values.
        d_output: the gradient of the output.
        decay: the decays of the heads, and the tokens' documents.
        d_final: [B * S, heads, 128, 64] float32, the gradient of the memory after the last chunk; None is 0.
        states: the memories that `query_gradient` has saved.
        skip: [heads] float32, the factor of each head's values in its output.
        scale: the factor of q.
        chunk_bounds: as for `scalar_scan`.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.

    Returns:
        The gradient of k, [B, T, heads / 2, 128], summed over each pair of heads; that of v, [B, T, heads, 64]; that of the initial
        memory, [B * S, heads, 128, 64] float32; inner products [B, heads, T]: k's with its gradient (v's with its gradient without the skip
        are equal), and v's with `d_output`; those of the memory with its gradient at the start of each interval of chunks, [B, heads, intervals].
    """
    dk, dots, dv, last, products = _scan(
        dict(x=v, y=d_output, z=q, own=k), decay, d_final, write_scale=scale, states=states, skip=skip, reverse=True,
        chunk_bounds=chunk_bounds, interpret=interpret,
    )  # fmt: skip
    products = jnp.sum(products, axis=-1)
    k_dots, skip_dots = _by_head(jnp.sum(dots[:, :, :2], axis=3)), _by_head(dots[:, :, 2])
    last = jnp.swapaxes(last.reshape(-1, v.shape[2], _WIDTH, _DEPTH), -1, -2)
    return dk, dv, last, k_dots, skip_dots, products


def _by_head(x):
    """Return an array [B, pairs of heads, 2, T] as [B, heads, T]."""
    return x.reshape(x.shape[0], -1, x.shape[3])


def _scan(
    tokens, decay: Decays, initial, *, read_scale: float = 1.0, write_scale: float = 1.0, states=None, skip=None,
    chunk_bounds=None, reverse: bool = False, interpret: Any,
) -> list[jax.Array]:  # fmt: skip
    """Run one of the two scans: if `reverse`, that of the gradients of k and v; else that of the gradient of q. Of `tokens`, x reads S, y
    and z write it, and `own` is the array of which the gradient is summed over pairs of heads.
    """
    batch, length, heads, _ = tokens["x"].shape
    count = length // CHUNK
    interval = 1 if chunk_bounds is not None else chunks_of_interval(count)
    runs = 1 if chunk_bounds is None else chunk_bounds.shape[1] - 1
    dtype = tokens["x"].dtype
    before, after = decay.read_decay, decay.write_decay
    assert before is not None and after is not None, "factors of writes require a decay"
    if reverse:
        before, after = after, before
    paired = {n: tokens[n].reshape(batch, length, heads // 2, 2 * _WIDTH) for n in "xy"}
    vectors = dict(
        write_decay=after * write_scale, read_decay=before * read_scale, cum=decay.cum, run=decay.run, write_cum=decay.write_cum
    )  # fmt: skip
    streams = {n: x for n, x in (tokens | paired | vectors).items() if x is not None}
    others = dict(
        chunk_decay=decay.chunk_decay, initial=None if initial is None else jnp.swapaxes(initial, -1, -2), states=states, skip=skip,
        chunk_bounds=chunk_bounds,
    )  # fmt: skip
    call = _Call(
        shapes={n: x.shape for n, x in streams.items()}, heads=heads, count=count, interval=interval, reverse=reverse,
        scale=read_scale * write_scale, interpret=interpret,
    )  # fmt: skip
    smem = _smem(call, dtype)

    def kernel(refs):
        at = _position(call, refs)
        with_smem(lambda buffers: _Warpgroup(call, at, refs, buffers).compute(), smem)

    struct: Any = jax.ShapeDtypeStruct
    outputs: dict[str, Any] = dict(
        dx=struct((batch, length, heads // 2, _DEPTH), dtype),
        dots=struct((batch, heads // 2, 3 if reverse else 2, 2, length), _F32),
    )
    if reverse:
        outputs |= dict(
            dv=struct((batch, length, heads, _WIDTH), dtype),
            last=struct((batch * runs * heads // 2, 2, _WIDTH, _DEPTH), _F32),
            products=struct((batch, heads, count // interval, _WIDTH), _F32),
        )  # fmt: skip
    else:
        shape = batch, heads, count // interval, _WIDTH, _DEPTH
        outputs["saved"] = struct(shape, dtype)
    results = launch(
        kernel, inputs=streams | others, outputs=outputs, grid=dict(row=batch * runs * heads // 2), num_threads=3,
        name="linear_attention_key_gradients" if reverse else "linear_attention_query_gradient", interpret=interpret,
    )  # fmt: skip
    return list(results.values())


class _Call(NamedTuple):
    """Sizes and options of one of the two scans.

    Attributes:
        shapes: shapes of the inputs that are loaded chunk by chunk, by name.
        heads: number of heads of the output.
        count: number of chunks of a row.
        interval: number of consecutive chunks in an interval; memories are saved at the start of each interval.
        reverse: whether the last chunk is computed first, for the gradients of k and v.
        scale: the factor by which the scores of a chunk's tokens with one another are multiplied.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.
    """

    shapes: dict[str, tuple[int, ...]]
    heads: int
    count: int
    interval: int
    reverse: bool
    scale: float
    interpret: Any


class _Position(NamedTuple):
    """The memory, and its chunks, that one warpgroup computes.

    Attributes:
        row: index of the memory in [B * S], b * S + s.
        pair: index of the pair of heads.
        h: index of the head.
        b: index of the row in the batch.
        steps: number of chunks that this memory passes through.
        chunk: function from n to the index, in the row, of the n-th chunk to be computed.
        group: the warpgroup's index in its thread block, which is that of the head in the pair.
        half: the slice of key channels whose gradient this warpgroup computes.
        chunk_decay: reference to the decay of the memory over each of the row's chunks.
        skip: the factor of the head's values in its output, or None.
    """

    row: Any
    pair: Any
    h: Any
    b: Any
    steps: Any
    chunk: Callable[[Any], Any]
    group: Any
    half: Any
    chunk_decay: Any
    skip: Any


def _position(call: _Call, refs: dict[str, Any]) -> _Position:
    """Return the memory and the chunks that this warpgroup computes, from its index in the grid."""
    index, pair_count = lax.axis_index("row"), call.heads // 2
    row, pair = lax.div(index, pair_count), lax.rem(index, pair_count)
    b, steps, chunk = wg.chunks_of_row(refs.get("chunk_bounds"), row, call.count, call.reverse)
    group = lax.axis_index("group")
    h = 2 * pair + jnp.minimum(group, 1)  # the warpgroup that loads has index 2, and no head
    half = pl.ds(group * _HALF, _HALF)
    skip = refs["skip"][h] if "skip" in refs else None
    return _Position(row, pair, h, b, steps, chunk, group, half, refs["chunk_decay"].at[b, h], skip)


def _smem(call: _Call, dtype) -> dict[str, Any]:
    """Return the types of a thread block's buffers and barriers in shared memory, besides the buffers into which its pipeline loads."""
    smem: Any = plgpu.SMEM
    tiles = functools.partial(smem, dtype=dtype, transforms=wg.TILED)
    return dict(
        memory=tiles((2, _WIDTH, _DEPTH)),
        weights=tiles((2, *_SQUARE)),
        written=tiles((2, CHUNK, _WIDTH)),
        out=tiles((2, CHUNK, _HALF)),
        left=tiles((2, *_SQUARE)) if call.interpret and call.reverse else None,
        stored=plgpu.Barrier(num_arrivals=2),
        used=plgpu.Barrier(num_arrivals=2),
    )


class _Warpgroup(NamedTuple):
    """The computation of one warpgroup: it carries one head's memory, transposed [64, 128], through the chunks.

    Attributes:
        call: sizes and options of the scan.
        at: which memory, and which chunks, the warpgroup computes.
        refs: inputs and outputs in global memory, by name.
        smem: buffers and barriers of the thread block in shared memory, as `_smem` returns them, by name. `memory`, `weights`, `written` and
            `out` have an entry for each warpgroup. After `stored`, both warpgroups read both entries of `memory` and `weights`, until
            both have arrived at `used`.
    """

    call: _Call
    at: _Position
    refs: dict[str, Any]
    smem: dict[str, Any]

    def compute(self) -> None:
        """Carry a memory through all of its chunks: run the pipeline in which another warpgroup loads the inputs of one chunk after
        another.
        """
        call = self.call
        sources, specs = zip(*map(self.source, call.shapes), strict=True)
        pipeline: Any = plgpu.emit_pipeline_warp_specialized
        pipeline(
            self.compute_chunk, grid=(self.at.steps,), in_specs=list(specs), max_concurrent_steps=min(_STAGES, call.count),
            num_compute_wgs=2, memory_registers=24, wg_axis="group", compute_context=self.compute_all,
        )(*sources)  # fmt: skip

    def source(self, name: str) -> tuple[Any, Any]:
        """Return, for the input `name`, a reference to the row and the pair of heads of it in global memory, and the `BlockSpec` of what is
        loaded for each chunk.
        """
        at, source = self.at, self.refs[name]
        if name == "run":
            return source.at[at.b], plgpu.BlockSpec((CHUNK,), lambda n: (at.chunk(n),))
        if source.ndim == 3:
            spec = plgpu.BlockSpec((2, CHUNK), lambda n: (0, at.chunk(n)))
            return source.at[at.b, pl.ds(2 * at.pair, 2)], spec
        head = lax.div(at.pair * self.call.shapes[name][2], self.call.heads // 2)
        block = plgpu.BlockSpec((CHUNK, _DEPTH), lambda n: (at.chunk(n), 0), transforms=wg.TILED)
        return source.at[at.b, :, head], block

    def compute_all(self, pipeline: Callable) -> None:
        """Carry this warpgroup's memory from its initial value (or 0) through all chunks, and store the gradient of the initial memory.

        `pipeline` runs `compute_chunk` for one chunk after another and returns the last memory.
        """
        at = self.at
        if "initial" in self.refs:
            S = wg.load_global(self.refs["initial"].at[at.row, at.h])
        else:
            S = plgpu.layout_cast(jnp.zeros((_WIDTH, _DEPTH), _F32), wg.LAYOUT)
        plgpu.barrier_arrive(self.smem["used"])
        S, _ = pipeline((S, at.chunk_decay[at.chunk(0)]))
        plgpu.barrier_wait(self.smem["used"])
        if "last" in self.refs:
            self.refs["last"].at[lax.axis_index("row"), at.group][...] = S
        plgpu.wait_smem_to_gmem(0)

    def compute_chunk(self, indices, *arguments) -> Any:
        """Return the memory S [64, 128] after one chunk and the decay of the memory over the next chunk; store the chunk's gradients.

        `indices` has the chunk's index in the order of computation; `arguments` are references to the chunk's inputs and, last, the
        pair of S before the chunk and the decay over the chunk.
        """
        call, at, smem = self.call, self.at, self.smem
        *loaded, (S, chunk_decay) = arguments
        chunk = dict(zip(call.shapes, loaded, strict=True))
        mine = self.of_head(chunk, at.group)
        n = at.chunk(indices[0])
        x, y, z = mine["x"], mine["y"], chunk["z"]
        # Loading a scalar from global memory is slow, so that it is loaded a chunk ahead.
        next_chunk_decay = at.chunk_decay[at.chunk(jnp.minimum(indices[0] + 1, at.steps - 1))]
        memory, written = (smem[name].at[at.group] for name in ("memory", "written"))
        writes = plgpu.load(y, layout=wg.LAYOUT).astype(_F32)
        if call.reverse:
            tokens = pl.ds(n * CHUNK, CHUNK)
            values = plgpu.load(x, layout=wg.LAYOUT).astype(_F32)
            target = self.refs["dots"].at[at.b, at.pair, 2, at.group, tokens]
            target[...] = jnp.sum(writes * values, axis=1)
        writes *= wg.spread_rows(wg.load_rows(mine["write_decay"]), (CHUNK, _WIDTH))
        written[...] = writes.astype(written.dtype)
        plgpu.barrier_wait(smem["used"])
        memory[...] = S.astype(memory.dtype)
        plgpu.commit_smem()
        starts = lax.rem(n, call.interval) == 0 if call.interval > 1 else chunk_decay >= 0.0
        if "saved" in self.refs:
            pl.when(starts)(lambda: self.save_state(n, memory))

        def update(total, scores):
            plgpu.wgmma(scores.ref, x, y.transpose((1, 0)))
            plgpu.wgmma(total.ref, written.transpose((1, 0)), z)
            weights = token_weights(mine, call.reverse, call.scale)
            weighed = (scores.read(1) * weights).astype(memory.dtype)

            def store(*pair_scores):
                smem["weights"].at[at.group][...] = weighed
                for sums in pair_scores:
                    plgpu.wgmma(sums.ref, chunk["own"], z.transpose((1, 0)))
                plgpu.commit_smem()
                plgpu.barrier_arrive(smem["stored"])
                return [(sums.read(0) * weights).astype(memory.dtype) for sums in pair_scores]

            if not call.reverse:
                return store(), total.read()
            weighed_pairs = wg.with_accumulators(store, _SQUARE, interpret=call.interpret)
            return weighed_pairs, total.read()

        pair_scores, S = wg.with_accumulators(
            update, S * chunk_decay, _SQUARE, interpret=call.interpret
        )
        if call.reverse:
            self.value_gradient(n, mine, pair_scores[0], chunk["own"])
        if "states" in self.refs:
            pl.when(starts)(lambda: self.store_products(n, S))
        plgpu.barrier_wait(smem["stored"])
        self.sum_heads(n, chunk)
        return S, next_chunk_decay

    def of_head(self, chunk, index) -> dict[str, Any]:
        """Return the references to a chunk's inputs of one of the two heads, by name, from those of both."""
        mine = {n: a if n == "run" else a.at[index] for n, a in chunk.items() if n not in ("z", "own")}  # fmt: skip
        columns = pl.ds(index * _WIDTH, _WIDTH)
        return mine | {n: chunk[n].at[:, columns] for n in "xy"}

    def save_state(self, n, memory) -> None:
        """Start to store the memory before chunk n, the first chunk of an interval."""
        at = self.at
        target = self.refs["saved"].at[at.b, at.h, lax.div(n, self.call.interval)]
        plgpu.copy_smem_to_gmem(memory, target)

    def store_products(self, n, S) -> None:
        """Store, for each row of the memory's gradient S [64, 128], its inner product with the same row of the memory that the scan of the
        gradient of q has saved at the start of chunk n.
        """
        at, interval = self.at, lax.div(n, self.call.interval)
        state = wg.load_global(self.refs["states"].at[at.b, at.h, interval])
        products = jnp.sum(S * state.astype(_F32), axis=1)
        self.refs["products"].at[at.b, at.h, interval][...] = products

    def value_gradient(self, n, mine, weights, keys) -> None:
        """Start to store the gradient of the chunk's values.

        `mine` has references to the chunk's inputs of this head, `weights` are the decayed scores of keys with queries, and `keys` is the
        reference to the keys.
        """
        call, at, smem = self.call, self.at, self.smem
        buffer = smem["written"].at[at.group]
        left = wg.as_left(
            weights, smem["left"].at[at.group] if call.interpret else None, call.interpret
        )
        memory, tile = smem["memory"].at[at.group], (CHUNK, _WIDTH)

        def products(dv, carried):
            plgpu.wgmma(dv, left, mine["y"])
            plgpu.wgmma(carried, keys, memory.transpose((1, 0)))

        skipped = at.skip * plgpu.load(mine["y"], layout=wg.LAYOUT).astype(_F32)
        dv, carried = wg.accumulate(
            products, skipped, jnp.zeros(tile, _F32), interpret=call.interpret
        )
        dv += carried * wg.spread_rows(wg.load_rows(mine["read_decay"]), tile)
        tokens = pl.ds(n * CHUNK, CHUNK)
        buffer[...] = dv.astype(buffer.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, self.refs["dv"].at[at.b, tokens, at.h])

    def sum_heads(self, n, chunk) -> None:
        """Compute half of the key channels of the gradient of q or k, summed over the two heads, and start to store it; store each
        head's inner products with q or k.
        """
        call, at, smem = self.call, self.at, self.smem
        heads = [self.of_head(chunk, index) for index in range(2)]
        shape = (CHUNK, _HALF)

        def from_memory(*sums):
            for index, out in enumerate(sums):
                plgpu.wgmma(out, heads[index]["x"], smem["memory"].at[index].at[:, at.half])

        def from_tokens(*sums):
            for index, out in enumerate(sums):
                plgpu.wgmma(out, smem["weights"].at[index], chunk["z"].at[:, at.half])

        zeros = [jnp.zeros(shape, _F32)] * 2
        sums = wg.accumulate(from_memory, *zeros, interpret=call.interpret)
        sums = [
            x * wg.spread_rows(wg.load_rows(head["read_decay"]), shape)
            for x, head in zip(sums, heads, strict=True)
        ]
        sums = wg.accumulate(from_tokens, *sums, interpret=call.interpret)
        plgpu.barrier_arrive(smem["used"])
        tokens = pl.ds(n * CHUNK, CHUNK)
        own = plgpu.load(chunk["own"].at[:, at.half], layout=wg.LAYOUT).astype(_F32)
        for index, x in enumerate(sums):
            target = self.refs["dots"].at[at.b, at.pair, index, at.group, tokens]
            target[...] = jnp.sum(x * own, axis=1)
        buffer = smem["out"].at[at.group]
        # The newest store of the scan of dk is that of dv, from another buffer.
        plgpu.wait_smem_to_gmem(1 if call.reverse else 0, wait_read_only=True)
        buffer[...] = (sums[0] + sums[1]).astype(buffer.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, self.refs["dx"].at[at.b, tokens, at.pair, at.half])
        # The next chunk overwrites what the other stores read.
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
