"""Sizes and tolerances of attention with forget gates, which its tests and benchmarks use.

- `HOPPER`, `HOPPER_PARTS`: cases that run on the card.
- `TIMED`: sizes that `python -m benchmarks attention` times.
"""

from __future__ import annotations

from typing import NamedTuple

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
TIMED = tuple(
    (batch, length, heads, dim)
    for heads, dim in ((24, 64), (16, 128))
    for batch, length in ((8, 2048), (4, 4096), (2, 8192), (1, 16384), (1, 32768), (1, 65536))
)
"""B, T, heads and their channels of the calls that are timed."""
