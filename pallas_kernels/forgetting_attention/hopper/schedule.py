"""The sizes and types of the attention kernels' pipeline, in which a warpgroup with 64 resident queries (or
keys) loops over tiles of keys (or queries): tile sizes, positions, the schedule of the loop, and the
computation of one step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

TILE = 128  # queries or keys of a thread block
ROWS = 64  # queries or keys of one warpgroup


class Position(NamedTuple):
    """The queries or keys that a warpgroup keeps during its loop (its resident tokens), as a position in the
    arrays.

    Attributes:
        b: the index of the row in the batch.
        h: the index of the query head.
        tile: the index of the thread block's tile of 128 queries or keys.
        first: the index of the warpgroup's first query or key in its array.
        tokens: the slice of the warpgroup's queries or keys in their array.
        row: the position in the row of the warpgroup's first query or key; it differs from `first` where the
            queries are only two parts of the row.
    """

    b: Any
    h: Any
    tile: Any
    first: Any
    tokens: Any
    row: Any


class Schedule(NamedTuple):
    """How an attention kernel's loop over the streamed tokens (keys, in a kernel with resident queries; or
    conversely) overlaps loads, matrix products and exponentials.

    Attributes:
        size: the number of streamed tokens of a step.
        deferred: whether the products that a step adds to the sums run during the next step's exponentials;
            the step's tiles remain in shared memory until then.
        stages: buffers of each streamed input: the number of steps whose tiles are being loaded or are in
            use.
        alternate: whether one warpgroup uses the tensor cores while the other computes exponentials.
    """

    size: int
    deferred: bool
    stages: int
    alternate: bool


class Products(NamedTuple):
    """The computation of one step of an attention kernel's loop: matrix products such as the scores,
    elementwise work on them, and products that are added to running sums such as the output.

    Attributes:
        scores: `scores(tiles, *refs)` adds the step's first matrix products, such as queries times keys, to
            references to accumulators, which have the shapes `shapes` and are zero before; `tiles` are the
            streamed inputs in shared memory.
        shapes: the shapes of the products that `scores` computes.
        use: `use(n, tiles, values, carry, **options)` receives the values of these products and returns the
            left operands [64, size] of the products that `add` computes, a factor by which the rows of the
            running sums are multiplied first (or None), and the carry for the next step.
        add: `add(tiles, operands, *refs)` adds to a reference to each running sum one product of an operand
            with the tiles.
    """

    scores: Callable
    shapes: list
    use: Callable
    add: Callable
