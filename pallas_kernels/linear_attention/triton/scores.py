"""The kernel of the decayed scores and keys of linear attention with a decay per key channel in Triton. Symbols, arrays and constants are
those of `bodies`.
"""

import triton
import triton.language as tl

from pallas_kernels.linear_attention.triton.exponential import decay_of

WEAK: tl.constexpr = tl.constexpr(-20.0)
"""The sum of the log decays since the chunk's start above which a row's products are computed at once, from factors of up to e^20."""


@triton.jit
def channel_scores(
    q, k, g, bonus, run, stays, scale, sums, written, scores,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, D_HEADS: tl.constexpr, HEADS: tl.constexpr,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, LEVELS: tl.constexpr, LOW: tl.constexpr,
    DOCUMENTS: tl.constexpr, EXCLUSIVE: tl.constexpr,
):  # fmt: skip
    """Store the sums of the log decay g [B, T, D_HEADS, K] of all chunks, the decayed keys, and the decayed scores P [B, N, HEADS, C, C].

    The sums are those of `bodies.sum_decays`, and `written` [B, T, D_HEADS, K] is k e^(b_C - b). Rows whose sums are all above `WEAK` have
    their scores at once, from q e^b and k e^-b, the others level by level of the halving of `pallas_kernels.tiles.channel_decay`: which way
    computes a row depends on no later token.
    """
    h, chunk = tl.program_id(0) % HEADS, (tl.program_id(0) // HEADS).to(tl.int64)
    rows, keys = tl.arange(0, C), tl.arange(0, BK)
    d_head = h * D_HEADS // HEADS
    # Several heads may read one memory: the first of them stores its keys, but each the sums that it loads again.
    first = tl.zeros([1, 1], tl.int32) + h % (HEADS // D_HEADS) == 0
    q += (chunk * C * Q_HEADS + h * Q_HEADS // HEADS) * K
    k += (chunk * C * K_HEADS + h * K_HEADS // HEADS) * K
    decays = (chunk * C * D_HEADS + d_head) * K
    g += decays
    sums += decays
    written += decays
    bonus += d_head * K
    i, j = rows[:, None], rows[None, :]
    by_key = i * (D_HEADS * K) + keys[None, :]
    q_rows = i * (Q_HEADS * K) + keys[None, :]
    k_rows = i * (K_HEADS * K) + keys[None, :]
    # 0, but no constant: else Triton moves the operands' layout in front of the exponentials, and each warp computes those of others.
    most = scale * 0.0
    P = tl.zeros([C, C], tl.float32)
    # By channel, for one sum and one minimum after the loop.
    own_products = tl.zeros([C, BK], tl.float32)
    smallest = tl.zeros([C, BK], tl.float32)
    for key in tl.range(0, K, BK, num_stages=1):
        own = tl.maximum(tl.load(g + key + by_key), -128.0)
        b = tl.cumsum(own, 0)
        tl.store(sums + key + by_key, b)
        smallest = tl.minimum(smallest, b)
        total = tl.sum(tl.where(i == C - 1, b, 0.0), 0)
        tile_q = tl.load(q + key + q_rows).to(tl.float32)
        tile_k = tl.load(k + key + k_rows).to(tl.float32)
        if EXCLUSIVE:
            weight = tl.load(bonus + key + keys)
            own_products += tile_q * tile_k * weight[None, :]
            before = b - own
        else:
            own_products += tile_q * tile_k
            before = b
        factor = decay_of(tl.minimum(total[None, :] - b, most))  # pyrefly: ignore[bad-index]
        if DOCUMENTS:
            factor = factor * tl.load(stays + chunk * C + rows)[:, None]
        x = (tile_k * factor).to(written.dtype.element_ty)
        tl.store(written + key + by_key, x, mask=first)
        # Rows with sums below `WEAK` use none of these products.
        low_k = (tile_k * decay_of(tl.minimum(-b, most - WEAK))).to(LOW)
        low_q = (tile_q * decay_of(tl.minimum(before, most))).to(LOW)
        P = tl.dot(low_q, tl.trans(low_k), P, input_precision="tf32")
    lowest = tl.min(smallest, 1)
    strong = (lowest <= WEAK)[:, None]
    P = tl.where(strong, 0.0, P)
    tl.debug_barrier()  # the sums have been stored
    levels = tl.where(tl.min(lowest, 0) > WEAK, 0, LEVELS)
    for level in tl.range(0, levels, num_stages=1):
        half = 1 << level
        later = (i & half) > 0
        # The last row of the earlier block, from which both blocks' sums are measured.
        middle = ((rows | (2 * half - 1)) - half)[:, None] * (D_HEADS * K) + keys[None, :]
        pairs = tl.zeros([C, C], tl.float32)
        for key in tl.range(0, K, BK, num_stages=1):
            tile_q = tl.load(q + key + q_rows).to(tl.float32)
            tile_k = tl.load(k + key + k_rows).to(tl.float32)
            inclusive = tl.load(sums + key + by_key)
            read_sums = inclusive
            if EXCLUSIVE:
                read_sums = tl.load(sums - D_HEADS * K + key + by_key, mask=i > 0, other=0.0)
            pivot = tl.load(sums + key + middle)
            away = tl.where(later, read_sums - pivot, pivot - inclusive)
            factor = decay_of(tl.minimum(away, most))
            X = (tl.where(later, tile_q, tile_k) * factor).to(LOW)
            pairs = tl.dot(X, tl.trans(X), pairs, input_precision="tf32")
        between = ((i ^ j) >= half) & ((i ^ j) < 2 * half)
        P += tl.where(between & strong, pairs, 0.0)
    current = tl.sum(own_products, 1)[:, None]  # pyrefly: ignore[bad-index]
    P = tl.where(i == j, current, tl.where(i > j, P, 0.0)) * scale
    if DOCUMENTS:
        of_chunk = run + chunk * C
        P = tl.where(tl.load(of_chunk + rows)[:, None] == tl.load(of_chunk + rows)[None, :], P, 0.0)
    target = scores + (chunk * HEADS + h) * C * C + i * C + j
    tl.store(target, P.to(scores.dtype.element_ty))
