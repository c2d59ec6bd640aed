"""Kernels of Mamba's selective scan in Triton: the same source for every NVIDIA card of compute capability 8.0 or more.

This module imports only Triton, so that its kernels can also run in Triton's interpreter and be compiled without a GPU. The scan is
`h_t = continues_t exp2(delta_t a) h_{t-1} + delta_t u_t b_t`, `y_t = Σ_n c_t h_t + d u_t`, with D channels of N entries each.

A program computes BD channels, whose memories [BD, N] are in its registers, token by token. A row of T tokens has T / C chunks of C
tokens, and `PARTS` parts of `PER` chunks (the last part may have fewer). All parts are computed in parallel: `selective_writes` computes the
memory that a part leaves if it begins with an empty one, `selective_carry` the memories that enter the parts, and then `selective_forward` the outputs.
The gradients are computed in the same way from the last token to the first. With one part, `selective_writes` and `selective_carry` are not needed.

Common to all kernels:

- u and y are [B, T, D]; delta [B, T, D], b and c [B, T, N], d [D] and `continues` [B, T] are float32; a [D, N] is the rates of decay times
  log2(e). Memories are float32. All are contiguous.
- `continues` is 0 at the first token of a document and else 1; with `DOCUMENTS` False it is not read.
- The tokens of a group of `GROUP` tokens are loaded together, before any is computed. GROUP divides C.
- An array that a kernel does not use is any other pointer.
"""

import triton
import triton.language as tl


@triton.jit
def _load_tokens(pointer, stride: tl.constexpr, offsets, GROUP: tl.constexpr):
    """Return the rows of GROUP tokens in float32, as a tuple: `pointer` + token * stride + offsets."""
    rows = ()
    for i in tl.static_range(GROUP):
        rows = rows + (tl.load(pointer + i * stride + offsets).to(tl.float32),)
    return rows


@triton.jit
def _decay(delta, rates, continues, i: tl.constexpr, DOCUMENTS: tl.constexpr):
    """Return the decay [BD, N] of token i, with delta [BD] and the rates [BD, N]; `continues` points at token 0."""
    decay = tl.exp2(delta[:, None] * rates)
    if DOCUMENTS:
        decay = decay * tl.load(continues + i)
    return decay


