"""Linear attention with a scalar decay on Mosaic TPU: one kernel forward, one backward, each a single pass over the tokens.

A program has up to eight memories in VMEM, in float32, and computes one chunk after another. Its tiles are blocks of columns of
[B, T, heads * D], the layout of the projections, so that nothing is transposed (`scalar_layout`). `tiles.scalar_decay` has the
mathematics.

The forward pass saves the memory before each chunk, in v's dtype. The backward pass loads these, computes the last chunk first, and
carries the gradient of the memory.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from pallas_kernels.compat import pl
from pallas_kernels.linear_attention.tpu.scalar_layout import (
    Layout,
    Plan,
    describe_heads,
    plan_heads,
)
from pallas_kernels.memory_calls import NO_BONUS, TPU, MemoryCall
from pallas_kernels.requirements import Requirement
from pallas_kernels.tiles import scalar_decay as tiles
from pallas_kernels.tpu import row_layout
from pallas_kernels.tpu.row_layout import CHUNK


def forward(
    q, k, v, log_decay, run, initial, *, scale: float, save: bool = True, interpret: Any = False
):  # fmt: skip
    """Compute linear attention with a scalar decay or none: the output, the final memories and what the backward pass requires.

    Args:
        q: [B, T, H, K] queries.
        k: [B, T, Hk, K] keys.
        v: [B, T, G, V] values.
        log_decay: [B, T, G] float32, the log decay of each memory, or None for no decay.
        run: [B, T] int32, nondecreasing: the number of documents that have begun up to each token; 0 continues `initial`. Or None.
        initial: [B * S, G, K, V] float32, the memories before the first token. With S > 1 memories per row, document number s
            continues memory s and begins at a chunk's start.
        scale: the factor by which the queries q are multiplied.
        save: whether to save the residuals for `backward`; else they are None.
        interpret: False to compile the kernel; True or `pltpu.InterpretParams` for the interpreter.

    Returns:
        The output [B, T, max(H, G), V] in v's dtype, the final memories in float32, shaped as `initial`, and the memories before
        all chunks.
    """
    layout = Layout(q, k, v, runs=len(initial) // len(q))
    inputs = layout.inputs(q, k, v, log_decay, run)
    inputs["initial"] = (layout.from_heads(initial), layout.memories())
    outs = dict(out=layout.tokens("out"), final=layout.memories())
    if save:
        outs["states"] = layout.states()
    result = layout.call(_forward_kernel, inputs, outs, scale, interpret)
    output = result["out"].reshape(*q.shape[:2], -1, v.shape[3])
    final = layout.to_heads(result["final"])
    return output, final[:, :: final.shape[1] // v.shape[2]], result.get("states")


def backward(
    q, k, v, log_decay, run, initial, residuals, d_output, d_final, *, scale: float,
    decay_gradient: bool = True, interpret: Any = False
):  # fmt: skip
    """Return the gradients of q, k, v, log_decay and initial of linear attention with a scalar decay or none.

    The arguments are those of `forward`, the memories before all chunks that it returned (`residuals`; None computes them again),
    and the gradients of the output and of the final memories. The gradient of log_decay is None if there is no decay or
    `decay_gradient` is False.
    """
    decay_gradient &= log_decay is not None
    if residuals is None:
        _, _, residuals = forward(
            q, k, v, log_decay, run, initial, scale=scale, interpret=interpret
        )
    layout = Layout(q, k, v, runs=len(initial) // len(q), reverse=True)
    inputs = layout.inputs(q, k, v, log_decay, run)
    inputs["states"] = (residuals, layout.states())
    inputs["d_out"] = (d_output.astype(v.dtype).reshape(*q.shape[:2], -1), layout.tokens("out"))
    repeats = (
        layout.memory_heads // v.shape[2]
    )  # only the first of these heads receives the gradient of the final memory
    d_final = jnp.pad(d_final[:, :, None], [(0, 0)] * 2 + [(0, repeats - 1)] + [(0, 0)] * 2)
    d_final = d_final.reshape(len(d_final), -1, *d_final.shape[3:])
    inputs["d_final"] = (layout.from_heads(d_final), layout.memories())
    outs = dict(dq=layout.gradient("q"), dk=layout.gradient("k"), dv=layout.gradient("v"))
    outs["d_initial"] = layout.memories()
    if decay_gradient:
        outs["d_decay"] = layout.decays()
    result = layout.call(_backward_kernel, inputs, outs, scale, interpret)

    def gradient(name, x):
        terms = result[name].reshape(*x.shape[:2], -1, x.shape[3])
        return row_layout.sum_heads(terms, x.shape[2], axis=2).astype(x.dtype)

    d_decay = None
    if decay_gradient:
        rows = result["d_decay"][:, :, : layout.memory_heads // layout.plan.programs]
        rows = rows.reshape(v.shape[0], layout.memory_heads, v.shape[1])
        d_decay = jnp.moveaxis(row_layout.sum_heads(rows, v.shape[2], axis=1), 1, 2)
    d_initial = row_layout.sum_heads(layout.to_heads(result["d_initial"]), v.shape[2], axis=1)
    return gradient("dq", q), gradient("dk", k), gradient("dv", v), d_decay, d_initial


def _forward_kernel(plan: Plan, scale: float, refs: dict, memory, first, last):
    """Compute the output of one chunk of linear attention with a scalar decay or none, for all memories of one program; save the
    memories before the chunk, and update them.

    `Layout.call` runs it for each row, program and chunk; `plan` says how heads are put into tiles, `refs` are references to the
    program's blocks of the inputs and outputs by name, and `first` and `last` say whether the chunk is the first or last one of
    its memories.
    """

    @pl.when(first)
    def _():
        for t in range(plan.tile_count):
            memory[t] = tiles.unfold(refs["initial"][t], plan.heads(t))

    chunk = _chunk(refs, scale)
    for t in range(plan.tile_count):
        heads = plan.heads(t)
        k, v = _tile(plan, refs, "k", t), _tile(plan, refs, "v", t)
        before = memory[t]
        narrow = before.astype(v.dtype)
        if "states" in refs:
            refs["states"][t] = tiles.fold(before, heads).astype(v.dtype)
        scales = [tiles.weights(chunk, heads.first + h) for h in range(heads.count)]
        for r in range(plan.queries):
            out = tiles.read(_tile(plan, refs, "q", t, r), k, v, narrow, scales, chunk, heads)
            _store(refs["out"], t * plan.queries + r, out)
        memory[t] = tiles.write(k, v, before, chunk, heads)

    @pl.when(last)
    def _():
        for t in range(plan.tile_count):
            refs["final"][t] = tiles.fold(memory[t], plan.heads(t))


def _backward_kernel(plan: Plan, scale: float, refs: dict, d_memory, first, last):
    """Compute the gradients of the inputs of one chunk of linear attention with a scalar decay or none, for all memories of one
    program; carry `d_memory`, the gradient of the memories, to the chunk before it.

    `Layout.call` runs it for each row, program and chunk; `plan` says how heads are put into tiles, `refs` are references to the
    program's blocks of the inputs and outputs by name, and `first` and `last` say whether the chunk is the first or last one of
    its memories.
    """

    @pl.when(first)
    def _():
        for t in range(plan.tile_count):
            d_memory[t] = tiles.unfold(refs["d_final"][t], plan.heads(t))

    chunk, decays = _chunk(refs, scale), "d_decay" in refs
    sums = dict(
        q={}, k={}
    )  # gradients of the tiles of q and k that several tiles of memories share, so far
    reads, writes, read_rows, totals = [], [], [], []

    def add(name, t, r, x):
        """Add x to the gradient of the tile of q or k (`name`) that tile `t` of memories uses; if several tiles of queries read
        these memories, `r` is the index of one of them.

        Several tiles of memories may share a tile of q or k: its gradient is stored after the last of them.
        """
        many, shared = plan.sharing(name)
        index = t // shared * many + r
        sums[name][index] = sums[name][index] + x if index in sums[name] else x
        if (t + 1) % shared == 0 or t + 1 == plan.tile_count:
            _store(refs["d" + name], index, sums[name].pop(index))

    for t in range(plan.tile_count):
        heads = plan.heads(t)
        k, v = _tile(plan, refs, "k", t), _tile(plan, refs, "v", t)
        before = tiles.unfold(refs["states"][t].astype(jnp.float32), heads).astype(v.dtype)
        scales = [tiles.weights(chunk, heads.first + h) for h in range(heads.count)]
        writes_gradient = tiles.write_backward(
            k, v, before, d_memory[t], chunk, heads, decays=decays
        )
        dk, dv, d_before = writes_gradient.k, writes_gradient.v, writes_gradient.memory
        columns, rows = [], []
        for r in range(plan.queries):
            q, d_out = _tile(plan, refs, "q", t, r), _tile(plan, refs, "d_out", t, r)
            reads_gradient = tiles.read_backward(
                q, k, v, d_out, before, scales, chunk, heads, decays=decays
            )
            add("q", t, r, reads_gradient.q)
            dk, dv, d_before = (
                dk + reads_gradient.k,
                dv + reads_gradient.v,
                d_before + reads_gradient.memory,
            )
            columns, rows = (
                _added(columns, reads_gradient.columns),
                _added(rows, reads_gradient.rows),
            )
        add("k", t, 0, dk)
        _store(refs["dv"], t, dv)
        d_memory[t] = d_before
        reads, writes = reads + columns, writes + writes_gradient.columns
        read_rows, totals = read_rows + rows, totals + writes_gradient.totals

    if decays:
        refs["d_decay"][...] = tiles.decay_gradient(reads, read_rows, writes, totals, chunk)

    @pl.when(last)
    def _():
        for t in range(plan.tile_count):
            refs["d_initial"][t] = tiles.fold(d_memory[t], plan.heads(t))


def _chunk(refs, scale: float) -> tiles.Chunk:
    """Return the decay factors of one chunk's tokens and the masks of its documents, as `tiles.Chunk`, from references to the
    chunk's log decays and document numbers.
    """
    log_decay, runs = (refs[name][...] if name in refs else None for name in ("log_decay", "runs"))
    return tiles.read_chunk(log_decay, runs, CHUNK, scale)


def _tile(plan: Plan, refs, name: str, t: int, r: int = 0):
    """Return the columns [C, width] of the chunk's array `name` (q, k, v or d_out) that tile `t` of a program's memories uses; if
    several tiles of queries read these memories, `r` is the index of one of them.
    """
    kind = "out" if name == "d_out" else name
    many, shared = plan.sharing(kind)
    width = refs[name].shape[1] // plan.block(kind)
    index = t // shared * many + r
    return refs[name][:, index * width : (index + 1) * width]


def _store(ref, index: int, x):
    """Store a tile x [C, width] as the `index`-th block of columns of a reference [C, columns]."""
    width = x.shape[1]
    ref[:, index * width : (index + 1) * width] = x.astype(ref.dtype)


def _added(sums: list, more: list) -> list:
    """Return the elementwise sums of two lists of arrays, of which the first may be empty."""
    return [a + b for a, b in zip(sums, more, strict=True)] if sums else more


def _fills_tiles(call: MemoryCall) -> bool:
    """Return whether the heads of q, k and v in `call` fill the columns of the TPU kernel's tiles, so that `plan_heads` has a
    plan for them.
    """
    return plan_heads(call.q, call.k, call.v) is not None


REQUIREMENTS = (
    NO_BONUS,
    *TPU,
    Requirement(
        "heads that fill 128 columns",
        _fills_tiles,
        lambda call: describe_heads(call.q, call.k, call.v),
    ),
)
