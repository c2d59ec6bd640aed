"""The mathematics of one chunk of linear attention with a scalar decay, on two-dimensional tiles.

A tile [C, n * D] has a row for each token of a chunk, and the channels of n memories side by side as columns. The n memories are one
block-diagonal matrix S. If all n have the same query and key, the tiles of q and k are [C, K], and S is [K, n * V] without zeros. With
b the inclusive sums of the log decay over the chunk, and W_ij = scale * exp(b_i - b_j) where i >= j belong to one document, else 0,
each memory computes

    O = (q kᵀ ⊙ W) v + scale e^b ⊙ (q S)          S' = e^b_C S + kᵀ (e^(b_C - b) ⊙ v)

(chunkwise form of Linear-MoE, arXiv 2503.05447, Eq. 5 with a scalar decay; as GLA, 2312.06635, Eq. 4, and Mamba2, 2405.21060,
Listing 1). Its gradient, with dS' that of S', A = q kᵀ, P = A ⊙ W and dA = (dO vᵀ) ⊙ W:

    dq = dA k + scale e^b ⊙ (dO Sᵀ)               dk = dAᵀ q + (e^(b_C - b) ⊙ v) dS'ᵀ
    dv = Pᵀ dO + e^(b_C - b) ⊙ (k dS')            dS = e^b_C dS' + qᵀ (scale e^b ⊙ dO)

A log decay g_l is a term of b_i - b_j for j < l <= i, of b_i for l <= i, of b_C - b_j for j < l, and of b_C:

    dg_l = Σ_{i>=l} (Σ_j M_ij - Σ_j M_ji + q_i · dq_i(S)) + Σ_{j<l} v_j · dv_j(S') + e^b_C <S, dS'>,   M = A ⊙ dA below its diagonal

where dq(S) and dv(S') are the terms above with S and with dS'. This is the reversed cumulative sum of q · dq - k · dk, without the
terms that would cancel. Documents zero e^b where they begin inside the chunk, e^(b_C - b) where they end in it, and e^b_C.

These functions use only dot, where, iota, exp, sum, transposes and slices at multiples of 8 rows, so that any backend can run them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

LANES = 128
_NEVER = -1e30
_FLOOR = -128.0  # e^-128 is 0 in float32
_COARSE = 512.0


class Heads(NamedTuple):
    """The memories of a tile.

    Attributes:
        first: index of the first in the chunk's decays.
        count: n, the number of memories.
        keys: number of key heads of the tile: n, or 1 if all memories share one.
    """

    first: int
    count: int
    keys: int


class Chunk(NamedTuple):
    """The factors and the mask of a chunk's decays and documents, for h memories; None is a factor of 1.

    Attributes:
        seen: [C, C], whether token i reads token j.
        rows: two arrays [h, C] whose sum is b. The first has multiples of 1/512, whose differences are exact.
        columns: `rows` transposed, [C, h].
        read_decay: [C, h], or [C, 1] for all, scale e^b.
        write_decay: as `read_decay`, e^(b_C - b).
        chunk_decay: [1, h] or [1, 1], e^b_C.
        scale: of the queries.
    """

    seen: jax.Array
    rows: tuple[jax.Array, jax.Array] | None
    columns: tuple[jax.Array, jax.Array] | None
    read_decay: jax.Array | None
    write_decay: jax.Array | None
    chunk_decay: jax.Array | None
    scale: float


class ReadGradient(NamedTuple):
    """The gradients through the output: of q, k, v and S, and terms of the decays', a column [C, 1] and a row [1, C] for each head."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    memory: jax.Array
    columns: list[jax.Array]
    rows: list[jax.Array]


class WriteGradient(NamedTuple):
    """The gradients through S': of k, v and S, and terms of the decays', a column [C, 1] and a number [1, 1] for each head."""

    k: jax.Array
    v: jax.Array
    memory: jax.Array
    columns: list[jax.Array]
    totals: list[jax.Array]


