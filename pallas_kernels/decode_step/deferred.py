"""The step of gated linear attention that writes its memories once in a group of n tokens: a token reads the memory S as the group found
it, and applies the writes that are pending since then by themselves,

    o = scale (q D) S + scale sum_j (q E_j k_j) v_j    with D the product of all decays since S, E_j of those after token j,

without a loss of exactness. So a token moves the memory once, and not twice, and only the last of a group stores

    M = D S + sum_j (E_j k_j)^T v_j.

Where there are many parts of memories, programs compute several each (`deferred_rows`). Otherwise a program has 64 KB of a memory, on their way to
shared memory (three programs to a processor: 192 KB) while each thread computes what belongs to one key channel or two: the decay from its low-rank
gate, the products of decays, the decayed keys, which all threads read from shared memory.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.compat import channel_rows, pl, plgpu
from pallas_kernels.decode_step import deferred_rows, hopper
from pallas_kernels.decode_step.pending import (
    ChannelGate,
    Pending,
    filled_places,
    gated_output,
    joined_decay,
    plain_decay,
    run_in_place,
)
from pallas_kernels.hopper.launch import launch
from pallas_kernels.requirements import Requirement, first_unmet

_F32 = jnp.float32
_WARPS, _THREADS = 4, 128
_TILES = 2  # of 32 KB of a memory that a program has, of which three run on a processor
_MAX_RANK = 64  # inner channels of the decay's gate, which each thread reads

PROGRAMS: dict[int, int] = {4: 396, 8: 264}
"""By the number of tokens of which one writes, about how many thread blocks compute rows one after another (`pallas_kernels.decode_step.deferred_rows`),
where K is 128 and V a multiple of it: of groups of 4 three run on each processor of an H200, of 8 two. Calls with fewer than two parts of a memory for each,
and groups that are not here, have a thread block for each part (256 rows of GLA 340M then have 0.958 times the tokens/s, in groups of 4)."""
GROUPS = (4, 8)
"""The numbers of tokens of which one writes."""


class _Call(NamedTuple):
    memory: Any
    tokens: Any
    up: Any
    group: int


REQUIREMENTS = (
    Requirement(
        "tokens in bfloat16 or float32",
        lambda c: c.tokens.dtype in (jnp.bfloat16, jnp.float32),
        lambda c: jnp.dtype(c.tokens.dtype).name,
    ),
    Requirement(
        "memory in float32",
        lambda c: c.memory.dtype == _F32,
        lambda c: jnp.dtype(c.memory.dtype).name,
    ),
    Requirement(
        "K 128 or 256 and V a multiple of 32",
        lambda c: (
            c.memory.shape[-2] in (_THREADS, 2 * _THREADS)
            and hopper.column_width(1, *c.memory.shape[-2:]) is not None
        ),
        lambda c: f"K {c.memory.shape[-2]} and V {c.memory.shape[-1]}",
    ),
    Requirement(
        f"at most {_MAX_RANK} inner channels of the gate",
        lambda c: c.up.shape[0] <= _MAX_RANK,
        lambda c: f"{c.up.shape[0]}",
    ),
    Requirement("groups of 4 or 8 tokens", lambda c: c.group in GROUPS, lambda c: f"{c.group}"),
    Requirement(
        f"at most {hopper.MAX_GRID:,} rows and memories of a row",
        lambda c: max(c.memory.shape[0], c.memory.shape[1]) <= hopper.MAX_GRID,
        lambda c: f"{c.memory.shape[0]:,} and {c.memory.shape[1]:,}",
    ),
)


def unsupported(memory: Any, tokens: Any, up: Any, group: int) -> str | None:
    """Return the first requirement that a call of `deferred_step` with these arrays (or their shapes and dtypes) and groups of `group`
    tokens does not meet, or None if the kernel supports it.
    """
    return first_unmet(REQUIREMENTS, _Call(memory, tokens, up, group))


def empty_writes(memory: Any, group: int, dtype: Any) -> Pending:
    """Return empty buffers for the pending writes to a memory [B, G, K, V] by groups of `group` tokens in `dtype`."""
    batch, memories, key_dim, value_dim = memory.shape
    shape = batch, group - 1, memories * key_dim
    values = jnp.zeros((*shape[:2], memories * value_dim), dtype)
    return Pending(jnp.zeros(shape, dtype), values, jnp.zeros(shape, _F32))


def apply_writes(
    memory: Float[Array, "B G K V"], pending: Pending, count: Int[Array, ""]
) -> Float[Array, "B G K V"]:
    """Return the memory after the first `count` pending writes, by XLA."""
    batch, memories, key_dim, _ = memory.shape
    slots = range(pending.keys.shape[1])

    def of_head(x, slot):
        return x[:, slot].reshape(batch, memories, -1)

    factors = [jnp.where(j < count, of_head(pending.decays, j), 0.0) for j in slots]
    after, keys = jnp.zeros((batch, memories, key_dim), _F32), {}
    for j in reversed(slots):
        keys[j] = plain_decay(after) * jnp.where(
            j < count, of_head(pending.keys, j).astype(_F32), 0.0
        )
        after = joined_decay(factors[j], after)
    memory = hopper.apply_decay(memory, after[..., None])
    for j in slots:
        value = jnp.where(j < count, of_head(pending.values, j).astype(_F32), 0.0)
        memory += keys[j][..., None] * value[..., None, :]
    return memory


def deferred_step(
    memory: Float[Array, "B G K V"],
    pending: Pending,
    count: Int[Array, ""],
    tokens: Float[Array, "B C"],
    up: Float[Array, "R GK"],
    bias: Float[Array, " GK"],
    *,
    columns: tuple[int, int, int, int],
    temperature: float,
    scale: float,
    gate: int | None = None,
    interpret: Any = False,
) -> tuple[Any, Float[Array, "B G K V"], Pending]:
    """Apply one token of each row to each of its matrix memories, `M <- diag(decay) M + k^T v`, `log decay = log sigmoid(down up + bias) /
    temperature`, and return the output `o = scale q M` [B, G, V], the memory as it is stored, and the pending writes. Neither differentiation nor
    `jax.vmap` is supported.

    With `gate`, the output is a pair: `o silu(gate)`, in float32 from o as it is rounded to the dtype of `tokens`, and rounded again; and the sums of
    the squares of this o, [G, P, B] float32, of the channels of each of P thread blocks of a memory, from which the norm of a head behind
    the memory divides a product of the gated output.

    Args:
        memory: [B, G, K, V] float32, the memories before the pending writes. Updated in place where its buffer may be reused.
        pending: the writes that `memory` does not hold, of groups of n tokens, from `empty_writes` with the dtype of `tokens`; in place likewise.
        count: int32 scalar, the number of pending writes, from 0 to n - 1. With n - 1 the memory is written, and none is pending after it.
        tokens: [B, C], the result of one product, of which queries, keys, values of all heads and the gate's inner channels are columns.
        up: [R, G K], the matrix from the inner channels to the decay's gate.
        bias: [G K], of the gate.
        columns: the first columns of queries, keys, values and inner channels.
        temperature: divides the logarithm.
        scale: the factor by which the queries are multiplied.
        gate: the first column of the gates of the output's channels, or None.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.

    Raises:
        NotImplementedError: the arrays do not meet a requirement (`REQUIREMENTS`); the message says which.
    """
    group = pending.keys.shape[1] + 1
    if (requirement := unsupported(memory, tokens, up, group)) is not None:
        raise NotImplementedError(f"deferred_step requires {requirement}")
    count, bias = jnp.reshape(count, 1).astype(jnp.int32), bias.astype(_F32)
    arrays = memory, pending, count, tokens, up, bias
    options: dict[str, Any] = dict(columns=columns, temperature=temperature, scale=scale)
    options |= dict(gate=gate, interpret=interpret)
    programs = PROGRAMS.get(group)
    if programs and deferred_rows.count_parts(memory) >= 2 * programs:
        return deferred_rows.step(*arrays, programs=programs, **options)
    return _step(*arrays, **options)


class _Keys:
    """The parts of the kernel of which each thread has a key channel, or K / 128 of them.

    Attributes:
        block: the warpgroup's part of the memory.
        keys: K.
        layout: how K numbers are distributed over the threads.
        slots: for each pending write its place in the buffers, another filled place where it is none.
    """

    def __init__(self, block: hopper.Block, group: int, count: Any):
        self.block, self.keys = block, block.shape[0]
        self.layout = plgpu.Layout.WG_STRIDED((self.keys,), self.keys // _THREADS)
        self.slots = filled_places(count, group)

    @property
    def own(self):
        """The slice of the key channels of this memory among those of its row."""
        return pl.ds(self.block.head * self.keys, self.keys)

    def load(self, name: str, *index: Any):
        """Load the key channels of this memory from an array of those of a row, at [*index]."""
        return plgpu.load(
            self.block.refs[name].at[(*index, self.own)], layout=self.layout, optimized=False
        )

    def load_token(self, name: str):
        """Load the token's own queries or keys."""
        first = self.block.starts[name] + self.block.head * self.keys
        ref = self.block.refs[name].at[self.block.row, pl.ds(first, self.keys)]
        return plgpu.load(ref, layout=self.layout, optimized=False)

    def load_gate(self):
        """Load what the gate of the token's decay is computed from."""
        refs, row, first = self.block.refs, self.block.row, self.block.starts["down"]
        ranks = range(refs["up"].shape[0])
        inner = [refs["k"][row, first + rank] for rank in ranks]
        return ChannelGate(self.load("bias"), inner, [self.load("up", rank) for rank in ranks])


