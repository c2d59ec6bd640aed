"""Sizes and tolerances of forgetting attention.

- `HOPPER`, `HOPPER_PARTS`: cases that run on the card.
- `TIMED`: sizes that `python -m benchmarks attention` times.
"""

from __future__ import annotations

from typing import NamedTuple

OUTPUT_TOLERANCE, GRADIENT_TOLERANCE = 5e-3, 1e-2
"""Largest difference of the output, and of a gradient, from XLA in float32, relative in RMS."""


class Case(NamedTuple):
    """Sizes and kind of a call.

    Attributes:
        heads: numbers of heads of q, and of k and v.
        dim: channels of a head.
        length: T.
        documents: mean number of documents for each token; None is one document without padding or masked
            tokens.
        gates: "mild", "strong", or None without.
        window: tokens that a query sees, or None.
    """

    heads: tuple[int, int]
    dim: int
    length: int
    documents: float | None
    gates: str | None
    window: int | None

    @property
    def id(self) -> str:
        """The case's name in the tests' output."""
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
