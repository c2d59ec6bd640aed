"""The kernel of the forward pass of attention with forget gates in Triton; `bodies` describes arrays, constants and scores.

A loop that keeps 128 x 128 sums in four warps has few registers left for operands. `PARTS` equal parts of the channels, which are read
and multiplied one after another, keep fewer of them in registers at a time.
"""

import triton
import triton.language as tl

from pallas_kernels.forgetting_attention.triton.bodies import (
    NEVER,
    gates_between,
    gates_of_first,
    gates_of_queries,
    hide,
)


@triton.jit
def _products(
    n, tile_q, k, KEY_HEADS: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Return q . k of a program's queries and tile n of the keys, [BM, BN], by products of `PARTS` equal parts of the channels; `tile_q`
    is a tuple of the parts of the queries.
    """
    SIZE: tl.constexpr = D // PARTS
    offsets = tl.arange(0, BN)[:, None] * (KEY_HEADS * D) + tl.arange(0, SIZE)[None, :]
    first = tl.cast(n, tl.int64) * (BN * KEY_HEADS * D)
    s = tl.zeros([tile_q[0].shape[0], BN], tl.float32)
    for part in tl.static_range(PARTS):
        tile_k = tl.load(k + first + part * SIZE + offsets)
        s = tl.dot(tile_q[part], tl.trans(tile_k), s, input_precision="tf32")
    return s


@triton.jit
def _attend(
    start, end, last, products, out, top, total, tile_q, queries, lowest, hidden, query_high, query_low,
    k, v, k_high, k_low, after, step, factor,
    KEY_HEADS: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, BN: tl.constexpr,
    GATED: tl.constexpr, PRUNED: tl.constexpr, DIAGONAL: tl.constexpr, LIMITED: tl.constexpr,
    PARTS: tl.constexpr, COLUMNS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Add the tiles of keys from `start` to before `end` to the sums of a program's queries; return `products`, and these sums: of the
    values times their weights, the largest score, and of the weights relative to it.

    With `DIAGONAL` scores are those up to the queries, and otherwise up to the last key of the last tile that was added: what the gates
    leave from there to a query is the same for all earlier keys. `out` and `tile_q` are tuples of `PARTS` equal parts of the channels.
    `total` is [BM], or [BM, COLUMNS] with a sum for each of as many columns of a tile, which are added after the last tile.
    With `AHEAD` the products of a tile are computed beside the weights of the tile before: `products` are those of tile `start`, and
    become those of tile `end`, or of the program's last tile, `last`.
    """
    SIZE: tl.constexpr = D // PARTS
    offsets = tl.arange(0, BN)[:, None] * (KEY_HEADS * D) + tl.arange(0, SIZE)[None, :]
    for n in range(start, end):
        first = tl.cast(n, tl.int64) * (BN * KEY_HEADS * D)
        if AHEAD:
            s = products * factor
            products = _products(tl.minimum(n + 1, last), tile_q, k, KEY_HEADS, D, BN, PARTS)
        else:
            s = _products(n, tile_q, k, KEY_HEADS, D, BN, PARTS) * factor
        keys = n * BN + tl.arange(0, BN)
        if GATED:
            if DIAGONAL:
                s += gates_between(
                    query_high, query_low, tl.load(k_high + keys), tl.load(k_low + keys)
                )
            else:
                s += tl.load(after + keys)[None, :]
                top += tl.load(step + n)
        s = hide(s, queries, keys, lowest, False, DIAGONAL, LIMITED)
        largest = tl.max(s, 1)
        if PRUNED and not DIAGONAL:
            largest = tl.where(hidden > n * BN // TILE, NEVER, largest)
        new_top = tl.maximum(top, largest)
        change = tl.exp2(top - new_top)
        subtracted = new_top
        if PRUNED and not DIAGONAL:
            subtracted = tl.where(hidden > n * BN // TILE, -NEVER, new_top)
        weights = tl.exp2(s - subtracted[:, None])
        if COLUMNS == 1:
            total = total * change + tl.sum(weights, 1)
        else:
            columns = tl.reshape(weights, [top.shape[0], BN // COLUMNS, COLUMNS])
            total = total * change[:, None] + tl.sum(columns, 1)
        weights = weights.to(v.dtype.element_ty)
        new_out = ()
        for part in tl.static_range(PARTS):
            tile_v = tl.load(v + first + part * SIZE + offsets)
            new_out += (
                tl.dot(weights, tile_v, out[part] * change[:, None], input_precision="tf32"),
            )
        out = new_out
        top = new_top
    return products, out, top, total


@triton.jit
def attend(
    q, k, v, q_high, q_low, k_high, k_low, high, low, after, step, lowest, pruned, places, begin, factor,
    out, sums,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    D: tl.constexpr, TILE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, GATED: tl.constexpr,
    PRUNED: tl.constexpr, LIMITED: tl.constexpr, PLACES: tl.constexpr, PARTS: tl.constexpr,
    COLUMNS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Store the output of attention `out`, 0 where a query sees no key, and `sums`. A program computes BM queries of one head.

    `begin` [B, HEADS, QUERIES / TILE] is the first tile of TILE keys that a tile of queries sees, not read without `PRUNED` and
    `LIMITED`, since then it is 0; `factor` is log2(e) scale.
    """
    count: tl.constexpr = QUERIES // BM
    block = count - 1 - tl.program_id(0) % count  # the longest loops first
    row = tl.program_id(0) // count
    h, b = row % HEADS, (row // HEADS).to(tl.int64)
    key_head = h * KEY_HEADS // HEADS
    rows, tile = block * BM + tl.arange(0, BM), block * BM // TILE
    k += (b * KEYS * KEY_HEADS + key_head) * D
    v += (b * KEYS * KEY_HEADS + key_head) * D
    # The first query moves the pointers: a thread then keeps one address.
    first_row = (b * QUERIES + block * BM) * (HEADS * D) + h * D
    q += first_row
    out += first_row
    SIZE: tl.constexpr = D // PARTS
    offsets = tl.arange(0, BM)[:, None] * (HEADS * D) + tl.arange(0, SIZE)[None, :]
    of_row = tl.arange(0, BM)
    first_of_row = row.to(tl.int64) * QUERIES + block * BM
    q_high += first_of_row
    q_low += first_of_row
    pruned += first_of_row
    sums += first_of_row
    of_keys = row.to(tl.int64) * KEYS
    queries = rows
    if PLACES:
        queries = rows - tile * TILE + tl.load(places + tile)
    first_keys = tl.zeros([BM], tl.int32)
    hidden = tl.zeros([BM], tl.int32)
    if PRUNED:
        hidden = tl.load(pruned + of_row)
    tile_q, total_out = (), ()
    for part in tl.static_range(PARTS):
        tile_q += (tl.load(q + part * SIZE + offsets),)
        total_out += (tl.zeros([BM, SIZE], tl.float32),)
    top = tl.full([BM], NEVER, tl.float32)
    total = tl.zeros([BM] if COLUMNS == 1 else [BM, COLUMNS], tl.float32)
    position = tl.min(queries, 0)
    start = 0
    if PRUNED or LIMITED:
        start = tl.load(begin + row * (QUERIES // TILE) + tile) * (TILE // BN)
    diagonal, end = position // BN, (position + BM + BN - 1) // BN
    if LIMITED:
        first_keys = tl.load(lowest + b * QUERIES + rows)
        start = tl.maximum(start, tl.min(first_keys, 0) // BN)
    products = 0.0
    if AHEAD:
        # Other loads than those of the loops, so that Triton reads the queries of the loops from shared memory.
        first_q = ()
        for part in tl.static_range(PARTS):
            first_q += (tl.load(q + part * SIZE + offsets, eviction_policy="evict_last"),)
        products = _products(start, first_q, k, KEY_HEADS, D, BN, PARTS)
    if LIMITED:
        free = tl.minimum((tl.max(first_keys, 0) + BN - 1) // BN, diagonal)
        products, total_out, top, total = _attend(
            start, free, end - 1, products, total_out, top, total, tile_q, queries, first_keys, hidden, top, top,
            k, v, k_high + of_keys, k_low + of_keys, after + of_keys, step + of_keys // BN, factor,
            KEY_HEADS, D, TILE, BN, GATED, PRUNED, False, True, PARTS, COLUMNS, AHEAD,
        )  # fmt: skip
        start = tl.maximum(start, free)
    products, total_out, top, total = _attend(
        start, diagonal, end - 1, products, total_out, top, total, tile_q, queries, first_keys, hidden, top, top,
        k, v, k_high + of_keys, k_low + of_keys, after + of_keys, step + of_keys // BN, factor,
        KEY_HEADS, D, TILE, BN, GATED, PRUNED, False, False, PARTS, COLUMNS, AHEAD,
    )  # fmt: skip
    # Before the first key there is no tile, and `top` is `NEVER` with any number added.
    base_high, base_low = gates_of_first(high, low, of_keys + tl.maximum(position - 1, 0), GATED)
    query_high, query_low, inside = gates_of_queries(
        q_high, q_low, of_row, base_high, base_low, BM, GATED
    )
    top += inside
    products, total_out, top, total = _attend(
        diagonal, end, end - 1, products, total_out, top, total, tile_q, queries, first_keys, hidden, query_high, query_low,
        k, v, k_high + of_keys, k_low + of_keys, after + of_keys, step + of_keys // BN, factor,
        KEY_HEADS, D, TILE, BN, GATED, PRUNED, True, LIMITED, PARTS, COLUMNS, AHEAD,
    )  # fmt: skip
    if COLUMNS > 1:
        total = tl.sum(total, 1)
    sees_none = top < 0.5 * NEVER
    inverse = tl.where(sees_none, 0.0, 1.0 / total)
    for part in tl.static_range(PARTS):
        result = total_out[part] * inverse[:, None]
        tl.store(out + part * SIZE + offsets, result.to(out.dtype.element_ty))
    tl.store(sums + of_row, tl.where(sees_none, -NEVER, top + tl.log2(total)))
