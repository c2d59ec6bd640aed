"""Sizes and tolerances of attention with forget gates, which its tests and benchmarks use.

- `HOPPER`, `HOPPER_PARTS`, `SPLITS`: cases that run on the card.
- `TIMED`: sizes that `python -m benchmarks attention` times.
"""

from __future__ import annotations

from typing import Any, NamedTuple

OUTPUT_TOLERANCE, GRADIENT_TOLERANCE = 5e-3, 1e-2
"""Largest difference of the output, and of a gradient, from XLA in float32, relative in RMS."""


class Case(NamedTuple):
    """The sizes of one tested call of `forgetting_attention`, and its documents, gates and window.

    Attributes:
        heads: the number of query heads, and that of key and value heads.
        dim: the number of channels of a head, for keys and values.
        length: T, the number of tokens of a row.
        documents: the mean number of documents per token of a row, such as 0.01; None is one document without
            padding or masked tokens.
        gates: the strength of the forget gates, "mild" or "strong"; None is no gates.
        window: the number of last tokens that a query sees, or None for all.
    """

    heads: tuple[int, int]
    dim: int
    length: int
    documents: float | None
    gates: str | None
    window: int | None

    @property
    def id(self) -> str:
        """The name of this case of `forgetting_attention` in the tests' output: its sizes, documents, gates
        and window.
        """
        sizes = [f"heads={self.heads[0]},{self.heads[1]}", f"D={self.dim}", f"T={self.length}"]
        documents = [] if self.documents is None else [f"documents={self.documents}"]
        window = [] if self.window is None else [f"window={self.window}"]
        return "-".join([*sizes, *documents, f"gates={self.gates}", *window])


HOPPER = (
    Case((4, 2), 128, 1000, 0.01, "mild", None),
    Case((2, 2), 64, 4096, None, "strong", None),
    Case((2, 1), 64, 1024, None, "mild", 300),
    Case((2, 2), 128, 512, 0.01, None, None),
    Case((2, 2), 64, 2048, 0.002, "mild", None),
)
"""Cases that run on an NVIDIA Hopper GPU."""
HOPPER_PARTS = (
    Case((4, 2), 128, 4096, None, None, None),
    Case((4, 2), 128, 4096, 0.002, "mild", None),
    Case((2, 2), 64, 4096, None, "mild", None),
    Case((2, 2), 128, 2048, None, "mild", 700),
)
"""Cases whose queries are two parts of the row, on an NVIDIA Hopper GPU."""
SPLITS: dict[str, tuple[tuple[int, ...], int, dict[str, Any]]] = {
    "partly-filled": ((90, 70), 260, {}),
    "from-empty-in-pieces": ((0, 128, 128), 256, {}),
    "no-gates": ((130, 140), 270, dict(gates=False)),
    "window": ((210, 90), 100, dict(window=100)),  # the ring is full, and begins in its middle
    "documents": ((130, 100), 230, dict(documents=True)),
    "masked": ((120, 80), 200, dict(masked=True)),
    "beyond-the-capacity": ((100, 80), 140, dict(documents=True)),
    "one-token": ((128, 1), 129, {}),
    "heads-of-256": ((130, 140), 300, dict(gates=False, documents=True, dim=256)),
}
"""Rows in several calls, each from the state of the one before: the tokens of each call, the first by XLA, and the state's capacity and the
arguments of all calls."""
TIMED = tuple(
    (batch, length, heads, dim)
    for heads, dim in ((24, 64), (16, 128))
    for batch, length in ((8, 2048), (4, 4096), (2, 8192), (1, 16384), (1, 32768), (1, 65536))
)
"""B, T, heads and their channels of the calls that are timed."""