# Traced and lowered once for all layers that are compiled one after the other.
@functools.partial(
    jax.jit, static_argnames=("columns", "temperature", "scale", "gate", "interpret")
)
def _step(
    memory, pending, count, tokens, up, bias, *, columns, temperature, scale, gate, interpret
) -> tuple[Any, jax.Array, Pending]:
    batch, memories, key_dim, value_dim = memory.shape
    group = pending.keys.shape[1] + 1
    width: Any = hopper.column_width(batch * memories, key_dim, value_dim)
    starts = dict(zip(("q", "k", "v", "down"), columns, strict=True))
    gated = gate is not None
    if gated:
        starts["gate"] = gate
    tile = channel_rows(group, key_dim, _WARPS)

    whole = value_dim // (_WARPS * width)  # tiles of a memory
    tiles = range(_TILES if whole % _TILES == 0 else 1)
    parts, own_channels = whole // len(tiles), len(tiles) * _WARPS * width

    def kernel(refs, shared):
        refs |= dict.fromkeys(("q", "k", "v", "gate"), refs["tokens"])
        part = lax.axis_index("part")
        blocks = [
            hopper.Block(refs, width, key_dim, value_dim, starts, part * len(tiles) + t)
            for t in tiles
        ]
        (block, *_), row, layout = blocks, blocks[0].row, blocks[0].layout
        channels_here = pl.ds(part * own_channels, own_channels)
        source = refs["memory"].at[row, block.head, slice(None), channels_here]
        plgpu.copy_gmem_to_smem(source, shared["memory"], shared["loaded"])
        # A store, which the compiler does not move, so that the copy is on its way before all else.
        shared["query"][...] = jnp.zeros(key_dim, _F32)
        if gated and own_channels < _THREADS:
            shared["output"][...] = jnp.zeros(_THREADS, _F32)
        count = refs["count"][0]
        keys = _Keys(block, group, count)

        def channels(block):
            return pl.ds(block.head * value_dim + block.channels.start, block.shape[1])

        def load_value(block, slot):
            ref = refs["values"].at[row, slot, channels(block)]
            return plgpu.load(ref, layout=layout.reduce(0), optimized=False)

        decay_gate = keys.load_gate()
        loaded = [(keys.load("keys", row, s), keys.load("decays", row, s)) for s in keys.slots]
        key, query = keys.load_token("k"), keys.load_token("q").astype(_F32)
        queries = refs["q"].at[row, pl.ds(starts["q"] + block.head * key_dim, key_dim)]
        queries = plgpu.load(queries, layout=tile.reduce(0), optimized=False)
        values = [[load_value(b, slot) for slot in keys.slots] for b in blocks]
        own_values = [b.load_values("v") for b in blocks]

        gates = [b.load_values("gate") for b in blocks] if gated else []

        own = decay = decay_gate.decay(temperature)
        shared["keys"].at[group - 1][...] = key.astype(_F32)
        for j in reversed(range(group - 1)):
            written = j < count
            late, factor = loaded[j]
            late = jnp.where(written, late.astype(_F32), 0.0)
            shared["keys"].at[j][...] = plain_decay(decay) * late
            decay = joined_decay(jnp.where(written, factor, 0.0), decay)
        shared["decay"][...] = decay
        shared["query"][...] = plain_decay(decay) * query

        # Each warp has the scores of some of the keys.
        each = lax.broadcast_in_dim(queries.astype(_F32), (group, key_dim), [1])
        each = plgpu.layout_cast(each, tile)
        late = plgpu.load(shared["keys"], layout=tile, optimized=False)
        shared["scores"][...] = plgpu.layout_cast(jnp.sum(each * late, axis=1), tile.reduce(1))

        def by_key(ref):
            return block.spread(plgpu.load(ref, layout=layout.reduce(1), optimized=False), 0)

        def load_memory(t):
            tile = shared["memory"].at[:, pl.ds(t * block.shape[1], block.shape[1])]
            return plgpu.load(tile, layout=layout, optimized=False)

        scores = [shared["scores"][j] for j in range(group)]
        plgpu.barrier_wait(shared["loaded"])
        for t in tiles:
            late = scores[0] * values[t][0].astype(_F32)
            for j in range(1, group - 1):
                late += scores[j] * values[t][j].astype(_F32)
            late = jnp.where(count > 0, late, 0.0)  # the scores are 0, the values anything
            output = hopper.read(by_key(shared["query"]), load_memory(t))
            output += late + scores[group - 1] * own_values[t]
            to = refs["output"].at[row, block.head, blocks[t].channels]
            output = plgpu.layout_cast((scale * output).astype(tokens.dtype), layout.reduce(0))
            if gated:
                output, here = output.astype(_F32), pl.ds(t * block.shape[1], block.shape[1])
                shared["output"].at[here][...] = output
                output = gated_output(output, gates[t]).astype(tokens.dtype)
            to[...] = output
        if gated:
            each = plgpu.Layout.WG_STRIDED((_THREADS,), 1)
            outputs = plgpu.load(shared["output"], layout=each, optimized=False)
            refs["squares"][block.head, part, row] = jnp.sum(outputs * outputs)

        @pl.when(count < group - 1)
        def _():
            for t in tiles:
                to = refs["values"].at[row, count, channels(blocks[t])]
                to[...] = plgpu.layout_cast(own_values[t].astype(tokens.dtype), layout.reduce(0))

        @pl.when((count < group - 1) & (part == 0))
        def _():
            refs["keys"].at[row, count, keys.own][...] = key
            refs["decays"].at[row, count, keys.own][...] = own

        @pl.when(count == group - 1)
        def _():
            for t in tiles:

                def add(j, value, to):
                    return to + by_key(shared["keys"].at[j]) * block.spread(value, 1)

                m = hopper.apply_decay(load_memory(t), by_key(shared["decay"]))
                m = add(group - 1, own_values[t], m)
                for j in range(group - 1):
                    m = add(j, load_value(blocks[t], j).astype(_F32), m)
                blocks[t].memory()[...] = m

    outputs = dict(output=jax.ShapeDtypeStruct((batch, memories, value_dim), tokens.dtype))
    if gated:
        outputs["squares"] = jax.ShapeDtypeStruct((memories, parts, batch), _F32)

    run = functools.partial(
        launch,
        kernel,
        outputs=outputs,
        scratch=dict(
            memory=plgpu.SMEM((key_dim, own_channels), _F32),
            keys=plgpu.SMEM((group, key_dim), _F32),
            decay=plgpu.SMEM((key_dim,), _F32),
            query=plgpu.SMEM((key_dim,), _F32),
            scores=plgpu.SMEM((group,), _F32),
            loaded=plgpu.Barrier(),
            **(dict(output=plgpu.SMEM((_THREADS,), _F32)) if gated else {}),
        ),
        # Thread blocks that are neighbours in memory run at the same time: the last axis varies fastest.
        grid=dict(row=batch, head=memories, part=parts),
        approx_math=False,
        name="deferred_step",
        interpret=interpret,
    )
    inputs = dict(tokens=tokens, count=count, up=up, bias=bias)
    return run_in_place(memory, pending, outputs, lambda refs: run(inputs=inputs | refs))
