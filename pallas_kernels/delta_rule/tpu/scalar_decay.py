"""The delta rule with no decay or a scalar one on Mosaic TPU: one kernel forward, one backward, each a single pass over the tokens.

A program has the memories of up to eight heads in VMEM, in float32, and walks over the chunks; the systems of its heads are solved
side by side, which hides how long one product waits for the one before. The mathematics is in `tiles`, the arrays those of
`linear_attention.tpu_layout`.

The forward pass keeps the memory each chunk starts from and the inverse of its system, in v's dtype; the backward pass walks back
over the chunks with them and carries the gradient of the memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.memory_calls import TPU
from pallas_kernels.tiles import scalar_decay as decays
from pallas_kernels.tiles.scalar_decay import dot
from pallas_kernels.tpu import layout as tpu_layout
from pallas_kernels.tpu import row_layout
from pallas_kernels.tpu.row_layout import CHUNK
from pallas_kernels.tpu.solve import HEADS, Residuals, indices, invert, length_multiple

__all__ = ["CHUNK", "REQUIREMENTS", "Residuals", "backward", "forward", "length_multiple"]
_F32 = jnp.float32


REQUIREMENTS = (*TPU,)


class _Head(NamedTuple):
    """One head's part of a chunk.

    Attributes:
        q: [C, K].
        k: [C, K].
        v: [C, V].
        beta: [1, C].
        beta_column: [C, 1].
        weights: [C, C], e^(b_i - b_j) where i >= j lie in one document, else 0.
        enter: [C, 1] or 1, e^b.
        leave: [C, 1] or 1, e^(b_C - b).
        keep: [1, 1] or 1, e^b_C.
        scores: [C, C], q kᵀ.
        alike: [C, C], k kᵀ.
    """

    q: Any
    k: Any
    v: Any
    beta: Any
    beta_column: Any
    weights: Any
    enter: Any
    leave: Any
    keep: Any
    scores: Any
    alike: Any


def forward(
    q, k, v, beta, log_decay, run, initial, *, scale: float, save: bool = True, interpret: Any = False
) -> tuple[jax.Array, jax.Array, Residuals | None]:  # fmt: skip
    """The output [B, T, max(H, G), V], the final memories as `initial` and, to `save`, the residuals. T is a multiple of `CHUNK`."""
    runs = len(initial) // len(q)
    layout = tpu_layout.Layout(q, k, v, CHUNK, heads=HEADS, runs=runs)
    given = layout.inputs(run, dict(beta=beta, log_decay=log_decay), q=q, k=k, v=v)
    given["initial"] = layout.as_memories(initial), layout.memories()
    outs = dict(out=layout.tokens(layout.heads, v.shape[3], v.dtype), final=layout.memories())
    if save:
        outs |= dict(states=layout.states(), inverse=layout.squares())
    result = layout.call(_forward_kernel, given, outs, scale, interpret)
    final = result["final"][:, :: layout.heads // v.shape[2]]
    residuals = Residuals(result["states"], result["inverse"]) if save else None
    return layout.from_tokens(result["out"], v.shape[3]), final, residuals


def backward(
    q, k, v, beta, log_decay, run, initial, residuals: Residuals, d_output, d_final, *,
    scale: float, decay_gradient: bool = True, interpret: Any = False,
):  # fmt: skip
    """Gradients of q, k, v, beta, log_decay (None without one, or where it is not wanted) and initial."""
    runs = len(initial) // len(q)
    layout = tpu_layout.Layout(q, k, v, CHUNK, heads=HEADS, runs=runs, reverse=True)
    given = layout.inputs(run, dict(beta=beta, log_decay=log_decay), q=q, k=k, v=v)
    of_output = layout.tokens(layout.heads, v.shape[3], v.dtype)
    given["d_out"] = layout.as_tokens(d_output.astype(v.dtype)), of_output
    given["states"] = residuals.states, layout.states()
    given["inverse"] = residuals.inverse, layout.squares()
    given["d_final"] = layout.as_memories(d_final, first=True), layout.memories()
    outs = {"d" + n: layout.gradient_tokens(x) for n, x in dict(q=q, k=k, v=v).items()}
    outs |= dict(d_beta=layout.rows(), d_initial=layout.memories())
    if decay_gradient and log_decay is not None:
        outs["d_decay"] = layout.rows()
    result = layout.call(_backward_kernel, given, outs, scale, interpret)
    dq, dk, dv = (layout.gradient(result["d" + n], x) for n, x in dict(q=q, k=k, v=v).items())
    d_beta = layout.rows_gradient(result["d_beta"], v.shape[2])
    d_decay = layout.rows_gradient(result["d_decay"], v.shape[2]) if "d_decay" in outs else None
    d_initial = row_layout.sum_heads(result["d_initial"], v.shape[2], axis=1)
    return dq, dk, dv, d_beta, d_decay, d_initial


def _forward_kernel(layout: tpu_layout.Layout, scale: float, refs: dict, memory):
    chunk, columns = _chunk(refs), refs["beta"][...].T
    heads = [_read(layout, refs, chunk, columns, h) for h in range(layout.block)]
    dtype = heads[0].v.dtype
    before = [memory[h].astype(dtype) for h in range(layout.block)]
    # Step by step for all, as in `invert`, and first what needs no inverse.
    held = [dot(jnp.concatenate([x.q, x.k]), m) for x, m in zip(heads, before, strict=True)]
    inverses = _inverses(heads)
    if "states" in refs:
        for h, (narrow, inverse) in enumerate(zip(before, inverses, strict=True)):
            refs["states"][h], refs["inverse"][h] = narrow, inverse
    missing = [
        _missing(x, own[CHUNK:], inverse)
        for x, own, inverse in zip(heads, held, inverses, strict=True)
    ]
    for h, (x, own, m) in enumerate(zip(heads, held, missing, strict=True)):
        out = dot((scale * x.scores * (x.weights * x.beta)).astype(dtype), m.astype(dtype))
        layout.store(refs["out"], h, scale * x.enter * own[:CHUNK] + out)
    for h, (x, m) in enumerate(zip(heads, missing, strict=True)):
        writes = (x.leave * x.beta_column * m).astype(dtype)
        memory[h] = x.keep * memory[h] + dot(x.k, writes, "tn")


def _backward_kernel(layout: tpu_layout.Layout, scale: float, refs: dict, d_memory):
    chunk = _chunk(refs)
    reads, read_rows, writes, totals = [], [], [], []
    i, j = indices(CHUNK)
    columns = refs["beta"][...].T
    refs["d_beta"][...] = jnp.zeros_like(refs["d_beta"])
    for h in range(layout.block):
        x = _read(layout, refs, chunk, columns, h)
        dtype = x.v.dtype
        cast = lambda x: x.astype(dtype)  # noqa: B023, E731
        d_out = refs["d_out"][layout.tile_index(refs["d_out"], h, layout.value_dim)]
        memory, inverse = refs["states"][h], refs["inverse"][h]
        later = d_memory[h]
        narrow = cast(later)
        missing = cast(_missing(x, dot(x.k, memory), inverse))

        d_writes = dot(cast(scale * x.scores * x.weights), d_out, "tn")
        d_writes += x.leave * dot(x.k, narrow)
        dv = dot(inverse, cast(x.beta_column * d_writes), "tn")
        layout.store(refs["dv"], h, dv)
        entering = dot(x.q, cast(scale * x.enter * d_out.astype(_F32)), "tn")
        entering -= dot(x.k, cast(x.enter * dv), "tn")
        d_memory[h] = x.keep * later + entering

        dv = cast(dv)
        pairs = scale * x.weights * dot(d_out, missing, "nt")
        erased = jnp.where(i > j, -x.weights * dot(dv, missing, "nt"), 0)
        read = scale * x.enter * dot(d_out, memory, "nt")
        erase = x.enter * dot(dv, memory, "nt")
        write = x.leave * dot(missing, narrow, "nt")
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
            own = jnp.sum(products, axis=1, keepdims=True)
            reads.append(own + jnp.sum(q * read - k * erase, axis=1, keepdims=True))
            read_rows.append(jnp.sum(products, axis=0, keepdims=True))
            writes.append(x.beta_column * written)
            total = jnp.sum(x.keep * memory.astype(_F32) * later, axis=0, keepdims=True)
            totals.append(jnp.sum(total, axis=1, keepdims=True))
    if "d_decay" in refs:
        refs["d_decay"][...] = decays.decay_gradient(reads, read_rows, writes, totals, chunk)


def _chunk(refs) -> decays.Chunk:
    log_decay, runs = (refs[name][...] if name in refs else None for name in ("log_decay", "runs"))
    return decays.read_chunk(log_decay, runs, CHUNK, 1.0)


def _read(layout: tpu_layout.Layout, refs, chunk: decays.Chunk, columns, h: int) -> _Head:
    sizes = dict(q=layout.key_dim, k=layout.key_dim, v=layout.value_dim)
    q, k, v = (refs[n][layout.tile_index(refs[n], h, size)] for n, size in sizes.items())
    beta = refs["beta"][h : h + 1]

    def own(x):
        if x is None:
            return 1.0
        return x if x.shape[1] == 1 else x[:, h : h + 1]

    weights = jnp.where(chunk.seen, decays.weights(chunk, h), 0.0)
    enter, leave, keep = (own(x) for x in (chunk.enter, chunk.leave, chunk.keep))
    scores, alike = dot(q, k, "nt"), dot(k, k, "nt")
    return _Head(q, k, v, beta, columns[:, h : h + 1], weights, enter, leave, keep, scores, alike)


def _inverses(heads: list[_Head]) -> list[jax.Array]:
    """Of each head's system, in v's dtype."""
    i, j = indices(CHUNK)
    systems = [jnp.where(i > j, x.alike * (x.weights * x.beta), 0.0) for x in heads]
    return invert(systems, heads[0].v.dtype)


def _missing(x: _Head, held, inverse):
    """What each token finds missing, [C, V] float32; `held` is what the memory holds at its key."""
    missing = x.v.astype(_F32) - x.enter * held
    return dot(inverse, missing.astype(x.v.dtype))
