"""The kernel that sums log forget gates, in Triton. This module imports only Triton, as `bodies`."""

import triton
import triton.language as tl


@triton.jit
def sum_gates(
    x, high, low, HEADS: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """Store the running sums of x [B, LENGTH, HEADS] along the tokens, [B, HEADS, LENGTH], as their rounded value `high` and the
    rounding error `low`. With `REVERSE` x is [B, HEADS, LENGTH], and `high` [B, LENGTH, HEADS] the sum from each token to the last.

    Sums are computed in float64. A program computes one row and head, BLOCK tokens at a time.
    """
    row, count = tl.program_id(0), tl.cdiv(LENGTH, BLOCK)
    by_token = (row // HEADS).to(tl.int64) * (LENGTH * HEADS) + row % HEADS
    by_head = row.to(tl.int64) * LENGTH
    total = tl.sum(tl.zeros([1], tl.float64), 0)
    for n in range(count):
        block = n
        if REVERSE:
            block = count - 1 - n
        tokens = block * BLOCK + tl.arange(0, BLOCK)
        inside = tokens < LENGTH
        apart, together = by_token + tokens * HEADS, by_head + tokens
        if REVERSE:
            apart, together = together, apart
        added = tl.load(x + apart, mask=inside, other=0.0).to(tl.float64)
        sums = total + tl.cumsum(added, 0, reverse=REVERSE)
        total += tl.sum(added, 0)
        rounded = sums.to(tl.float32)
        tl.store(high + together, rounded, mask=inside)
        if not REVERSE:
            tl.store(low + together, (sums - rounded.to(tl.float64)).to(tl.float32), mask=inside)
