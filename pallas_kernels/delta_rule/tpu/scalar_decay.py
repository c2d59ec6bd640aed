"""The delta rule without decay or with a scalar decay on Mosaic TPU: a forward and a backward kernel, each one pass over the tokens.

A program carries the memories of up to eight heads through the chunks, in VMEM and in float32. It solves the
systems of its heads in lockstep: a head's products then run while another's wait for their operands.
`pallas_kernels.tiles.delta` has the formulas, `pallas_kernels.tpu.layout` the arrays.

The forward pass saves the memory before each chunk and the inverse of the chunk's system, in v's dtype. The
backward pass reads them, and carries the gradient of the memory through the chunks from the last to the
first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.memory_calls import DECAYED_ERASE, TPU_IN_PARTS
from pallas_kernels.tiles import scalar_decay as decays
from pallas_kernels.tiles.scalar_decay import dot
from pallas_kernels.tpu import layout as tpu_layout
from pallas_kernels.tpu import row_layout
from pallas_kernels.tpu.row_layout import CHUNK
from pallas_kernels.tpu.solve import HEADS, Residuals, indices, invert, length_multiple

__all__ = ["CHUNK", "REQUIREMENTS", "Residuals", "backward", "forward", "length_multiple"]
_F32 = jnp.float32
REQUIREMENTS = (*TPU_IN_PARTS, DECAYED_ERASE)


class _Head(NamedTuple):
    """The tokens, decays and scores of one chunk and head that the forward and the backward kernel of the delta rule both use.

    b are the inclusive sums of the chunk's log decays, b_C the sum over the whole chunk of C tokens.

    Attributes:
        q: [C, K], the queries.
        k: [C, K], the keys.
        v: [C, V], the values.
        beta: [1, C], beta of each token, as a row.
        beta_column: [C, 1], beta of each token, as a column.
        weights: [C, C], e^(b_i - b_j) where i >= j are in one document, else 0.
        read_decay: [C, 1] or 1, the decay from the chunk's start to each token, e^b.
        write_decay: [C, 1] or 1, the decay from each token to the chunk's end, e^(b_C - b).
        chunk_decay: [1, 1] or 1, the decay over the whole chunk, e^b_C.
        scores: [C, C], the products q kᵀ of queries with keys, without decay.
        alike: [C, C], the products k kᵀ of keys with keys, without decay.
    """

    q: Any
    k: Any
    v: Any
    beta: Any
    beta_column: Any
    weights: Any
    read_decay: Any
    write_decay: Any
    chunk_decay: Any
    scores: Any
    alike: Any


def forward(
    q, k, v, beta, log_decay, run, initial, *, scale: float, save: bool = True, interpret: Any = False
) -> tuple[jax.Array, jax.Array, Residuals | None]:  # fmt: skip
    """Compute the delta rule with a scalar decay or none, and the arrays that `backward` requires.

    Return the output [B, T, max(H, G), V], the final memories in the shape of `initial`, and the residuals
    (None without `save`): the memory before each chunk, and the inverse of each chunk's triangular system.
    The other arguments are those of the op `delta_rule`; T is divisible by `CHUNK`.
    """
    runs = len(initial) // len(q)
    layout = tpu_layout.Layout(q, k, v, CHUNK, heads=HEADS, runs=runs)
    inputs = layout.inputs(run, dict(beta=beta, log_decay=log_decay), q=q, k=k, v=v)
    inputs["initial"] = layout.as_memories(initial), layout.memories()
    outputs = dict(out=layout.tokens(layout.heads, v.shape[3], v.dtype), final=layout.memories())
    if save:
        outputs |= dict(states=layout.states(), inverse=layout.squares())
    result = layout.call(_forward_kernel, inputs, outputs, scale, interpret)
    final = result["final"][:, :: layout.heads // v.shape[2]]
    residuals = Residuals(result["states"], result["inverse"]) if save else None
    return layout.from_tokens(result["out"], v.shape[3]), final, residuals


def backward(
    q, k, v, beta, log_decay, run, initial, residuals: Residuals, d_output, d_final, *,
    scale: float, decay_gradient: bool = True, interpret: Any = False,
):  # fmt: skip
    """Return the gradients of q, k, v, beta, log_decay and initial of the delta rule with a scalar decay or
    none, each in the shape of its input.

    The arguments are the inputs of `forward`, the residuals that `forward` returned, and the gradients of the
    output, `d_output`, and of the final memories, `d_final`. The gradient of log_decay is None if there is no
    decay or `decay_gradient` is False.
    """
    runs = len(initial) // len(q)
    layout = tpu_layout.Layout(q, k, v, CHUNK, heads=HEADS, runs=runs, reverse=True)
    inputs = layout.inputs(run, dict(beta=beta, log_decay=log_decay), q=q, k=k, v=v)
    output_tokens = layout.tokens(layout.heads, v.shape[3], v.dtype)
    inputs["d_out"] = layout.as_tokens(d_output.astype(v.dtype)), output_tokens
    inputs["states"] = residuals.states, layout.states()
    inputs["inverse"] = residuals.inverse, layout.squares()
    inputs["d_final"] = layout.as_memories(d_final, first=True), layout.memories()
    outputs = {"d" + n: layout.gradient_tokens(x) for n, x in dict(q=q, k=k, v=v).items()}
    outputs |= dict(d_beta=layout.rows(), d_initial=layout.memories())
    if decay_gradient and log_decay is not None:
        outputs["d_decay"] = layout.rows()
    result = layout.call(_backward_kernel, inputs, outputs, scale, interpret)
    dq, dk, dv = (layout.gradient(result["d" + n], x) for n, x in dict(q=q, k=k, v=v).items())
    d_beta = layout.rows_gradient(result["d_beta"], v.shape[2])
    d_decay = layout.rows_gradient(result["d_decay"], v.shape[2]) if "d_decay" in outputs else None
    d_initial = row_layout.sum_heads(result["d_initial"], v.shape[2], axis=1)
    return dq, dk, dv, d_beta, d_decay, d_initial


def _forward_kernel(layout: tpu_layout.Layout, scale: float, refs: dict, memory):
    """Compute the output of one chunk by the delta rule, for all heads of one program, and update the heads'
    memories [K, V] in `memory`.

    If residuals are saved, also store the memories before the chunk and the inverses of the heads' triangular
    systems.
    """
    chunk, columns = _chunk(refs), refs["beta"][...].T
    heads = [_read_head(layout, refs, chunk, columns, h) for h in range(layout.block)]
    dtype = heads[0].v.dtype
    before = [memory[h].astype(dtype) for h in range(layout.block)]
    # Each step for all heads, as in `invert`; first the products that need no inverse.
    reads = [dot(jnp.concatenate([x.q, x.k]), m) for x, m in zip(heads, before, strict=True)]
    inverses = _inverses(heads)
    if "states" in refs:
        for h, (narrow, inverse) in enumerate(zip(before, inverses, strict=True)):
            refs["states"][h], refs["inverse"][h] = narrow, inverse
    missing = [
        _missing(x, read[CHUNK:], inverse)
        for x, read, inverse in zip(heads, reads, inverses, strict=True)
    ]
    for h, (x, read, m) in enumerate(zip(heads, reads, missing, strict=True)):
        out = dot((scale * x.scores * (x.weights * x.beta)).astype(dtype), m.astype(dtype))
        layout.store(refs["out"], h, scale * x.read_decay * read[:CHUNK] + out)
    for h, (x, m) in enumerate(zip(heads, missing, strict=True)):
        writes = (x.write_decay * x.beta_column * m).astype(dtype)
        memory[h] = x.chunk_decay * memory[h] + dot(x.k, writes, "tn")


def _backward_kernel(layout: tpu_layout.Layout, scale: float, refs: dict, d_memory):
    """Compute the gradients of the inputs of one chunk of the delta rule, for all heads of one program.

    `d_memory` is the gradient of the heads' memories: after the chunk when the kernel begins, before the
    chunk when it ends.
    """
    chunk = _chunk(refs)
    reads, read_rows, writes, totals = [], [], [], []
    i, j = indices(CHUNK)
    columns = refs["beta"][...].T
    refs["d_beta"][...] = jnp.zeros_like(refs["d_beta"])
    for h in range(layout.block):
        x = _read_head(layout, refs, chunk, columns, h)
        dtype = x.v.dtype
        cast = lambda x: x.astype(dtype)  # noqa: B023, E731
        d_out = refs["d_out"][layout.tile_index(refs["d_out"], h, layout.value_dim)]
        memory, inverse = refs["states"][h], refs["inverse"][h]
        later = d_memory[h]
        narrow = cast(later)
        missing = cast(_missing(x, dot(x.k, memory), inverse))

        d_writes = dot(cast(scale * x.scores * x.weights), d_out, "tn")
        d_writes += x.write_decay * dot(x.k, narrow)
        dv = dot(inverse, cast(x.beta_column * d_writes), "tn")
        layout.store(refs["dv"], h, dv)
        entering = dot(x.q, cast(scale * x.read_decay * d_out.astype(_F32)), "tn")
        entering -= dot(x.k, cast(x.read_decay * dv), "tn")
        d_memory[h] = x.chunk_decay * later + entering

        dv = cast(dv)
        pairs = scale * x.weights * dot(d_out, missing, "nt")
        erased = jnp.where(i > j, -x.weights * dot(dv, missing, "nt"), 0)
        read = scale * x.read_decay * dot(d_out, memory, "nt")
        erase = x.read_decay * dot(dv, memory, "nt")
        write = x.write_decay * dot(missing, narrow, "nt")
        q, k = (a.astype(_F32) for a in (x.q, x.k))
        products = x.scores * pairs + x.alike * erased
        written = jnp.sum(k * write, axis=1, keepdims=True)
        refs["d_beta"][h : h + 1] = jnp.sum(products, axis=0, keepdims=True) + written.T
        narrow_pairs, narrow_erased = cast(pairs * x.beta), cast(erased * x.beta)
        layout.store(refs["dq"], h, read + dot(narrow_pairs, x.k))
        dk = dot(narrow_pairs, x.q, "tn") + dot(narrow_erased, x.k) + dot(narrow_erased, x.k, "tn")
        layout.store(refs["dk"], h, dk - erase + x.beta_column * write)
        if "d_decay" in refs:
            products = jnp.where(i > j, products * x.beta, 0)
            row_sums = jnp.sum(products, axis=1, keepdims=True)
            reads.append(row_sums + jnp.sum(q * read - k * erase, axis=1, keepdims=True))
            read_rows.append(jnp.sum(products, axis=0, keepdims=True))
            writes.append(x.beta_column * written)
            total = jnp.sum(x.chunk_decay * memory.astype(_F32) * later, axis=0, keepdims=True)
            totals.append(jnp.sum(total, axis=1, keepdims=True))
    if "d_decay" in refs:
        refs["d_decay"][...] = decays.decay_gradient(reads, read_rows, writes, totals, chunk)


def _chunk(refs) -> decays.Chunk:
    """Return the decay factors of one chunk and the mask of its tokens that read each other, from `refs`,
    references to the chunk's log decays and document numbers by name.
    """
    log_decay, runs = (refs[name][...] if name in refs else None for name in ("log_decay", "runs"))
    return decays.read_chunk(log_decay, runs, CHUNK, 1.0)


def _read_head(layout: tpu_layout.Layout, refs, chunk: decays.Chunk, columns, h: int) -> _Head:
    """Return the queries, keys, values, beta, decays and scores of one chunk for the program's head with
    index h.

    Args:
        layout: the layout of the kernel's arrays.
        refs: references to the chunk's inputs, by name.
        chunk: the decays of all heads of the program.
        columns: [C, heads], beta of each token, with a column for each head.
        h: index of the head in the program.
    """
    sizes = dict(q=layout.key_dim, k=layout.key_dim, v=layout.value_dim)
    q, k, v = (refs[n][layout.tile_index(refs[n], h, size)] for n, size in sizes.items())
    beta = refs["beta"][h : h + 1]

    def column(x):
        if x is None:
            return 1.0
        return x if x.shape[1] == 1 else x[:, h : h + 1]

    weights = jnp.where(chunk.seen, decays.weights(chunk, h), 0.0)
    read_decay, write_decay, chunk_decay = (
        column(x) for x in (chunk.read_decay, chunk.write_decay, chunk.chunk_decay)
    )
    scores, alike = dot(q, k, "nt"), dot(k, k, "nt")
    return _Head(
        q,
        k,
        v,
        beta,
        columns[:, h : h + 1],
        weights,
        read_decay,
        write_decay,
        chunk_decay,
        scores,
        alike,
    )


def _inverses(heads: list[_Head]) -> list[jax.Array]:
    """Return, for each head, the inverse [C, C] of the triangular system of its chunk, in v's dtype."""
    i, j = indices(CHUNK)
    systems = [jnp.where(i > j, x.alike * (x.weights * x.beta), 0.0) for x in heads]
    return invert(systems, heads[0].v.dtype)


def _missing(x: _Head, predicted, inverse):
    """Return the errors x = X (v - e^b ⊙ (k S)) [C, V] float32 of the memory's predictions of a chunk's
    values.

    Args:
        x: the chunk's values v, its decays e^b from the chunk's start, and other arrays of the head.
        predicted: [C, V], k S, what the keys read of the memory S before the chunk.
        inverse: [C, C], X, the inverse of the chunk's triangular system.
    """
    missing = x.v.astype(_F32) - x.read_decay * predicted
    return dot(inverse, missing.astype(x.v.dtype))
