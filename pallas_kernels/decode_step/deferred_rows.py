"""The step of `pallas_kernels.decode_step.deferred` in programs that compute rows one after another, so that nothing is waited for between two
memories: while a program reads the tiles of one row's memory, those of the next row's are on their way to shared memory, each as soon as the tile
before it in its place is read, and the next row's vectors to registers. A thread has one key channel and one value channel.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import channel_rows, key_columns, pl, plgpu
from pallas_kernels.decode_step import hopper
from pallas_kernels.decode_step.pending import (
    ChannelGate,
    filled_places,
    gated_output,
    joined_decay,
    plain_decay,
    run_in_place,
)
from pallas_kernels.hopper.launch import launch

_F32 = jnp.float32
_WARPS, _THREADS = 4, 128
_TILES, _KEYS = 2, 64  # tiles of a program's part of a memory, and their key channels
_WRITTEN = 16  # key channels of a tile that are written at once, so that few registers hold them
_SINGLE = "query", "plain query", "decay", "output", "scores"  # vectors in shared memory


class _Vectors(NamedTuple):
    """The entries of a row's vectors that a thread has, as they are stored.

    Attributes:
        inner: the token's inner channels of the decay's gate.
        query, key: of its key channel.
        value, gate: of its value channel.
        keys, decays, values: those of the pending writes.
    """

    inner: list[Any]
    query: Any
    key: Any
    value: Any
    gate: Any
    keys: list[Any]
    decays: list[Any]
    values: list[Any]


def count_parts(memory: Any) -> int:
    """Return the number of parts of the memories [B, G, K, V] that programs compute, or 0 if no thread could have one key and one value channel:
    K must be 128, and V a multiple of it.
    """
    batch, memories, key_dim, value_dim = memory.shape
    possible = key_dim == _THREADS and value_dim % _THREADS == 0
    return batch * memories * (value_dim // _THREADS) if possible else 0


# Traced and lowered once for all layers that are compiled one after the other.
@functools.partial(
    jax.jit,
    static_argnames=("columns", "temperature", "scale", "gate", "programs", "interpret"),
)
def step(
    memory, pending, count, tokens, up, bias,
    *, columns, temperature, scale, gate, programs, interpret,
) -> tuple[Any, jax.Array, Any]:  # fmt: skip
    """Return what `deferred.deferred_step` returns, whose arguments these are, with count int32 [1] and bias float32, computed by about
    `programs` thread blocks.
    """
    batch, memories, key_dim, value_dim = memory.shape
    group = pending.keys.shape[1] + 1
    starts = dict(zip(("q", "k", "v", "down"), columns, strict=True))
    gated = gate is not None
    parts = value_dim // _THREADS
    rows = pl.cdiv(batch * memories * parts, programs)
    each = plgpu.Layout.WG_STRIDED((_THREADS,), 1)
    by_warp, layout = channel_rows(group, key_dim, _WARPS), key_columns(_THREADS // _WARPS)
    writes = group - 1  # the number of pending writes of a token that writes the memory

    def spread(ref, axis, keys):
        """Load a vector of a tile's key channels (axis 0) or of value channels (1) from shared memory, and broadcast it to the tile."""
        x = plgpu.load(ref, layout=layout.reduce(1 - axis), optimized=False)
        return plgpu.layout_cast(lax.broadcast_in_dim(x, (keys, _THREADS), [axis]), layout)

    def kernel(refs, shared):
        # One buffer, since each begins at a multiple of 1 KB.
        shared |= {name: shared["vectors"].at[group + i] for i, name in enumerate(_SINGLE)}
        shared["keys"] = shared["vectors"].at[pl.ds(0, group)]
        shared["values"] = shared["vectors"].at[pl.ds(group + len(_SINGLE), group)]
        head, part = lax.axis_index("head"), lax.axis_index("part")
        first = lax.axis_index("rows") * rows
        end = jnp.minimum(first + rows, batch)
        own_keys, own_values = head * key_dim, head * value_dim + part * _THREADS

        def memory(row, keys):
            """Return a reference to the program's part of the memory."""
            return refs["memory"].at[row, head, keys, pl.ds(part * _THREADS, _THREADS)]

        def load_tile(row, t):
            source = memory(row, pl.ds(t * _KEYS, _KEYS))
            plgpu.copy_gmem_to_smem(source, shared["memory"].at[t], shared["loaded"].at[t])

        def load(name, *index, start=own_keys):
            ref = refs[name].at[(*index, pl.ds(start, _THREADS))]
            return plgpu.load(ref, layout=each, optimized=False)

        for t in range(_TILES):
            load_tile(first, t)
        count = refs["count"][0]
        slots = filled_places(count, group)
        ranks = range(refs["up"].shape[0])

        def load_gate():
            return load("bias"), [load("up", rank) for rank in ranks]

        def load_vectors(row):
            inner = [refs["tokens"][row, starts["down"] + rank] for rank in ranks]

            def of_token(name, start):
                return load("tokens", row, start=starts[name] + start)

            return _Vectors(
                inner, of_token("q", own_keys), of_token("k", own_keys), of_token("v", own_values),
                of_token("gate", own_values) if gated else None,
                [load("keys", row, s) for s in slots],
                [load("decays", row, s) for s in slots],
                [load("values", row, s, start=own_values) for s in slots],
            )  # fmt: skip

        def logit_of(vectors, gate):
            bias, up = gate
            return ChannelGate(bias, vectors.inner, up).logit()

        def of_row(row, loaded):
            given, logit = loaded
            query, value = given.query.astype(_F32), given.value.astype(_F32)
            own = decay = hopper.gated_factor(logit, temperature)
            shared["keys"].at[group - 1][...] = given.key.astype(_F32)
            for j in reversed(range(group - 1)):
                written = j < count
                late = jnp.where(written, given.keys[j].astype(_F32), 0.0)
                shared["keys"].at[j][...] = plain_decay(decay) * late
                decay = joined_decay(jnp.where(written, given.decays[j], 0.0), decay)
            shared["plain query"][...] = query
            shared["query"][...] = plain_decay(decay) * query

            @pl.when(count == writes)
            def _():
                shared["decay"][...] = decay
                for j, late in enumerate(given.values):
                    shared["values"].at[j][...] = late.astype(_F32)
                shared["values"].at[group - 1][...] = value

            # Each warp has the scores of some of the keys.
            queries = plgpu.load(shared["plain query"], layout=by_warp.reduce(0), optimized=False)
            queries = lax.broadcast_in_dim(queries, (group, key_dim), [1])
            queries = plgpu.layout_cast(queries, by_warp)
            late = queries * plgpu.load(shared["keys"], layout=by_warp, optimized=False)
            shared["scores"].at[pl.ds(0, group)][...] = plgpu.layout_cast(
                jnp.sum(late, axis=1), by_warp.reduce(1)
            )
            scores = [shared["scores"][j] for j in range(group)]
            late = scores[0] * given.values[0].astype(_F32)
            for j in range(1, group - 1):
                late += scores[j] * given.values[j].astype(_F32)
            late = jnp.where(count > 0, late, 0.0)  # the scores are 0, the values anything
            late += scores[group - 1] * value

            # Both branches only store, so that what is loaded behind them is on its way during the tiles.
            @pl.when(count < writes)
            def _():
                refs["values"].at[row, count, pl.ds(own_values, _THREADS)][...] = given.value

            @pl.when((count < writes) & (part == 0))
            def _():
                refs["keys"].at[row, count, pl.ds(own_keys, _THREADS)][...] = given.key
                refs["decays"].at[row, count, pl.ds(own_keys, _THREADS)][...] = own

            following = load_vectors(jnp.minimum(row + 1, end - 1))
            output: Any = 0.0
            for t in range(_TILES):
                plgpu.barrier_wait(shared["loaded"].at[t])
                output += of_tile(row, t)
                plgpu.commit_smem()  # the tile is read before it is loaded anew
                pl.when(row + 1 < end)(lambda t=t: load_tile(row + 1, t))

            gate = load_gate()  # few enough to be in the L1 cache
            shared["output"][...] = output
            output = plgpu.load(shared["output"], layout=each, optimized=False) + late
            output = (scale * output).astype(tokens.dtype)
            if gated:
                plain_output = output.astype(_F32)
                output = gated_output(plain_output, given.gate.astype(_F32)).astype(tokens.dtype)
                refs["squares"][head, part, row] = jnp.sum(plain_output * plain_output)
            refs["output"].at[row, head, pl.ds(part * _THREADS, _THREADS)][...] = output
            return following._replace(inner=[]), logit_of(following, gate)

        def of_tile(row, t):
            """Compute a tile's part of the output, and store the tile by the last token of a group."""
            here = pl.ds(t * _KEYS, _KEYS)

            @pl.when(count == writes)
            def _():
                for first in range(0, _KEYS, _WRITTEN):
                    write(row, t, first)

            m = plgpu.load(shared["memory"].at[t], layout=layout, optimized=False)
            return hopper.read(spread(shared["query"].at[here], 0, _KEYS), m)

        def write(row, t, first):
            """Store the memory of some key channels of a tile."""
            within, here = pl.ds(first, _WRITTEN), pl.ds(t * _KEYS + first, _WRITTEN)
            m = plgpu.load(shared["memory"].at[t, within], layout=layout, optimized=False)
            m = hopper.apply_decay(m, spread(shared["decay"].at[here], 0, _WRITTEN))
            for j in (group - 1, *range(group - 1)):
                value = spread(shared["values"].at[j], 1, _WRITTEN)
                m += spread(shared["keys"].at[j, here], 0, _WRITTEN) * value
            memory(row, here)[...] = m

        vectors = load_vectors(first)
        loaded = vectors._replace(inner=[]), logit_of(vectors, load_gate())
        lax.fori_loop(first, end, of_row, loaded)

    outputs = dict(output=jax.ShapeDtypeStruct((batch, memories, value_dim), tokens.dtype))
    if gated:
        starts["gate"] = gate
        outputs["squares"] = jax.ShapeDtypeStruct((memories, parts, batch), _F32)
    run = functools.partial(
        launch,
        kernel,
        outputs=outputs,
        scratch={
            "memory": plgpu.SMEM((_TILES, _KEYS, _THREADS), _F32),
            "vectors": plgpu.SMEM((2 * group + len(_SINGLE), _THREADS), _F32),
            "loaded": plgpu.Barrier(num_barriers=_TILES),
        },
        grid=dict(rows=pl.cdiv(batch, rows), head=memories, part=parts),
        approx_math=False,
        reduction_scratch_bytes=_THREADS * 4,
        name="deferred_step",
        interpret=interpret,
    )
    inputs = dict(tokens=tokens, count=count, up=up, bias=bias)
    return run_in_place(memory, pending, outputs, lambda refs: run(inputs=inputs | refs))
