"""Kernels of the backward pass of attention with forget gates in Triton, and what they share with that of the forward pass in
`forward_bodies`: the same source for every NVIDIA card of compute capability 8.0 or more.

These modules import only Triton, so that their kernels can also run in Triton's interpreter and be compiled without a GPU.

Scores are base-2 logarithms of weights: those of query i and key j <= i are `log2(e) (scale q_i . k_j + F_i - F_j)`, with F the sum
of the log forget gates, stored as high + low. F_i - F_j is computed from these parts where a tile has keys after some of its queries.
For a tile of earlier keys, whose last key is n, it is (F_i - F_n) + (F_n - F_j), of which neither term is positive: the second is
added to the scores, one number per key, and the first, one number per query, to their maximum and sum. `attend` adds the first tile
by tile, from each tile's last key to the next tile's.

Common to all kernels:

- q, out, d_out and dq are [B, QUERIES, HEADS, D]; k and v are [B, KEYS, KEY_HEADS, D], and dk and dv [B, KEYS, HEADS, D].
- `q_high`, `q_low` [B, HEADS, QUERIES] and `high`, `low` [B, HEADS, KEYS] are F at the queries and keys. `k_high`, `k_low` are F at
  the keys too, but very large where a token is not a key. `after` [B, HEADS, KEYS] is log2(e) (F_n - F_j) of key j, with n the last key
  of its tile of BN keys, and `step` [B, HEADS, KEYS / BN] is log2(e) (F_n - F_m) of each tile, with m the last key before it (of the
  first tile it has no effect). With `GATED` False none is read.
- `lowest` [B, QUERIES] is the position of the first key that documents and the window let a query see; it does not decrease. With
  `LIMITED` False it is not read: then a query sees all earlier keys.
- `pruned` [B, HEADS, QUERIES] is the number of tiles of `TILE` keys that the gates hide from a query; not read if `PRUNED` is False.
- `places` [QUERIES / TILE] is the position among the keys of the first query of each tile; not read if `PLACES` is False: then each
  query has the position of its index.
- `sums` [B, HEADS, QUERIES] is the base-2 logarithm of the sum of a query's weights, 1e30 where it sees no key.
- A program computes BM queries or BN keys, and loops over tiles of the other; both divide TILE, and TILE divides QUERIES and KEYS.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
NEVER = tl.constexpr(-1e30)  # a score whose weight is 0


@triton.jit
def hide(
    s, queries, keys, lowest, KEYS_IN_ROWS: tl.constexpr, DIAGONAL: tl.constexpr,
    LIMITED: tl.constexpr,
):  # fmt: skip
    """Return scores with `NEVER` where a query does not see a key: of later keys (`DIAGONAL`), and before `lowest` (`LIMITED`).

    `queries` and `keys` are positions; `lowest` has a number for each query.
    """
    if DIAGONAL or LIMITED:
        if KEYS_IN_ROWS:
            i, j, first = queries[None, :], keys[:, None], lowest[None, :]
        else:
            i, j, first = queries[:, None], keys[None, :], lowest[:, None]
        if DIAGONAL:
            seen = j <= i
            if LIMITED:
                seen = seen & (j >= first)
        else:
            seen = j >= first
        s = tl.where(seen, s, NEVER)
    return s


@triton.jit
def gates_between(query_high, query_low, key_high, key_low):
    """Return log2(e) (F_i - F_j) of every query i and key j, [queries, keys]."""
    return (
        (query_high[:, None] - key_high[None, :]) + (query_low[:, None] - key_low[None, :])
    ) * LOG2E


@triton.jit
def _query_scores(
    n, tile_q, tile_k, queries, lowest, hidden, query_high, query_low, k_high, k_low, high, low, after,
    factor, TILE: tl.constexpr, BN: tl.constexpr, GATED: tl.constexpr, PRUNED: tl.constexpr,
    DIAGONAL: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    """Return the scores [BM, BN] of a program's queries with tile n of the keys, and a number for each query, or for all, that is added to
    them.

    Of a tile of earlier keys `query_high` and `query_low` are F at the first of the queries, and the scores those up to it. `tile_q` and `tile_k` are the queries and keys, and `queries` the positions of the queries; the parameters after `queries` up to
    `query_low` have a number for each query otherwise; the others are pointers to a row and head.
    """
    keys = n * BN + tl.arange(0, BN)
    s = tl.dot(tile_q, tl.trans(tile_k), input_precision="tf32") * factor
    shift = query_high * 0.0
    if GATED:
        if DIAGONAL:
            s += gates_between(query_high, query_low, tl.load(k_high + keys), tl.load(k_low + keys))
        else:
            last_high = tl.load(high + n * BN + BN - 1)
            last_low = tl.load(low + n * BN + BN - 1)
            s += tl.load(after + keys)[None, :]
            shift = ((query_high - last_high) + (query_low - last_low)) * LOG2E
            if PRUNED:
                shift = tl.where(hidden > n * BN // TILE, 2 * NEVER, shift)
    return hide(s, queries, keys, lowest, False, DIAGONAL, LIMITED), shift


@triton.jit
def gates_of_first(q_high, q_low, first, GATED: tl.constexpr):
    """Return F at the first of a program's queries, whose index is `first`, in two parts; 0 without gates."""
    high, low = 0.0, 0.0
    if GATED:
        high, low = tl.load(q_high + first), tl.load(q_low + first)
    return high, low


