"""The kernel of the sums and factors of a scalar log decay in Triton. Symbols, arrays and constants are those of `bodies`."""

import triton
import triton.language as tl


@triton.jit
def scalar_sums(
    g, enters, stays, cum, head_cum, read_decay, write_decay, chunk_decay, erase_decay,
    HEADS: tl.constexpr, C: tl.constexpr, BH: tl.constexpr, DOCUMENTS: tl.constexpr,
    UNDECAYED: tl.constexpr,
):  # fmt: skip
    """Store the sums and factors of the log decay g [B, T, HEADS] of all chunks, in tiles [C, BH]: `cum`, `head_cum`, `read_decay`,
    `write_decay`, `chunk_decay`, and with `UNDECAYED` e^a as `erase_decay` [B, T, HEADS].

    A decay below e^-128 is 0 in float32; larger sums would cost the others their precision. The sums up to a token and after it are
    computed apart, for the same reason.
    """
    tiles: tl.constexpr = (HEADS + BH - 1) // BH
    heads = tl.program_id(0) % tiles * BH + tl.arange(0, BH)[None, :]
    chunk = (tl.program_id(0) // tiles).to(tl.int64)
    i = tl.arange(0, C)[:, None]
    here = heads < HEADS
    at = chunk * (C * HEADS) + i * HEADS + heads
    b = tl.cumsum(tl.maximum(tl.load(g + at, mask=here, other=0.0).to(tl.float32), -128.0), 0)
    x = tl.load(g + at + HEADS, mask=here & (i < C - 1), other=0.0).to(tl.float32)
    later = tl.cumsum(tl.maximum(x, -128.0), 0, reverse=True)
    read, write = tl.exp(b), tl.exp(later)
    if DOCUMENTS:
        same_first = tl.load(enters + chunk * C + i)
        read = read * same_first
        write = write * tl.load(stays + chunk * C + i)
    tl.store(cum + at, b, mask=here)
    tl.store(head_cum + (chunk * HEADS + heads) * C + i, b, mask=here)
    tl.store(read_decay + at, read, mask=here)
    tl.store(write_decay + at, write, mask=here)
    # The factor of the last token is that of the chunk.
    of_chunk = chunk_decay + chunk * HEADS + heads + i * 0
    tl.store(of_chunk, read, mask=here & (i == C - 1))
    if UNDECAYED:
        x = tl.load(g + at - HEADS, mask=here & (i > 0), other=0.0).to(tl.float32)
        erase = tl.exp(tl.cumsum(tl.maximum(x, -128.0), 0))
        if DOCUMENTS:
            erase = erase * same_first  # pyrefly: ignore[unbound-name]
        tl.store(erase_decay + at, erase, mask=here)
