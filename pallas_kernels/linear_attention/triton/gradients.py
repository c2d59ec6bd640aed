"""The Triton kernels of the linear memory's backward pass that compute all chunks in parallel; `bodies.scan` carries the gradient of the
memories through the chunks. Symbols, arrays and constants are those of `bodies`.
"""

import triton
import triton.language as tl

WEAK: tl.constexpr = tl.constexpr(-20.0)
"""The sum of the log decays of a chunk above which the gradients of all its pairs of tokens are computed at once, from factors of up to
e^20. One rounded factor for all pairs costs the decays' gradients precision, the more the steeper they are: those of the levels differ.
"""


@triton.jit
def score_gradients(
    d_out, v, cum, run, scale, d_scores,
    V_HEADS: tl.constexpr, D_HEADS: tl.constexpr, HEADS: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BV: tl.constexpr, LOW: tl.constexpr, DECAY: tl.constexpr,
    DOCUMENTS: tl.constexpr, UNDECAYED: tl.constexpr,
):  # fmt: skip
    """Store the gradient of the scores q kᵀ of all chunks, [B, N, HEADS, C, C]: scale dO vᵀ on and below the diagonal, 0 above.

    With a scalar decay (`DECAY`) it is multiplied by e^(b_i - b_j), with `UNDECAYED` by e^(b_(i-1) - b_j) and 0 on the diagonal too. d_out
    is [B, T, HEADS, V].
    """
    h, chunk = tl.program_id(0) % HEADS, (tl.program_id(0) // HEADS).to(tl.int64)
    rows, values = tl.arange(0, C), tl.arange(0, BV)
    d_out += (chunk * C * HEADS + h) * V
    v += (chunk * C * V_HEADS + h * V_HEADS // HEADS) * V
    i, j = rows[:, None], rows[None, :]
    dP = tl.zeros([C, C], tl.float32)
    for column in range(0, V, BV):
        tile_d = tl.load(d_out + column + rows[:, None] * (HEADS * V) + values[None, :])
        tile_v = tl.load(v + column + rows[:, None] * (V_HEADS * V) + values[None, :])
        dP = tl.dot(tile_d.to(LOW), tl.trans(tile_v.to(LOW)), dP, input_precision="tf32")
    seen = i > j if UNDECAYED else i >= j
    if DOCUMENTS:
        of_chunk = run + chunk * C
        seen = seen & (tl.load(of_chunk + rows)[:, None] == tl.load(of_chunk + rows)[None, :])
    if DECAY:
        of_token = cum + chunk * C * D_HEADS + h * D_HEADS // HEADS + rows * D_HEADS
        b = tl.load(of_token)
        if UNDECAYED:
            up_to = tl.load(of_token - D_HEADS, mask=rows > 0, other=0.0)
        else:
            up_to = b
        dP = dP * tl.exp(tl.where(seen, up_to[:, None] - b[None, :], 0.0))
    dP = tl.where(seen, dP * scale, 0.0)
    target = d_scores + (chunk * HEADS + h) * C * C + i * C + j
    tl.store(target, dP.to(d_scores.dtype.element_ty))


@triton.jit
def value_gradients(
    q, k, d_out, scores, cum, write_decay, sums, run, stays, d_states, scale, dv,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, D_HEADS: tl.constexpr, HEADS: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LOW: tl.constexpr, CHANNELS: tl.constexpr, DECAY: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Store the gradients of the values of all chunks, dv = Pᵀ dO + (k e^(b_C - b)) dS', [B, T, HEADS, V], in tiles [C, BV].

    `d_states` [B, N, HEADS, K, V] are the gradients of the memories after the chunks.
    """
    columns: tl.constexpr = V // BV
    tile, at = tl.program_id(0) % columns, tl.program_id(0) // columns
    h, chunk = at % HEADS, (at // HEADS).to(tl.int64)
    column = tile * BV
    rows, keys, values = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    d_head = h * D_HEADS // HEADS
    q += (chunk * C * Q_HEADS + h * Q_HEADS // HEADS) * K
    k += (chunk * C * K_HEADS + h * K_HEADS // HEADS) * K
    d_out += (chunk * C * HEADS + h) * V + column
    dv += (chunk * C * HEADS + h) * V + column
    d_states += (chunk * HEADS + h) * K * V + column
    sums += (chunk * C * D_HEADS + d_head) * K
    # Row i is the token that is read, and column j the token that reads.
    i, j = rows[:, None], rows[None, :]
    gradient = tl.zeros([C, BV], tl.float32)
    P = tl.zeros([C, C], tl.float32)
    for key in range(0, K, BK):
        tile_k = tl.load(k + key + rows[:, None] * (K_HEADS * K) + keys[None, :])
        dS = tl.load(d_states + key * V + keys[:, None] * V + values[None, :]).to(LOW)
        if CHANNELS:
            total = tl.load(sums + key + (C - 1) * (D_HEADS * K) + keys)
            b = tl.load(sums + key + rows[:, None] * (D_HEADS * K) + keys[None, :])
            written = tile_k.to(tl.float32) * tl.exp(tl.minimum(total[None, :] - b, 0.0))
            if DOCUMENTS:
                written = written * tl.load(stays + chunk * C + rows)[:, None]
            gradient = tl.dot(written.to(LOW), dS, gradient, input_precision="tf32")
        else:
            tile_q = tl.load(q + key + rows[:, None] * (Q_HEADS * K) + keys[None, :])
            P = tl.dot(tile_k.to(LOW), tl.trans(tile_q.to(LOW)), P, input_precision="tf32")
            gradient = tl.dot(tile_k.to(LOW), dS, gradient, input_precision="tf32")
    if CHANNELS:
        P = tl.load(scores + (chunk * HEADS + h) * C * C + j * C + i).to(tl.float32)
    else:
        by_row = chunk * C * D_HEADS + d_head + rows * D_HEADS
        gradient = gradient * tl.load(write_decay + by_row)[:, None]
        seen = i <= j
        if DOCUMENTS:
            of_chunk = run + chunk * C
            seen = seen & (tl.load(of_chunk + rows)[:, None] == tl.load(of_chunk + rows)[None, :])
        if DECAY:
            cums = tl.load(cum + by_row)
            P = P * tl.exp(tl.where(seen, cums[None, :] - cums[:, None], 0.0))
        P = tl.where(seen, P * scale, 0.0)
    tile_d = tl.load(d_out + rows[:, None] * (HEADS * V) + values[None, :])
    gradient = tl.dot(P.to(LOW), tile_d.to(LOW), gradient, input_precision="tf32")
    target = dv + rows[:, None] * (HEADS * V) + values[None, :]
    tl.store(target, gradient.to(dv.dtype.element_ty))


@triton.jit
def scalar_gradients(
    q, k, v, d_out, d_scores, read_decay, write_decay, chunk_decay, run, states, d_states, scale,
    dq, dk, dg,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, D_HEADS: tl.constexpr,
    HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, LOW: tl.constexpr, DECAY: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Store the gradients of the queries and keys of all chunks with a scalar decay or none, in tiles [C, BK].

    dq = dA k + scale e^b (dO Sᵀ), dk = dAᵀ q + (e^(b_C - b) v) dS'ᵀ, both [B, T, HEADS, K], with dA from `score_gradients`. With
    `DECAY`, dg [B, T, HEADS, K / BK] has the term of the log decay's gradient that comes from each BK key channels; the terms are to
    be added.
    """
    tiles: tl.constexpr = K // BK
    tile, at = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    h, chunk = at % HEADS, (at // HEADS).to(tl.int64)
    rows, keys, values = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    d_head, v_head = h * D_HEADS // HEADS, h * V_HEADS // HEADS
    q += (chunk * C * Q_HEADS + h * Q_HEADS // HEADS) * K + tile * BK
    k += (chunk * C * K_HEADS + h * K_HEADS // HEADS) * K + tile * BK
    v += (chunk * C * V_HEADS + v_head) * V
    d_out += (chunk * C * HEADS + h) * V
    states += (chunk * V_HEADS + v_head) * K * V + tile * BK * V
    d_states += (chunk * HEADS + h) * K * V + tile * BK * V
    d_scores += (chunk * HEADS + h) * C * C
    i, j = rows[:, None], rows[None, :]
    read = tl.zeros([C, BK], tl.float32)
    write = tl.zeros([C, BK], tl.float32)
    total = tl.zeros([BK], tl.float32)
    for column in range(0, V, BV):
        tile_d = tl.load(d_out + column + rows[:, None] * (HEADS * V) + values[None, :])
        tile_v = tl.load(v + column + rows[:, None] * (V_HEADS * V) + values[None, :])
        S = tl.load(states + column + keys[:, None] * V + values[None, :])
        dS = tl.load(d_states + column + keys[:, None] * V + values[None, :])
        read = tl.dot(tile_d.to(LOW), tl.trans(S.to(LOW)), read, input_precision="tf32")
        write = tl.dot(tile_v.to(LOW), tl.trans(dS.to(LOW)), write, input_precision="tf32")
        if DECAY:
            total += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
    by_row = chunk * C * D_HEADS + d_head + rows * D_HEADS
    read = read * (tl.load(read_decay + by_row) * scale)[:, None]
    write = write * tl.load(write_decay + by_row)[:, None]
    tile_q = tl.load(q + rows[:, None] * (Q_HEADS * K) + keys[None, :])
    tile_k = tl.load(k + rows[:, None] * (K_HEADS * K) + keys[None, :])
    # Without its diagonal, which no decay separates.
    dA = tl.load(d_scores + i * C + j, mask=i > j, other=0.0).to(LOW)
    read = tl.dot(dA, tile_k.to(LOW), read, input_precision="tf32")
    dA = tl.load(d_scores + j * C + i, mask=j > i, other=0.0).to(LOW)
    pairs = tl.dot(dA, tile_q.to(LOW), input_precision="tf32")
    diagonal = tl.load(d_scores + rows * (C + 1)).to(tl.float32)[:, None]
    tile_q, tile_k = tile_q.to(tl.float32), tile_k.to(tl.float32)
    if DECAY:
        later = tl.sum(tile_q * read - tile_k * pairs, 1)
        earlier = tl.sum(tile_k * write, 1)
        same = j >= i
        if DOCUMENTS:
            of_chunk = run + chunk * C
            same = same & (tl.load(of_chunk + rows)[:, None] == tl.load(of_chunk + rows)[None, :])
        gradient = tl.sum(tl.where(same, later[None, :], 0.0), 1)
        gradient += tl.sum(tl.where(j < i, earlier[None, :], 0.0), 1)
        gradient += tl.load(chunk_decay + chunk * D_HEADS + d_head) * tl.sum(total, 0)
        tl.store(dg + ((chunk * C * HEADS + h) + rows * HEADS) * tiles + tile, gradient)
    target = (chunk * C * HEADS + h) * K + tile * BK
    by_key = rows[:, None] * (HEADS * K) + keys[None, :]
    tl.store(dq + target + by_key, (read + diagonal * tile_k).to(dq.dtype.element_ty))
    tl.store(dk + target + by_key, (pairs + write + diagonal * tile_q).to(dk.dtype.element_ty))


@triton.jit
def masked_sums(mask, x, LOW: tl.constexpr):
    """Return the products of a boolean matrix [C, C] with x [C, K] float32: x is added in two terms that bfloat16 represents."""
    ones = tl.where(mask, 1.0, 0.0).to(LOW)
    high = x.to(tl.bfloat16).to(tl.float32)
    sums = tl.dot(ones, high.to(LOW), input_precision="tf32")
    return tl.dot(ones, (x - high).to(LOW), sums, input_precision="tf32")


@triton.jit
def _decay(sums, inclusive, pivot, queries, most, stride, EXCLUSIVE: tl.constexpr):
    """Return the decays [C, K], at most e^most, from the pivots to the rows that are of `queries`, and to the pivots from other rows.

    `inclusive` are the decays' sums, from the pointers `sums`. With `EXCLUSIVE` queries have the sums of the token before; the first
    token, which reads none of its chunk, may have any.
    """
    if EXCLUSIVE:  # read again, for which the registers do not suffice
        inclusive = tl.load(sums - tl.where(queries, stride, 0))
    return tl.exp(tl.minimum(tl.where(queries, inclusive - pivot, pivot - inclusive), most))


@triton.jit
def channel_gradients(
    q, k, v, d_out, d_scores, sums, bonus, run, enters, stays, states, d_states, scale,
    dq, dk, dg, d_bonus,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, D_HEADS: tl.constexpr,
    HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, LEVELS: tl.constexpr, LOW: tl.constexpr, DOCUMENTS: tl.constexpr,
    EXCLUSIVE: tl.constexpr, ONLY_QUERY: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Store the gradients of the queries, keys and log decays [B, T, HEADS, K] of all chunks with a decay per key channel.

    A program computes a tile [C, BK]. `d_scores` is scale dO vᵀ on and below the diagonal, from `score_gradients`. With `EXCLUSIVE`
    also the terms d_bonus [B, N, HEADS, K] of the bonus' gradient; with `ONLY_QUERY` only dq, and q and `d_states` are not read. With
    `EXACT`, which requires `ONLY_QUERY`, the decayed keys are the sum of two terms of dtype `LOW`, so that their rounding adds no error.
    """
    tiles: tl.constexpr = K // BK
    tile, at = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    h, chunk = at % HEADS, (at // HEADS).to(tl.int64)
    rows, keys, values = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    d_head, v_head = h * D_HEADS // HEADS, h * V_HEADS // HEADS
    q += (chunk * C * Q_HEADS + h * Q_HEADS // HEADS) * K + tile * BK
    k += (chunk * C * K_HEADS + h * K_HEADS // HEADS) * K + tile * BK
    v += (chunk * C * V_HEADS + v_head) * V
    d_out += (chunk * C * HEADS + h) * V
    states += (chunk * V_HEADS + v_head) * K * V + tile * BK * V
    d_states += (chunk * HEADS + h) * K * V + tile * BK * V
    d_scores += (chunk * HEADS + h) * C * C
    sums += (chunk * C * D_HEADS + d_head) * K + tile * BK
    i, j = rows[:, None], rows[None, :]
    by_key = rows[:, None] * (D_HEADS * K) + keys[None, :]
    read = tl.zeros([C, BK], tl.float32)
    for column in range(0, V, BV):
        tile_d = tl.load(d_out + column + rows[:, None] * (HEADS * V) + values[None, :])
        S = tl.load(states + column + keys[:, None] * V + values[None, :])
        read = tl.dot(tile_d.to(LOW), tl.trans(S.to(LOW)), read, input_precision="tf32")
    inclusive = tl.load(sums + by_key)
    if EXCLUSIVE:
        read_sums = tl.load(sums - D_HEADS * K + by_key, mask=i > 0, other=0.0)
    else:
        read_sums = inclusive
    total = tl.load(sums + (C - 1) * (D_HEADS * K) + keys)
    read_decay = tl.exp(read_sums) * scale
    if DOCUMENTS:
        read_decay = read_decay * tl.load(enters + chunk * C + rows)[:, None]
    read = read * read_decay
    tile_k = tl.load(k + rows[:, None] * (K_HEADS * K) + keys[None, :]).to(tl.float32)
    if ONLY_QUERY:
        tile_q = tile_k
    else:
        tile_q = tl.load(q + rows[:, None] * (Q_HEADS * K) + keys[None, :]).to(tl.float32)
    pairs = tl.zeros([C, BK], tl.float32)
    # dP below the diagonal and its transpose above, read once for all levels.
    below, above = i * C + j, j * C + i
    of_pairs = tl.where(i > j, tl.load(d_scores + below), tl.load(d_scores + above)).to(LOW)
    # Weak decays need no halving: in step 0 the keys of all pairs are multiplied, in step 1 the queries, by factors of up to e^-WEAK.
    # `ONLY_QUERY` serves outputs, which may not depend on whether the decays of later tokens are weak.
    weak = False
    most = 0.0
    steps = LEVELS
    if not ONLY_QUERY:
        weak = tl.min(total, 0) > WEAK
        most = tl.where(weak, -WEAK, 0.0)
        steps = tl.where(weak, 2, LEVELS)
    stride = tl.where(i > 0, D_HEADS * K, 0)
    for step in tl.range(0, steps, num_stages=1):
        half = 1 << step
        reads = tl.where(weak, step == 0, (i & half) > 0)  # rows of dX that are of queries
        between = ((i ^ j) >= half) & ((i ^ j) < 2 * half)
        between = tl.where(weak, tl.where(step == 0, i > j, i < j), between)
        middle = tl.where(weak, C // 2 - 1, (rows | (2 * half - 1)) - half)
        pivot = tl.load(sums + middle[:, None] * (D_HEADS * K) + keys[None, :])
        queries = reads != weak  # rows of X that are queries
        factor = _decay(sums + by_key, inclusive, pivot, queries, most, stride, EXCLUSIVE)
        wide = tl.where(queries, tile_q, tile_k) * factor
        X = wide.to(LOW)
        if not ONLY_QUERY:
            factor = _decay(sums + by_key, inclusive, pivot, reads, most, stride, EXCLUSIVE)
        weights = tl.where(between, of_pairs, 0.0)
        dX = tl.dot(weights, X, input_precision="tf32")
        if EXACT:
            rest = (wide - X.to(tl.float32)).to(LOW)
            dX = tl.dot(weights, rest, dX, input_precision="tf32")
        dX = dX * factor
        read += tl.where(reads, dX, 0.0)
        pairs += tl.where(reads, 0.0, dX)
    diagonal = tl.load(d_scores + rows * (C + 1)).to(tl.float32)[:, None]
    target = (chunk * C * HEADS + h) * K + tile * BK + rows[:, None] * (HEADS * K) + keys[None, :]
    if ONLY_QUERY:
        tl.store(dq + target, (read + diagonal * tile_k).to(dq.dtype.element_ty))
    else:
        after_own = tile_q * read - tile_k * pairs
        if EXCLUSIVE:
            of_bonus = (chunk * HEADS + h) * K + tile * BK + keys
            tl.store(d_bonus + of_bonus, tl.sum(diagonal * tile_q * tile_k, 0))
            diagonal = diagonal * tl.load(bonus + d_head * K + tile * BK + keys)[None, :]
            by_own = tile_q * read
        # dq and dk first, whose registers the sums then have.
        tl.store(dq + target, (read + diagonal * tile_k).to(dq.dtype.element_ty))
        pairs += diagonal * tile_q
        # The writes only now, for which the registers did not suffice; S is loaded again for the last token's decay.
        write = tl.zeros([C, BK], tl.float32)
        at_end = tl.zeros([BK], tl.float32)
        for column in range(0, V, BV):
            tile_v = tl.load(v + column + rows[:, None] * (V_HEADS * V) + values[None, :])
            dS = tl.load(d_states + column + keys[:, None] * V + values[None, :])
            write = tl.dot(tile_v.to(LOW), tl.trans(dS.to(LOW)), write, input_precision="tf32")
            S = tl.load(states + column + keys[:, None] * V + values[None, :])
            at_end += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
        write_decay = tl.exp(tl.minimum(total[None, :] - tl.load(sums + by_key), 0.0))
        chunk_decay = tl.exp(total)
        if DOCUMENTS:
            write_decay = write_decay * tl.load(stays + chunk * C + rows)[:, None]
            chunk_decay = chunk_decay * tl.load(enters + chunk * C + C - 1)
        write = write * write_decay
        tl.store(dk + target, (pairs + write).to(dk.dtype.element_ty))
        before_own = write * tl.load(k + rows[:, None] * (K_HEADS * K) + keys[None, :]).to(
            tl.float32
        )
        same = j >= i
        if DOCUMENTS:
            of_chunk = run + chunk * C
            same = same & (tl.load(of_chunk + rows)[:, None] == tl.load(of_chunk + rows)[None, :])
        gradient = masked_sums(same, after_own, LOW) + masked_sums(j < i, before_own, LOW)
        if EXCLUSIVE:  # a token reads before its own decay
            gradient -= by_own
        tl.store(dg + target, gradient + (chunk_decay * at_end)[None, :])
