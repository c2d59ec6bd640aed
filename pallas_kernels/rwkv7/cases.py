"""Sizes and tolerances of the kernels of RWKV7, which their tests use.

- `INTERPRETED`: small cases for the interpreter, on a CPU.
- `COMPILED`: cases that are compiled for the card, and that run on it.
"""

from __future__ import annotations

from typing import NamedTuple

TOLERANCES = {"interpreted": 4e-3, "card": 5e-3}
"""Largest difference of a result and of each gradient from those in float32, relative to the largest entry."""


class Case(NamedTuple):
    """The sizes of one call: B rows of T tokens, H heads of K channels."""

    batch: int
    length: int
    heads: int
    channels: int

    @property
    def id(self) -> str:
        """The name of this case of RWKV7's kernels in the tests' output: its sizes."""
        return "x".join(map(str, self))


INTERPRETED = (Case(1, 18, 8, 64), Case(2, 7, 32, 16), Case(1, 6, 16, 32), Case(1, 4, 8, 128))
"""Cases for the interpreter; the one of the fast tests comes first."""
COMPILED = (
    Case(2, 1024, 16, 64),
    Case(8, 4096, 32, 64),
    Case(2, 1000, 8, 128),
    Case(1, 512, 32, 32),
)
"""Cases that are compiled for, and run on, an NVIDIA Hopper GPU; the second is a layer of RWKV7 with 1.3B parameters."""