@triton.jit
def gates_of_queries(
    q_high, q_low, of_row, base_high, base_low, BM: tl.constexpr, GATED: tl.constexpr
):
    """Return F at a program's queries in two parts, and log2(e) times its difference to F at the first of them; 0 without gates.

    Tiles of earlier keys are added with scores up to the first query: what the gates leave from there to a query is the same for all of
    them, and is added to the largest score, or subtracted from the logarithm of the sum.
    """
    high = tl.zeros([BM], tl.float32)
    low = tl.zeros([BM], tl.float32)
    if GATED:
        high, low = tl.load(q_high + of_row), tl.load(q_low + of_row)
    return high, low, ((high - base_high) + (low - base_low)) * LOG2E


@triton.jit
def _add_query_gradients(
    start, end, dq, error, tile_q, tile_d, row_sums, row_delta, queries, lowest, hidden,
    query_high, query_low, k, v, k_high, k_low, high, low, after, factor,
    KEY_HEADS: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, BN: tl.constexpr,
    GATED: tl.constexpr, PRUNED: tl.constexpr, DIAGONAL: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    """Add the tiles of keys from `start` to before `end` to dq / scale and to the sums of the scores' gradients; return both."""
    offsets = tl.arange(0, BN)[:, None] * (KEY_HEADS * D) + tl.arange(0, D)[None, :]
    for n in range(start, end):
        first = tl.cast(n, tl.int64) * (BN * KEY_HEADS * D)
        tile_k = tl.load(k + first + offsets)
        s, shift = _query_scores(
            n, tile_q, tile_k, queries, lowest, hidden, query_high, query_low, k_high, k_low, high, low, after, factor,
            TILE, BN, GATED, PRUNED, DIAGONAL, LIMITED,
        )  # fmt: skip
        weights = tl.exp2(s - (row_sums - shift)[:, None])
        tile_v = tl.load(v + first + offsets)
        d_weights = tl.dot(tile_d, tl.trans(tile_v), input_precision="tf32")
        d_scores = weights * (d_weights - row_delta[:, None])
        error += tl.sum(d_scores, 1)
        dq = tl.dot(d_scores.to(tile_k.dtype), tile_k, dq, input_precision="tf32")
    return dq, error


@triton.jit
def query_gradients(
    q, k, v, d_out, sums, delta, q_high, q_low, k_high, k_low, high, low, after, lowest, pruned, places,
    begin, factor, scale, dq, error,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    D: tl.constexpr, TILE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, GATED: tl.constexpr,
    PRUNED: tl.constexpr, LIMITED: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Store the gradient of the queries, and `error` [B, HEADS, QUERIES]: the sum over keys of the gradients of a query's scores.

    With weights P and output gradient dO, the gradient of a score is `dS_ij = P_ij (dO_i . v_j - delta_i)`, and dq_i is `scale Σ_j
    dS_ij k_j`. `delta` [B, HEADS, QUERIES] is O_i . dO_i. A program computes BM queries of one head; `begin` is as in `attend`.
    """
    count: tl.constexpr = QUERIES // BM
    block = count - 1 - tl.program_id(0) % count
    row = tl.program_id(0) // count
    h, b = row % HEADS, (row // HEADS).to(tl.int64)
    key_head = h * KEY_HEADS // HEADS
    rows, tile = block * BM + tl.arange(0, BM), block * BM // TILE
    k += (b * KEYS * KEY_HEADS + key_head) * D
    v += (b * KEYS * KEY_HEADS + key_head) * D
    first_row = (b * QUERIES + block * BM) * (HEADS * D) + h * D
    q += first_row
    d_out += first_row
    dq += first_row
    offsets = tl.arange(0, BM)[:, None] * (HEADS * D) + tl.arange(0, D)[None, :]
    of_row = row.to(tl.int64) * QUERIES + rows
    of_keys = row.to(tl.int64) * KEYS
    queries = rows
    if PLACES:
        queries = rows - tile * TILE + tl.load(places + tile)
    first_keys = tl.zeros([BM], tl.int32)
    hidden = tl.zeros([BM], tl.int32)
    if PRUNED:
        hidden = tl.load(pruned + of_row)
    tile_q, tile_d = tl.load(q + offsets), tl.load(d_out + offsets)
    row_sums, row_delta = tl.load(sums + of_row), tl.load(delta + of_row)
    base_high, base_low = gates_of_first(q_high, q_low, row * QUERIES + block * BM, GATED)
    query_high, query_low, inside = gates_of_queries(
        q_high, q_low, of_row, base_high, base_low, BM, GATED
    )
    base_sums = row_sums - inside
    total = tl.zeros([BM, D], tl.float32)
    row_error = tl.zeros([BM], tl.float32)
    position = tl.min(queries, 0)
    start = 0
    if PRUNED or LIMITED:
        start = tl.load(begin + row * (QUERIES // TILE) + tile) * (TILE // BN)
    diagonal, end = position // BN, (position + BM + BN - 1) // BN
    if LIMITED:
        first_keys = tl.load(lowest + b * QUERIES + rows)
        start = tl.maximum(start, tl.min(first_keys, 0) // BN)
        free = tl.minimum((tl.max(first_keys, 0) + BN - 1) // BN, diagonal)
        total, row_error = _add_query_gradients(
            start, free, total, row_error, tile_q, tile_d, base_sums, row_delta, queries, first_keys, hidden,
            base_high, base_low, k, v, k_high + of_keys, k_low + of_keys, high + of_keys, low + of_keys, after + of_keys, factor,
            KEY_HEADS, D, TILE, BN, GATED, PRUNED, False, True,
        )  # fmt: skip
        start = tl.maximum(start, free)
    total, row_error = _add_query_gradients(
        start, diagonal, total, row_error, tile_q, tile_d, base_sums, row_delta, queries, first_keys, hidden,
        base_high, base_low, k, v, k_high + of_keys, k_low + of_keys, high + of_keys, low + of_keys, after + of_keys, factor,
        KEY_HEADS, D, TILE, BN, GATED, PRUNED, False, False,
    )  # fmt: skip
    total, row_error = _add_query_gradients(
        diagonal, end, total, row_error, tile_q, tile_d, row_sums, row_delta, queries, first_keys, hidden,
        query_high, query_low, k, v, k_high + of_keys, k_low + of_keys, high + of_keys, low + of_keys, after + of_keys, factor,
        KEY_HEADS, D, TILE, BN, GATED, PRUNED, True, LIMITED,
    )  # fmt: skip
    tl.store(dq + offsets, (total * scale).to(dq.dtype.element_ty))
    tl.store(error + of_row, row_error)


@triton.jit
def _add_key_gradients(
    start, end, dk, dv, d_sums, tile_k, tile_v, keys, key_high, key_low, last_high, last_low,
    q, d_out, sums, delta, q_high, q_low, lowest, pruned, places, factor,
    HEADS: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    GATED: tl.constexpr, PRUNED: tl.constexpr, PLACES: tl.constexpr, DIAGONAL: tl.constexpr,
    LIMITED: tl.constexpr,
):  # fmt: skip
    """Add the tiles of queries from `start` to before `end` to dk / scale, dv and the sums over queries of the gradients of the scores;
    return the three.
    """
    offsets = tl.arange(0, BM)[:, None] * (HEADS * D) + tl.arange(0, D)[None, :]
    key_tile = tl.min(keys, 0) // TILE
    fall = ((last_high - key_high) + (last_low - key_low)) * LOG2E
    for m in range(start, end):
        first = tl.cast(m, tl.int64) * (BM * HEADS * D)
        rows = m * BM + tl.arange(0, BM)
        tile_q = tl.load(q + first + offsets)
        s = tl.dot(tile_k, tl.trans(tile_q), input_precision="tf32") * factor
        column_sums = tl.load(sums + rows)
        if GATED:
            query_high, query_low = tl.load(q_high + rows), tl.load(q_low + rows)
            if DIAGONAL:
                s += (
                    (query_high[None, :] - key_high[:, None])
                    + (query_low[None, :] - key_low[:, None])
                ) * LOG2E
            else:
                s += fall[:, None]
                column_sums -= ((query_high - last_high) + (query_low - last_low)) * LOG2E
                if PRUNED:
                    column_sums = tl.where(tl.load(pruned + rows) > key_tile, -NEVER, column_sums)
        queries = rows
        if PLACES:
            tile = m * BM // TILE
            queries = rows - tile * TILE + tl.load(places + tile)
        if LIMITED:
            first_keys = tl.load(lowest + rows)
        else:
            first_keys = rows
        s = hide(s, queries, keys, first_keys, True, DIAGONAL, LIMITED)
        weights = tl.exp2(s - column_sums[None, :])
        tile_d = tl.load(d_out + first + offsets)
        dv = tl.dot(weights.to(tile_d.dtype), tile_d, dv, input_precision="tf32")
        d_weights = tl.dot(tile_v, tl.trans(tile_d), input_precision="tf32")
        d_scores = weights * (d_weights - tl.load(delta + rows)[None, :])
        if GATED:
            d_sums += tl.sum(d_scores, 1)
        dk = tl.dot(d_scores.to(tile_q.dtype), tile_q, dk, input_precision="tf32")
    return dk, dv, d_sums


@triton.jit
def key_gradients(
    q, k, v, d_out, sums, delta, q_high, q_low, k_high, k_low, high, low, lowest, pruned, places,
    begin, last, free, factor, scale, dk, dv, d_sums,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    D: tl.constexpr, TILE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, GATED: tl.constexpr,
    PRUNED: tl.constexpr, LIMITED: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Store the gradients of the keys and of the values for each query head, and of F as a bias of the keys, `d_sums` [B, HEADS, KEYS].

    With the gradients dS of the scores, as in `query_gradients`, `dk_j = scale Σ_i dS_ij q_i`, `dv_j = Σ_i P_ij dO_i` and `dF_j =
    -Σ_i dS_ij`. A program computes BN keys of one head. `begin` and `last` [B, HEADS, KEYS / TILE] are the first and the last tile of
    TILE queries that a tile of keys is seen by; without `PLACES` the first is not read, and without `PRUNED` and `LIMITED` the last is
    the last tile of all, and not read. `free` [B, KEYS / BN] is the number of tiles
    of BM queries whose `lowest` is not after the first of the BN keys; not read if `LIMITED` is False.
    """
    count: tl.constexpr = KEYS // BN
    block, row = tl.program_id(0) % count, tl.program_id(0) // count
    h, b = row % HEADS, (row // HEADS).to(tl.int64)
    key_head = h * KEY_HEADS // HEADS
    keys, tile = block * BN + tl.arange(0, BN), block * BN // TILE
    q += (b * QUERIES * HEADS + h) * D
    d_out += (b * QUERIES * HEADS + h) * D
    channels = tl.arange(0, D)[None, :]
    offsets = tl.arange(0, BN)[:, None] * (KEY_HEADS * D) + channels
    first_key = (b * KEYS + block * BN) * (KEY_HEADS * D) + key_head * D
    k += first_key
    v += first_key
    of_queries, of_keys = row.to(tl.int64) * QUERIES, row.to(tl.int64) * KEYS
    sums += of_queries
    delta += of_queries
    q_high += of_queries
    q_low += of_queries
    pruned += of_queries
    lowest += b * QUERIES
    tile_k, tile_v = tl.load(k + offsets), tl.load(v + offsets)
    key_high = tl.zeros([BN], tl.float32)
    key_low = tl.zeros([BN], tl.float32)
    last_high = 0.0
    last_low = 0.0
    if GATED:
        key_high, key_low = tl.load(k_high + of_keys + keys), tl.load(k_low + of_keys + keys)
        last_high = tl.load(high + of_keys + block * BN + BN - 1)
        last_low = tl.load(low + of_keys + block * BN + BN - 1)
    if PLACES:
        start = tl.load(begin + row * (KEYS // TILE) + tile) * (TILE // BM)
        below = start + TILE // BM
    else:
        start = block * BN // BM
        below = (block * BN + BN + BM - 1) // BM
    end = QUERIES // BM
    if PRUNED or LIMITED:
        end = (tl.load(last + row * (KEYS // TILE) + tile) + 1) * (TILE // BM)
    total_k = tl.zeros([BN, D], tl.float32)
    total_v = tl.zeros([BN, D], tl.float32)
    total = tl.zeros([BN], tl.float32)
    total_k, total_v, total = _add_key_gradients(
        start, below, total_k, total_v, total, tile_k, tile_v, keys, key_high, key_low, last_high, last_low,
        q, d_out, sums, delta, q_high, q_low, lowest, pruned, places, factor,
        HEADS, D, TILE, BM, BN, GATED, PRUNED, PLACES, True, LIMITED,
    )  # fmt: skip
    inside = end
    if LIMITED:
        inside = tl.minimum(tl.maximum(tl.load(free + b * count + block), below), end)
    total_k, total_v, total = _add_key_gradients(
        below, inside, total_k, total_v, total, tile_k, tile_v, keys, key_high, key_low, last_high, last_low,
        q, d_out, sums, delta, q_high, q_low, lowest, pruned, places, factor,
        HEADS, D, TILE, BM, BN, GATED, PRUNED, PLACES, False, False,
    )  # fmt: skip
    if LIMITED:
        inside = tl.maximum(inside, below)
        total_k, total_v, total = _add_key_gradients(
            inside, end, total_k, total_v, total, tile_k, tile_v, keys, key_high, key_low, last_high, last_low,
            q, d_out, sums, delta, q_high, q_low, lowest, pruned, places, factor,
            HEADS, D, TILE, BM, BN, GATED, PRUNED, PLACES, False, True,
        )  # fmt: skip
    target = tl.arange(0, BN)[:, None] * (HEADS * D) + channels
    first_target = (b * KEYS + block * BN) * (HEADS * D) + h * D
    dk += first_target
    dv += first_target
    tl.store(dk + target, (total_k * scale).to(dk.dtype.element_ty))
    tl.store(dv + target, total_v.to(dv.dtype.element_ty))
    if GATED:
        tl.store(d_sums + of_keys + keys, -total)
