"""Kernels of the delta rule in Triton: the same source for every NVIDIA card of compute capability 8.0 or more.

This module imports only Triton and other kernels, so that its kernels can also run in Triton's interpreter and be compiled without a
GPU. The mathematics is that of `pallas_kernels.tiles.delta`, whose symbols are used here. A row of T tokens is divided into N chunks of
C tokens. With u = beta ⊙ x the rows that are written to the memory S, a chunk is linear attention with the values u: `S' = e^b_C S + (k
e^(b_C - b))ᵀ u`, `O = P u + scale (q e^b) S`. The kernels of linear attention therefore compute the decayed products of tokens, the
outputs and the gradients of products (with `CHANNELS`, `scores.delta_scores` computes the products); the kernels of this module compute
u and the other gradients. `delta_scan` and `delta_scan_backward` compute one chunk after another; all other kernels compute the chunks
in parallel.

Arrays, `HEADS`, `LOW`, `CHANNELS`, `DECAY` and `DOCUMENTS` are those of `pallas_kernels.linear_attention.triton.bodies`. In addition:

- `beta` [B, T, MEMORIES] is float32 and not 0. `inverse` [B, N, MEMORIES, C, C] are the matrices X.
- With `CHANNELS`, the tokens that the scans read are decayed: `read` is scale q e^b, `erase` is k e^b and `written` is k e^(b_C - b),
  and `chunk_decay` [B, N, MEMORIES, K] is e^b_C. Without, they are q and k, and `read_decay`, `write_decay` and `chunk_decay` are
  factors of their rows.
- `count` is N. `bounds` [B, SEGMENTS + 1] are the chunks at which a row's memories begin and end if SEGMENTS > 1.
- With `UNDECAYED` keys read the memory ahead of their token's scalar decay: N, E and what k reads of S have the sums a_i = b_(i-1) up to the
  token before, a_0 = 0, in place of b_i, and `erase_decay` [B, T, MEMORIES] is e^a.
"""

import triton
import triton.language as tl

from pallas_kernels.linear_attention.triton.gradients import masked_sums


@triton.jit
def unit_inverse(strict, C: tl.constexpr, LEVELS: tl.constexpr, LOW: tl.constexpr):
    """Return the inverse of I + strict [C, C], for a strictly lower triangular matrix and C = 2^LEVELS: see
    `pallas_kernels.tiles.delta.unit_inverse`.
    """
    rows = tl.arange(0, C)
    apart = rows[:, None] ^ rows[None, :]
    x = tl.where(apart == 0, 1.0, tl.where(apart == 1, -strict, 0.0))
    # `strict` in two terms, each an operand of a product: they need fewer registers than its float32 numbers.
    high = strict.to(tl.bfloat16)
    rest = (strict - high.to(tl.float32)).to(LOW)
    low = strict.to(LOW)
    for level in tl.range(1, LEVELS, num_stages=1):
        size = 1 << level
        # x is 0 outside of blocks of `size`, so that the mask may follow the product, which then has one operand for all levels.
        left = tl.dot(x.to(LOW), low, input_precision="tf32")
        left = tl.where((apart >= size) & (apart < 2 * size), left, 0.0)
        x -= tl.dot(left.to(LOW), x.to(LOW), input_precision="tf32")
    # A Newton step, from the right, for which `strict` is not rounded: x (I - (I + strict) x) = x (I - x - strict x).
    rounded = x.to(LOW)
    x = rounded.to(tl.float32)
    left = tl.dot(high.to(LOW), rounded, x, input_precision="tf32")
    left = tl.dot(rest, rounded, left, input_precision="tf32")
    residual = tl.where(apart == 0, 1.0, 0.0) - left
    return tl.dot(rounded, residual.to(LOW), x, input_precision="tf32")


