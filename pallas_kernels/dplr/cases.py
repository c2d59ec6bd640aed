"""Sizes and tolerances of the kernels of diagonal-plus-low-rank memories that the tests of all backends
share.

- `HOPPER_INTERPRETED`, `TPU_INTERPRETED`: small cases for the interpreters, on a CPU.
- `HOPPER`: cases that run on the card.
- `HOPPER_COMPILED`, `TPU_COMPILED`: cases that are only compiled, for a chip that the machine need not have.
- `pallas_kernels.memory_cases.TIMED`: sizes that are timed.
"""

from __future__ import annotations

from typing import NamedTuple

from pallas_kernels.memory_cases import Compiled

OUTPUT_TOLERANCE, GRADIENT_TOLERANCE = 5e-3, 1e-2
"""Largest difference of the Hopper kernels from the recurrence in float32, relative to the norm."""
TPU_TOLERANCES = {"float32": 5e-6, "bfloat16": 1.5e-2}
"""Largest difference of the TPU kernels from the recurrence in float32, relative to the largest entry or to 1."""


class Case(NamedTuple):
    """Sizes, decay and options with which one test calls the op `dplr` (diagonal-plus-low-rank memories).

    Attributes:
        heads: numbers of heads of q; of k, `a` and b; and of v.
        key_dim: number of key channels, K.
        value_dim: number of value channels, V.
        length: number of tokens of each row, T.
        documents: whether rows contain several documents.
        decay: "channel" for a decay per key channel, "strong channel" or "steep channel" for stronger ones,
            or "token".
        name: the case's name in the tests' output.
        size: the factor by which the queries are multiplied.
        parts: number of parts that a row is split into; None is what the kernel chooses.
    """

    heads: tuple[int, int, int]
    key_dim: int
    value_dim: int
    length: int
    documents: bool
    decay: str
    name: str = ""
    size: float = 1.0
    parts: int | None = None

    @property
    def dims(self) -> tuple[int, ...]:
        """The sizes T, H, Hk, G, K and V of this case (tokens; heads of q, k and v; key and value channels),
        which are the first arguments of the function `make` that creates a test's inputs.
        """
        return self.length, *self.heads, self.key_dim, self.value_dim

    @property
    def strength(self) -> float:
        """How strong the decays are, as an argument of the function `make` that creates a test's inputs:
        False for moderate ones, True to make some of them e^-30, or a factor of the log decay.
        """
        return {"channel": False, "strong channel": True, "steep channel": 8}[self.decay]


HOPPER_INTERPRETED = (
    Case((1, 1, 1), 64, 64, 128, True, "channel", "documents"),
    Case((1, 1, 2), 128, 128, 100, True, "strong channel", "memories-share"),
    Case((2, 1, 1), 64, 128, 65, False, "channel", "queries-share"),
    Case((1, 1, 2), 64, 64, 128, False, "channel", "parts", parts=2),
    Case((1, 1, 1), 64, 256, 65, True, "channel", "wide"),
    Case((1, 1, 1), 128, 64, 65, False, "channel", "deep"),
    Case((1, 1, 1), 256, 64, 130, True, "channel", "deeper"),
    Case((1, 1, 1), 256, 256, 65, False, "channel", "deeper-wide"),
    Case((1, 1, 1), 64, 64, 65, True, "steep channel", "some-rows-in-range"),
    Case((1, 1, 1), 64, 64, 64, False, "channel", "large-queries", size=1e25),
)
"""Cases for the Hopper interpreter."""
HOPPER = (
    Case((1, 1, 2), 128, 256, 600, True, "channel"),
    Case((4, 2, 2), 64, 128, 1100, True, "channel"),
    Case((2, 2, 4), 128, 64, 500, True, "strong channel"),
    Case((2, 2, 4), 128, 64, 500, True, "steep channel"),
    Case((2, 2, 2), 64, 64, 2048, False, "token"),
    Case((2, 2, 4), 64, 64, 700, True, "channel"),
    # Chunks in range of float32 beside others.
    Case((2, 2, 4), 64, 64, 700, True, "steep channel"),
    # More memories than processors: two warpgroups share the tiles that are loaded.
    Case((40, 40, 40), 128, 128, 300, True, "channel"),
    Case((2, 1, 2), 256, 256, 600, True, "channel"),
    # Few rows, computed in eight parts.
    Case((1, 1, 2), 64, 128, 8200, True, "channel"),
    # Wide values: an odd number of slices, parts.
    Case((2, 1, 2), 64, 384, 600, True, "channel"),
    Case((1, 1, 1), 128, 512, 8150, True, "channel"),
)
"""Cases that run on the card."""
HOPPER_COMPILED = (
    # More memories than processors: two warpgroups share the tiles that are loaded.
    Compiled((80, 80, 80), 128, 128, "channel log_decay segment_ids", 984),
    Compiled((4, 4, 4), 128, 128, "channel log_decay segment_ids", 956),
    Compiled((4, 2, 4), 64, 64, "log_decay", 1136),
    Compiled((4, 2, 4), 64, 64, "log_decay memories", 644),  # RWKV7
    Compiled((80, 80, 80), 128, 128, "channel log_decay memories", 860),
    Compiled((4, 4, 4), 256, 256, "channel log_decay segment_ids", 4540),
)
"""Cases that are compiled for an H200; heads of RWKV7 have K = V = 64."""
TPU_INTERPRETED = (
    Case((1, 1, 1), 16, 8, 40, True, "strong channel", "short"),
    Case((1, 1, 1), 16, 8, 160, True, "strong channel", "documents"),
    Case((2, 1, 1), 8, 16, 130, False, "channel", "more queries"),
    Case((1, 1, 2), 128, 128, 130, True, "channel", "fewer queries, wide"),
)
"""Cases for the TPU interpreter, the one of the fast tests first."""
TPU_COMPILED = (
    Compiled((4, 2, 4), 64, 64, "channel log_decay segment_ids"),
    Compiled((8, 8, 8), 128, 128, "channel log_decay"),
)
"""Cases that are compiled for TPUs."""
