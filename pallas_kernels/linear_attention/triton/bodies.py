"""Kernels of linear attention in Triton: the same source for every NVIDIA card of compute capability 8.0 or more.

This module, and `gradients` and `joined` with the kernels of the backward pass, import only Triton and each other, so that their kernels can also
run in Triton's interpreter and be compiled without a GPU. The mathematics is that of `pallas_kernels.tiles.scalar_decay` and
`pallas_kernels.tiles.channel_decay`, whose symbols are used here. A row of T tokens is divided into N chunks of C tokens. `scan` alone
computes one chunk after another: it carries the memory S (or, from the last chunk to the first, its gradient) and stores it at every
chunk's boundary. The other kernels compute all chunks in parallel from these memories.

Common to all kernels:

- Arrays of tokens are [B, T, heads, channels], contiguous. The number of heads of an array divides `HEADS`, the number of heads that
  the kernel computes. T is a multiple of C.
- `CHANNELS` is False for a scalar decay or none: then `read_decay` and `write_decay` [B, T, D_HEADS], `chunk_decay` [B, N, D_HEADS]
  and `cum` [B, T, D_HEADS] are the factors e^b, e^(b_C - b), e^b_C and the sums b, and the first three are 0 where documents end.
  `head_cum` [B, N, D_HEADS, C] are the sums once more, those of a chunk and head beside each other.
- `CHANNELS` is True for a decay per key channel: then `sums` [B, T, D_HEADS, K] has the sums b of the log decay from each chunk's
  start, and `enters` and `stays` [B, T] are 1 where a token's document is that of the last token before the chunk, or of the chunk's
  last token.
- `run` [B, T] is the number of each token's document. With `DOCUMENTS` False it is not read, nor are `enters` and `stays`.
- `PLAIN` is no decay and one document: the factors are 1 and are not read.
- `EXCLUSIVE` is the read before the write, with `bonus` [D_HEADS, K].
- An array that a kernel does not use is any other pointer.
- `LOW` is the dtype of the operands of matrix products: bfloat16, or float32 for products in tf32. Sums are float32.
- Sizes are constants of the compilation, and a program moves a pointer instead of computing offsets for each element: a thread then
  keeps one address.
"""

import triton
import triton.language as tl

from pallas_kernels.linear_attention.triton.exponential import decay_of


