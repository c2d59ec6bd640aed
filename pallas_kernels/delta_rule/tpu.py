"""The delta rule with no decay or a scalar one on Mosaic TPU: one kernel forward, one backward, each a single pass over the tokens.

A program has the memories of up to four heads in VMEM, in float32, and walks over the chunks; the systems of its heads are solved
side by side, which hides how long one product waits for the one before. The mathematics is in `tiles`. Keys or values of 128 or
256 channels are column blocks of [B, T, heads * D], so that nothing is transposed; others lie as [B, heads, T, D].

The forward pass keeps the memory each chunk starts from and the inverse of its system, in v's dtype; the backward pass walks back
over the chunks with them and carries the gradient of the memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, pltpu
from pallas_kernels.delta_rule.tiles import unit_inverse
from pallas_kernels.linear_attention import tiles as decays
from pallas_kernels.linear_attention import tpu as linear
from pallas_kernels.linear_attention.tiles import dot

CHUNK = 128
_HEADS = 4  # of one program
_BYTES = 2048  # of one token of a program's keys or values
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
    dtypes = {jnp.dtype(x.dtype).name for x in (q, k, v)}
    if len(dtypes) > 1 or not dtypes <= {"bfloat16", "float32"}:
        return f"q, k and v all in bfloat16 or all in float32, not {', '.join(sorted(dtypes))}"
    for name, size in dict(K=q.shape[-1], V=v.shape[-1]).items():
        if size % 8 or not 0 < size <= 256:
            return f"{name} a multiple of 8 up to 256, not {size}"
    if log_decay is not None and len(log_decay.shape) != 3:
        return f"log_decay [B, T, G], not {log_decay.shape}"
    return None


def forward(
    q, k, v, beta, log_decay, run, initial, *, scale: float, save: bool = True, interpret: Any = False
) -> tuple[jax.Array, jax.Array, Residuals | None]:  # fmt: skip
    """The output [B, T, max(H, G), V], the final memory [B, G, K, V] and, to `save`, the residuals. T is a multiple of `CHUNK`."""
    layout = _Layout(q, k, v)
    given = layout.inputs(q, k, v, beta, log_decay, run)
    given["initial"] = linear._repeat(initial.astype(_F32), layout.heads, 1), layout.memories()
    outs = dict(out=layout.tokens(layout.heads, v.shape[3], v.dtype), final=layout.memories())
    if save:
        outs |= dict(states=layout.states(), inverse=layout.inverse())
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
    layout = _Layout(q, k, v, reverse=True)
    given = layout.inputs(q, k, v, beta, log_decay, run)
    of_output = layout.tokens(layout.heads, v.shape[3], v.dtype)
    given["d_out"] = layout.as_tokens(d_output.astype(v.dtype)), of_output
    given["states"] = residuals.states, layout.states()
    given["inverse"] = residuals.inverse, layout.inverse()
    # Of several heads that carry one memory, the first hands on the gradient from outside.
    every = layout.heads // v.shape[2]
    first = (jnp.arange(layout.heads) % every == 0)[:, None, None]
    given["d_final"] = jnp.where(first, jnp.repeat(d_final, every, 1), 0), layout.memories()
    outs = {}
    for name, x in dict(q=q, k=k, v=v).items():
        dtype = x.dtype if x.shape[2] == layout.heads else _F32
        outs["d" + name] = layout.tokens(layout.heads, x.shape[3], dtype)
    outs |= dict(d_beta=layout.rows(), d_initial=layout.memories())
    if decay_gradient and log_decay is not None:
        outs["d_decay"] = layout.rows()
    result = layout.call(_backward_kernel, given, outs, scale, interpret)

    def gradient(name, x):
        parts = layout.from_tokens(result[name], x.shape[3])
        return linear._sum_heads(parts, x.shape[2], axis=2).astype(x.dtype)

    def of_rows(name):
        if name not in result:
            return None
        rows = result[name][:, :, : layout.block].reshape(len(v), layout.heads, -1)
        return jnp.moveaxis(linear._sum_heads(rows, v.shape[2], axis=1), 1, 2)

    d_initial = linear._sum_heads(result["d_initial"], v.shape[2], axis=1)
    return (
        gradient("dq", q), gradient("dk", k), gradient("dv", v), of_rows("d_beta"), of_rows("d_decay"),
        d_initial,
    )  # fmt: skip


def _forward_kernel(layout: _Layout, scale: float, refs: dict, memory):
    @pl.when(pl.program_id(2) == 0)
    def _():
        memory[...] = refs["initial"][...]

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

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        refs["final"][...] = memory[...]


def _backward_kernel(layout: _Layout, scale: float, refs: dict, d_memory):
    @pl.when(pl.program_id(2) == 0)
    def _():
        d_memory[...] = refs["d_final"][...]

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

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        refs["d_initial"][...] = d_memory[...]


def _chunk(refs) -> decays.Chunk:
    log_decay, runs = (refs[name][...] if name in refs else None for name in ("log_decay", "runs"))
    return decays.read_chunk(log_decay, runs, CHUNK, 1.0)


def _read(layout: _Layout, refs, chunk: decays.Chunk, h: int) -> _Head:
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

    def product(a, b):
        return dot(a.astype(dtype), b.astype(dtype))

    def exact(a, b):
        b = b.astype(dtype)
        if dtype == _F32:
            return b, dot(a, b)
        high = a.astype(dtype)
        rest = (a - high.astype(_F32)).astype(dtype)
        return b.astype(_F32), dot(high, b) + dot(rest, b)

    dtype = heads[0].v.dtype
    results = []
    for x in heads:
        strict = jnp.where(i > j, x.alike * x.weights, 0.0) * x.beta
        results.append(unit_inverse(strict, i ^ j, product, exact).astype(dtype))
    return results


def _written(x: _Head, memory, inverse):
    """What each token finds missing, and what it writes, [C, V] float32."""
    missing = x.v.astype(_F32) - x.enter * dot(x.k, memory)
    missing = dot(inverse, missing.astype(x.v.dtype))
    return missing, x.beta_column * missing


def _indices():
    return (lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))


class _Layout:
    """The arrays of one call as the kernels take them, and what of each a program sees: (shape, block)."""

    def __init__(self, q, k, v, *, reverse: bool = False):
        self.batch, self.length = q.shape[:2]
        self.dtype, self.reverse = v.dtype, reverse
        self.key_dim, self.value_dim = q.shape[3], v.shape[3]
        self.heads = max(q.shape[2], v.shape[2])
        width = max(self.key_dim, self.value_dim) * jnp.dtype(v.dtype).itemsize
        shared = [self.heads // x.shape[2] for x in (q, k, v)]
        self.block = next(
            n
            for n in range(min(_HEADS, max(_BYTES // width, 1)), 0, -1)
            if self.heads % n == 0 and all(n % s == 0 or s % n == 0 for s in shared)
        )

    def inputs(self, q, k, v, beta, log_decay, run) -> dict:
        """What both kernels read: name -> (array, (shape, block))."""
        given = {}
        for name, x in dict(q=q, k=k, v=v).items():
            given[name] = self.as_tokens(x), self.tokens(x.shape[2], x.shape[3], x.dtype)
        for name, x in dict(beta=beta, log_decay=log_decay).items():
            if x is not None:
                rows = linear._repeat(jnp.moveaxis(x.astype(_F32), 1, 2), self.heads, axis=1)
                rows = rows.reshape(self.batch, -1, self.block, self.length)
                rows = jnp.pad(rows, [(0, 0), (0, 0), (0, 8 - self.block), (0, 0)])
                given[name] = rows, self.rows()
        if run is not None:
            rows = linear.run_rows(run)
            spec = pl.BlockSpec((None, 8, CHUNK), lambda b, h, n: (b, 0, self._at(n)))
            given["runs"] = rows, (jax.ShapeDtypeStruct(rows.shape, rows.dtype), spec)
        return given

    def call(self, kernel, given: dict, outs: dict, scale: float, interpret) -> dict:
        """Run `kernel` over batch, programs and chunks."""
        names = (*given, *outs)
        result = pl.pallas_call(
            lambda *refs: kernel(self, scale, dict(zip(names, refs, strict=False)), refs[-1]),
            grid=(self.batch, self.heads // self.block, self.length // CHUNK),
            in_specs=[spec for _, (_, spec) in given.values()],
            out_specs=[spec for _, spec in outs.values()],
            out_shape=[shape for shape, _ in outs.values()],
            scratch_shapes=[pltpu.VMEM((self.block, self.key_dim, self.value_dim), _F32)],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary")
            ),
            interpret=interpret,
        )(*(array for array, _ in given.values()))
        return dict(zip(outs, result, strict=True))

    def place(self, ref, h: int, size: int):
        """Where the program's h-th head is in tiles of heads of `size`, which several may share."""
        if len(ref.shape) == 3:
            return h * ref.shape[0] // self.block
        index = h * (ref.shape[1] // size) // self.block
        return slice(None), slice(index * size, (index + 1) * size)

    def store(self, ref, h: int, x):
        """Of all heads."""
        ref[self.place(ref, h, x.shape[1])] = x.astype(ref.dtype)

    def as_tokens(self, x):
        """[B, T, heads, D] as the kernels take it."""
        whole = x.shape[3] % decays.LANES == 0
        return x.reshape(*x.shape[:2], -1) if whole else jnp.moveaxis(x, 2, 1)

    def from_tokens(self, x, size: int):
        """The reverse."""
        return x.reshape(*x.shape[:2], -1, size) if x.ndim == 3 else jnp.moveaxis(x, 1, 2)

    def tokens(self, heads: int, size: int, dtype):
        """Of [B, T, heads, D], in which a head may serve several."""
        block = max(self.block * heads // self.heads, 1)
        at = lambda h: lax.div(h * self.block * heads, self.heads * block)  # noqa: E731
        if size % decays.LANES == 0:
            shape = (self.batch, self.length, heads * size)
            spec = pl.BlockSpec(
                (None, CHUNK, block * size), lambda b, h, n: (b, self._at(n), at(h))
            )
        else:
            shape = (self.batch, heads, self.length, size)
            spec = pl.BlockSpec(
                (None, block, CHUNK, size), lambda b, h, n: (b, at(h), self._at(n), 0)
            )
        return jax.ShapeDtypeStruct(shape, dtype), spec

    def rows(self):
        """Of one number a token and head, [B, programs, 8, T]."""
        spec = pl.BlockSpec((None, None, 8, CHUNK), lambda b, h, n: (b, h, 0, self._at(n)))
        shape = (self.batch, self.heads // self.block, 8, self.length)
        return jax.ShapeDtypeStruct(shape, _F32), spec

    def memories(self):
        """Of [B, heads, K, V]."""
        matrix = (self.key_dim, self.value_dim)
        spec = pl.BlockSpec((None, self.block, *matrix), lambda b, h, n: (b, h, 0, 0))
        return jax.ShapeDtypeStruct((self.batch, self.heads, *matrix), _F32), spec

    def states(self):
        """Of the memories that chunks start from."""
        matrix = (self.key_dim, self.value_dim)
        spec = pl.BlockSpec(
            (None, self.block, None, *matrix), lambda b, h, n: (b, h, self._at(n), 0, 0)
        )
        shape = (self.batch, self.heads, self.length // CHUNK, *matrix)
        return jax.ShapeDtypeStruct(shape, self.dtype), spec

    def inverse(self):
        """Of the chunks' systems."""
        spec = pl.BlockSpec(
            (None, self.block, CHUNK, CHUNK), lambda b, h, n: (b, h, self._at(n), 0)
        )
        shape = (self.batch, self.heads, self.length, CHUNK)
        return jax.ShapeDtypeStruct(shape, self.dtype), spec

    def _at(self, n):
        return self.length // CHUNK - 1 - n if self.reverse else n
