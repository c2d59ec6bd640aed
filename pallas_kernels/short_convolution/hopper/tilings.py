"""How the Hopper kernels of short convolutions divide a call into blocks and how their tokens reach the registers: a table by kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

AHEAD = 4
"""Tokens of an unrolled step, whose rows are loaded together."""


class Tiling(NamedTuple):
    """The size of the blocks that a warpgroup of one kernel computes, and how it loads them.

    Attributes:
        channels: the number of channels of a thread, 2, 4 or 8; other numbers where heads or the call's channels do not permit it.
        step: the number of tokens that are copied to shared memory together, a multiple of 4.
        stages: the number of such steps in shared memory at a time, one of which is computed while the others are copied, fewer where not
            all have room; 0 loads the next 4 tokens into registers instead.
        tokens: the largest number of tokens of a block, a power of two from 16 on.
        blocks: the number of blocks of a call from which blocks are this long; with fewer they have half as many tokens, and so on.
        groups: the number of warpgroups of a thread block, each with a block of its own; 3 limit the registers of a thread to 168, 4 to 128. One
            where a thread has more channels than the tiling.
    """

    channels: int
    step: int
    stages: int
    tokens: int
    blocks: int
    groups: int = 1


REGISTERS = Tiling(8, 4, 0, 128, 528)
"""Loads into registers only: the tiling of all calls before there was a table, and forward of tokens in an order of their own, which no copy
follows.
"""
ORDERED_BACKWARD = Tiling(4, 4, 0, 128, 528, groups=4)
"""The tiling of the backward pass of tokens in an order of their own, which with 8 channels in a thread spills registers."""

TILINGS = {
    "forward": Tiling(8, 4, 4, 128, 512),
    "backward": Tiling(4, 8, 3, 128, 512),
    "normalised_forward": Tiling(8, 4, 4, 128, 512, groups=4),
    "normalised_backward": Tiling(4, 8, 3, 256, 512, groups=4),
    "wide_forward": Tiling(8, 4, 4, 128, 384),
    "wide_backward": Tiling(8, 4, 4, 128, 512),
    "full_forward": Tiling(8, 4, 4, 128, 512, groups=4),
    "full_backward": Tiling(4, 8, 3, 256, 512, groups=4),
    "full_normalised_backward": Tiling(4, 8, 3, 256, 512, groups=4),
}
"""The tilings, by kernel: `normalised` with normalised heads of up to 128 channels, `wide` of 256, which have 8 channels in each thread of a warp;
`full` with documents or a bias, whose masks and sums take registers, where they differ.

132 processors have at most 528 blocks at a time in fours, 396 in threes: 512 and 384 blocks fill them once.
"""


def tiling(kernel: str, head_dim: int | None, order: Any, run: Any, bias: Any) -> Tiling:
    """Return the tiling of a call of the kernel "forward" or "backward".

    Args:
        kernel: "forward" or "backward".
        head_dim: the number of channels of a head that is normalised, or None.
        order: the order of processing, or None where tokens are computed in that of x.
        run: the index of each token's document, or None.
        bias: what is added to the convolution, or None.
    """
    if order is not None:
        return REGISTERS if kernel == "forward" else ORDERED_BACKWARD
    if head_dim is not None:
        kernel = f"{'wide' if head_dim == 256 else 'normalised'}_{kernel}"
    full = run is not None or bias is not None
    return TILINGS.get(f"full_{kernel}" if full else kernel, TILINGS[kernel])


def unaccepted_tiling(
    channels: int, step: int, stages: int, tokens: int, blocks: int, groups: int = 1
) -> str | None:
    """Return what a tiling must be if the fields of one, as in `Tiling`, are not accepted, or None if they are."""
    if channels not in (2, 4, 8):
        return f"accepted are 2, 4 or 8 channels, not {channels}"
    if step not in (4, 8, 16) or (stages == 0 and step != AHEAD):
        return f"accepted are steps of 4, 8 or 16 tokens, and of 4 without stages, not {step}"
    if stages < 0 or stages == 1:
        return f"accepted are 0 or at least 2 stages, not {stages}"
    if tokens < 16 or tokens & (tokens - 1):
        return f"accepted are powers of two from 16 on as tokens, not {tokens}"
    if blocks < 1:
        return f"accepted are 1 or more blocks, not {blocks}"
    if groups not in (1, 2, 3, 4):
        return f"accepted are 1, 2, 3 or 4 groups, not {groups}"
    return None
