"""The kernels of the delta rule that compute one chunk, or one part of a row, after the other. Symbols, arrays and constants are those of
`bodies`.

A long row may be divided into parts, which are then rows of the scans' arrays and are computed at the same time. A part changes a memory
S to `Θ S + W`: with `UPDATE` the scan computes W [K, V], the memory after a part that begins with an empty one, and Θ [K, K], the one
after a part that begins with the identity and to which nothing is written. The gradient of the memory before a part is `Θᵀ dS' + R`:
with `UPDATE` the reversed scan computes R [K, V], the one if dS', that of the memory after the part, is 0. `link_parts` computes the
memories before the parts, or the gradients of those after them, and without `UPDATE` the scans compute the rest from these.
"""

import triton
import triton.language as tl


@triton.jit
def delta_scan(
    erase, written, v, other_written, other_v, inverse, beta, erase_decay, write_decay, chunk_decay,
    bounds, initial, count, states, writes, final, transitions,
    K_HEADS: tl.constexpr, HEADS: tl.constexpr, SEGMENTS: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, LOW: tl.constexpr, CHANNELS: tl.constexpr,
    LOW_RANK: tl.constexpr, UPDATE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Carry memories through their chunks: u = beta ⊙ X (v - e^b ⊙ (k S)), `S' = e^b_C S + (k e^(b_C - b))ᵀ u`.

    `erase_decay` is e^b, or e^a if keys read the undecayed memory. With `EXACT` v - e^b ⊙ (k S) is the sum of two terms of dtype `LOW`,
    so that its rounding adds no error. With `LOW_RANK`, the memory of `dplr`, beta is 1, and
    `other_writtenᵀ other_v` [B, T, HEADS, K and V] is added to S' too. A program computes [K, BV] of one memory. The memories before the
    chunks are stored in `states` [B, N, HEADS, K, V], u in `writes` [B, T, HEADS, V]. `initial` and
    `final` are [B * SEGMENTS, HEADS, K, V] float32. With `UPDATE` only W and Θ are stored, as `final` and `transitions` [B, HEADS, K, K]
    float32: the columns of Θ come after those of W.
    """
    columns: tl.constexpr = (V + K if UPDATE else V) // BV
    column, at = tl.program_id(0) % columns * BV, tl.program_id(0) // columns
    h, memory = at % HEADS, (at // HEADS).to(tl.int64)
    b = memory // SEGMENTS
    if SEGMENTS > 1:
        first = tl.load(bounds + b * (SEGMENTS + 1) + memory % SEGMENTS)
        last = tl.load(bounds + b * (SEGMENTS + 1) + memory % SEGMENTS + 1)
    else:
        first = 0
        last = count
    rows, keys, values = tl.arange(0, C), tl.arange(0, K), tl.arange(0, BV)
    k_rows = rows[:, None] * (K_HEADS * K) + keys[None, :]
    v_rows = rows[:, None] * (HEADS * V) + values[None, :]
    square = rows[:, None] * C + rows[None, :]
    cell = keys[:, None] * V + values[None, :]
    outside = (memory * HEADS + h) * K * V + column
    chunks = b * count
    erase += (chunks * C * K_HEADS + h * K_HEADS // HEADS) * K
    written += (chunks * C * K_HEADS + h * K_HEADS // HEADS) * K
    other_written += (chunks * C * K_HEADS + h * K_HEADS // HEADS) * K
    # With `UPDATE`, whether the columns are of W; those of Θ have no values.
    of_values = column < V
    value = tl.where(of_values, column, 0) if UPDATE else column
    v += (chunks * C * HEADS + h) * V + value
    other_v += (chunks * C * HEADS + h) * V + value
    writes += (chunks * C * HEADS + h) * V + column
    states += (chunks * HEADS + h) * K * V + column
    inverse += (chunks * HEADS + h) * C * C
    beta += chunks * C * HEADS + h
    erase_decay += chunks * C * HEADS + h
    write_decay += chunks * C * HEADS + h
    if CHANNELS:
        chunk_decay += (chunks * HEADS + h) * K
    else:
        chunk_decay += chunks * HEADS + h
    if UPDATE:
        S = tl.where(column + values[None, :] == V + keys[:, None], 1.0, 0.0)
    else:
        S = tl.load(initial + outside + cell)
    for step in range(first, last):
        n = tl.cast(step, tl.int64)
        tile = tl.load(erase + n * (C * K_HEADS * K) + k_rows).to(LOW)
        if not UPDATE:
            tl.store(states + n * (HEADS * K * V) + cell, S.to(states.dtype.element_ty))
        predicted = tl.dot(tile, S.to(LOW), input_precision="tf32")
        if not CHANNELS:
            factor = tl.load(erase_decay + n * (C * HEADS) + rows * HEADS)
            predicted = predicted * factor[:, None]
        tile_v = tl.load(v + n * (C * HEADS * V) + v_rows).to(tl.float32)
        if UPDATE:
            tile_v = tl.where(of_values, tile_v, 0.0)
        X = tl.load(inverse + n * (HEADS * C * C) + square).to(LOW)
        difference = tile_v - predicted
        u = tl.dot(X, difference.to(LOW), input_precision="tf32")
        if EXACT:
            difference -= difference.to(LOW).to(tl.float32)
            u = tl.dot(X, difference.to(LOW), u, input_precision="tf32")
        if not LOW_RANK:
            u = u * tl.load(beta + n * (C * HEADS) + rows * HEADS)[:, None]
        if not UPDATE:
            tl.store(writes + n * (C * HEADS * V) + v_rows, u.to(writes.dtype.element_ty))
        if CHANNELS:
            tile = tl.load(written + n * (C * K_HEADS * K) + k_rows).to(LOW)
            S = S * tl.load(chunk_decay + n * (HEADS * K) + keys)[:, None]
        else:
            u = u * tl.load(write_decay + n * (C * HEADS) + rows * HEADS)[:, None]
            S = S * tl.load(chunk_decay + n * HEADS)
        S = tl.dot(tl.trans(tile), u.to(LOW), S, input_precision="tf32")
        if LOW_RANK:
            tile = tl.load(other_written + n * (C * K_HEADS * K) + k_rows).to(LOW)
            u = tl.load(other_v + n * (C * HEADS * V) + v_rows)
            if UPDATE:
                u = tl.where(of_values, u, 0.0)
            S = tl.dot(tl.trans(tile), u.to(LOW), S, input_precision="tf32")
    if UPDATE:
        # The addresses of the columns' matrix, W or Θ.
        of_transition = (memory * HEADS + h) * K * K + column - V
        matrix = tl.where(of_values, final + outside, transitions + of_transition)
        width = tl.where(of_values, V, K)
        tl.store(matrix + keys[:, None] * width + values[None, :], S)
    else:
        tl.store(final + outside + cell, S)


@triton.jit
def delta_scan_backward(
    read, erase, written, d_out, local, writes, inverse, beta, read_decay, erase_decay, write_decay,
    chunk_decay, bounds, d_final, count, scale, d_states, dv, d_beta, d_initial,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, MEMORIES: tl.constexpr, HEADS: tl.constexpr,
    SEGMENTS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
    LOW: tl.constexpr, CHANNELS: tl.constexpr, UNDECAYED: tl.constexpr, LOW_RANK: tl.constexpr,
    UPDATE: tl.constexpr,
):  # fmt: skip
    """Carry the gradients of memories from the last chunk to the first: du = Pᵀ dO + e^(b_C - b) ⊙ (k dS'), dv = Xᵀ (beta ⊙ du),
    `dS = e^b_C dS' + (scale e^b ⊙ q)ᵀ dO - (e^b ⊙ k)ᵀ dv`.

    A program computes [K, BV] of one gradient. `local` is Pᵀ dO, and `writes` u. The gradients of the memories after the chunks are
    stored in `d_states` [B, N, HEADS, K, V], dv [B, T, HEADS, V], and in d_beta [B, T, HEADS, V / BV] the terms x · dv / beta of each BV
    value channels, which are to be added. With `LOW_RANK` beta is 1 and d_beta is not stored. `d_final` and `d_initial` are [B * SEGMENTS, HEADS, K, V] float32.
    With `UPDATE` only R is stored, as `d_initial`, and `d_final` is 0.
    """
    columns: tl.constexpr = V // BV
    tile, at = tl.program_id(0) % columns, tl.program_id(0) // columns
    h, memory = at % HEADS, (at // HEADS).to(tl.int64)
    column = tile * BV
    b = memory // SEGMENTS
    if SEGMENTS > 1:
        first = tl.load(bounds + b * (SEGMENTS + 1) + memory % SEGMENTS)
        last = tl.load(bounds + b * (SEGMENTS + 1) + memory % SEGMENTS + 1)
    else:
        first = 0
        last = count
    rows, keys, values = tl.arange(0, C), tl.arange(0, K), tl.arange(0, BV)
    q_head, k_head, g = h * Q_HEADS // HEADS, h * K_HEADS // HEADS, h * MEMORIES // HEADS
    q_rows = rows[:, None] * (Q_HEADS * K) + keys[None, :]
    k_rows = rows[:, None] * (K_HEADS * K) + keys[None, :]
    v_rows = rows[:, None] * (HEADS * V) + values[None, :]
    u_rows = rows[:, None] * (MEMORIES * V) + values[None, :]
    square = rows[:, None] * C + rows[None, :]
    cell = keys[:, None] * V + values[None, :]
    outside = (memory * HEADS + h) * K * V + column
    chunks = b * count
    read += (chunks * C * Q_HEADS + q_head) * K
    erase += (chunks * C * K_HEADS + k_head) * K
    written += (chunks * C * K_HEADS + k_head) * K
    d_out += (chunks * C * HEADS + h) * V + column
    local += (chunks * C * HEADS + h) * V + column
    dv += (chunks * C * HEADS + h) * V + column
    d_beta += (chunks * C * HEADS + h) * columns + tile
    writes += (chunks * C * MEMORIES + g) * V + column
    d_states += (chunks * HEADS + h) * K * V + column
    inverse += (chunks * MEMORIES + g) * C * C
    beta += chunks * C * MEMORIES + g
    read_decay += chunks * C * MEMORIES + g
    erase_decay += chunks * C * MEMORIES + g
    write_decay += chunks * C * MEMORIES + g
    if CHANNELS:
        chunk_decay += (chunks * MEMORIES + g) * K
    else:
        chunk_decay += chunks * MEMORIES + g
    if UPDATE:
        dS = tl.zeros([K, BV], tl.float32)
    else:
        dS = tl.load(d_final + outside + cell)
    for step in range(first, last):
        n = tl.cast(first + last - 1 - step, tl.int64)
        by_row = n * (C * MEMORIES) + rows * MEMORIES
        tile_w = tl.load(written + n * (C * K_HEADS * K) + k_rows).to(LOW)
        X = tl.load(inverse + n * (MEMORIES * C * C) + square).to(LOW)
        if not UPDATE:
            tl.store(d_states + n * (HEADS * K * V) + cell, dS.to(d_states.dtype.element_ty))
        du = tl.dot(tile_w, dS.to(LOW), input_precision="tf32")
        if not CHANNELS:
            du = du * tl.load(write_decay + by_row)[:, None]
        du += tl.load(local + n * (C * HEADS * V) + v_rows).to(tl.float32)
        if not LOW_RANK:
            strength = tl.load(beta + by_row)[:, None]
            du = du * strength
        tile_dv = tl.dot(tl.trans(X), du.to(LOW), input_precision="tf32")
        if not UPDATE:
            tl.store(dv + n * (C * HEADS * V) + v_rows, tile_dv.to(dv.dtype.element_ty))
        if not LOW_RANK and not UPDATE:
            # beta may be so small that its square is 0.
            u = tl.load(writes + n * (C * MEMORIES * V) + u_rows).to(tl.float32)
            u = u / strength  # pyrefly: ignore[unbound-name]
            term = tl.sum(u * (tile_dv / strength), 1)
            tl.store(d_beta + n * (C * HEADS * columns) + rows * (HEADS * columns), term)
        tile_q = tl.load(read + n * (C * Q_HEADS * K) + q_rows).to(LOW)
        tile_d = tl.load(d_out + n * (C * HEADS * V) + v_rows)
        if CHANNELS:
            dS = dS * tl.load(chunk_decay + n * (MEMORIES * K) + keys)[:, None]
            tile_w = tl.load(erase + n * (C * K_HEADS * K) + k_rows).to(LOW)
        else:
            dS = dS * tl.load(chunk_decay + n * MEMORIES)
            factor = tl.load(read_decay + by_row)[:, None]
            tile_d = tile_d.to(tl.float32) * (factor * scale)
            if UNDECAYED:
                factor = tl.load(erase_decay + by_row)[:, None]
            tile_dv = tile_dv * factor
        dS = tl.dot(tl.trans(tile_q), tile_d.to(LOW), dS, input_precision="tf32")
        dS = tl.dot(tl.trans(tile_w), (-tile_dv).to(LOW), dS, input_precision="tf32")
    tl.store(d_initial + outside + cell, dS)


@triton.jit
def link_parts(
    transitions, written, outside, parts, starts,
    MEMORIES: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Store the memories before all parts of each row, S' = Θ S + W, or with `REVERSE` the gradients of those after them, dS = Θᵀ dS' + R.

    A program computes [K, BV] of one memory, with products of BK key channels. P is `parts`; `transitions` are Θ [B * P, MEMORIES, K, K],
    `written` W or R, and `starts` the results, [B * P, HEADS, K, V], and `outside` [B, HEADS, K, V] the memories before the rows, or the
    gradients of those after them, all float32.
    """
    columns: tl.constexpr = V // BV
    column, at = tl.program_id(0) % columns * BV, tl.program_id(0) // columns
    h, b = at % HEADS, (at // HEADS).to(tl.int64)
    keys, values = tl.arange(0, K), tl.arange(0, BV)
    cell = keys[:, None] * V + values[None, :]
    transitions += (b * parts * MEMORIES + h * MEMORIES // HEADS) * K * K
    written += (b * parts * HEADS + h) * K * V + column
    starts += (b * parts * HEADS + h) * K * V + column
    S = tl.load(outside + (b * HEADS + h) * K * V + column + cell)
    for step in range(0, parts - 1):
        n = tl.cast(parts - 1 - step if REVERSE else step, tl.int64)
        tl.store(starts + n * (HEADS * K * V) + cell, S)
        tl.debug_barrier()  # S has been stored
        S = tl.load(written + n * (HEADS * K * V) + cell)
        for key in tl.range(0, K, BK, num_stages=1):
            some = key + tl.arange(0, BK)
            of_part = transitions + n * (MEMORIES * K * K)
            if REVERSE:
                tile = tl.trans(tl.load(of_part + some[:, None] * K + keys[None, :]))
            else:
                tile = tl.load(of_part + keys[:, None] * K + some[None, :])
            rows = some[:, None] * V + values[None, :]
            before = tl.load(starts + n * (HEADS * K * V) + rows)
            S = tl.dot(tile, before, S, input_precision="tf32x3")
    n = 0 if REVERSE else parts - 1
    tl.store(starts + tl.cast(n, tl.int64) * (HEADS * K * V) + cell, S)
