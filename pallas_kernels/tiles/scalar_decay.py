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
    """Which memories a tile [C, n * D] contains: n memories, each with D channels as columns, side by side.

    Attributes:
        first: index of the tile's first memory among the h memories of a `Chunk`.
        count: n, the number of memories in the tile.
        keys: number of key heads in the tile: n, or 1 if all its memories share one key.
    """

    first: int
    count: int
    keys: int


class Chunk(NamedTuple):
    """The decay factors of one chunk of C tokens, and the mask of the tokens that read each other, for h memories; None is a factor of 1.

    Attributes:
        seen: [C, C] bool, whether token i reads token j: i >= j, in one document.
        rows: two arrays [h, C] whose sum is b, the inclusive sums of the log decay since the chunk's start. The first has multiples of
            1/512, whose differences are exact.
        columns: the arrays of `rows` transposed, [C, h].
        read_decay: [C, h], or [C, 1] for all memories: scale e^b, the factor with which a token reads the memory before the chunk.
        write_decay: [C, h] or [C, 1]: e^(b_C - b), the factor of a token's write in the memory after the chunk.
        chunk_decay: [1, h] or [1, 1]: e^b_C, the decay of the memory over the whole chunk.
        scale: the number that multiplies the queries.
    """

    seen: jax.Array
    rows: tuple[jax.Array, jax.Array] | None
    columns: tuple[jax.Array, jax.Array] | None
    read_decay: jax.Array | None
    write_decay: jax.Array | None
    chunk_decay: jax.Array | None
    scale: float


class ReadGradient(NamedTuple):
    """The gradients of one chunk's inputs that come through the chunk's output, not through the memory after
    it, for the n memories of a tile. `columns` and `rows` are empty if no gradient of the log decay is
    computed.

    Attributes:
        q: [C, n * K] or [C, K], the gradient of the queries.
        k: [C, n * K] or [C, K], the gradient of the keys.
        v: [C, n * V], the gradient of the values.
        memory: the gradient of the block-diagonal memory S before the chunk.
        columns: for each memory [C, 1], a number for each token as the one that reads, which `decay_gradient`
            sums to the gradient of the log decay.
        rows: for each memory [1, C], such a number for each token as the one that is read by others.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    memory: jax.Array
    columns: list[jax.Array]
    rows: list[jax.Array]


class WriteGradient(NamedTuple):
    """The gradients of one chunk's inputs that come through the memory after the chunk, not through its
    output, for the n memories of a tile. `columns` and `totals` are empty if no gradient of the log decay is
    computed.

    Attributes:
        k: [C, n * K] or [C, K], the gradient of the keys.
        v: [C, n * V], the gradient of the values.
        memory: the gradient of the block-diagonal memory S before the chunk.
        columns: for each memory [C, 1], the inner product of each token's value and its gradient, from which
            `decay_gradient` computes a term of the log decay's gradient.
        totals: for each memory [1, 1], e^b_C <S, dS'>, the inner product of the decayed memory and the
            gradient of the memory after the chunk: another term of the log decay's gradient.
    """

    k: jax.Array
    v: jax.Array
    memory: jax.Array
    columns: list[jax.Array]
    totals: list[jax.Array]


def dot(a: jax.Array, b: jax.Array, contract: str = "nn") -> jax.Array:
    """Return the matrix product of a and b in float32: `a b` for "nn", `a bᵀ` for "nt", `aᵀ b` for "tn". With float32 operands the product
    is exact to float32.
    """
    axes = {"nn": ((1,), (0,)), "nt": ((1,), (1,)), "tn": ((0,), (0,))}[contract]
    wide = a.dtype == jnp.float32
    precision = lax.Precision.HIGHEST if wide else lax.Precision.DEFAULT
    return lax.dot_general(
        a, b, (axes, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def exact_sums(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Return, with the precision of float32, the matrix product of x [h, m] float32 and a boolean mask [m, n]: for each column of the
    mask, the sum of the entries of each row of x that the mask selects. h is a multiple of 8.

    x is split into three terms that bfloat16 represents exactly, so that a single product in bfloat16 is enough.
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
    """Compute a chunk's decay factors and its mask of the tokens that read each other, as a `Chunk`, from log
    decays and document numbers.

    Args:
        log_decay: [h, C] float32, the log decay of each of h memories, at most 0, with h a multiple of 8;
            None is no decay. Any value below -128 is a decay of 0.
        runs: [8, C] float32, from `row_layout.document_rows`; None is one document. Row 0 has the number of
            each token's document. Row 1 has 1 where this is the document of the last token before the chunk,
            row 2 has 1 where it is the document of the chunk's last token, else 0.
        size: C, the number of tokens in the chunk.
        scale: the factor by which the queries are multiplied.
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
    """Return the weights scale * e^(b_i - b_j) [C, C] with which one memory's scores are multiplied, 0 where token i does not read token j
    (b: inclusive sums of the log decay over the chunk). Without a decay, return the scale alone; then `_weigh` applies the mask.
    """
    if chunk.rows is None or chunk.columns is None:
        return chunk.scale
    coarse, fine = (
        column[:, head : head + 1] - row[head : head + 1]
        for column, row in zip(chunk.columns, chunk.rows, strict=True)
    )
    return jnp.exp(jnp.where(chunk.seen, coarse + fine, _NEVER)) * chunk.scale


