"""Definitions that the test and benchmark cases of `linear_attention`, `delta_rule` and `dplr` share: the type of a
compiled case, cases with one state per segment and of slot memory, and the timed sizes.
"""

from __future__ import annotations

from typing import NamedTuple


class Compiled(NamedTuple):
    """A call of an op that is compiled, but not run: its sizes and arguments.

    Attributes:
        heads: the numbers of heads of q, of k (and of a and b), and of v.
        key_dim: K, the number of key channels of a head.
        value_dim: V, the number of value channels of a head.
        arguments: words that name optional arguments: "log_decay", with "channel" for one per key channel, "value_log_decay", "bonus",
            "segment_ids"; "undecayed" for the memory that a delta rule's keys read; "gate" for an input gate and a normaliser; "rank" for tokens of four rows; "memories" if the forward pass saves the memories before
            all chunks.
        spilled: the bytes of registers that the kernels may spill on Hopper, at most.
    """

    heads: tuple[int, int, int]
    key_dim: int
    value_dim: int
    arguments: str
    spilled: int = 0


class Segments(NamedTuple):
    """A call with one state per segment: the op ("linear", "delta" or "dplr"), the numbers of heads of q, k and v, K, V, and the decay: None,
    "token", "channel", "value" or "bonus" (of key channels, with a bonus).
    """

    op: str
    heads: tuple[int, int, int]
    key_dim: int
    value_dim: int
    decay: str | None


SEGMENTS = {
    "scalar": Segments("linear", (1, 1, 1), 64, 64, "token"),
    "plain-shared": Segments("linear", (2, 1, 1), 64, 128, None),
    "channels": Segments("linear", (1, 1, 2), 64, 64, "channel"),
    "bonus": Segments("linear", (2, 1, 1), 128, 64, "bonus"),
    "values": Segments("linear", (1, 1, 1), 64, 64, "value"),
    "delta": Segments("delta", (1, 1, 2), 64, 64, "token"),
    "delta-plain-deep": Segments("delta", (2, 1, 1), 256, 64, None),
    "delta-channels": Segments("delta", (1, 1, 1), 64, 128, "channel"),
    "dplr": Segments("dplr", (1, 1, 2), 64, 64, "channel"),
}
"""Cases with one state per segment, by name."""
SEGMENTS_WIDE = {
    "scalar-wide": Segments("linear", (2, 1, 1), 64, 512, "token"),
    "channels-wide": Segments("linear", (1, 1, 2), 64, 384, "channel"),
    "values-wide": Segments("linear", (1, 1, 1), 64, 256, "value"),
    "delta-wide": Segments("delta", (1, 1, 1), 128, 512, "token"),
    "delta-channels-wide": Segments("delta", (1, 1, 1), 64, 384, "channel"),
    "dplr-wide": Segments("dplr", (1, 1, 1), 64, 512, "channel"),
}
"""Those that run only on the card."""


class Slots(NamedTuple):
    """A call of `slot_memory`.

    Attributes:
        heads: the numbers of heads of q, of k, and of v.
        sizes: K, the number of slots, and V.
        length: T, the number of tokens of a row.
        states: "row" (one document), "documents", "state" (one document from a given state) or "segments" (one given state each).
        scale: the factor of the queries.
        spread: the deviation of the input of SiLU, whose results are q, k and v; None is normal q, k and v.
        dtype: the dtype of q, k and v.
    """

    heads: tuple[int, int, int]
    sizes: tuple[int, int, int]
    length: int
    states: str
    scale: float
    spread: float | None = None
    dtype: str = "bfloat16"


SLOTS = (
    Slots((2, 2, 2), (256, 64, 256), 2048, "row", 1 / 256),
    Slots((2, 1, 2), (64, 64, 128), 1100, "documents", 1.0),
    Slots((4, 2, 2), (128, 128, 128), 700, "documents", 1 / 128),
    # As in the layer of the 340M model: 0.64 is the initial deviation 0.02 times the root of 1024 channels.
    Slots((4, 4, 4), (256, 64, 256), 2048, "documents", 1.0, 0.64),
    # Scores with a deviation of 16, whose softmax selects one slot.
    Slots((2, 2, 2), (256, 64, 256), 2048, "row", 1.0),
    Slots((2, 1, 2), (64, 64, 64), 600, "state", 1 / 8),
    Slots((1, 1, 2), (64, 64, 64), 2036, "segments", 1 / 8),
)
"""Cases of slot memory that run on the card."""
TIMED = (
    (8, 4096, 16, 128),
    (2, 16384, 16, 128),
    (4, 2048, 16, 128),
    (4, 4096, 64, 128),
    (8, 2048, 32, 256),
    (8, 1024, 8, 64),
    (1, 8192, 96, 128),
)
"""B, T, heads and K = V of the calls that `python -m benchmarks kernels` times, the main one first."""
