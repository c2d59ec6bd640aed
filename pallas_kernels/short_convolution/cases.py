"""Sizes and tolerances of short convolutions, which their tests and benchmarks use.

- `INTERPRETED`: small cases for the interpreter, on a CPU.
- `HOPPER`: cases that run on the card.
- `TIMED`, `TIMED_HEAD_DIM`: sizes that `python -m benchmarks convolution` times.
"""

from __future__ import annotations

from typing import NamedTuple

TOLERANCES = {"interpreted": 3e-3, "card": 5e-3}
"""Largest difference of the output and of each gradient from those in float32, relative to the largest entry."""


class Case(NamedTuple):
    """The sizes of one tested call of `short_convolution`, and its options.

    Attributes:
        length: T, the number of tokens of a row.
        channels: D, the number of channels.
        width: W, the number of tokens over which the convolution sums.
        documents: whether rows contain several documents, with padding inside and between them.
        bias: whether there is a bias.
        silu: whether SiLU is applied.
        head_dim: the number of channels of a head that is normalised, or None.
    """

    length: int
    channels: int
    width: int
    documents: bool
    bias: bool
    silu: bool
    head_dim: int | None

    @property
    def id(self) -> str:
        """The name of this case of `short_convolution` in the tests' output: its sizes and options."""
        options = [name for name in ("documents", "bias", "silu") if getattr(self, name)]
        heads = [] if self.head_dim is None else [f"heads of {self.head_dim}"]
        return "-".join(
            [f"T={self.length}", f"D={self.channels}", f"W={self.width}", *options, *heads]
        )


INTERPRETED = (
    Case(20, 256, 4, True, True, True, 64),
    Case(48, 512, 3, False, False, True, 128),
    Case(32, 256, 2, True, False, False, None),
    Case(40, 1024, 4, True, False, True, 256),
    Case(36, 768, 4, False, True, False, 64),
)
"""Cases for the interpreter, in blocks of 16 tokens; the one of the fast tests comes first."""
HOPPER = tuple(
    Case(1000, channels, width, documents, True, True, head_dim)
    for documents in (False, True)
    for channels, width, head_dim in ((1024, 4, 128), (1536, 3, 64), (2048, 4, 256), (768, 4, None))
)
"""Cases that run on an NVIDIA Hopper GPU."""
TIMED = ((8, 4096, 2048), (1, 16384, 2048))
"""B, T and D of the calls that are timed, with a weight of 4 rows."""
TIMED_HEAD_DIM = 128
"""Channels of a head of those calls that normalise heads."""