@triton.jit
def sum_decays(g, sums, HEADS: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr):
    """Store the sums of the log decay g [B, T, HEADS, K] over each chunk, up to and with each token.

    A decay below e^-128 is 0 in float32; larger sums would cost the others their precision.
    """
    tile, at = tl.program_id(0) % (K // BK), tl.program_id(0) // (K // BK)
    h, chunk = at % HEADS, (at // HEADS).to(tl.int64)
    start = (chunk * C * HEADS + h) * K + tile * BK
    offsets = tl.arange(0, C)[:, None] * (HEADS * K) + tl.arange(0, BK)[None, :]
    x = tl.maximum(tl.load(g + start + offsets).to(tl.float32), -128.0)
    tl.store(sums + start + offsets, tl.cumsum(x, 0))


@triton.jit
def scan(
    x, y, row_decay, chunk_decay, sums, marks, enters, bounds, initial, count, scale, states, final,
    X_HEADS: tl.constexpr, Y_HEADS: tl.constexpr, D_HEADS: tl.constexpr, HEADS: tl.constexpr,
    SEGMENTS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, LOW: tl.constexpr, CHANNELS: tl.constexpr, DOCUMENTS: tl.constexpr,
    EXCLUSIVE: tl.constexpr, REVERSE: tl.constexpr, SAVE: tl.constexpr, PLAIN: tl.constexpr,
    DECAYED: tl.constexpr,
):  # fmt: skip
    """Carry memories through their chunks, `S' = e^(b_C) S + (x f)ᵀ y`: the memory before each chunk, or its gradient after it.

    Forward, (x, y) = (k, v) and f = e^(b_C - b). With `REVERSE`, from the last chunk to the first, (x, y) = (q, dO) and f = scale e^b.
    With `DECAYED` x is x f / scale, of a decay per key channel. A program computes a tile [BK, BV] of one memory. `row_decay` is f / scale
    and `marks` is `stays`, or `enters` if `REVERSE`.
    `bounds` [B, SEGMENTS + 1] are the chunks at which a row's memories begin and end if SEGMENTS > 1. `initial` and `final` are [B *
    SEGMENTS, HEADS, K, V] float32; `states` [B, N, HEADS, K, V] is stored if `SAVE`.
    """
    columns: tl.constexpr = V // BV
    tiles: tl.constexpr = (K // BK) * columns
    tile, at = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    h, memory = at % HEADS, (at // HEADS).to(tl.int64)
    key, column = tile // columns * BK, tile % columns * BV
    b = memory // SEGMENTS
    if SEGMENTS > 1:
        first = tl.load(bounds + b * (SEGMENTS + 1) + memory % SEGMENTS)
        last = tl.load(bounds + b * (SEGMENTS + 1) + memory % SEGMENTS + 1)
    else:
        first = 0
        last = count
    rows, keys, values = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    x_head, y_head, d_head = h * X_HEADS // HEADS, h * Y_HEADS // HEADS, h * D_HEADS // HEADS
    chunks = b * count
    x += (chunks * C * X_HEADS + x_head) * K + key
    y += (chunks * C * Y_HEADS + y_head) * V + column
    states += (chunks * HEADS + h) * K * V + key * V + column
    cell = keys[:, None] * V + values[None, :]
    outside = (memory * HEADS + h) * K * V + key * V + column
    x_rows = rows[:, None] * (X_HEADS * K) + keys[None, :]
    y_rows = rows[:, None] * (Y_HEADS * V) + values[None, :]
    d_rows = rows[:, None] * (D_HEADS * K) + keys[None, :]
    sums += (chunks * C * D_HEADS + d_head) * K + key
    row_decay += chunks * C * D_HEADS + d_head
    chunk_decay += chunks * D_HEADS + d_head
    marks += chunks * C
    enters += chunks * C
    S = tl.load(initial + outside + cell)
    for step in range(first, last):
        if REVERSE:
            n = tl.cast(first + last - 1 - step, tl.int64)
        else:
            n = tl.cast(step, tl.int64)
        tile_x = tl.load(x + n * (C * X_HEADS * K) + x_rows)
        tile_y = tl.load(y + n * (C * Y_HEADS * V) + y_rows)
        if SAVE:
            tl.store(states + n * (HEADS * K * V) + cell, S.to(states.dtype.element_ty))
        if PLAIN:  # the scale forward too: else Triton would not load x ahead
            tile_x = tile_x.to(tl.float32) * scale
        elif CHANNELS:
            of_chunk = sums + n * (C * D_HEADS * K)
            total = tl.load(of_chunk + (C - 1) * (D_HEADS * K) + keys)
            if DECAYED:
                factor = 1.0
            elif REVERSE:
                if EXCLUSIVE:  # without the token's own decay
                    before = tl.load(
                        of_chunk - D_HEADS * K + d_rows, mask=rows[:, None] > 0, other=0.0
                    )
                else:
                    before = tl.load(of_chunk + d_rows)
                factor = tl.exp(before)
            else:
                factor = tl.exp(tl.minimum(total[None, :] - tl.load(of_chunk + d_rows), 0.0))
            decay = tl.exp(total)
            if DOCUMENTS:
                if not DECAYED:
                    factor = factor * tl.load(marks + n * C + rows)[:, None]
                decay = decay * tl.load(enters + n * C + C - 1)
            S = S * decay[:, None]
            tile_x = tile_x.to(tl.float32) * (factor * scale)
        else:
            factor = tl.load(row_decay + n * (C * D_HEADS) + rows * D_HEADS) * scale
            tile_x = tile_x.to(tl.float32) * factor[:, None]
            S = S * tl.load(chunk_decay + n * D_HEADS)
        S = tl.dot(tl.trans(tile_x.to(LOW)), tile_y.to(LOW), S, input_precision="tf32")
    tl.store(final + outside + cell, S)


@triton.jit
def outputs(
    q, k, v, scores, head_cum, read_decay, sums, run, enters, states, scale, out,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, D_HEADS: tl.constexpr,
    HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, LOW: tl.constexpr, CHANNELS: tl.constexpr, DECAY: tl.constexpr,
    DOCUMENTS: tl.constexpr, EXCLUSIVE: tl.constexpr, EXACT: tl.constexpr, DECAYED: tl.constexpr,
    PLAIN: tl.constexpr,
):  # fmt: skip
    """Store the outputs of all chunks, O = P v + scale (q e^b) S, in tiles [C, BV].

    With `EXACT` P is the sum of two terms of dtype `LOW`, so that its rounding adds no error. With `DECAYED` q is scale q e^b.
    With a scalar decay or none P is computed here, (q kᵀ) ⊙ scale e^(b_i - b_j); else it is read from `scores`, on and below the
    diagonal. `states` [B, N, V_HEADS, K, V] are the memories before the chunks.
    """
    columns: tl.constexpr = V // BV
    tile, at = tl.program_id(0) % columns, tl.program_id(0) // columns
    h, chunk = at % HEADS, (at // HEADS).to(tl.int64)
    column = tile * BV
    rows, keys, values = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    d_head, v_head = h * D_HEADS // HEADS, h * V_HEADS // HEADS
    q += (chunk * C * Q_HEADS + h * Q_HEADS // HEADS) * K
    k += (chunk * C * K_HEADS + h * K_HEADS // HEADS) * K
    v += (chunk * C * V_HEADS + v_head) * V + column
    out += (chunk * C * HEADS + h) * V + column
    states += (chunk * V_HEADS + v_head) * K * V + column
    sums += (chunk * C * D_HEADS + d_head) * K
    i, j = rows[:, None], rows[None, :]
    total = tl.zeros([C, BV], tl.float32)
    P = tl.zeros([C, C], tl.float32)
    for key in range(0, K, BK):
        tile_q = tl.load(q + key + rows[:, None] * (Q_HEADS * K) + keys[None, :])
        S = tl.load(states + key * V + keys[:, None] * V + values[None, :]).to(LOW)
        if DECAYED:
            total = tl.dot(tile_q.to(LOW), S, total, input_precision="tf32")
        elif CHANNELS:
            by_key = rows[:, None] * (D_HEADS * K) + keys[None, :]
            if EXCLUSIVE:
                before = tl.load(sums - D_HEADS * K + key + by_key, mask=i > 0, other=0.0)
            else:
                before = tl.load(sums + key + by_key)
            read = tile_q.to(tl.float32) * tl.exp(before) * scale
            if DOCUMENTS:
                read = read * tl.load(enters + chunk * C + rows)[:, None]
            total = tl.dot(read.to(LOW), S, total, input_precision="tf32")
        else:
            tile_k = tl.load(k + key + rows[:, None] * (K_HEADS * K) + keys[None, :])
            P = tl.dot(tile_q.to(LOW), tl.trans(tile_k.to(LOW)), P, input_precision="tf32")
            total = tl.dot(tile_q.to(LOW), S, total, input_precision="tf32")
    if CHANNELS:
        P = tl.load(scores + (chunk * HEADS + h) * C * C + i * C + j)
        P = tl.where(i >= j, P.to(tl.float32), 0.0)
    else:
        by_row = chunk * C * D_HEADS + d_head + rows * D_HEADS
        if PLAIN:
            total = total * scale
        else:
            total = total * (tl.load(read_decay + by_row) * scale)[:, None]
        seen = i >= j
        if DOCUMENTS:
            of_chunk = run + chunk * C
            seen = seen & (tl.load(of_chunk + rows)[:, None] == tl.load(of_chunk + rows)[None, :])
        if DECAY:
            b = tl.load(head_cum + (chunk * D_HEADS + d_head) * C + rows)
            P = P * decay_of(tl.where(seen, b[:, None] - b[None, :], 0.0))
        P = tl.where(seen, P * scale, 0.0)
    tile_v = tl.load(v + rows[:, None] * (V_HEADS * V) + values[None, :])
    total = tl.dot(P.to(LOW), tile_v.to(LOW), total, input_precision="tf32")
    if EXACT:
        P -= P.to(LOW).to(tl.float32)
        total = tl.dot(P.to(LOW), tile_v.to(LOW), total, input_precision="tf32")
    tl.store(out + rows[:, None] * (HEADS * V) + values[None, :], total.to(out.dtype.element_ty))