@triton.jit
def solve(
    k, alike, beta, cum, run, inverse,
    K_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    LEVELS: tl.constexpr, LOW: tl.constexpr, CHANNELS: tl.constexpr, DECAY: tl.constexpr,
    DOCUMENTS: tl.constexpr, UNDECAYED: tl.constexpr, LOW_RANK: tl.constexpr,
):  # fmt: skip
    """Store X = (I + N diag(beta))⁻¹ of all chunks, [B, N, HEADS, C, C]; with `LOW_RANK` beta is 1.

    N are the decayed products of keys with earlier keys: with `CHANNELS` they are read from `alike` [B, N, HEADS, C, C] float32.
    """
    h, chunk = tl.program_id(0) % HEADS, (tl.program_id(0) // HEADS).to(tl.int64)
    rows, keys = tl.arange(0, C), tl.arange(0, BK)
    i, j = rows[:, None], rows[None, :]
    by_row = chunk * C * HEADS + h + rows * HEADS
    square = (chunk * HEADS + h) * C * C + i * C + j
    below = i > j
    if CHANNELS:
        N = tl.load(alike + square).to(tl.float32)
    else:
        k += (chunk * C * K_HEADS + h * K_HEADS // HEADS) * K
        N = tl.zeros([C, C], tl.float32)
        for key in range(0, K, BK):
            tile = tl.load(k + key + rows[:, None] * (K_HEADS * K) + keys[None, :]).to(LOW)
            N = tl.dot(tile, tl.trans(tile), N, input_precision="tf32")
        if DOCUMENTS:
            of_chunk = run + chunk * C
            below = below & (tl.load(of_chunk + rows)[:, None] == tl.load(of_chunk + rows)[None, :])
        if DECAY:
            b = tl.load(cum + by_row)
            if UNDECAYED:
                a = tl.load(cum + by_row - HEADS, mask=rows > 0, other=0.0)
            else:
                a = b
            N = N * tl.exp(tl.where(below, a[:, None] - b[None, :], 0.0))
    if not LOW_RANK:
        N = N * tl.load(beta + by_row)[None, :]
    strict = tl.where(below, N, 0.0)
    X = unit_inverse(strict, C, LEVELS, LOW)
    tl.store(inverse + square, X.to(inverse.dtype.element_ty))


@triton.jit
def local_gradients(
    q, k, d_out, scores, cum, run, scale, gradient,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, D_HEADS: tl.constexpr, HEADS: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LOW: tl.constexpr, CHANNELS: tl.constexpr, DECAY: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Store Pᵀ dO of all chunks, [B, T, HEADS, V], in tiles [C, BV]: the gradient of u through the outputs of its chunk.

    With `CHANNELS` P is read from `scores` [B, N, HEADS, C, C], on and below the diagonal.
    """
    columns: tl.constexpr = V // BV
    column, at = tl.program_id(0) % columns * BV, tl.program_id(0) // columns
    h, chunk = at % HEADS, (at // HEADS).to(tl.int64)
    rows, keys, values = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    # Row i is the token that is read, and column j the token that reads.
    i, j = rows[:, None], rows[None, :]
    if CHANNELS:
        P = tl.load(scores + (chunk * HEADS + h) * C * C + j * C + i)
        P = tl.where(i <= j, P, 0.0)
    else:
        q += (chunk * C * Q_HEADS + h * Q_HEADS // HEADS) * K
        k += (chunk * C * K_HEADS + h * K_HEADS // HEADS) * K
        P = tl.zeros([C, C], tl.float32)
        for key in range(0, K, BK):
            tile_q = tl.load(q + key + rows[:, None] * (Q_HEADS * K) + keys[None, :])
            tile_k = tl.load(k + key + rows[:, None] * (K_HEADS * K) + keys[None, :])
            P = tl.dot(tile_k.to(LOW), tl.trans(tile_q.to(LOW)), P, input_precision="tf32")
        seen = i <= j
        if DOCUMENTS:
            of_chunk = run + chunk * C
            seen = seen & (tl.load(of_chunk + rows)[:, None] == tl.load(of_chunk + rows)[None, :])
        if DECAY:
            b = tl.load(cum + chunk * C * D_HEADS + h * D_HEADS // HEADS + rows * D_HEADS)
            P = P * tl.exp(tl.where(seen, b[None, :] - b[:, None], 0.0))
        P = tl.where(seen, P * scale, 0.0)
    place = (chunk * C * HEADS + h) * V + column + rows[:, None] * (HEADS * V) + values[None, :]
    total = tl.dot(P.to(LOW), tl.load(d_out + place).to(LOW), input_precision="tf32")
    tl.store(gradient + place, total.to(gradient.dtype.element_ty))


@triton.jit
def delta_scalar_gradients(
    q, k, writes, d_out, dv, d_scores, d_alike, read_decay, erase_decay, write_decay, chunk_decay,
    run, states, d_states, scale, dq, dk, dg,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, MEMORIES: tl.constexpr, HEADS: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LOW: tl.constexpr, DECAY: tl.constexpr, DOCUMENTS: tl.constexpr, UNDECAYED: tl.constexpr,
):  # fmt: skip
    """Store the gradients of the queries and keys of all chunks with a scalar decay or none, in tiles [C, BK].

    dq = A k + scale e^b ⊙ (dO Sᵀ), dk = Aᵀ q + (E + Eᵀ) k - e^b ⊙ (dv Sᵀ) + e^(b_C - b) ⊙ (u dS'ᵀ), both [B, T, HEADS, K]. A is
    `d_scores`, and E `d_alike` without its diagonal, both from `score_gradients` of linear attention. With `DECAY`, dg [B, T, HEADS,
    K / BK] has the term of the log decay's gradient that comes from each BK key channels; the terms are to be added.
    """
    tiles: tl.constexpr = K // BK
    tile, at = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    h, chunk = at % HEADS, (at // HEADS).to(tl.int64)
    rows, keys, values = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    g = h * MEMORIES // HEADS
    q += (chunk * C * Q_HEADS + h * Q_HEADS // HEADS) * K + tile * BK
    k += (chunk * C * K_HEADS + h * K_HEADS // HEADS) * K + tile * BK
    writes += (chunk * C * MEMORIES + g) * V
    d_out += (chunk * C * HEADS + h) * V
    dv += (chunk * C * HEADS + h) * V
    states += (chunk * MEMORIES + g) * K * V + tile * BK * V
    d_states += (chunk * HEADS + h) * K * V + tile * BK * V
    d_scores += (chunk * HEADS + h) * C * C
    d_alike += (chunk * HEADS + h) * C * C
    i, j = rows[:, None], rows[None, :]
    by_row = chunk * C * MEMORIES + g + rows * MEMORIES
    read = tl.zeros([C, BK], tl.float32)
    erase = tl.zeros([C, BK], tl.float32)
    write = tl.zeros([C, BK], tl.float32)
    total = tl.zeros([BK], tl.float32)
    for column in range(0, V, BV):
        by_value = column + rows[:, None] * (HEADS * V) + values[None, :]
        S = tl.load(states + column + keys[:, None] * V + values[None, :])
        dS = tl.load(d_states + column + keys[:, None] * V + values[None, :])
        turned = tl.trans(S.to(LOW))
        read = tl.dot(tl.load(d_out + by_value).to(LOW), turned, read, input_precision="tf32")
        erase = tl.dot(tl.load(dv + by_value).to(LOW), turned, erase, input_precision="tf32")
        u = tl.load(writes + column + rows[:, None] * (MEMORIES * V) + values[None, :]).to(LOW)
        write = tl.dot(u, tl.trans(dS.to(LOW)), write, input_precision="tf32")
        if DECAY:
            total += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
    factor = tl.load(read_decay + by_row)
    read = read * (factor * scale)[:, None]
    if UNDECAYED:
        factor = tl.load(erase_decay + by_row)
    erase = erase * -factor[:, None]
    write = write * tl.load(write_decay + by_row)[:, None]
    # Without the diagonal of A, which no decay separates. In parts, for whose loads the registers suffice.
    written = tl.zeros([C, BK], tl.float32)
    PART: tl.constexpr = C // 2
    for part in tl.range(0, C, PART, num_stages=1):
        others = part + tl.arange(0, PART)
        of_row, of_column = i * C + others[None, :], others[None, :] * C + i
        tile_k = tl.load(k + others[:, None] * (K_HEADS * K) + keys[None, :]).to(LOW)
        tile_q = tl.load(q + others[:, None] * (Q_HEADS * K) + keys[None, :]).to(LOW)
        before, after = i > others[None, :], i < others[None, :]
        pairs = tl.where(before, tl.load(d_scores + of_row), 0.0).to(LOW)
        read = tl.dot(pairs, tile_k, read, input_precision="tf32")
        pairs = tl.where(before, tl.load(d_alike + of_row), 0.0).to(LOW)
        erase = tl.dot(pairs, tile_k, erase, input_precision="tf32")
        pairs = tl.where(after, tl.load(d_alike + of_column), 0.0).to(LOW)
        written = tl.dot(pairs, tile_k, written, input_precision="tf32")
        pairs = tl.where(after, tl.load(d_scores + of_column), 0.0).to(LOW)
        written = tl.dot(pairs, tile_q, written, input_precision="tf32")
    diagonal = tl.load(d_scores + rows * (C + 1)).to(tl.float32)[:, None]
    tile_q = tl.load(q + rows[:, None] * (Q_HEADS * K) + keys[None, :]).to(tl.float32)
    tile_k = tl.load(k + rows[:, None] * (K_HEADS * K) + keys[None, :]).to(tl.float32)
    target = (chunk * C * HEADS + h) * K + tile * BK + rows[:, None] * (HEADS * K) + keys[None, :]
    if DECAY:
        if UNDECAYED:
            later = tl.sum(tile_q * read - tile_k * written, 1)
            erased = tl.sum(tile_k * erase, 1)
        else:
            later = tl.sum(tile_q * read + tile_k * (erase - written), 1)
        earlier = tl.sum(tile_k * write, 1)
    tl.store(dq + target, (read + diagonal * tile_k).to(dq.dtype.element_ty))
    gradient_k = erase + written + write + diagonal * tile_q
    tl.store(dk + target, gradient_k.to(dk.dtype.element_ty))
    if DECAY:
        same = j >= i
        if DOCUMENTS:
            of_chunk = run + chunk * C
            same = same & (tl.load(of_chunk + rows)[:, None] == tl.load(of_chunk + rows)[None, :])
        gradient = tl.sum(tl.where(same, later[None, :], 0.0), 1)
        if UNDECAYED:  # a token erases ahead of its own decay
            gradient += tl.sum(tl.where(same & (j > i), erased[None, :], 0.0), 1)
        gradient += tl.sum(tl.where(j < i, earlier[None, :], 0.0), 1)
        gradient += tl.load(chunk_decay + chunk * MEMORIES + g) * tl.sum(total, 0)
        tl.store(dg + ((chunk * C * HEADS + h) + rows * HEADS) * tiles + tile, gradient)


@triton.jit
def delta_channel_gradients(
    q, k, writes, d_out, dv, d_scores, d_alike, sums, run, enters, stays, states, d_states, scale,
    dq, dk, dg,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, MEMORIES: tl.constexpr, HEADS: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LEVELS: tl.constexpr, LOW: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Store the gradients of the queries, keys and log decays [B, T, HEADS, K] of all chunks with a decay per key channel, in tiles
    [C, BK].

    `d_scores` is scale dO uᵀ and `d_alike` -dv uᵀ, on and below the diagonal: the gradients of decayed products, which are computed level
    by level of the halving of `pallas_kernels.tiles.channel_decay`.
    """
    tiles: tl.constexpr = K // BK
    tile, at = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    h, chunk = at % HEADS, (at // HEADS).to(tl.int64)
    rows, keys, values = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    g = h * MEMORIES // HEADS
    q += (chunk * C * Q_HEADS + h * Q_HEADS // HEADS) * K + tile * BK
    k += (chunk * C * K_HEADS + h * K_HEADS // HEADS) * K + tile * BK
    writes += (chunk * C * MEMORIES + g) * V
    d_out += (chunk * C * HEADS + h) * V
    dv += (chunk * C * HEADS + h) * V
    states += (chunk * MEMORIES + g) * K * V + tile * BK * V
    d_states += (chunk * HEADS + h) * K * V + tile * BK * V
    d_scores += (chunk * HEADS + h) * C * C
    d_alike += (chunk * HEADS + h) * C * C
    sums += (chunk * C * MEMORIES + g) * K + tile * BK
    i, j = rows[:, None], rows[None, :]
    read = tl.zeros([C, BK], tl.float32)
    erase = tl.zeros([C, BK], tl.float32)
    write = tl.zeros([C, BK], tl.float32)
    at_end = tl.zeros([BK], tl.float32)
    for column in range(0, V, BV):
        by_value = column + rows[:, None] * (HEADS * V) + values[None, :]
        S = tl.load(states + column + keys[:, None] * V + values[None, :])
        dS = tl.load(d_states + column + keys[:, None] * V + values[None, :])
        turned = tl.trans(S.to(LOW))
        read = tl.dot(tl.load(d_out + by_value).to(LOW), turned, read, input_precision="tf32")
        erase = tl.dot(tl.load(dv + by_value).to(LOW), turned, erase, input_precision="tf32")
        u = tl.load(writes + column + rows[:, None] * (MEMORIES * V) + values[None, :]).to(LOW)
        write = tl.dot(u, tl.trans(dS.to(LOW)), write, input_precision="tf32")
        at_end += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
    b = tl.load(sums + rows[:, None] * (MEMORIES * K) + keys[None, :])
    total = tl.load(sums + (C - 1) * (MEMORIES * K) + keys)
    read_decay = tl.exp(b)
    write_decay = tl.exp(tl.minimum(total[None, :] - b, 0.0))
    at_end = at_end * tl.exp(total)
    if DOCUMENTS:
        read_decay = read_decay * tl.load(enters + chunk * C + rows)[:, None]
        write_decay = write_decay * tl.load(stays + chunk * C + rows)[:, None]
        at_end = at_end * tl.load(enters + chunk * C + C - 1)
    read = read * (read_decay * scale)
    erase = erase * -read_decay
    write = write * write_decay
    tile_q = tl.load(q + rows[:, None] * (Q_HEADS * K) + keys[None, :]).to(tl.float32)
    tile_k = tl.load(k + rows[:, None] * (K_HEADS * K) + keys[None, :]).to(tl.float32)
    written = tl.zeros([C, BK], tl.float32)
    # Both below the diagonal and their transposes above, read once for all levels.
    below, above = i * C + j, j * C + i
    of_scores = tl.where(i > j, tl.load(d_scores + below), tl.load(d_scores + above)).to(LOW)
    of_alike = tl.where(i > j, tl.load(d_alike + below), tl.load(d_alike + above)).to(LOW)
    for level in tl.range(0, LEVELS, num_stages=1):
        half = 1 << level
        later = (i & half) > 0
        middle = ((rows | (2 * half - 1)) - half)[:, None] * (MEMORIES * K) + keys[None, :]
        pivot = tl.load(sums + middle)
        factor = tl.exp(tl.minimum(tl.where(later, b - pivot, pivot - b), 0.0))
        between = ((i ^ j) >= half) & ((i ^ j) < 2 * half)
        X = (tl.where(later, tile_q, tile_k) * factor).to(LOW)
        dX = tl.dot(tl.where(between, of_scores, 0.0), X, input_precision="tf32") * factor
        read += tl.where(later, dX, 0.0)
        written += tl.where(later, 0.0, dX)
        X = (tile_k * factor).to(LOW)
        dX = tl.dot(tl.where(between, of_alike, 0.0), X, input_precision="tf32") * factor
        erase += tl.where(later, dX, 0.0)
        written += tl.where(later, 0.0, dX)
    same = j >= i
    if DOCUMENTS:
        of_chunk = run + chunk * C
        same = same & (tl.load(of_chunk + rows)[:, None] == tl.load(of_chunk + rows)[None, :])
    target = (chunk * C * HEADS + h) * K + tile * BK + rows[:, None] * (HEADS * K) + keys[None, :]
    gradient = masked_sums(same, tile_q * read + tile_k * (erase - written), LOW)
    gradient += masked_sums(j < i, tile_k * write, LOW)
    tl.store(dg + target, gradient + at_end[None, :])
    diagonal = tl.load(d_scores + rows * (C + 1)).to(tl.float32)[:, None]
    tl.store(dq + target, (read + diagonal * tile_k).to(dq.dtype.element_ty))
    gradient = erase + written + write + diagonal * tile_q
    tl.store(dk + target, gradient.to(dk.dtype.element_ty))