def read(q, k, v, memory, scales, chunk: Chunk, heads: Heads) -> jax.Array:
    """Return the output of one chunk for the n memories of a tile, [C, n * V] float32: (q kᵀ ⊙ W) v + scale
    e^b ⊙ (q S), what the tokens read from each other and from the memory S before the chunk.

    Args:
        q: [C, n * K] or [C, K], the queries.
        k: the keys, shaped like q.
        v: [C, n * V], the values.
        memory: the block-diagonal memory S, in q's dtype.
        scales: for each memory, the weights W of its scores [C, C], as `weights` returns them.
        chunk: the chunk's decay factors and mask.
        heads: which memories the tile contains.
    """
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
    """Return the memory after a chunk, S' = e^b_C S + kᵀ (e^(b_C - b) ⊙ v), float32 and block-diagonal, for
    the n memories of a tile.

    Args:
        k: [C, n * K] or [C, K], the keys.
        v: [C, n * V], the values.
        memory: the block-diagonal memory S before the chunk, float32.
        chunk: the chunk's decay factors.
        heads: which memories the tile contains.
    """
    update = _diagonal(dot(k, _leaving(v, chunk, heads), "tn"), heads)
    return _decay(memory, chunk, heads) + update


def read_backward(
    q, k, v, d_out, memory, scales, chunk: Chunk, heads: Heads, *, decays: bool
) -> ReadGradient:
    """Return the gradients of a chunk's queries, keys and values, and of the memory before it, that come
    through the chunk's output, for the n memories of a tile.

    Args:
        q: [C, n * K] or [C, K], the queries.
        k: the keys, shaped like q.
        v: [C, n * V], the values.
        d_out: [C, n * V], the gradient of the output.
        memory: the block-diagonal memory before the chunk, in q's dtype.
        scales: for each memory, the weights of its scores [C, C], as `weights` returns them.
        chunk: the chunk's decay factors and mask.
        heads: which memories the tile contains.
        decays: whether to compute also the terms of the log decay's gradient.
    """
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
    """Return the gradients of a chunk's keys and values, and of the memory before it, that come through the
    memory after the chunk, for the n memories of a tile.

    Args:
        k: [C, n * K] or [C, K], the keys.
        v: [C, n * V], the values.
        memory: the block-diagonal memory before the chunk, in k's dtype.
        d_memory: the gradient of the block-diagonal memory after the chunk, float32.
        chunk: the chunk's decay factors.
        heads: which memories the tile contains.
        decays: whether to compute also the terms of the log decay's gradient.
    """
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
    """Return the gradient of a chunk's log decay for all h memories, [h, C], with rows of zeros up to a
    multiple of 8.

    Args:
        reads: for each memory [C, 1], a number for each token as the one that reads (`ReadGradient.columns`).
        read_rows: for each memory [1, C], a number for each token as the one that is read
            (`ReadGradient.rows`).
        writes: for each memory [C, 1], the inner products of values and their gradients through the memory
            after the chunk (`WriteGradient.columns`).
        totals: for each memory [1, 1], the inner product of the decayed memory and the gradient of the memory
            after the chunk (`WriteGradient.totals`).
        chunk: the chunk's decay factors and mask; only the mask of tokens that read each other is used.
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
    """Return a matrix [128, C] whose rows are the given columns [C, 1], each at its index in the dictionary; the other rows are 0. C is
    `size`.
    """
    wide = jnp.zeros((size, LANES), jnp.float32)
    lane = iota(size, LANES, 1)
    for index, column in columns.items():
        wide = jnp.where(lane == index, column, wide)
    return wide.T


def side_by_side(parts: list[jax.Array], width: int) -> jax.Array:
    """Return a tile [*, width] whose h-th block of `width / n` columns comes from the h-th of n arrays in `parts`. Each array is [*,
    width], of which only that block is used, or [*, 1] for a block of equal columns.
    """
    tile = parts[0]
    for index, part in enumerate(parts[1:], 1):
        column = iota(1, width, 1)
        tile = jnp.where(column >= index * (width // len(parts)), part, tile)
    return tile


def fold(memory: jax.Array, heads: Heads) -> jax.Array:
    """Return the n memories of a block-diagonal memory [n * K, n * V] side by side, [K, n * V], without the
    zeros between them. If the n memories share one key head, the memory has this shape already and is
    returned unchanged.
    """
    size = len(memory) // heads.keys
    return sum((memory[i * size :][:size] for i in range(1, heads.keys)), memory[:size])


def unfold(memory: jax.Array, heads: Heads) -> jax.Array:
    """Return the block-diagonal memory [n * K, n * V] float32 from its n memories side by side, [K, n * V];
    the inverse of `fold`. If the n memories share one key head, the memory is returned unchanged.
    """
    return _diagonal(jnp.concatenate([memory] * heads.keys), heads)


def iota(rows: int, columns: int, axis: int) -> jax.Array:
    """Return a tile [rows, columns] int32 in which each entry is its row index (`axis` 0) or its column index (`axis` 1)."""
    return lax.broadcasted_iota(jnp.int32, (rows, columns), axis)


def _only(x, index: int, count: int):
    """Return the tile x [rows, count * D] with 0 in all columns but the D columns of the memory with index
    `index`, where the D channels of `count` memories are side by side.
    """
    if count == 1:
        return x
    block = lax.div(iota(1, x.shape[1], 1), x.shape[1] // count)
    return jnp.where(block == index, x.astype(jnp.float32), 0).astype(x.dtype)


def _row_sums(a, b):
    """Return, for each row, the sum of the row's entries in the tile a and in the tile b together, [rows, 1];
    a and b may have different numbers of columns.
    """
    if a.shape == b.shape:  # one reduction in place of two
        return jnp.sum(a + b, axis=1, keepdims=True)
    return jnp.sum(a, axis=1, keepdims=True) + jnp.sum(b, axis=1, keepdims=True)


def _sums(x, count: int) -> list[jax.Array]:
    """Return, for each of the `count` memories whose D channels are side by side in the tile x [rows,
    count * D], the sums of the rows over the memory's channels: a list of arrays [rows, 1].
    """
    return [jnp.sum(_only(x, index, count), axis=1, keepdims=True) for index in range(count)]


def _diagonal(memory, heads: Heads):
    """Return `memory`, a product kᵀ v [n * K, n * V] of the keys and values of n memories, with 0 outside its
    n diagonal blocks, where one memory's key would meet another one's value. If all memories share one key,
    [K, n * V], return it unchanged.
    """
    if heads.keys == 1:
        return memory
    rows, columns = memory.shape
    row = lax.div(iota(rows, columns, 0), rows // heads.keys)
    column = lax.div(iota(rows, columns, 1), columns // heads.count)
    return jnp.where(row == column, memory, 0)


def _weigh(x, scale, chunk: Chunk):
    """Return one memory's products of queries with keys x [C, C] (or the gradient of its scores) times
    `scale`, the result of `weights`, and with 0 where token i does not read token j.
    """
    return jnp.where(chunk.seen, x * scale, 0)


def _spread(x, heads: Heads, width: int):
    """Return the factor of each column of a tile of `width` columns, [*, width], from the factors x [*, h] of all h memories: a memory's
    columns all have its factor. If x is [*, 1], one factor for all columns, return x.
    """
    if x.shape[1] == 1:
        return x
    factors = [x[:, head : head + 1] for head in range(heads.first, heads.first + heads.count)]
    return side_by_side(factors, width)


def _leaving(v, chunk: Chunk, heads: Heads):
    """Return a chunk's values decayed from each token to the chunk's end, e^(b_C - b) ⊙ v [C, n * V], in v's
    dtype. The product of the keys with them is what the chunk adds to the memory.
    """
    if chunk.write_decay is None:
        return v
    factor = _spread(chunk.write_decay, heads, v.shape[1])
    return (v.astype(jnp.float32) * factor).astype(v.dtype)


def _decay(memory, chunk: Chunk, heads: Heads):
    """Return the memory before a chunk (or the gradient of the memory after it) times the memory's decay over
    the whole chunk, e^b_C; without a decay, unchanged.
    """
    if chunk.chunk_decay is None:
        return memory
    return memory * _spread(chunk.chunk_decay, heads, memory.shape[1])
