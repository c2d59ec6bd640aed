"""The delta rule with no decay or a scalar one on Mosaic TPU: one kernel forward, one backward, each a single pass over the tokens.

A program has the memories of up to four heads in VMEM, in float32, and walks over the chunks; the systems of its heads are solved
side by side, which hides how long one product waits for the one before. The mathematics is in `tiles`, the arrays those of
`linear_attention.tpu_layout`.

The forward pass keeps the memory each chunk starts from and the inverse of its system, in v's dtype; the backward pass walks back
over the chunks with them and carries the gradient of the memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.delta_rule.tiles import unit_inverse
from pallas_kernels.linear_attention import tiles as decays
from pallas_kernels.linear_attention import tpu as linear
from pallas_kernels.linear_attention import tpu_layout
from pallas_kernels.linear_attention.tiles import dot

CHUNK = 128
_HEADS = tpu_layout.HEADS
_TILE = 16  # rows of 16 bits that lie together
_F32 = jnp.float32


class Residuals(NamedTuple):
    """What `forward` leaves for `backward`.

    Attributes:
        states: [B, N, T / C, K, V], the memories that chunks start from.
        inverse: [B, N, T, C], of each chunk's system.
    """

    states: jax.Array
    inverse: jax.Array


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


def reason(q, k, v, log_decay, run, initial) -> str | None:
    """Why this backend does not serve these arguments (arrays or their shapes), or None."""
    del run, initial
    if log_decay is not None and len(log_decay.shape) != 3:
        return f"log_decay [B, T, G], not {log_decay.shape}"
    return tpu_layout.reason(q, k, v)


def multiple(q, k, v) -> int:
    """What T is to be a multiple of."""
    del q, k, v
    return CHUNK


def forward(
    q, k, v, beta, log_decay, run, initial, *, scale: float, save: bool = True, interpret: Any = False
) -> tuple[jax.Array, jax.Array, Residuals | None]:  # fmt: skip
    """The output [B, T, max(H, G), V], the final memory [B, G, K, V] and, to `save`, the residuals. T is a multiple of `CHUNK`."""
    layout = tpu_layout.Layout(q, k, v, CHUNK, heads=_HEADS)
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
    del initial
    layout = tpu_layout.Layout(q, k, v, CHUNK, heads=_HEADS, reverse=True)
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
    d_initial = linear._sum_heads(result["d_initial"], v.shape[2], axis=1)
    return dq, dk, dv, d_beta, d_decay, d_initial


def _forward_kernel(layout: tpu_layout.Layout, scale: float, refs: dict, memory):
    chunk = _chunk(refs)
    heads = [_read(layout, refs, chunk, h) for h in range(layout.block)]
    for h, (x, inverse) in enumerate(zip(heads, _inverses(heads), strict=True)):
        before = memory[h]
        narrow = before.astype(x.v.dtype)
        if "states" in refs:
            refs["states"][h] = narrow
            refs["inverse"][h] = inverse
        _, writes = _written(x, narrow, inverse)
        out = scale * x.enter * dot(x.q, narrow)
        out += dot((scale * x.scores * x.weights).astype(x.v.dtype), writes.astype(x.v.dtype))
        layout.store(refs["out"], h, out)
        update = dot(x.k, (x.leave * writes).astype(x.v.dtype), "tn")
        memory[h] = x.keep * before + update


def _backward_kernel(layout: tpu_layout.Layout, scale: float, refs: dict, d_memory):
    chunk = _chunk(refs)
    reads, read_rows, writes, totals = [], [], [], []
    i, j = _indices()
    refs["d_beta"][...] = jnp.zeros_like(refs["d_beta"])
    for h in range(layout.block):
        x = _read(layout, refs, chunk, h)
        dtype = x.v.dtype
        cast = lambda x: x.astype(dtype)  # noqa: B023, E731
        d_out = refs["d_out"][layout.place(refs["d_out"], h, layout.value_dim)]
        memory, inverse = refs["states"][h], refs["inverse"][h]
        later = d_memory[h]
        narrow = cast(later)
        missing, _ = _written(x, memory, inverse)
        missing = cast(missing)

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


def _read(layout: tpu_layout.Layout, refs, chunk: decays.Chunk, h: int) -> _Head:
    sizes = dict(q=layout.key_dim, k=layout.key_dim, v=layout.value_dim)
    q, k, v = (refs[n][layout.place(refs[n], h, size)] for n, size in sizes.items())
    beta = refs["beta"][h : h + 1]

    def own(x):
        if x is None:
            return 1.0
        return x if x.shape[1] == 1 else x[:, h : h + 1]

    weights = jnp.where(chunk.seen, decays.weights(chunk, h), 0.0)
    enter, leave, keep = (own(x) for x in (chunk.enter, chunk.leave, chunk.keep))
    scores, alike = dot(q, k, "nt"), dot(k, k, "nt")
    return _Head(q, k, v, beta, beta.T, weights, enter, leave, keep, scores, alike)


def _inverses(heads: list[_Head]) -> list[jax.Array]:
    """Of each head's system, in v's dtype."""
    i, j = _indices()
    systems = [jnp.where(i > j, x.alike * x.weights, 0.0) * x.beta for x in heads]
    return invert(systems, heads[0].v.dtype)


def invert(systems: list[jax.Array], dtype) -> list[jax.Array]:
    """`unit_inverse` of each [C, C] in float32, by products in `dtype`, which is the results'.

    Step by step for all, so that none waits for its own last product.
    """
    i, j = _indices()

    def dots(a, b):
        return jnp.stack([dot(x, y) for x, y in zip(a, b, strict=True)])

    def product(a, b):
        return dots(a.astype(dtype), b.astype(dtype))

    def exact(a, b):
        b = b.astype(dtype)
        if dtype == _F32:
            return b, dots(a, b)
        high = a.astype(dtype)
        rest = (a - high.astype(_F32)).astype(dtype)
        return b.astype(_F32), dots(high, b) + dots(rest, b)

    def step(x, between, size):
        if size < _TILE:
            return product(product(x, between), x)
        blocks = range(0, CHUNK, 2 * size)
        second = [x[:, n + size : n + 2 * size] for n in blocks]
        second = product(product(jnp.concatenate(second, axis=1), between), x)
        zero = jnp.zeros((len(x), size, CHUNK), _F32)
        parts = [y for n in blocks for y in (zero, second[:, n // 2 : n // 2 + size])]
        return jnp.concatenate(parts, axis=1)

    inverses = unit_inverse(jnp.stack(systems), i ^ j, product, exact, step).astype(dtype)
    return [inverses[h] for h in range(len(systems))]


def _written(x: _Head, memory, inverse):
    """What each token finds missing, and what it writes, [C, V] float32."""
    missing = x.v.astype(_F32) - x.enter * dot(x.k, memory)
    missing = dot(inverse, missing.astype(x.v.dtype))
    return missing, x.beta_column * missing


def _indices():
    return (lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
