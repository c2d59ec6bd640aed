"""Sizes and tolerances of grouped products for the tests.

- `INTERPRETED`, `INTERPRETED_PARTS`, `SEGMENTS`: small cases for the interpreter, on a CPU.
- `HOPPER`: cases that run on the card.
"""

from __future__ import annotations

from typing import NamedTuple

TOLERANCES = {"interpreted": 3e-3, "card": 5e-3, "segments": 5e-3}
"""Largest RMS of the error, relative to the RMS of the result in float64."""


class Case(NamedTuple):
    """The sizes of one tested call of `grouped_product` or `grouped_sums`.

    Attributes:
        sizes: the number of rows of each group.
        rows: N, the number of all rows; those after the last group belong to no group.
        width: D, the number of columns of x.
        out: F, the number of columns of the product.
    """

    sizes: tuple[int, ...]
    rows: int
    width: int
    out: int

    @property
    def id(self) -> str:
        """The name of this case of grouped products in the tests' output: its sizes."""
        sizes = ",".join(map(str, self.sizes))
        return "-".join([f"sizes={sizes}", f"N={self.rows}", f"D={self.width}", f"F={self.out}"])


INTERPRETED = Case((128, 0, 256), 512, 128, 192)
"""The case for the interpreter: an empty group, and rows after the last group."""
INTERPRETED_PARTS = Case((64, 192, 64), 320, 128, 192)
"""The case for the interpreter with `parts`: groups with odd numbers of blocks of 64 rows, which end with half a tile."""
SEGMENTS = Case((64, 192, 0, 128), 384, 128, 192)
"""The case of `segment_product`, whose segments are multiplied by two matrices in turn."""
GATED = Case((128, 0, 256), 512, 128, 256)
"""The case of grouped SwiGLU layers, of inner width F, for the interpreter."""
GATED_ON_HOPPER = Case((384, 0, 256, 512), 1280, 256, 384)
"""The case of grouped SwiGLU layers that runs on an NVIDIA Hopper GPU."""
HOPPER = (
    Case((384, 0, 256, 512), 1152, 256, 192),
    Case((1152, 0, 0, 0), 1152, 256, 192),
    Case((0, 128, 128, 0), 1152, 256, 192),
)
"""Cases that run on an NVIDIA Hopper GPU."""
