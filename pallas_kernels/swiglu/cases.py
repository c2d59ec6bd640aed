"""Sizes and tolerances of gradients of SwiGLU, which their tests and benchmarks use.

- `INTERPRETED`: small cases for the interpreter, on a CPU.
- `COMPILED`: cases that are compiled for the card, and that run on it.
- `TIMED`: cases that `python -m benchmarks swiglu` checks and times.
"""

from __future__ import annotations

from typing import NamedTuple

TOLERANCES = {"interpreted": 4e-3, "card": 5e-3}
"""Largest difference of each result from that in float32, relative to the largest entry."""


class Case(NamedTuple):
    """The sizes of one call of `swiglu_gradients`.

    Attributes:
        batch: B, the number of rows.
        length: T, the number of tokens of a row.
        channels: F, the channels of the hidden layer.
        scale: multiplies the gate.
    """

    batch: int
    length: int
    channels: int
    scale: float = 1.0

    @property
    def id(self) -> str:
        """The name of this case in the tests' output: its sizes."""
        scale = "" if self.scale == 1 else f"-scale={self.scale}"
        return f"{self.batch}x{self.length}x{self.channels}{scale}"


INTERPRETED = (Case(1, 24, 512), Case(2, 36, 256, 0.5), Case(1, 72, 768))
"""Cases for the interpreter; the one of the fast tests comes first."""
COMPILED = (
    Case(2, 1024, 2816),
    Case(2, 1024, 5632),
    Case(1, 1032, 2048, 0.5),
    Case(8, 4096, 5632),
)
"""Cases that are compiled for, and run on, an NVIDIA Hopper GPU; the first two have the widths of models with 340M and 1.3B parameters."""
TIMED = (Case(16, 2048, 2816), Case(8, 4096, 5632))
"""Cases that are timed: models with 340M and 1.3B parameters."""
