"""Sizes and tolerances of linear attention that the tests of all backends share.

- `HOPPER_INTERPRETED`, `TPU_SCALAR_INTERPRETED`, `TPU_CHANNEL_INTERPRETED`: small cases for the interpreters, on a CPU.
- `HOPPER`: cases that run on the card.
- `HOPPER_COMPILED`, `TPU_COMPILED`: cases that are compiled for chips that need not be here.
- `pallas_kernels.memory_cases.TIMED`: sizes that are timed.
"""

from __future__ import annotations

from typing import NamedTuple

from pallas_kernels.memory_cases import Compiled

OUTPUT_TOLERANCE, GRADIENT_TOLERANCE = 5e-3, 1e-2
"""Largest error of Hopper's kernels: of the output and the final memory, and of a gradient, in RMS relative to float32's RMS."""
TPU_TOLERANCE = 2e-6
"""Largest error of TPU kernels in float32, relative to the largest entry or to 1."""


class Case(NamedTuple):
    """Sizes, decay and options of one call of linear attention that a test makes.

    Attributes:
        heads: numbers of heads of q, of k and of v.
        key_dim: number of key channels, K.
        value_dim: number of value channels, V.
        length: number of tokens of each row, T.
        documents: whether rows contain several documents, rather than one.
        decay: words: "token", "channel" (of the keys), "value channel" or "constant"; None is no decay.
        strong: whether some decays are e^-30; or a number by which the log decay is multiplied.
        bonus: whether a token reads its own write times a bonus.
    """

    heads: tuple[int, int, int]
    key_dim: int
    value_dim: int
    length: int
    documents: bool
    decay: str | None
    strong: float = False
    bonus: bool = False


