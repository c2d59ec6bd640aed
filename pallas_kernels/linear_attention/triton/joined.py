"""The Triton kernel that computes all gradients of a chunk with a scalar decay or none in one program. Symbols, arrays and constants are
those of `bodies`.

The kernels of `gradients` load q, k, v, dO, the memories and their gradients up to three times from the card's memory, and store the
gradient of the scores between them. Here each comes from there once, and from the caches when it is loaded again, since the registers do
not suffice for all.
"""

import triton
import triton.language as tl

from pallas_kernels.linear_attention.triton.exponential import decay_of

WEAK: tl.constexpr = tl.constexpr(-40.0)
"""The sum of a chunk's log decays above which the decays between its tokens are products of those from and to its middle, of up to e^40
and as exact as the exponential of a difference for products of 1e-20 and more, which the first factor may leave at 1e-37."""


@triton.jit
def _seen(of_chunk, C: tl.constexpr, DOCUMENTS: tl.constexpr):
    """Return whether row i's token is read by column j's, [C, C]: i <= j, of one document. `of_chunk` are the tokens' documents."""
    rows = tl.arange(0, C)
    seen = rows[:, None] <= rows[None, :]
    if DOCUMENTS:
        seen = seen & (tl.load(of_chunk + rows)[:, None] == tl.load(of_chunk + rows)[None, :])
    return seen


