"""The kernel of one token in Triton: the same source for every NVIDIA card of compute capability 8.0 or more.

This module imports only Triton, so that the kernel can also run in Triton's interpreter and be compiled without a GPU.
"""

import triton
import triton.language as tl


@triton.jit
def _apply_decay(m, factor):
    """Return the memory m multiplied by a decay: a factor of at most 0 is decay - 1, a factor above 0 is the decay itself."""
    return tl.where(factor > 0, 0.0, m) + factor * m


@triton.jit
def _store_outputs(
    m, q, first, output, row, g, keys, present, scale,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Store the outputs scale q M of all queries that read memory g of a row, the first of which is given; `output` points at the program's
    value channels.
    """
    QUERIES: tl.constexpr = H // G if H > G else 1
    HEADS: tl.constexpr = H if H > G else G
    query = first
    for i in tl.static_range(QUERIES):
        head = g * QUERIES + i
        if i > 0:
            query = tl.load(q + (row * H + head * H // HEADS) * K + keys, mask=present, other=0.0)
        total = tl.sum(query.to(tl.float32)[:, None] * m, 0) * scale
        tl.store(output + (row * HEADS + head) * V, total.to(output.dtype.element_ty))


@triton.jit
def one_token(
    memory, q, k, v, beta, decay, value_decay, a, b, bonus, emptied, layer, scale, output,
    BATCH: tl.constexpr, G: tl.constexpr, H: tl.constexpr, K_HEADS: tl.constexpr,
    A_HEADS: tl.constexpr, B_HEADS: tl.constexpr, K: tl.constexpr, KEYS: tl.constexpr,
    V: tl.constexpr, BV: tl.constexpr, BETA: tl.constexpr, UNDECAYED: tl.constexpr,
    DECAY: tl.constexpr, VALUE_DECAY: tl.constexpr, LOW_RANK: tl.constexpr, BONUS: tl.constexpr,
    EMPTIED: tl.constexpr, LAYER: tl.constexpr,
):  # fmt: skip
    """Apply one token to BV value channels of one memory [K, V] float32, which is loaded once and stored once, in place, and store the outputs
    [B, max(H, G), V].

    `memory` is [B, G, K, V], or with `LAYER` the stack [L, B, G, K, V] and `layer` [1] the index. q is [B, H, K], k [B, K_HEADS, K], v [B, G, V],
    beta [B, G], value_decay [B, G, V], a [B, A_HEADS, K], b [B, B_HEADS, K], bonus [G, K], emptied [B] int32. `DECAY` is 0 without a decay, 1 for
    one [B, G] and 2 for one [B, G, K]; decays are factors as in `_apply_decay`. KEYS is a power of two, at least K. With `LOW_RANK` the
    token reads the memory with a before its decay, and writes what it read with b. With `UNDECAYED` the token replaces what its key reads
    before the decay.
    """
    columns: tl.constexpr = V // BV
    column, at = tl.program_id(0) % columns, (tl.program_id(0) // columns).to(tl.int64)
    g, row = at % G, at // G
    keys, values = tl.arange(0, KEYS), column * BV + tl.arange(0, BV)
    present = keys < K
    if LAYER:
        memory += tl.load(layer).to(tl.int64) * (BATCH * G * K * V)
    cell = memory + at * (K * V) + keys[:, None] * V + values[None, :]
    m = tl.load(cell, mask=present[:, None], other=0.0)
    # Loads are in front of the sums, behind which they would wait for the memory; but for other queries than the first, and with a bonus, whose output is
    # first, for decays, so that fewer registers are in use.
    query = tl.load(q + (row * H + g * H // G) * K + keys, mask=present, other=0.0)
    key = tl.load(k + (row * K_HEADS + g * K_HEADS // G) * K + keys, mask=present, other=0.0)
    key = key.to(tl.float32)
    value = tl.load(v + at * V + values).to(tl.float32)
    to = output + values
    if EMPTIED:
        m = tl.where(tl.load(emptied + row) > 0, 0.0, m)
    if BONUS:
        weight = tl.load(bonus + g * K + keys, mask=present, other=0.0)
        with_bonus = m + (weight * key)[:, None] * value[None, :]
        _store_outputs(with_bonus, q, query, to, row, g, keys, present, scale, G, H, K, V)
    if DECAY == 1:
        factor = tl.load(decay + at)
    if DECAY == 2:
        factor = tl.load(decay + at * K + keys, mask=present, other=0.0)[:, None]
    if VALUE_DECAY:
        value_factor = tl.load(value_decay + at * V + values)[None, :]
    if BETA:
        strength = tl.load(beta + at)
    if LOW_RANK:
        left = tl.load(a + (row * A_HEADS + g * A_HEADS // G) * K + keys, mask=present, other=0.0)
        right = tl.load(b + (row * B_HEADS + g * B_HEADS // G) * K + keys, mask=present, other=0.0)
        before = tl.sum(left.to(tl.float32)[:, None] * m, 0)
    if UNDECAYED:
        held = tl.sum(key[:, None] * m, 0)
    if DECAY > 0:
        m = _apply_decay(m, factor)
    if VALUE_DECAY:
        m = _apply_decay(m, value_factor)
    if BETA:
        if not UNDECAYED:
            held = tl.sum(key[:, None] * m, 0)
        value = strength * (value - held)
    m += key[:, None] * value[None, :]
    if LOW_RANK:
        m += right.to(tl.float32)[:, None] * before[None, :]
    tl.store(cell, m, mask=present[:, None])
    if not BONUS:
        _store_outputs(m, q, query, to, row, g, keys, present, scale, G, H, K, V)