@triton.jit
def selective_writes(
    x, delta, a, factor, continues, chunks, write, decay,
    D: tl.constexpr, N: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, PARTS: tl.constexpr,
    PER: tl.constexpr, GROUP: tl.constexpr, DOCUMENTS: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Store the memory after each part that begins with an empty one, `write` [B, PARTS, D, N], and each part's `decay` [B, PARTS, D, N].

    x is u and `factor` is b. With `REVERSE`, x is dy and `factor` is c, and `write` is the gradient of the memory before each part, as far as
    it comes from the part's outputs.
    """
    columns: tl.constexpr = D // BD
    column, at = tl.program_id(0) % columns, (tl.program_id(0) // columns).to(tl.int64)
    part, row = at % PARTS, at // PARTS
    first = part * PER * C
    last = tl.minimum((part + 1) * PER, chunks) * C
    channels, entries = column * BD + tl.arange(0, BD), tl.arange(0, N)
    tile = channels[:, None] * N + entries[None, :]
    x += row * chunks * C * D
    delta += row * chunks * C * D
    factor += row * chunks * C * N
    continues += row * chunks * C
    rates = tl.load(a + tile)
    memory = tl.zeros([BD, N], tl.float32)
    total = tl.zeros([BD], tl.float32)
    connected = 1.0
    for step in range(first, last, GROUP):
        if REVERSE:
            t = first + last - GROUP - step
        else:
            t = step
        xs = _load_tokens(x + t * D, D, channels, GROUP)
        deltas = _load_tokens(delta + t * D, D, channels, GROUP)
        factors = _load_tokens(factor + t * N, N, entries, GROUP)
        for i in tl.static_range(GROUP):
            if REVERSE:
                written = xs[GROUP - 1 - i][:, None] * factors[GROUP - 1 - i][None, :]
                token_decay = _decay(deltas[GROUP - 1 - i], rates, continues + t, GROUP - 1 - i, DOCUMENTS)  # fmt: skip
                memory = token_decay * (memory + written)
            else:
                written = (deltas[i] * xs[i])[:, None] * factors[i][None, :]
                memory = _decay(deltas[i], rates, continues + t, i, DOCUMENTS) * memory + written
            total += deltas[i]
            if DOCUMENTS:
                connected = connected * tl.load(continues + t + i)
    tl.store(write + at * (D * N) + tile, memory)
    tl.store(decay + at * (D * N) + tile, tl.exp2(total[:, None] * rates) * connected)


@triton.jit
def selective_carry(
    write, decay, initial, entering,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Store the memory that enters each part, [B, PARTS, SIZE] with SIZE = D N, from the results of `selective_writes` and the `initial` memory [B, SIZE].

    With `REVERSE`, from the last part to the first, the gradient of the memory after each part, and `initial` is that of the final memory.
    """
    columns: tl.constexpr = SIZE // BLOCK
    column, row = tl.program_id(0) % columns, (tl.program_id(0) // columns).to(tl.int64)
    entries = column * BLOCK + tl.arange(0, BLOCK)
    memory = tl.load(initial + row * SIZE + entries)
    for step in range(0, PARTS):
        if REVERSE:
            part = PARTS - 1 - step
        else:
            part = step
        to = (row * PARTS + part) * SIZE + entries
        tl.store(entering + to, memory)
        memory = tl.load(decay + to) * memory + tl.load(write + to)


@triton.jit
def selective_forward(
    u, delta, a, b, c, d, continues, entering, chunks, y, states, final,
    D: tl.constexpr, N: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, PARTS: tl.constexpr,
    PER: tl.constexpr, GROUP: tl.constexpr, DOCUMENTS: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """Store the outputs y from the memories `entering` each part [B, PARTS, D, N], the memories `final` after each part, of the same shape, and,
    if `SAVE`, the memories `states` before each chunk [B, T / C, D, N].
    """
    columns: tl.constexpr = D // BD
    column, at = tl.program_id(0) % columns, (tl.program_id(0) // columns).to(tl.int64)
    part, row = at % PARTS, at // PARTS
    first = part * PER
    last = tl.minimum(first + PER, chunks)
    channels, entries = column * BD + tl.arange(0, BD), tl.arange(0, N)
    tile = channels[:, None] * N + entries[None, :]
    u += row * chunks * C * D
    delta += row * chunks * C * D
    y += row * chunks * C * D
    b += row * chunks * C * N
    c += row * chunks * C * N
    continues += row * chunks * C
    states += row * chunks * D * N
    rates = tl.load(a + tile)
    skip = tl.load(d + channels)
    tokens = tl.arange(0, GROUP)[None, :]
    memory = tl.load(entering + at * (D * N) + tile)
    for chunk in range(first, last):
        if SAVE:
            tl.store(states + chunk * (D * N) + tile, memory)
        for group in range(0, C, GROUP):
            t = chunk * C + group
            us = _load_tokens(u + t * D, D, channels, GROUP)
            deltas = _load_tokens(delta + t * D, D, channels, GROUP)
            bs = _load_tokens(b + t * N, N, entries, GROUP)
            cs = _load_tokens(c + t * N, N, entries, GROUP)
            outputs = tl.zeros([BD, GROUP], tl.float32)
            for i in tl.static_range(GROUP):
                token_decay = _decay(deltas[i], rates, continues + t, i, DOCUMENTS)
                memory = token_decay * memory + (deltas[i] * us[i])[:, None] * bs[i][None, :]
                output = tl.sum(memory * cs[i][None, :], 1) + skip * us[i]
                outputs = tl.where(tokens == i, output[:, None], outputs)
            tl.store(y + (t + tokens) * D + channels[:, None], outputs.to(y.dtype.element_ty))
    tl.store(final + at * (D * N) + tile, memory)


@triton.jit
def selective_backward(
    u, delta, a, b, c, d, continues, states, dy, leaving, chunks,
    du, d_delta, da, db, dc, d_entering, starts,
    D: tl.constexpr, N: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, PARTS: tl.constexpr,
    PER: tl.constexpr, GROUP: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Store the gradients of u, delta [B, T, D], a (of each part, [B, PARTS, D, N]), b and c (of each BD channels, [B, D / BD, T, N]), and of the
    memories that enter the parts, `d_entering` [B, PARTS, D, N].

    `states` [B, T / C, D, N] are the memories before each chunk, and `leaving` [B, PARTS, D, N] the gradients of the memories after each part.
    `starts` [B, PARTS, C / GROUP, D, N] is scratch for the memories before the groups of a chunk, from which those before the tokens of a group
    are computed anew. With G_t the gradient of h_t from token t and later ones, and E_t = decay_t h_{t-1} G_t that of the exponent delta_t a:
    db_t = Σ_d delta_t u_t G_t, dc_t = Σ_d dy_t h_t, du_t = delta_t Σ_n b_t G_t + d dy_t, d_delta_t = u_t Σ_n b_t G_t + Σ_n a E_t and
    da = Σ_t delta_t E_t.
    """
    groups: tl.constexpr = C // GROUP
    LN2: tl.constexpr = 0.6931471805599453
    columns: tl.constexpr = D // BD
    column, at = tl.program_id(0) % columns, (tl.program_id(0) // columns).to(tl.int64)
    part, row = at % PARTS, at // PARTS
    first = part * PER
    last = tl.minimum(first + PER, chunks)
    channels, entries = column * BD + tl.arange(0, BD), tl.arange(0, N)
    tile = channels[:, None] * N + entries[None, :]
    u += row * chunks * C * D
    delta += row * chunks * C * D
    dy += row * chunks * C * D
    du += row * chunks * C * D
    d_delta += row * chunks * C * D
    b += row * chunks * C * N
    c += row * chunks * C * N
    db += (row * columns + column) * chunks * C * N
    dc += (row * columns + column) * chunks * C * N
    continues += row * chunks * C
    states += row * chunks * D * N
    rates = tl.load(a + tile)
    skip = tl.load(d + channels)
    d_memory = tl.load(leaving + at * (D * N) + tile)
    d_rates = tl.zeros([BD, N], tl.float32)
    starts += at * groups * D * N
    rows = tl.arange(0, GROUP)[:, None]
    tokens = tl.arange(0, GROUP)[None, :]
    for step in range(first, last):
        chunk = first + last - 1 - step
        memory = tl.load(states + chunk * (D * N) + tile)
        tl.store(starts + tile, memory)
        for group in range(0, groups - 1):
            t = chunk * C + group * GROUP
            us = _load_tokens(u + t * D, D, channels, GROUP)
            deltas = _load_tokens(delta + t * D, D, channels, GROUP)
            bs = _load_tokens(b + t * N, N, entries, GROUP)
            for i in tl.static_range(GROUP):
                token_decay = _decay(deltas[i], rates, continues + t, i, DOCUMENTS)
                memory = token_decay * memory + (deltas[i] * us[i])[:, None] * bs[i][None, :]
            tl.store(starts + (group + 1) * (D * N) + tile, memory)
        tl.debug_barrier()  # all threads have stored `starts`
        for back in range(0, groups):
            group = groups - 1 - back
            t = chunk * C + group * GROUP
            memory = tl.load(starts + group * (D * N) + tile)
            memories = (memory,)
            us = _load_tokens(u + t * D, D, channels, GROUP)
            deltas = _load_tokens(delta + t * D, D, channels, GROUP)
            bs = _load_tokens(b + t * N, N, entries, GROUP)
            for i in tl.static_range(GROUP):
                token_decay = _decay(deltas[i], rates, continues + t, i, DOCUMENTS)
                memory = token_decay * memory + (deltas[i] * us[i])[:, None] * bs[i][None, :]
                memories = memories + (memory,)
            cs = _load_tokens(c + t * N, N, entries, GROUP)
            d_outputs = _load_tokens(dy + t * D, D, channels, GROUP)
            d_inputs = tl.zeros([BD, GROUP], tl.float32)
            d_steps = tl.zeros([BD, GROUP], tl.float32)
            d_bs = tl.zeros([GROUP, N], tl.float32)
            d_cs = tl.zeros([GROUP, N], tl.float32)
            for back_token in tl.static_range(GROUP):
                i = GROUP - 1 - back_token
                token_delta, token_u = deltas[GROUP - 1 - back_token], us[GROUP - 1 - back_token]
                d_output = d_outputs[GROUP - 1 - back_token]
                token_decay = _decay(token_delta, rates, continues + t, GROUP - 1 - back_token, DOCUMENTS)  # fmt: skip
                g = d_memory + d_output[:, None] * cs[GROUP - 1 - back_token][None, :]
                d_c = tl.sum(d_output[:, None] * memories[GROUP - back_token], 0)
                d_b = tl.sum((token_delta * token_u)[:, None] * g, 0)
                d_cs = tl.where(rows == i, d_c[None, :], d_cs)
                d_bs = tl.where(rows == i, d_b[None, :], d_bs)
                d_write = tl.sum(g * bs[GROUP - 1 - back_token][None, :], 1)
                d_memory = token_decay * g
                d_exponent = d_memory * memories[GROUP - 1 - back_token]
                d_step = token_u * d_write + tl.sum(d_exponent * rates, 1) * LN2
                d_input = token_delta * d_write + skip * d_output
                d_inputs = tl.where(tokens == i, d_input[:, None], d_inputs)
                d_steps = tl.where(tokens == i, d_step[:, None], d_steps)
                d_rates += token_delta[:, None] * d_exponent
            by_channel = (t + tokens) * D + channels[:, None]
            by_entry = (t + rows) * N + entries[None, :]
            tl.store(du + by_channel, d_inputs.to(du.dtype.element_ty))
            tl.store(d_delta + by_channel, d_steps)
            tl.store(db + by_entry, d_bs)
            tl.store(dc + by_entry, d_cs)
        tl.debug_barrier()  # all threads have loaded `starts`
    tl.store(da + at * (D * N) + tile, d_rates)
    tl.store(d_entering + at * (D * N) + tile, d_memory)