@triton.jit
def _decayed(products, cum, of_chunk, scale, C: tl.constexpr, DECAY: tl.constexpr, DOCUMENTS: tl.constexpr):  # fmt: skip
    """Return products [C, C] of row i's and column j's token times scale e^(b_j - b_i) if i <= j and both are of one document, else 0.

    `cum` points to the sum b of the first token, and `of_chunk` the tokens' documents.
    """
    seen = _seen(of_chunk, C, DOCUMENTS)
    if DECAY:
        b = tl.load(cum + tl.arange(0, C))
        if tl.load(cum + C - 1) > WEAK:
            middle = tl.load(cum + C // 2 - 1)
            products = products * decay_of(b - middle)[None, :] * decay_of(middle - b)[:, None]
        else:
            products = products * decay_of(tl.where(seen, b[None, :] - b[:, None], 0.0))
    return tl.where(seen, products * scale, 0.0)


@triton.jit
def joined_gradients(
    q, k, v, d_out, head_cum, read_decay, write_decay, chunk_decay, run, states, d_states, scale, dq, dk, dv, dg,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, D_HEADS: tl.constexpr,
    HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LOW: tl.constexpr, DECAY: tl.constexpr, PLAIN: tl.constexpr, GRADIENT: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Store the gradients of the queries, keys and values of all chunks, [B, T, HEADS, K or V], and with `GRADIENT` that of a scalar log
    decay, dg [B, T, HEADS].

    dv = Pᵀ dO + (k e^(b_C - b)) dS', dq = dA k + scale e^b (dO Sᵀ) and dk = dAᵀ q + (e^(b_C - b) v) dS'ᵀ, with P = (q kᵀ) ⊙ D, dA = (dO
    vᵀ) ⊙ D and D = scale e^(b_i - b_j) on and below the diagonal. A program computes one chunk of one head.
    """
    h, chunk = tl.program_id(0) % HEADS, (tl.program_id(0) // HEADS).to(tl.int64)
    rows, keys, values = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    d_head, v_head = h * D_HEADS // HEADS, h * V_HEADS // HEADS
    q += (chunk * C * Q_HEADS + h * Q_HEADS // HEADS) * K
    k += (chunk * C * K_HEADS + h * K_HEADS // HEADS) * K
    v += (chunk * C * V_HEADS + v_head) * V
    out = chunk * C * HEADS + h
    d_out += out * V
    dv += out * V
    dq += out * K
    dk += out * K
    states += (chunk * V_HEADS + v_head) * K * V
    d_states += (chunk * HEADS + h) * K * V
    of_decay = head_cum + (chunk * D_HEADS + d_head) * C
    by_row = chunk * C * D_HEADS + d_head + rows * D_HEADS
    q_rows = rows[:, None] * (Q_HEADS * K) + keys[None, :]
    k_rows = rows[:, None] * (K_HEADS * K) + keys[None, :]
    v_rows = rows[:, None] * (V_HEADS * V) + values[None, :]
    d_rows = rows[:, None] * (HEADS * V) + values[None, :]
    dk_rows = rows[:, None] * (HEADS * K) + keys[None, :]
    cell = keys[:, None] * V + values[None, :]
    # Row i is the token that is read, and column j the token that reads.
    i, j = rows[:, None], rows[None, :]
    dA = tl.zeros([C, C], tl.float32)
    for column in range(0, V, BV):
        tile_d = tl.load(d_out + column + d_rows).to(LOW)
        tile_v = tl.load(v + column + v_rows).to(LOW)
        dA = tl.dot(tile_v, tl.trans(tile_d), dA, input_precision="tf32")
    dA = _decayed(dA, of_decay, run + chunk * C, scale, C, DECAY, DOCUMENTS)
    diagonal = 0.0
    if GRADIENT:  # without its diagonal, which no decay separates
        diagonal = tl.sum(tl.where(i == j, dA, 0.0), 1)[:, None]  # pyrefly: ignore[bad-index]
        dA = tl.where(i < j, dA, 0.0)
    dA = dA.to(LOW)
    if PLAIN:
        read_factor = scale
        write_factor = 1.0
    else:
        read_factor = (tl.load(read_decay + by_row) * scale)[:, None]
        write_factor = tl.load(write_decay + by_row)[:, None]
    later = tl.zeros([C], tl.float32)
    earlier = tl.zeros([C], tl.float32)
    total = tl.zeros([BK], tl.float32)
    for key in range(0, K, BK):
        read = tl.zeros([C, BK], tl.float32)
        for column in range(0, V, BV):
            tile_d = tl.load(d_out + column + d_rows).to(LOW)
            S = tl.load(states + key * V + column + cell).to(LOW)
            read = tl.dot(tile_d, tl.trans(S), read, input_precision="tf32")
        tile_k = tl.load(k + key + k_rows)
        read = read * read_factor
        read = tl.dot(tl.trans(dA), tile_k.to(LOW), read, input_precision="tf32")
        if GRADIENT:
            later += tl.sum(tl.load(q + key + q_rows).to(tl.float32) * read, 1)
            read += diagonal * tile_k.to(tl.float32)
        tl.store(dq + key + dk_rows, read.to(dq.dtype.element_ty))
        write = tl.zeros([C, BK], tl.float32)
        for column in range(0, V, BV):
            tile_v = tl.load(v + column + v_rows).to(LOW)
            dS = tl.load(d_states + key * V + column + cell).to(LOW)
            write = tl.dot(tile_v, tl.trans(dS), write, input_precision="tf32")
            if GRADIENT:
                S = tl.load(states + key * V + column + cell)
                total += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
        if not PLAIN:
            write = write * write_factor
        tile_q = tl.load(q + key + q_rows)
        if GRADIENT:
            tile_k = tl.load(k + key + k_rows).to(tl.float32)
            earlier += tl.sum(tile_k * write, 1)
            pairs = tl.dot(dA, tile_q.to(LOW), input_precision="tf32")
            later -= tl.sum(tile_k * pairs, 1)
            write += pairs + diagonal * tile_q.to(tl.float32)
        else:
            write = tl.dot(dA, tile_q.to(LOW), write, input_precision="tf32")
        tl.store(dk + key + dk_rows, write.to(dk.dtype.element_ty))
    if GRADIENT:
        after = _seen(run + chunk * C, C, DOCUMENTS)
        sums = tl.sum(tl.where(after, later[None, :], 0.0), 1)
        sums += tl.sum(tl.where(j < i, earlier[None, :], 0.0), 1)
        sums += tl.load(chunk_decay + chunk * D_HEADS + d_head) * tl.sum(total, 0)
        tl.store(dg + out + rows * HEADS, sums)
    P = tl.zeros([C, C], tl.float32)
    for key in range(0, K, BK):
        tile_k = tl.load(k + key + k_rows).to(LOW)
        tile_q = tl.load(q + key + q_rows).to(LOW)
        P = tl.dot(tile_k, tl.trans(tile_q), P, input_precision="tf32")
    P = _decayed(P, of_decay, run + chunk * C, scale, C, DECAY, DOCUMENTS).to(LOW)
    for column in range(0, V, BV):
        gradient = tl.zeros([C, BV], tl.float32)
        for key in range(0, K, BK):
            tile_k = tl.load(k + key + k_rows).to(LOW)
            dS = tl.load(d_states + key * V + column + cell).to(LOW)
            gradient = tl.dot(tile_k, dS, gradient, input_precision="tf32")
        if not PLAIN:
            gradient = gradient * write_factor
        tile_d = tl.load(d_out + column + d_rows).to(LOW)
        gradient = tl.dot(P, tile_d, gradient, input_precision="tf32")
        tl.store(dv + column + d_rows, gradient.to(dv.dtype.element_ty))
