"""Kernels of a diagonal-plus-low-rank memory (RWKV7) in Triton: the same source for every NVIDIA card of compute capability 8.0 or more.

A row of T tokens is divided into N chunks of C tokens. With S the memory before a chunk, S' after it, and A_xy the products of x and y
times the decay between their tokens (a reads before its token's decay, q after it),

    U = (I - A_ab)⁻¹ (ã S + A_ak V)        O = q̃ S + A_qb U + A_qk V        S' = e^b_C S + b̃ᵀ U + k̃ᵀ V

where ~ marks tokens with their decay from the chunk's start (q, with its scale, and a) or to its end (b and k). Backward, with R the
right side of the system,

    dU = A_qbᵀ dO + b̃ dS'        dR = (I - A_ab)⁻ᵀ dU        dV = A_qkᵀ dO + A_akᵀ dR + k̃ dS'
    dS = e^b_C dS' + q̃ᵀ dO + ãᵀ dR

and A_qb, A_qk, A_ab and A_ak have the gradients dO Uᵀ, dO Vᵀ, dR Uᵀ and dR Vᵀ. The kernels of the delta rule (with `LOW_RANK`) compute the system and the two scans; this module has the others, which compute all
chunks in parallel. Arrays, `HEADS`, `LOW` and `DOCUMENTS` are those of `pallas_kernels.linear_attention.triton.bodies`; `MEMORIES` is the number of
heads of v, `writes` is U, and `d_right` dR [B, T, HEADS, V].
"""

import triton
import triton.language as tl

from pallas_kernels.delta_rule.triton.scores import stacked, store_level
from pallas_kernels.linear_attention.triton.gradients import masked_sums


