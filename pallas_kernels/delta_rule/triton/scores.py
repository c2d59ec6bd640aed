"""The kernel of the decayed products and tokens of the delta rule with a decay per key channel, and its parts that diagonal-plus-low-rank
memories use too. Symbols, arrays and constants are those of `bodies`.

A level of the halving of `pallas_kernels.tiles.channel_decay` divides the rows in pairs of one row of a later block and one of the earlier
block beside it: products of later rows of two arrays, [C, BK] together, with [C / 2, BK] earlier rows have all the level's entries. Each
entry belongs to one level, which stores it.
"""

import triton
import triton.language as tl

from pallas_kernels.linear_attention.triton.exponential import decay_of

WEAK: tl.constexpr = tl.constexpr(-20.0)
"""The sum of the log decays since the chunk's start above which a row's products are computed at once, from factors of up to e^20."""
WIDTH: tl.constexpr = tl.constexpr(32)
"""The number of key channels of which a step multiplies the weakly decayed rows."""


@triton.jit
def stacked(first, second, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the rows of `first`, and after them those of `second`, [ROWS, COLUMNS]."""
    return tl.reshape(tl.permute(tl.join(first, second), (2, 0, 1)), (ROWS, COLUMNS))


@triton.jit
def store_level(
    products, level, of_first, of_second, first_scale, second_scale, store_second, of_chunk,
    C: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Store a level's entries of the matrices `of_first` and `of_second` [C, C], of which the second one is stored if `store_second` [1, 1].

    `products` [C, C / 2] are those of later rows of two stacked arrays with earlier rows, `first_scale` and `second_scale` their factors,
    and `of_chunk` the documents of the chunk's tokens.
    """
    rows, pairs = tl.arange(0, C), tl.arange(0, C // 2)
    half = 1 << level
    block = pairs >> level
    earlier = block * (2 * half) + (pairs & (half - 1))
    first, pair = rows < C // 2, rows & (C // 2 - 1)
    row_block = pair >> level
    row = row_block * (2 * half) + half + (pair & (half - 1))
    stored = row_block[:, None] == block[None, :]
    if DOCUMENTS:
        same = tl.load(of_chunk + row)[:, None] == tl.load(of_chunk + earlier)[None, :]
        products = tl.where(same, products, 0.0)
    stored = stored & (first[:, None] | store_second)
    products = products * tl.where(first, first_scale, second_scale)[:, None]
    entry = row[:, None] * C + earlier[None, :]
    tl.store(tl.where(first, of_first, of_second)[:, None] + entry, products, mask=stored)


@triton.jit
def store_pairs(
    products, level, target, stored, of_chunk, C: tl.constexpr, DOCUMENTS: tl.constexpr
):
    """Store a level's entries of the matrix `target` [C, C], from the products [C / 2, C / 2] of later with earlier rows, of the later rows
    that are `stored` [C / 2, 1]. `of_chunk` are the documents of the chunk's tokens.
    """
    pairs = tl.arange(0, C // 2)
    half = 1 << level
    block = pairs >> level
    earlier = block * (2 * half) + (pairs & (half - 1))
    later = earlier + half
    stored = stored & (block[:, None] == block[None, :])
    if DOCUMENTS:
        same = tl.load(of_chunk + later)[:, None] == tl.load(of_chunk + earlier)[None, :]
        products = tl.where(same, products, 0.0)
    tl.store(target + later[:, None] * C + earlier[None, :], products, mask=stored)


@triton.jit
def delta_scores(
    q, k, g, run, enters, stays, scale, sums, read, erase, written, chunk_decay, scores, alike,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, MEMORIES: tl.constexpr, HEADS: tl.constexpr,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, LEVELS: tl.constexpr, LOW: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Store the sums of the log decay g of all chunks, and the decayed products and tokens, the tokens in tiles [C, 32].

    The sums are those of `linear_attention.triton.bodies.sum_decays`. `scores` are the products of q with k times the scale, [B, N, HEADS,
    C, C], of which the entries on and below the diagonal are stored, and `alike` those of k with k, [B, N, MEMORIES, C, C], of which those
    below the diagonal are stored; above it, entries have no meaning. Rows whose sums are all above `WEAK` have their products at once, the
    others level by level. `erase` and `written` are [B, T, MEMORIES, K], `chunk_decay` [B, N, MEMORIES, K], and `read` [B, T,
    HEADS, K].
    """
    h, chunk = tl.program_id(0) % HEADS, (tl.program_id(0) // HEADS).to(tl.int64)
    rows, keys, narrow = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, 32)
    wide = tl.arange(0, WIDTH)
    memory = h * MEMORIES // HEADS
    # Several heads may read one memory: the first of them stores the memory's arrays, but each the sums that it loads again.
    first = tl.zeros([1, 1], tl.int32) + h % (HEADS // MEMORIES) == 0
    q += (chunk * C * Q_HEADS + h * Q_HEADS // HEADS) * K
    k += (chunk * C * K_HEADS + h * K_HEADS // HEADS) * K
    decays = (chunk * C * MEMORIES + memory) * K
    g += decays
    sums += decays
    read += (chunk * C * HEADS + h) * K
    erase += (chunk * C * MEMORIES + memory) * K
    written += (chunk * C * MEMORIES + memory) * K
    chunk_decay += (chunk * MEMORIES + memory) * K
    scores += (chunk * HEADS + h) * C * C
    alike += (chunk * MEMORIES + memory) * C * C
    of_chunk = run + chunk * C
    i = rows[:, None]
    diagonal = tl.zeros([C], tl.float32)
    for key in range(0, K, 32):
        by_memory = key + i * (MEMORIES * K) + narrow[None, :]
        b = tl.cumsum(tl.maximum(tl.load(g + by_memory), -128.0), 0)
        tl.store(sums + by_memory, b)
        total = tl.sum(tl.where(i == C - 1, b, 0.0), 0)
        tile_q = tl.load(q + key + i * (Q_HEADS * K) + narrow[None, :]).to(tl.float32)
        tile_k = tl.load(k + key + i * (K_HEADS * K) + narrow[None, :]).to(tl.float32)
        diagonal += tl.sum(tile_q * tile_k, 1)
        read_decay = decay_of(b)
        end_decay = decay_of(total)
        write_decay = decay_of(tl.minimum(total[None, :] - b, 0.0))  # pyrefly: ignore[bad-index]
        if DOCUMENTS:
            read_decay = read_decay * tl.load(enters + chunk * C + rows)[:, None]
            write_decay = write_decay * tl.load(stays + chunk * C + rows)[:, None]
            end_decay = end_decay * tl.load(enters + chunk * C + C - 1)
        x = (tile_q * (read_decay * scale)).to(read.dtype.element_ty)
        tl.store(read + key + i * (HEADS * K) + narrow[None, :], x)
        tl.store(erase + by_memory, (tile_k * read_decay).to(erase.dtype.element_ty), mask=first)
        x = (tile_k * write_decay).to(written.dtype.element_ty)
        tl.store(written + by_memory, x, mask=first)
        tl.store(chunk_decay + key + narrow[None, :], end_decay[None, :], mask=first)
    tl.debug_barrier()  # the sums have been stored
    # 0, but no constant: else Triton moves the operands' layout in front of the exponentials, and each warp computes those of others.
    most = scale * 0.0
    lowest = tl.zeros([C], tl.float32)
    of_q = tl.zeros([C, C], tl.float32)
    of_k = tl.zeros([C, C], tl.float32)
    for key in tl.range(0, K, WIDTH, num_stages=1):
        at_key = key + wide[None, :]
        b = tl.load(sums + i * (MEMORIES * K) + at_key)
        lowest = tl.minimum(lowest, tl.min(b, 1))
        tile_k = tl.load(k + i * (K_HEADS * K) + at_key).to(tl.float32)
        # Rows with sums below `WEAK` use none of these products.
        factor = decay_of(tl.minimum(-b, most - WEAK))
        low_k = tl.trans((tile_k * factor).to(LOW))
        factor = decay_of(tl.minimum(b, most))
        tile_q = tl.load(q + i * (Q_HEADS * K) + at_key).to(tl.float32)
        of_q = tl.dot((tile_q * factor).to(LOW), low_k, of_q, input_precision="tf32")
        of_k = tl.dot((tile_k * factor).to(LOW), low_k, of_k, input_precision="tf32")
    # Whole rows, which fewer instructions store than parts; the diagonal comes after them.
    j, weak = rows[None, :], (lowest > WEAK)[:, None]
    if DOCUMENTS:
        same = tl.load(of_chunk + rows)[:, None] == tl.load(of_chunk + rows)[None, :]
        of_q = tl.where(same, of_q, 0.0)
        of_k = tl.where(same, of_k, 0.0)
    tl.store(scores + i * C + j, of_q * scale, mask=weak)
    tl.store(alike + i * C + j, of_k, mask=weak & first)
    tl.debug_barrier()  # the rows have been stored
    tl.store(scores + rows * (C + 1), diagonal * scale)
    # The other rows level by level, if there are any: which way computes a row depends on no later token.
    levels = tl.where(tl.min(lowest, 0) > WEAK, 0, LEVELS)
    pairs = tl.arange(0, C // 2)
    for level in tl.range(0, levels, num_stages=1):
        half = 1 << level
        earlier = (pairs >> level) * (2 * half) + (pairs & (half - 1))
        later = earlier + half
        # The last row of the earlier block, from which both blocks' sums are measured.
        middle = (pairs >> level) * (2 * half) + half - 1
        pairs_q = tl.zeros([C // 2, C // 2], tl.float32)
        pairs_k = tl.zeros([C // 2, C // 2], tl.float32)
        smallest = tl.zeros([C // 2], tl.float32)
        for key in tl.range(0, K, BK, num_stages=1):
            sums_at, at_key = sums + key + keys[None, :], key + keys[None, :]
            pivot = tl.load(sums_at + middle[:, None] * (MEMORIES * K))
            after = tl.load(sums_at + later[:, None] * (MEMORIES * K))
            before = tl.load(sums_at + earlier[:, None] * (MEMORIES * K))
            smallest = tl.minimum(smallest, tl.min(after, 1))
            x = tl.load(k + earlier[:, None] * (K_HEADS * K) + at_key).to(tl.float32)
            factor = decay_of(tl.minimum(pivot - before, most))
            low_k = tl.trans((x * factor).to(LOW))
            factor = decay_of(tl.minimum(after - pivot, most))
            x = tl.load(q + later[:, None] * (Q_HEADS * K) + at_key).to(tl.float32)
            pairs_q = tl.dot((x * factor).to(LOW), low_k, pairs_q, input_precision="tf32")
            x = tl.load(k + later[:, None] * (K_HEADS * K) + at_key).to(tl.float32)
            pairs_k = tl.dot((x * factor).to(LOW), low_k, pairs_k, input_precision="tf32")
        strong = (smallest <= WEAK)[:, None]
        store_pairs(pairs_q * scale, level, scores, strong, of_chunk, C, DOCUMENTS)
        store_pairs(pairs_k, level, alike, strong & first, of_chunk, C, DOCUMENTS)
