"""Sizes and tolerances of the delta rule's kernels that the tests of all backends share.

- `HOPPER_INTERPRETED`, `TPU_INTERPRETED`: small cases for the interpreters, on a CPU.
- `HOPPER`: cases that run on the card.
- `HOPPER_COMPILED`, `TPU_COMPILED`: cases that are only compiled, for a chip that the machine need not have.
- `pallas_kernels.memory_cases.TIMED`: sizes that are timed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pallas_kernels.memory_cases import Compiled

OUTPUT_TOLERANCE, GRADIENT_TOLERANCE = 5e-3, 1e-2
"""Largest difference of the Hopper kernels from the recurrence in float32, relative to the norm."""
TPU_TOLERANCES = {"float32": 5e-6, "float32, keys alike": 2e-5, "bfloat16": 1.5e-2}
"""Largest difference of the TPU kernels from the recurrence in float32, relative to the largest entry or to 1."""


class Case(NamedTuple):
    """Sizes, decay and options with which one test calls the op `delta_rule`.

    Attributes:
        heads: numbers of heads of q, of k and of v.
        key_dim: number of key channels, K.
        value_dim: number of value channels, V.
        length: number of tokens of each row, T.
        documents: whether rows contain several documents.
        decay: "token" for a scalar decay per token or "channel" for one per key channel, with "strong" or
            "steep" for stronger ones; "constant" for one decay per head; "" for none.
        name: the case's name in the tests' output.
        alike: whether all keys are nearly equal.
        size: the factor by which the queries are multiplied.
        parts: number of parts that a row is split into; None is what the kernel chooses.
        checkpoints: number of checkpointed memories along a row; None is what the kernel chooses.
        many: whether the kernel is told that the card has one processor, so that it puts two warpgroups into
            a thread block, which use the same loaded inputs.
        erase: "decayed" or "undecayed", the memory that keys read.
    """

    heads: tuple[int, int, int]
    key_dim: int
    value_dim: int
    length: int
    documents: bool
    decay: str
    name: str = ""
    alike: bool = False
    size: float = 1.0
    parts: int | None = None
    checkpoints: int | None = None
    many: bool = False
    erase: str = "decayed"

    @property
    def dims(self) -> tuple[int, ...]:
        """The sizes T, H, Hk, G, K and V of this case (tokens; heads of q, k and v; key and value channels),
        which are the first arguments of the function `make` that creates a test's inputs.
        """
        return self.length, *self.heads, self.key_dim, self.value_dim

    @property
    def options(self) -> dict[str, Any]:
        """The decay and options of this case, except documents, as keyword arguments of the function `make`
        that creates a test's inputs.
        """
        return dict(decay=self.decay, alike=self.alike, size=self.size)


HOPPER_INTERPRETED = (
    Case((1, 1, 1), 64, 64, 128, True, "token", "decay"),
    Case((1, 1, 1), 64, 64, 65, True, "steep channel", "channel-some-rows-in-range"),
    Case((1, 1, 1), 64, 64, 100, False, "", "plain"),
    Case((2, 1, 1), 64, 128, 65, True, "", "queries-share"),
    Case((1, 1, 2), 128, 128, 100, False, "token", "memories-share-wide"),
    Case((1, 1, 1), 128, 64, 192, False, "strong", "strong"),
    Case((1, 1, 1), 256, 64, 128, True, "token", "deep"),
    Case((1, 1, 1), 64, 512, 65, False, "token", "wide"),
    Case((1, 1, 1), 64, 768, 65, True, "token", "values-in-parts"),
    # As with more scans than processors: two warpgroups share what is loaded, a memory with K = 256 has two buffers.
    Case((2, 1, 1), 64, 128, 65, True, "token", "many", many=True),
    Case((1, 1, 1), 256, 128, 65, True, "token", "many-deep", many=True),
    Case((1, 1, 1), 256, 256, 130, True, "token", "many-deep-wide", many=True),
    Case((2, 1, 1), 128, 256, 100, False, "", "many-wide", many=True),
    Case((1, 1, 1), 64, 128, 65, True, "channel", "many-channel", many=True),
    Case((1, 1, 1), 64, 64, 128, False, "", "alike", alike=True),
    Case((1, 1, 1), 64, 64, 128, True, "channel", "channel"),
    Case((2, 1, 1), 128, 64, 100, True, "channel", "channel-queries-share"),
    Case((1, 1, 1), 256, 64, 130, True, "channel", "channel-deep"),
    Case((1, 1, 1), 64, 256, 65, True, "channel", "channel-wide"),
    Case((1, 1, 1), 256, 256, 65, True, "channel", "channel-deep-wide"),
    Case((1, 1, 1), 64, 64, 256, False, "token", "parts", parts=2),
    Case((2, 1, 1), 64, 64, 200, True, "", "parts-documents", parts=4),
    Case((1, 1, 2), 64, 64, 128, False, "channel", "parts-channel", parts=2),
    Case((1, 1, 1), 64, 64, 256, True, "token", "checkpoints", checkpoints=2),
    Case((1, 1, 1), 256, 64, 256, False, "token", "checkpoints-deep", checkpoints=4),
    Case((1, 1, 2), 64, 64, 128, False, "channel", "checkpoints-channel", checkpoints=2),
    Case((1, 1, 2), 64, 128, 128, False, "strong channel", "channel-strong"),
    Case((1, 1, 1), 64, 64, 64, False, "channel", "channel-large-queries", size=1e25),
    Case((1, 1, 1), 64, 64, 128, True, "token", "undecayed", erase="undecayed"),
    Case((2, 1, 2), 128, 64, 192, True, "strong", "undecayed-strong", erase="undecayed"),
    Case((1, 1, 1), 256, 64, 130, False, "steep", "undecayed-deep", erase="undecayed"),
    Case((1, 1, 1), 64, 512, 65, True, "token", "undecayed-wide", erase="undecayed"),
    Case((1, 1, 1), 256, 128, 65, True, "token", "undecayed-many", many=True, erase="undecayed"),
    Case((1, 1, 1), 64, 64, 256, False, "token", "undecayed-parts", parts=2, erase="undecayed"),
    Case(
        (1, 1, 1),
        256,
        64,
        256,
        False,
        "token",
        "undecayed-checkpoints",
        checkpoints=4,
        erase="undecayed",
    ),
)
"""Cases for the Hopper interpreter, the two of the fast tests first."""
HOPPER = (
    Case((1, 1, 2), 128, 256, 600, True, "channel"),
    Case((4, 4, 4), 128, 128, 512, False, ""),
    Case((4, 2, 2), 64, 128, 1100, True, "token"),
    Case((2, 2, 4), 128, 64, 2048, True, "strong"),
    Case((2, 2, 2), 64, 64, 4096, False, "constant"),
    Case((1, 1, 2), 256, 512, 300, True, "token"),
    Case((2, 1, 1), 256, 256, 640, False, ""),
    Case((4, 2, 2), 64, 128, 1100, True, ""),
    Case((6, 6, 6), 128, 128, 600, True, ""),
    Case((4, 2, 2), 64, 128, 1100, True, "channel"),
    Case((2, 2, 4), 128, 64, 500, True, "strong channel"),
    Case((2, 2, 4), 128, 64, 500, True, "steep channel"),
    Case((2, 2, 2), 128, 128, 2048, False, "channel"),
    # More memories than processors: two warpgroups share the tiles that are loaded.
    Case((40, 20, 40), 128, 128, 300, True, "token"),
    Case((16, 16, 16), 256, 512, 300, True, "token"),
    Case((40, 40, 40), 64, 128, 300, True, "channel"),
    Case((2, 2, 2), 256, 128, 1100, True, "channel"),
    Case((2, 1, 2), 256, 256, 600, True, "channel"),
    Case((1, 1, 2), 256, 768, 300, True, "token"),
    # Few rows, computed in eight parts.
    Case((1, 1, 2), 128, 128, 8300, True, "token"),
    Case((2, 1, 1), 128, 64, 8192, False, "strong channel"),
    # Memories recomputed in four parts.
    Case((1, 1, 2), 256, 512, 4096, True, "token"),
    # Wide values: an odd number of slices, parts, recomputed memories.
    Case((1, 1, 1), 128, 512, 8150, True, "strong"),
    Case((1, 1, 1), 128, 256, 4096, False, "token"),
    Case((2, 1, 2), 64, 384, 600, True, "channel"),
    Case((1, 1, 1), 128, 512, 8150, True, "channel"),
    Case((1, 1, 1), 256, 384, 4096, True, "channel"),
    # Comba's heads; rows in parts, wide rows of many memories, and decays of e^-30.
    Case((1, 1, 2), 256, 512, 4096, True, "token", erase="undecayed"),
    Case((16, 16, 16), 256, 512, 300, True, "token", erase="undecayed"),
    Case((2, 2, 4), 128, 256, 2048, True, "strong", erase="undecayed"),
    Case((1, 1, 2), 128, 128, 8300, False, "token", erase="undecayed"),
    Case((4, 2, 2), 64, 64, 1100, False, "strong", erase="undecayed"),
    Case((2, 1, 1), 256, 256, 640, True, "constant", erase="undecayed"),
)
"""Cases that run on the card."""
HOPPER_COMPILED = (
    Compiled((4, 4, 4), 128, 128, "", 20),  # DeltaNet
    Compiled((4, 4, 4), 128, 128, "segment_ids", 104),
    Compiled((4, 2, 4), 64, 64, "log_decay segment_ids", 116),
    Compiled((2, 1, 2), 256, 512, "log_decay", 792),  # Gated DeltaNet
    Compiled((4, 4, 4), 256, 256, "log_decay", 64),
    # More memories than processors: two warpgroups share the tiles that are loaded.
    Compiled((80, 80, 80), 128, 128, "log_decay", 172),
    Compiled((32, 16, 32), 256, 512, "log_decay", 704),
    Compiled((3, 3, 3), 256, 512, "log_decay undecayed", 816),  # Comba
    Compiled((4, 4, 4), 128, 256, "log_decay segment_ids undecayed", 556),
    Compiled((2, 1, 2), 256, 512, "log_decay memories", 88),
    Compiled((4, 4, 4), 128, 128, "memories", 20),
    Compiled((4, 2, 4), 64, 64, "log_decay segment_ids memories", 116),
    Compiled((80, 80, 80), 128, 128, "log_decay memories", 172),
    Compiled((32, 16, 32), 256, 512, "log_decay memories", 400),
    Compiled((80, 80, 80), 128, 128, "channel log_decay segment_ids", 552),
    Compiled((4, 4, 4), 128, 128, "channel log_decay segment_ids", 500),  # KDA
    Compiled((4, 4, 4), 128, 128, "channel log_decay segment_ids memories", 140),
    Compiled((80, 80, 80), 128, 128, "channel log_decay memories", 228),
    Compiled((4, 4, 4), 64, 64, "channel log_decay", 460),
    Compiled((4, 4, 4), 256, 256, "channel log_decay segment_ids", 2580),
)
"""Cases that are compiled for an H200."""
TPU_INTERPRETED = (
    Case((1, 1, 1), 16, 8, 160, True, "token", "documents"),
    Case((1, 1, 2), 16, 8, 40, True, "strong channel", "channels, short"),
    Case((1, 1, 2), 8, 512, 40, True, "token", "values in parts, short"),
    Case((1, 1, 1), 8, 16, 256, True, "", "no decay"),
    Case((4, 1, 2), 8, 8, 256, False, "strong", "strong decays, more queries"),
    Case((1, 2, 4), 128, 128, 256, False, "token", "keys alike, fewer queries, wide", alike=True),
    Case((1, 1, 4), 8, 8, 130, False, "token", "two programs to a key"),
    Case((1, 1, 1), 16, 8, 160, True, "channel", "channels, documents"),
    Case((2, 1, 1), 8, 8, 130, False, "strong channel", "strong channels, more queries"),
    Case((1, 1, 2), 128, 128, 130, True, "channel", "channels, keys alike, fewer queries, wide", alike=True),
)  # fmt: skip
"""Cases for the TPU interpreter, the three of the fast tests first."""
TPU_COMPILED = (
    Compiled((8, 4, 8), 128, 128, "log_decay segment_ids"),
    Compiled((4, 4, 4), 64, 64, ""),
    Compiled((8, 4, 8), 128, 128, "channel log_decay segment_ids"),
    Compiled((3, 3, 3), 256, 512, "log_decay segment_ids"),  # Gated DeltaNet
)
"""Cases that are compiled for TPUs."""