@triton.jit
def dplr_scores(
    q, k, a, b, sums, run, enters, stays, scale, read, erase, written_b, written_k, chunk_decay, qk, qb, ak,
    system,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, A_HEADS: tl.constexpr, B_HEADS: tl.constexpr,
    MEMORIES: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    LEVELS: tl.constexpr, LOW: tl.constexpr, DOCUMENTS: tl.constexpr, SCORES: tl.constexpr,
):  # fmt: skip
    """Store the decayed tokens of all chunks, in tiles [C, BK / 2], and with `SCORES` their A.

    `read` is q̃ [B, T, HEADS, K], `erase` -ã, `written_b` b̃ and `written_k` k̃ [B, T, MEMORIES, K], and `chunk_decay` [B, N, MEMORIES, K]
    e^b_C. `qk` and `qb` are A_qk and A_qb [B, N, HEADS, C, C], `ak` A_ak and `system` -A_ab [B, N, MEMORIES, C, C]. `system` has only the
    entries below the diagonal; the others are 0 above it.

    The A are computed level by level of the halving of `pallas_kernels.tiles.channel_decay`. A level divides the rows in pairs of one row
    of a later block and one of the earlier block beside it: products of later rows of q and of a, [C, BK] together, with [C / 2, BK]
    earlier rows of k or b have all its entries. Each entry belongs to one level, which stores it.
    """
    h, chunk = tl.program_id(0) % HEADS, (tl.program_id(0) // HEADS).to(tl.int64)
    rows, keys, narrow = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BK // 2)
    g = h * MEMORIES // HEADS
    # Several heads may read one memory: the first of them stores the memory's arrays.
    first = tl.zeros([1, 1], tl.int32) + h % (HEADS // MEMORIES) == 0
    q += (chunk * C * Q_HEADS + h * Q_HEADS // HEADS) * K
    k += (chunk * C * K_HEADS + h * K_HEADS // HEADS) * K
    a += (chunk * C * A_HEADS + h * A_HEADS // HEADS) * K
    b += (chunk * C * B_HEADS + h * B_HEADS // HEADS) * K
    sums += (chunk * C * MEMORIES + g) * K
    read += (chunk * C * HEADS + h) * K
    erase += (chunk * C * MEMORIES + g) * K
    written_b += (chunk * C * MEMORIES + g) * K
    written_k += (chunk * C * MEMORIES + g) * K
    chunk_decay += (chunk * MEMORIES + g) * K
    i, j = rows[:, None], rows[None, :]
    of_qk = tl.zeros([C], tl.float32)
    of_qb = tl.zeros([C], tl.float32)
    for key in range(0, K, BK // 2):
        by_memory = key + i * (MEMORIES * K) + narrow[None, :]
        inclusive = tl.load(sums + by_memory)
        total = tl.load(sums + key + (C - 1) * (MEMORIES * K) + narrow)
        tile_q = tl.load(q + key + i * (Q_HEADS * K) + narrow[None, :]).to(tl.float32)
        tile_k = tl.load(k + key + i * (K_HEADS * K) + narrow[None, :]).to(tl.float32)
        tile_b = tl.load(b + key + i * (B_HEADS * K) + narrow[None, :]).to(tl.float32)
        of_qk += tl.sum(tile_q * tile_k, 1)
        of_qb += tl.sum(tile_q * tile_b, 1)
        write_decay = tl.exp(tl.minimum(total[None, :] - inclusive, 0.0))
        q_decay, end_decay = tl.exp(inclusive), tl.exp(total)
        if DOCUMENTS:
            write_decay = write_decay * tl.load(stays + chunk * C + rows)[:, None]
            q_decay = q_decay * tl.load(enters + chunk * C + rows)[:, None]
            end_decay = end_decay * tl.load(enters + chunk * C + C - 1)
        x = tile_q * (q_decay * scale)
        tl.store(read + key + i * (HEADS * K) + narrow[None, :], x.to(read.dtype.element_ty))
        x = (tile_b * write_decay).to(written_b.dtype.element_ty)
        tl.store(written_b + by_memory, x, mask=first)
        x = (tile_k * write_decay).to(written_k.dtype.element_ty)
        tl.store(written_k + by_memory, x, mask=first)
        tl.store(chunk_decay + key + narrow[None, :], end_decay[None, :], mask=first)
        tile_a = tl.load(a + key + i * (A_HEADS * K) + narrow[None, :]).to(tl.float32)
        a_decay = tl.exp(tl.load(sums - MEMORIES * K + by_memory, mask=i > 0, other=0.0))
        if DOCUMENTS:
            a_decay = a_decay * tl.load(enters + chunk * C + rows)[:, None]
        tl.store(erase + by_memory, (tile_a * -a_decay).to(erase.dtype.element_ty), mask=first)
    if SCORES:
        of_chunk = run + chunk * C
        qk += (chunk * HEADS + h) * C * C
        qb += (chunk * HEADS + h) * C * C
        ak += (chunk * MEMORIES + g) * C * C
        system += (chunk * MEMORIES + g) * C * C
        square = i * C + j
        tl.store(qk + square, tl.where(i == j, of_qk[:, None] * scale, 0.0), mask=i <= j)
        tl.store(qb + square, tl.where(i == j, of_qb[:, None] * scale, 0.0), mask=i <= j)
        tl.store(ak + square, tl.zeros([C, C], tl.float32), mask=(i <= j) & first)
        pairs = tl.arange(0, C // 2)
        # 0, but no constant: else Triton moves the operands' layout in front of the exponentials, and each warp computes those of others.
        most = scale * 0.0
        for level in tl.range(0, LEVELS, num_stages=1):
            half = 1 << level
            block, inside = pairs >> level, pairs & (half - 1)
            earlier = block * (2 * half) + inside
            later = earlier + half
            # The last row of the earlier block, from which both blocks' sums are measured.
            middle = block * (2 * half) + half - 1
            through_k = tl.zeros([C, C // 2], tl.float32)
            through_b = tl.zeros([C, C // 2], tl.float32)
            for key in range(0, K, BK):
                of_key = sums + key + keys[None, :]
                pivot = tl.load(of_key + middle[:, None] * (MEMORIES * K))
                inclusive = tl.load(of_key + later[:, None] * (MEMORIES * K))
                exclusive = tl.load(of_key + (later[:, None] - 1) * (MEMORIES * K))
                before = tl.load(of_key + earlier[:, None] * (MEMORIES * K))
                at_key = key + keys[None, :]
                tile_q = tl.load(q + later[:, None] * (Q_HEADS * K) + at_key).to(tl.float32)
                tile_a = tl.load(a + later[:, None] * (A_HEADS * K) + at_key).to(tl.float32)
                tile_k = tl.load(k + earlier[:, None] * (K_HEADS * K) + at_key).to(tl.float32)
                tile_b = tl.load(b + earlier[:, None] * (B_HEADS * K) + at_key).to(tl.float32)
                low_q = (tile_q * tl.exp(tl.minimum(inclusive - pivot, most))).to(LOW)
                low_a = (tile_a * tl.exp(tl.minimum(exclusive - pivot, most))).to(LOW)
                factor = tl.exp(tl.minimum(pivot - before, most))
                low_k, low_b = (
                    tl.trans((tile_k * factor).to(LOW)),
                    tl.trans((tile_b * factor).to(LOW)),
                )
                both = stacked(low_q, low_a, C, BK)
                through_k = tl.dot(both, low_k, through_k, input_precision="tf32")
                through_b = tl.dot(both, low_b, through_b, input_precision="tf32")
            store_level(through_k, level, qk, ak, scale, 1.0, first, of_chunk, C, DOCUMENTS)
            store_level(through_b, level, qb, system, scale, -1.0, first, of_chunk, C, DOCUMENTS)


@triton.jit
def score_products(
    scores, x, out,
    X_HEADS: tl.constexpr, HEADS: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
    LOW: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Store A x of all chunks, or with `TRANSPOSED` Aᵀ x, [B, T, HEADS, V] in tiles [C, BV], for `scores` A [B, N, HEADS, C, C]."""
    columns: tl.constexpr = V // BV
    column, at = tl.program_id(0) % columns * BV, tl.program_id(0) // columns
    h, chunk = at % HEADS, (at // HEADS).to(tl.int64)
    rows, values = tl.arange(0, C), tl.arange(0, BV)
    x += (chunk * C * X_HEADS + h * X_HEADS // HEADS) * V + column
    out += (chunk * C * HEADS + h) * V + column
    A = tl.load(scores + (chunk * HEADS + h) * C * C + rows[:, None] * C + rows[None, :]).to(LOW)
    if TRANSPOSED:
        A = tl.trans(A)
    tile = tl.load(x + rows[:, None] * (X_HEADS * V) + values[None, :]).to(LOW)
    product = tl.dot(A, tile, input_precision="tf32")
    tl.store(out + rows[:, None] * (HEADS * V) + values[None, :], product.to(out.dtype.element_ty))


@triton.jit
def dplr_outputs(
    read, through_b, through_k, writes, v, states, out,
    MEMORIES: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """Store the outputs of all chunks, q̃ S + A_qb U + A_qk V, [B, T, HEADS, V] in tiles [C, BV].

    `read` is q̃ [B, T, HEADS, K]. `through_b` and `through_k` are A_qb and A_qk [B, N, HEADS, C, C] float32, of which each is the sum of
    two terms of dtype `LOW`, so that their rounding adds no error.
    """
    columns: tl.constexpr = V // BV
    column, at = tl.program_id(0) % columns * BV, tl.program_id(0) // columns
    h, chunk = at % HEADS, (at // HEADS).to(tl.int64)
    rows, keys, values = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    g = h * MEMORIES // HEADS
    read += (chunk * C * HEADS + h) * K
    states += (chunk * MEMORIES + g) * K * V + column
    square = (chunk * HEADS + h) * C * C + rows[:, None] * C + rows[None, :]
    by_value = (chunk * C * MEMORIES + g) * V + column
    by_value += rows[:, None] * (MEMORIES * V) + values[None, :]
    total = tl.zeros([C, BV], tl.float32)
    for key in range(0, K, BK):
        tile = tl.load(read + key + rows[:, None] * (HEADS * K) + keys[None, :]).to(LOW)
        S = tl.load(states + key * V + keys[:, None] * V + values[None, :]).to(LOW)
        total = tl.dot(tile, S, total, input_precision="tf32")
    tile = tl.load(writes + by_value).to(LOW)
    A = tl.load(through_b + square)
    total = tl.dot(A.to(LOW), tile, total, input_precision="tf32")
    total = tl.dot((A - A.to(LOW).to(tl.float32)).to(LOW), tile, total, input_precision="tf32")
    tile = tl.load(v + by_value).to(LOW)
    A = tl.load(through_k + square)
    total = tl.dot(A.to(LOW), tile, total, input_precision="tf32")
    total = tl.dot((A - A.to(LOW).to(tl.float32)).to(LOW), tile, total, input_precision="tf32")
    target = (chunk * C * HEADS + h) * V + column + rows[:, None] * (HEADS * V) + values[None, :]
    tl.store(out + target, total.to(out.dtype.element_ty))


@triton.jit
def dplr_value_gradients(
    written, through_k, values_of_a, d_out, d_right, d_states, dv,
    MEMORIES: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """Store the gradients of the values of all chunks, A_qkᵀ dO + A_akᵀ dR + k̃ dS', [B, T, HEADS, V] in tiles [C, BV].

    `written` is k̃ [B, T, MEMORIES, K], `through_k` A_qk [B, N, HEADS, C, C] and `values_of_a` A_ak [B, N, MEMORIES, C, C].
    """
    columns: tl.constexpr = V // BV
    column, at = tl.program_id(0) % columns * BV, tl.program_id(0) // columns
    h, chunk = at % HEADS, (at // HEADS).to(tl.int64)
    rows, keys, values = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    g = h * MEMORIES // HEADS
    written += (chunk * C * MEMORIES + g) * K
    d_states += (chunk * HEADS + h) * K * V + column
    square = rows[:, None] * C + rows[None, :]
    by_value = (chunk * C * HEADS + h) * V + column
    by_value += rows[:, None] * (HEADS * V) + values[None, :]
    total = tl.zeros([C, BV], tl.float32)
    for key in range(0, K, BK):
        tile = tl.load(written + key + rows[:, None] * (MEMORIES * K) + keys[None, :]).to(LOW)
        dS = tl.load(d_states + key * V + keys[:, None] * V + values[None, :]).to(LOW)
        total = tl.dot(tile, dS, total, input_precision="tf32")
    A = tl.load(through_k + (chunk * HEADS + h) * C * C + square).to(LOW)
    tile = tl.load(d_out + by_value).to(LOW)
    total = tl.dot(tl.trans(A), tile, total, input_precision="tf32")
    A = tl.load(values_of_a + (chunk * MEMORIES + g) * C * C + square).to(LOW)
    tile = tl.load(d_right + by_value).to(LOW)
    total = tl.dot(tl.trans(A), tile, total, input_precision="tf32")
    tl.store(dv + by_value, total.to(dv.dtype.element_ty))


@triton.jit
def _store_pairs(
    target, x, y, scale, entry, stored, diagonal,
    HEADS: tl.constexpr, MEMORIES: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
    LOW: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    """Store the products [C, C] of rows x and y, times the scale, at `entry` of `target` where `stored`, and with `DIAGONAL` their diagonal."""
    rows, values = tl.arange(0, C), tl.arange(0, BV)
    i, j = rows[:, None], rows[None, :]
    total = tl.zeros([C, C], tl.float32)
    for column in range(0, V, BV):
        tile_x = tl.load(x + column + i * (HEADS * V) + values[None, :]).to(LOW)
        tile_y = tl.load(y + column + i * (MEMORIES * V) + values[None, :]).to(LOW)
        total = tl.dot(tile_x, tl.trans(tile_y), total, input_precision="tf32")
    total = total * scale
    tl.store(target + entry, total.to(target.dtype.element_ty), mask=stored)
    if DIAGONAL:
        tl.store(diagonal + i + j * 0, total, mask=i == j)


@triton.jit
def pair_gradients(
    d_out, d_right, v, writes, run, scale, pairs, diagonals,
    MEMORIES: tl.constexpr, HEADS: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
    LEVELS: tl.constexpr, LOW: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Store the gradients of all A of all chunks, as matrices [B, N, HEADS, LEVELS, C, C] by level of the halving, and the diagonals of
    A_qk's and A_qb's, [B, N, HEADS, 2, C].

    A level's matrix has the rows of later blocks for q, and again for a, and the columns of the earlier blocks beside them for k, and
    again for b. It is 0 for tokens of two pairs of blocks and for tokens of two documents.
    """
    h, chunk = tl.program_id(0) % HEADS, (tl.program_id(0) // HEADS).to(tl.int64)
    rows = tl.arange(0, C)
    d_out += (chunk * C * HEADS + h) * V
    d_right += (chunk * C * HEADS + h) * V
    v += (chunk * C * MEMORIES + h * MEMORIES // HEADS) * V
    writes += (chunk * C * MEMORIES + h * MEMORIES // HEADS) * V
    same = rows[:, None] >= 0
    if DOCUMENTS:
        document = tl.load(run + chunk * C + rows)
        same = document[:, None] == document[None, :]
    pairs += (chunk * HEADS + h) * LEVELS * C * C
    diagonals += (chunk * HEADS + h) * 2 * C
    i, j = rows[:, None], rows[None, :]
    zeros = tl.zeros([C, C], pairs.dtype.element_ty)
    for level in tl.static_range(LEVELS):
        tl.store(pairs + level * C * C + i * C + j, zeros)
    # Other threads of the program store the entries.
    tl.debug_barrier()
    level = tl.zeros([C, C], tl.int32)
    for above in tl.static_range(1, LEVELS):
        level += ((i ^ j) >> above > 0).to(tl.int32)
    inside = (1 << level) - 1
    row = ((i >> (level + 1)) << level) + (i & inside)
    column = ((j >> (level + 1)) << level) + (j & inside)
    entry = (level * C + row) * C + column
    stored = (i > j) & same
    of_a = pairs + C // 2 * C
    _store_pairs(
        pairs, d_out, v, scale, entry, stored, diagonals, HEADS, MEMORIES, V, C, BV, LOW, True
    )
    _store_pairs(
        pairs + C // 2,
        d_out,
        writes,
        scale,
        entry,
        stored,
        diagonals + C,
        HEADS,
        MEMORIES,
        V,
        C,
        BV,
        LOW,
        True,
    )
    _store_pairs(
        of_a, d_right, v, 1.0, entry, stored, diagonals, HEADS, MEMORIES, V, C, BV, LOW, False
    )
    _store_pairs(
        of_a + C // 2,
        d_right,
        writes,
        1.0,
        entry,
        stored,
        diagonals,
        HEADS,
        MEMORIES,
        V,
        C,
        BV,
        LOW,
        False,
    )


@triton.jit
def dplr_gradients(
    q, k, a, b, writes, v, d_out, d_right, pairs, diagonals, sums, run, enters, stays, states,
    d_states, scale, dq, dk, da, db, dg,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, A_HEADS: tl.constexpr, B_HEADS: tl.constexpr,
    MEMORIES: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, LEVELS: tl.constexpr, LOW: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Store the gradients of q, k, a, b and of the log decays, [B, T, HEADS, K] of all chunks, in tiles [C, BK].

    `pairs` and `diagonals` are the gradients of all A from `pair_gradients`. On a level of the halving of
    `pallas_kernels.tiles.channel_decay`, one tile has the later rows of q and of a, and a second one the earlier rows of k and of b: each
    one's gradient is the level's matrix, or its transpose, times the other. The results are then moved to the rows of their tokens.
    """
    tiles: tl.constexpr = K // BK
    tile, at = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    h, chunk = at % HEADS, (at // HEADS).to(tl.int64)
    rows, keys, values = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    g = h * MEMORIES // HEADS
    q += (chunk * C * Q_HEADS + h * Q_HEADS // HEADS) * K + tile * BK
    k += (chunk * C * K_HEADS + h * K_HEADS // HEADS) * K + tile * BK
    a += (chunk * C * A_HEADS + h * A_HEADS // HEADS) * K + tile * BK
    b += (chunk * C * B_HEADS + h * B_HEADS // HEADS) * K + tile * BK
    writes += (chunk * C * MEMORIES + g) * V
    v += (chunk * C * MEMORIES + g) * V
    d_out += (chunk * C * HEADS + h) * V
    d_right += (chunk * C * HEADS + h) * V
    states += (chunk * MEMORIES + g) * K * V + tile * BK * V
    d_states += (chunk * HEADS + h) * K * V + tile * BK * V
    pairs += (chunk * HEADS + h) * LEVELS * C * C
    diagonals += (chunk * HEADS + h) * 2 * C
    sums += (chunk * C * MEMORIES + g) * K + tile * BK
    i, j = rows[:, None], rows[None, :]
    of_first, pair, twice = rows < C // 2, rows & (C // 2 - 1), tl.arange(0, 2 * C)
    # By token: of q, and after it of a; of k, and after it of b.
    of_later = tl.zeros([2 * C, BK], tl.float32)
    of_earlier = tl.zeros([2 * C, BK], tl.float32)
    square = i * C + j
    most = scale * 0.0  # no constant, as in dplr_scores
    for level in tl.range(0, LEVELS, num_stages=1):
        half = 1 << level
        earlier = ((pair >> level) << (level + 1)) + (pair & (half - 1))
        later = earlier + half
        # The last row of the earlier block, from which both blocks' sums are measured.
        middle = ((pair >> level) << (level + 1)) + half - 1
        of_key = sums + keys[None, :]
        pivot = tl.load(of_key + middle[:, None] * (MEMORIES * K))
        after = tl.load(of_key + tl.where(of_first, later, later - 1)[:, None] * (MEMORIES * K))
        before = tl.load(of_key + earlier[:, None] * (MEMORIES * K))
        at_row = tl.where(of_first, later * (Q_HEADS * K), later * (A_HEADS * K))[:, None]
        X = tl.load(tl.where(of_first, q, a)[:, None] + at_row + keys[None, :]).to(tl.float32)
        at_row = tl.where(of_first, earlier * (K_HEADS * K), earlier * (B_HEADS * K))[:, None]
        Y = tl.load(tl.where(of_first, k, b)[:, None] + at_row + keys[None, :]).to(tl.float32)
        x_decay = tl.exp(tl.minimum(after - pivot, most))
        y_decay = tl.exp(tl.minimum(pivot - before, most))
        weights = tl.load(pairs + level * C * C + square).to(LOW)
        dX = tl.dot(weights, (Y * y_decay).to(LOW), input_precision="tf32") * x_decay
        dY = tl.dot(tl.trans(weights), (X * x_decay).to(LOW), input_precision="tf32") * y_decay
        both = tl.reshape(tl.permute(tl.join(dX, dY), (2, 0, 1)), (2 * C, BK))
        token = twice & (C - 1)
        is_later = (token & half) > 0
        source = ((token >> (level + 1)) << level) + (token & (half - 1))
        source += tl.where(is_later, 0, C) + tl.where(twice < C, 0, C // 2)
        both = tl.gather(both, tl.broadcast_to(source[:, None], (2 * C, BK)), 0)
        of_later += tl.where(is_later[:, None], both, 0.0)
        of_earlier += tl.where(is_later[:, None], 0.0, both)
    by_token = tl.permute(tl.reshape(of_later, (2, C, BK)), (1, 2, 0))
    level_q, level_a = tl.split(by_token)
    by_token = tl.permute(tl.reshape(of_earlier, (2, C, BK)), (1, 2, 0))
    level_k, level_b = tl.split(by_token)
    of_q = tl.zeros([C, BK], tl.float32)
    of_a = tl.zeros([C, BK], tl.float32)
    of_k = tl.zeros([C, BK], tl.float32)
    of_b = tl.zeros([C, BK], tl.float32)
    at_end = tl.zeros([BK], tl.float32)
    for column in range(0, V, BV):
        by_value = column + rows[:, None] * (HEADS * V) + values[None, :]
        by_memory = column + rows[:, None] * (MEMORIES * V) + values[None, :]
        S = tl.load(states + column + keys[:, None] * V + values[None, :])
        dS = tl.load(d_states + column + keys[:, None] * V + values[None, :])
        turned = tl.trans(S.to(LOW))
        of_q = tl.dot(tl.load(d_out + by_value).to(LOW), turned, of_q, input_precision="tf32")
        of_a = tl.dot(tl.load(d_right + by_value).to(LOW), turned, of_a, input_precision="tf32")
        turned = tl.trans(dS.to(LOW))
        of_k = tl.dot(tl.load(v + by_memory).to(LOW), turned, of_k, input_precision="tf32")
        of_b = tl.dot(tl.load(writes + by_memory).to(LOW), turned, of_b, input_precision="tf32")
        at_end += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
    by_key = rows[:, None] * (MEMORIES * K) + keys[None, :]
    inclusive = tl.load(sums + by_key)
    exclusive = tl.load(sums - MEMORIES * K + by_key, mask=i > 0, other=0.0)
    total = tl.load(sums + (C - 1) * (MEMORIES * K) + keys)
    q_decay, a_decay = tl.exp(inclusive) * scale, tl.exp(exclusive)
    write_decay = tl.exp(tl.minimum(total[None, :] - inclusive, 0.0))
    at_end = at_end * tl.exp(total)
    if DOCUMENTS:
        begun = tl.load(enters + chunk * C + rows)[:, None]
        q_decay, a_decay = q_decay * begun, a_decay * begun
        write_decay = write_decay * tl.load(stays + chunk * C + rows)[:, None]
        at_end = at_end * tl.load(enters + chunk * C + C - 1)
    of_q, of_a = of_q * q_decay, of_a * a_decay
    of_k, of_b = of_k * write_decay, of_b * write_decay
    tile_q = tl.load(q + rows[:, None] * (Q_HEADS * K) + keys[None, :]).to(tl.float32)
    tile_k = tl.load(k + rows[:, None] * (K_HEADS * K) + keys[None, :]).to(tl.float32)
    tile_a = tl.load(a + rows[:, None] * (A_HEADS * K) + keys[None, :]).to(tl.float32)
    tile_b = tl.load(b + rows[:, None] * (B_HEADS * K) + keys[None, :]).to(tl.float32)
    written = tile_k * of_k + tile_b * of_b
    of_q, of_a, of_k, of_b = of_q + level_q, of_a + level_a, of_k + level_k, of_b + level_b
    # The gradients are stored before the decays' terms are summed, so that few tiles are in registers by then.
    of_read = tile_q * of_q - tile_k * of_k - tile_b * of_b + written
    of_erase = tile_a * of_a
    target = (chunk * C * HEADS + h) * K + tile * BK + rows[:, None] * (HEADS * K) + keys[None, :]
    through_k = tl.load(diagonals + rows)[:, None]
    through_b = tl.load(diagonals + C + rows)[:, None]
    of_q += through_k * tile_k + through_b * tile_b
    tl.store(dq + target, of_q.to(dq.dtype.element_ty))
    tl.store(dk + target, (of_k + through_k * tile_q).to(dk.dtype.element_ty))
    tl.store(da + target, of_a.to(da.dtype.element_ty))
    tl.store(db + target, (of_b + through_b * tile_q).to(db.dtype.element_ty))
    same = j >= i
    if DOCUMENTS:
        of_chunk = run + chunk * C
        same = same & (tl.load(of_chunk + rows)[:, None] == tl.load(of_chunk + rows)[None, :])
    gradient = masked_sums(j < i, written, LOW)
    gradient += masked_sums(same, of_read, LOW)
    gradient += masked_sums(same & (i != j), of_erase, LOW)
    tl.store(dg + target, gradient + at_end[None, :])