HOPPER_INTERPRETED = {
    "decay": Case((1, 1, 1), 64, 64, 128, False, "token"),
    "documents": Case((1, 1, 1), 64, 64, 250, True, "token"),
    "plain-queries-share": Case((2, 1, 1), 64, 128, 100, False, None),
    "memories-share-wide-keys": Case((1, 1, 2), 128, 64, 65, False, "token"),
    "strong": Case((1, 1, 1), 64, 64, 128, True, "token", strong=True),
    "parts": Case((1, 1, 1), 64, 64, 256, True, "token"),
    "deep": Case((1, 1, 1), 256, 64, 65, True, "token"),
    "wide": Case((1, 1, 2), 64, 256, 65, False, "token"),
    "channels": Case((1, 1, 1), 64, 64, 128, True, "channel"),
    "channels-queries-share-wide": Case((2, 1, 1), 128, 128, 65, False, "channel"),
    "channels-memories-share": Case((1, 1, 2), 64, 128, 100, True, "channel"),
    "channels-wide": Case((1, 1, 2), 64, 256, 65, True, "channel", bonus=True),
    "channels-deep-wide": Case((1, 1, 1), 128, 256, 65, True, "channel"),
    "channels-deeper-wide": Case((1, 1, 1), 256, 256, 70, True, "channel"),
    "channels-deeper-heads": Case((2, 2, 2), 256, 256, 65, True, "channel", bonus=True),
    "channels-deeper-odd": Case((1, 1, 1), 256, 384, 65, True, "channel"),
    "channels-deeper-shared": Case((2, 1, 1), 256, 128, 65, True, "channel"),
    "channels-wider": Case((1, 1, 1), 64, 512, 65, True, "channel"),
    "channels-deep-wider": Case((1, 1, 1), 128, 512, 130, False, "channel"),
    "channels-wide-parts": Case((1, 1, 1), 64, 256, 256, True, "channel"),
    "channels-deeper": Case((1, 1, 1), 256, 64, 130, True, "channel", bonus=True),
    "channels-wide-shared": Case((2, 1, 1), 64, 256, 65, True, "channel"),
    "channels-strong": Case((1, 1, 1), 128, 64, 128, True, "channel", strong=True),
    "channels-some-rows-in-range": Case((1, 1, 1), 64, 64, 128, True, "channel", strong=8),
    "bonus-some-rows-in-range": Case(
        (1, 1, 1), 128, 64, 65, False, "channel", strong=8, bonus=True
    ),
    "bonus": Case((1, 1, 2), 64, 64, 100, True, "channel", strong=True, bonus=True),
    "value-channels": Case((2, 1, 1), 64, 64, 100, True, "value channel", strong=True),
    "value-channels-memories-share": Case((1, 1, 2), 64, 128, 65, False, "value channel"),
    "value-channels-deep": Case((1, 1, 1), 256, 64, 130, True, "value channel"),
    "channels-parts": Case((1, 1, 1), 64, 64, 256, True, "channel"),
}
"""Cases for the Hopper interpreter, by name. Those whose name ends with "parts" are computed in parts of 128 tokens."""
HOPPER = (
    Case((4, 4, 4), 128, 128, 512, False, "token"),
    Case((4, 2, 2), 64, 128, 500, True, "token"),
    Case((2, 1, 2), 128, 64, 1100, True, None),
    Case((2, 2, 4), 64, 64, 2048, True, "token"),
    Case((2, 2, 2), 128, 128, 4096, False, "strong"),
    Case((2, 2, 2), 128, 128, 1024, False, "constant"),
    Case((2, 1, 2), 256, 256, 1100, True, "token"),
    Case((4, 2, 2), 64, 512, 600, False, "strong"),
    Case((4, 2, 2), 64, 128, 1100, True, "channel"),
    Case((2, 2, 4), 128, 128, 512, False, "strong channel"),
    # Only the first rows of a chunk are in the range of `AllPairs`.
    Case((2, 2, 4), 128, 128, 512, True, "steep channel"),
    Case((2, 2, 2), 64, 256, 512, False, "steep channel and bonus"),
    # Sizes whose products with the largest decays exceed float32's exponents.
    Case((2, 2, 2), 128, 128, 600, True, "channel, large queries of small keys"),
    Case((2, 2, 2), 64, 64, 600, False, "channel and bonus, small gradients"),
    Case((2, 2, 2), 128, 256, 700, True, "channel"),
    Case((1, 1, 1), 128, 512, 4100, True, "channel"),
    Case((2, 2, 2), 128, 64, 600, True, "channel and bonus"),
    Case((2, 2, 2), 256, 512, 1100, True, "channel"),
    Case((2, 2, 2), 256, 64, 600, True, "channel and bonus"),
    Case((2, 1, 2), 256, 256, 600, True, "strong value channel"),
    Case((4, 1, 2), 128, 64, 300, True, "strong value channel"),
    # Wide values: an odd number of slices, parts, recomputed memories.
    Case((2, 1, 2), 128, 384, 600, True, "channel"),
    Case((2, 1, 2), 64, 384, 600, True, "strong value channel"),
    Case((2, 1, 1), 64, 384, 600, True, "channel and bonus"),
    Case((1, 1, 1), 64, 512, 8150, True, "token"),
    Case((1, 1, 1), 256, 256, 8150, True, "strong"),
    Case((1, 1, 1), 128, 512, 8150, True, "channel"),
    Case((1, 1, 1), 128, 256, 8150, True, "value channel"),
)
"""Cases that run on the card. Their words also name a "steep" log decay (times 20), a "strong" one (e^-30), a "bonus", and sizes of
the inputs."""
MLSTM = (
    Case((4, 4, 4), 128, 256, 2048, False, "mlstm"),
    Case((4, 4, 4), 128, 256, 1100, True, "mlstm"),
    Case((2, 1, 2), 64, 64, 600, True, "mlstm"),
    Case((4, 2, 2), 128, 128, 500, True, "mlstm, long"),
    Case((2, 2, 2), 256, 512, 1100, False, "mlstm, long"),
    Case((2, 2, 4), 64, 128, 1024, True, "mlstm, strong"),
    Case((2, 2, 2), 128, 64, 700, False, "mlstm, closed"),
)
"""Cases of mLSTM's memory that run on the card. Their words name decays near 1 ("long"), input gates of e^±20 and decays of e^-30 ("strong"), and
input gates of e^-10, which leave the divisor to its floor ("closed")."""
HOPPER_COMPILED = (
    Compiled((4, 4, 4), 128, 128, "", 0),
    Compiled((4, 2, 2), 64, 64, "log_decay", 0),
    Compiled((4, 2, 2), 128, 128, "log_decay segment_ids", 0),
    Compiled((2, 1, 2), 256, 512, "log_decay", 4),
    Compiled((4, 4, 4), 128, 64, "log_decay rank", 0),
    Compiled((1, 1, 4), 128, 64, "log_decay writes", 0),
    Compiled((1, 1, 4), 128, 64, "log_decay writes segment_ids", 0),
    Compiled((1, 1, 3), 128, 64, "log_decay writes", 0),
    Compiled((4, 4, 4), 128, 256, "log_decay gate", 364),  # mLSTM
    Compiled((4, 2, 2), 64, 128, "log_decay gate segment_ids", 120),
    Compiled((4, 4, 4), 64, 128, "channel log_decay segment_ids", 176),
    Compiled((4, 4, 4), 128, 128, "channel log_decay", 116),
    Compiled((4, 4, 4), 128, 256, "channel log_decay", 348),
    Compiled((4, 4, 4), 128, 512, "channel log_decay segment_ids", 672),
    Compiled((4, 4, 4), 128, 256, "channel log_decay memories", 348),  # GLA
    Compiled((4, 4, 4), 64, 64, "channel log_decay bonus", 360),
    Compiled((4, 4, 4), 256, 512, "channel log_decay", 656),
    Compiled((4, 4, 4), 256, 512, "channel log_decay memories", 640),
    Compiled((4, 2, 4), 128, 64, "value_log_decay", 128),
)
"""Cases that are compiled for an H200."""
TPU_SCALAR_INTERPRETED = {
    "whole width": ((2, 2, 2), (8, 16), (2, 2, 1, 1)),
    "pairs": ((4, 4, 4), (64, 64), (2, 2, 1, 2)),
    "narrow, shared keys, more queries": ((4, 1, 2), (64, 64), (2, 2, 1, 2)),
    "narrow, fewer queries": ((1, 2, 2), (64, 64), (2, 2, 1, 1)),
    "pairs of one key": ((1, 1, 4), (128, 64), (2, 1, 1, 2)),
    "more queries": ((4, 1, 2), (128, 128), (1, 1, 1, 2)),
    "one program to a key": ((2, 2, 4), (128, 128), (1, 1, 2, 2)),
    "two programs to a key": ((1, 1, 4), (128, 128), (1, 1, 2, 2)),
}
"""Cases of a scalar decay for the TPU interpreter, by name: heads of q, k and v; K and V; and, with at most two memories for each program,
the memories and keys of a tile, the tiles of a program, and the programs."""
TPU_CHANNEL_INTERPRETED = {
    "key channels, short": Case((1, 1, 1), 16, 8, 40, True, "channel"),
    "bonus, short": Case((1, 1, 2), 8, 16, 40, True, "channel", bonus=True),
    "value channels, short": Case((1, 1, 1), 8, 16, 40, True, "value channel"),
    "key channels, more queries": Case((2, 1, 1), 8, 16, 130, False, "channel"),
    "key channels, fewer queries, wide": Case((1, 1, 2), 128, 128, 130, True, "channel"),
    "bonus, long": Case((1, 1, 2), 8, 16, 160, True, "channel", bonus=True),
    "bonus, more queries": Case((2, 1, 1), 8, 8, 130, False, "channel", bonus=True),
    "value channels, more queries": Case((2, 1, 1), 16, 8, 130, False, "value channel"),
    "value channels, wide": Case((1, 1, 2), 128, 128, 130, True, "value channel"),
}
"""Cases of a decay per channel for the TPU interpreter, by name. The "short" ones have chunks of 16 tokens."""
TPU_COMPILED = (
    Compiled((4, 4, 4), 64, 64, "log_decay segment_ids"),
    Compiled((4, 2, 4), 128, 128, "log_decay"),
    Compiled((4, 2, 4), 128, 128, "channel log_decay segment_ids"),
    Compiled((4, 4, 4), 64, 64, "channel log_decay bonus"),
    Compiled((2, 2, 2), 256, 256, "channel log_decay"),
    Compiled((4, 2, 4), 128, 64, "value_log_decay"),
)
"""Cases that are compiled for TPUs."""
