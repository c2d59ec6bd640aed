"""The requirements of the Hopper kernels of short convolutions on shapes and dtypes, and the numbers of
channels and tokens that a thread and a thread block compute.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels.requirements import Requirement, first_unmet

LANES, WARPS = 32, 4  # threads of a warp; warps of a warpgroup
_VECTORS = (8, 4, 2)  # numbers of channels that a thread may have
MULTIPLE = 16
"""The number of tokens must be a multiple of this."""
COMPUTES_IN_PLACE = True
"""Whether the kernels can compute documents in the order of x, if no padding is inside documents."""


def thread_channels(channels: int, head_dim: int | None, wanted: int = _VECTORS[0]) -> int | None:
    """Return the number of channels that a thread of a short convolution's kernel computes, such that no head
    is divided among warps, or None if no number is possible.

    Args:
        channels: D, the number of channels of the tokens.
        head_dim: the number of channels of a head that is normalised, or None.
        wanted: the number of channels if it is possible; else the largest possible one of those below it, or of all.
    """
    for size in _by_preference(wanted):
        if channels % (LANES * WARPS * size):
            continue
        if head_dim is None or (head_dim % size == 0 and LANES * size % head_dim == 0):
            return size
    return None


def _by_preference(wanted: int) -> list[int]:
    return sorted(_VECTORS, key=lambda size: (size > wanted, -size))


class Division(NamedTuple):
    """How the tokens and channels of a call are divided among the warps and threads of warpgroups.

    Attributes:
        size: the number of channels of a thread.
        rows: the number of rows of the batch that a warpgroup computes: 1, of which its warps have consecutive channels, or 4, one in
            each warp, of which they have the same channels: those of a head, if heads are normalised.
        parts: the number of consecutive parts into which each row of the batch is cut, which are then rows of their own.
    """

    size: int
    rows: int = 1
    parts: int = 1


def divide(
    shape: tuple[int, int, int], head_dim: int | None, ordered: bool, wanted: int = _VECTORS[0]
) -> Division | None:
    """Return how a short convolution is divided among warps and threads, such that no head is divided among warps, or None if that is
    not possible. Channels that four warps cannot divide, as B and C of Mamba2, or whose heads they cannot, are in each of them.

    Args:
        shape: (B, T, D), the shape of the tokens.
        head_dim: the number of channels of a head that is normalised, or None.
        ordered: whether tokens are computed in another order than that of x, which differs from row to row.
        wanted: the number of channels of a thread where several are possible (see `thread_channels`).
    """
    batch, length, channels = shape
    if (size := thread_channels(channels, head_dim, wanted)) is not None:
        return Division(size)
    if ordered:
        return None
    # A warp computes one head, or as many channels as possible.
    sizes = [s for s in _by_preference(wanted) if head_dim in (None, LANES * s) and channels % (LANES * s) == 0]  # fmt: skip
    if not sizes:
        return None
    padded = -(-length // MULTIPLE) * MULTIPLE
    for parts in (1, 2, 4):
        if batch * parts % WARPS == 0 and padded % (parts * MULTIPLE) == 0:
            return Division(sizes[0], WARPS, parts)
    return None


def block_tokens(batch: int, length: int, columns: int, most: int, blocks: int) -> int:
    """Return the number of consecutive tokens that a warpgroup of a short convolution's kernel computes.

    Tokens at the boundary of two such blocks are loaded twice. Hence blocks are as long as possible with at
    least `blocks` of them.

    Args:
        batch: B, the number of rows.
        length: T, the number of tokens of a row.
        columns: the number of blocks into which the channels are divided.
        most: the largest number of tokens, a power of two.
        blocks: the number of blocks that are enough for all processors.
    """
    sizes = [s for s in (256, 128, 64, 32, 16) if s <= most and length % s == 0]
    enough = [s for s in sizes if batch * (length // s) * columns >= blocks]
    return (enough or sizes[-1:])[0]


def _given(call) -> str:
    batch, length, channels = call.x.shape
    documents = ", with documents that may have padding inside" if call.ordered else ""
    heads = "" if call.head_dim is None else f" in heads of {call.head_dim}"
    return f"{channels}{heads}, {batch} x {length} tokens{documents}"


REQUIREMENTS = (
    Requirement(
        "x in bfloat16",
        lambda c: c.x.dtype == jnp.bfloat16,
        lambda c: jnp.dtype(c.x.dtype).name,
    ),
    Requirement(
        "a weight of 2 to 4 rows",
        lambda c: 2 <= c.weight.shape[0] <= 4,
        lambda c: str(c.weight.shape[0]),
    ),
    Requirement(
        "a multiple of 256 channels, in heads that fit into the channels of a warp; or a multiple of 64, in heads of 64, 128 or 256 if they are "
        "normalised, no padding inside documents, and rows that can be cut into a multiple of 4 parts of equal length, 1, 2 or 4 of each row, "
        "a multiple of 16 tokens",
        lambda c: divide(c.x.shape, c.head_dim, c.ordered) is not None,
        _given,
    ),
)


def unsupported(call) -> str | None:
    """Return the first requirement of the Hopper kernels that a call of `short_convolution` does not meet, or
    None if they support it.
    """
    return first_unmet(REQUIREMENTS, call)