def dot(a: jax.Array, b: jax.Array, contract: str = "nn") -> jax.Array:
    """`a b` in float32; "nt" is `a bᵀ`, "tn" `aᵀ b`. Exact to float32 for float32 operands."""
    axes = {"nn": ((1,), (0,)), "nt": ((1,), (1,)), "tn": ((0,), (0,))}[contract]
    wide = a.dtype == jnp.float32
    precision = lax.Precision.HIGHEST if wide else lax.Precision.DEFAULT
    return lax.dot_general(
        a, b, (axes, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def exact_sums(x: jax.Array, mask: jax.Array) -> jax.Array:
    """`x mask` for x [h, *] float32, with h a multiple of 8, and a boolean mask: sums with the precision of float32.

    x is split into three parts that bfloat16 represents exactly, so that a single product in bfloat16 is enough.
    """
    parts = []
    for _ in range(3):
        bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-65536)  # the upper half
        parts.append(lax.bitcast_convert_type(bits, jnp.float32))
        x = x - parts[-1]
    ones = jnp.where(mask, 1.0, 0.0).astype(jnp.bfloat16)
    sums = dot(jnp.concatenate(parts).astype(jnp.bfloat16), ones)
    return sum(sums[i * len(x) : (i + 1) * len(x)] for i in (1, 2)) + sums[: len(x)]


def read_chunk(
    log_decay: jax.Array | None, runs: jax.Array | None, size: int, scale: float
) -> Chunk:
    """Compute the factors of decays and documents.

    Args:
        log_decay: [h, C] float32, at most 0, with h a multiple of 8; None is no decay. Below -128 it is a factor of 0.
        runs: [8, C] float32, of `row_layout.document_rows`; None is one document. Its rows are the number of each token's document, 1
            where that is the document of the last token before the chunk, and 1 where that is the document of the chunk's last token.
        size: C.
        scale: multiplies the queries.
    """
    i, j = iota(size, size, 0), iota(size, size, 1)
    seen = i >= j
    columns = None
    if runs is not None:
        columns = runs.T
        seen &= columns[:, :1] == runs[:1]
    if log_decay is None:
        if columns is None:
            return Chunk(seen, None, None, None, None, None, scale)
        read_decay, write_decay = columns[:, 1:2], columns[:, 2:3]
        return Chunk(seen, None, None, read_decay * scale, write_decay, read_decay[-1:], scale)
    log_decay = jnp.maximum(log_decay, _FLOOR)
    coarse = jnp.floor(log_decay * _COARSE) / _COARSE
    coarse, fine = exact_sums(coarse, i <= j), exact_sums(log_decay - coarse, i <= j)
    read_decay = coarse + fine
    write_decay = jnp.minimum((coarse[:, -1:] - coarse) + (fine[:, -1:] - fine), 0)
    if runs is not None:
        read_decay = jnp.where(runs[1:2] > 0, read_decay, _NEVER)
        write_decay = jnp.where(runs[2:3] > 0, write_decay, _NEVER)
    read_decay, write_decay = jnp.exp(read_decay).T, jnp.exp(write_decay).T
    rows, columns = (coarse, fine), (coarse.T, fine.T)
    return Chunk(seen, rows, columns, read_decay * scale, write_decay, read_decay[-1:], scale)


def weights(chunk: Chunk, head: int):
    """W of one head, [C, C], or the scale alone if there is no decay; `_weigh` sets the tokens that are not read to 0."""
    if chunk.rows is None or chunk.columns is None:
        return chunk.scale
    coarse, fine = (
        column[:, head : head + 1] - row[head : head + 1]
        for column, row in zip(chunk.columns, chunk.rows, strict=True)
    )
    return jnp.exp(jnp.where(chunk.seen, coarse + fine, _NEVER)) * chunk.scale


def read(q, k, v, memory, scales, chunk: Chunk, heads: Heads) -> jax.Array:
    """Return O [C, n * V] float32; `scales` is a list of `weights` for each head, and `memory` is S in q's dtype."""
    parts, scores = [], None
    for index, scale in enumerate(scales):
        if scores is None or heads.keys > 1:
            scores = dot(_only(q, index, heads.keys), k, "nt")
        parts.append(dot(_weigh(scores, scale, chunk).astype(v.dtype), v))
    carried = dot(q, memory)
    carried *= (
        chunk.scale if chunk.read_decay is None else _spread(chunk.read_decay, heads, v.shape[1])
    )
    return side_by_side(parts, v.shape[1]) + carried


def write(k, v, memory, chunk: Chunk, heads: Heads) -> jax.Array:
    """Return S' in float32, from S in float32."""
    update = _diagonal(dot(k, _leaving(v, chunk, heads), "tn"), heads)
    return _decay(memory, chunk, heads) + update


def read_backward(
    q, k, v, d_out, memory, scales, chunk: Chunk, heads: Heads, *, decays: bool
) -> ReadGradient:
    """The gradients through O, from dO [C, n * V]; `decays`: also those of the decays; `scales` and `memory` as for `read`."""
    dq, dv, pairs, columns, rows = [], [], [], [], []
    scores = None
    for index, scale in enumerate(scales):
        if scores is None or heads.keys > 1:
            scores = dot(_only(q, index, heads.keys), k, "nt")
        d_scores = _weigh(dot(_only(d_out, index, heads.count), v, "nt"), scale, chunk)
        dv.append(dot(_weigh(scores, scale, chunk).astype(q.dtype), d_out, "tn"))
        if decays:
            size = len(q)
            later = iota(size, size, 0) > iota(size, size, 1)
            products = jnp.where(later, scores * d_scores, 0)
            pairs.append(products)
            rows.append(jnp.sum(products, axis=0, keepdims=True))
        if heads.keys > 1 or not dq:
            dq.append(d_scores)
        else:
            dq[0] = dq[0] + d_scores
    dq = [x.astype(q.dtype) for x in dq]
    dk = side_by_side([dot(x, q, "tn") for x in dq], k.shape[1])
    dq = side_by_side([dot(x, k) for x in dq], q.shape[1])
    factor = (
        chunk.scale if chunk.read_decay is None else _spread(chunk.read_decay, heads, v.shape[1])
    )
    entering = (d_out.astype(jnp.float32) * factor).astype(q.dtype)
    carried = dot(entering, memory, "nt")
    if decays:
        if heads.keys == heads.count:
            products = q.astype(jnp.float32) * carried
        else:
            products = entering.astype(jnp.float32) * dot(q, memory)
        products = [_only(products, index, heads.count) for index in range(heads.count)]
        columns = [_row_sums(*both) for both in zip(pairs, products, strict=True)]
    d_memory = _diagonal(dot(q, entering, "tn"), heads)
    return ReadGradient(dq + carried, dk, side_by_side(dv, v.shape[1]), d_memory, columns, rows)


def write_backward(
    k, v, memory, d_memory, chunk: Chunk, heads: Heads, *, decays: bool
) -> WriteGradient:
    """The gradients through S', from dS' (`d_memory`, float32); `decays`: also those of the decays; `memory` is S in k's dtype."""
    narrow = d_memory.astype(k.dtype)
    dv = dot(k, narrow)
    if chunk.write_decay is not None:
        dv *= _spread(chunk.write_decay, heads, v.shape[1])
    dk = dot(_leaving(v, chunk, heads), narrow, "nt")
    decayed = _decay(d_memory, chunk, heads)
    columns, totals = [], []
    if decays:
        columns = _sums(v.astype(jnp.float32) * dv, heads.count)
        products = jnp.sum(memory.astype(jnp.float32) * decayed, axis=0, keepdims=True)
        totals = _sums(products, heads.count)
    return WriteGradient(dk, dv, decayed, columns, totals)


def decay_gradient(reads, read_rows, writes, totals, chunk: Chunk) -> jax.Array:
    """dg [h, C] of all heads, with rows of zeros up to a multiple of 8.

    Args:
        reads: `ReadGradient.columns` of all heads.
        read_rows: `ReadGradient.rows` of all heads.
        writes: `WriteGradient.columns` of all heads.
        totals: `WriteGradient.totals` of all heads.
        chunk: the chunk.
    """
    size, count = len(reads[0]), -(-len(reads) // 8) * 8
    transposed = _as_rows(dict(enumerate(reads)) | dict(enumerate(writes, count)), size)
    later, before = transposed[:count], transposed[count : 2 * count]
    row, column = iota(count, size, 0), iota(count, size, 1)
    for head, (of_rows, total) in enumerate(zip(read_rows, totals, strict=True)):
        more = jnp.where(column == size - 1, total, 0) - of_rows
        later += jnp.where(row == head, more, 0)
    earlier = iota(size, size, 0) < iota(size, size, 1)
    return exact_sums(later, chunk.seen) + exact_sums(before, earlier)


def _as_rows(columns: dict[int, jax.Array], size: int) -> jax.Array:
    """Return [128, C] whose rows are the given columns [C, 1], at their indices; the other rows are 0."""
    wide = jnp.zeros((size, LANES), jnp.float32)
    lane = iota(size, LANES, 1)
    for index, column in columns.items():
        wide = jnp.where(lane == index, column, wide)
    return wide.T


def side_by_side(parts: list[jax.Array], width: int) -> jax.Array:
    """A tile [*, width] whose h-th block of columns is that of the h-th part; each part is [*, width], or [*, 1] for a constant."""
    tile = parts[0]
    for index, part in enumerate(parts[1:], 1):
        column = iota(1, width, 1)
        tile = jnp.where(column >= index * (width // len(parts)), part, tile)
    return tile


def fold(memory: jax.Array, heads: Heads) -> jax.Array:
    """Return the n memories of S side by side, [K, n * V]."""
    size = len(memory) // heads.keys
    return sum((memory[i * size :][:size] for i in range(1, heads.keys)), memory[:size])


def unfold(memory: jax.Array, heads: Heads) -> jax.Array:
    """Return S from the n memories side by side, [K, n * V] float32."""
    return _diagonal(jnp.concatenate([memory] * heads.keys), heads)


def iota(rows: int, columns: int, axis: int) -> jax.Array:
    """Indices along `axis` of a tile of rows x columns."""
    return lax.broadcasted_iota(jnp.int32, (rows, columns), axis)


def _only(x, index: int, count: int):
    """Return x with 0 in all of its `count` blocks of columns but the one with index `index`."""
    if count == 1:
        return x
    block = lax.div(iota(1, x.shape[1], 1), x.shape[1] // count)
    return jnp.where(block == index, x.astype(jnp.float32), 0).astype(x.dtype)


def _row_sums(a, b):
    """The sums of the rows of a and b together, [*, 1]."""
    if a.shape == b.shape:  # one reduction in place of two
        return jnp.sum(a + b, axis=1, keepdims=True)
    return jnp.sum(a, axis=1, keepdims=True) + jnp.sum(b, axis=1, keepdims=True)


def _sums(x, count: int) -> list[jax.Array]:
    """The row sums of each of the `count` blocks of columns of x, [*, 1] each."""
    return [jnp.sum(_only(x, index, count), axis=1, keepdims=True) for index in range(count)]


def _diagonal(memory, heads: Heads):
    """Return x with only its blocks on the diagonal; the others, products of one memory's key and another
    one's value, are set to 0.
    """
    if heads.keys == 1:
        return memory
    rows, columns = memory.shape
    row = lax.div(iota(rows, columns, 0), rows // heads.keys)
    column = lax.div(iota(rows, columns, 1), columns // heads.count)
    return jnp.where(row == column, memory, 0)


def _weigh(x, scale, chunk: Chunk):
    """Return x [C, C] times the `weights` of a head, with 0 where token i does not read token j."""
    return jnp.where(chunk.seen, x * scale, 0)


def _spread(x, heads: Heads, width: int):
    """The factor of each of a tile's columns, [*, width], from factors [*, h] of all heads; [*, 1] if the columns have one factor."""
    if x.shape[1] == 1:
        return x
    factors = [x[:, head : head + 1] for head in range(heads.first, heads.first + heads.count)]
    return side_by_side(factors, width)


def _leaving(v, chunk: Chunk, heads: Heads):
    """e^(b_C - b) ⊙ v, in v's dtype."""
    if chunk.write_decay is None:
        return v
    factor = _spread(chunk.write_decay, heads, v.shape[1])
    return (v.astype(jnp.float32) * factor).astype(v.dtype)


def _decay(memory, chunk: Chunk, heads: Heads):
    """e^b_C S."""
    if chunk.chunk_decay is None:
        return memory
    return memory * _spread(chunk.chunk_decay, heads, memory.shape[1])
