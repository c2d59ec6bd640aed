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
        batch: B, the number of rows.
        contiguous: whether documents have no padding inside, and the call says so.
    """

    length: int
    channels: int
    width: int
    documents: bool
    bias: bool
    silu: bool
    head_dim: int | None
    batch: int = 1
    contiguous: bool = False

    @property
    def id(self) -> str:
        """The name of this case of `short_convolution` in the tests' output: its sizes and options."""
        options = [
            name for name in ("contiguous", "documents", "bias", "silu") if getattr(self, name)
        ]
        rows = [f"B={self.batch}"] * (self.batch > 1)
        heads = [] if self.head_dim is None else [f"heads of {self.head_dim}"]
        return "-".join(
            [*rows, f"T={self.length}", f"D={self.channels}", f"W={self.width}", *options, *heads]
        )


INTERPRETED = (
    Case(20, 256, 4, True, True, True, 64),
    Case(48, 512, 3, False, False, True, 128),
    Case(32, 256, 2, True, False, False, None),
    Case(40, 1024, 4, True, False, True, 256),
    Case(36, 768, 4, False, True, False, 64),
    Case(48, 512, 4, True, True, True, 128, contiguous=True),
    Case(40, 64, 4, True, True, True, 64, batch=4, contiguous=True),
    Case(33, 256, 4, False, True, True, 256, batch=4),
    Case(48, 192, 3, True, False, True, 64, batch=8, contiguous=True),
    Case(64, 384, 4, True, True, True, 128, batch=2, contiguous=True),
    Case(120, 256, 4, False, True, True, 256, batch=1),
    Case(128, 64, 2, True, True, False, 64, batch=1, contiguous=True),
    Case(40, 128, 4, True, True, True, None, batch=4, contiguous=True),
    Case(48, 128, 4, False, True, True, None, batch=8),
    Case(64, 192, 3, True, False, True, None, batch=2, contiguous=True),
)
"""Cases for the interpreter, in blocks of 16 tokens; the one of the fast tests comes first."""
HOPPER = (
    *(
        Case(1000, channels, width, documents, True, True, head_dim, batch=2)
        for documents in (False, True)
        for channels, width, head_dim in (
            (1024, 4, 128), (1536, 3, 64), (2048, 4, 256), (768, 4, None)
        )
    ),
    *(
        Case(1020, channels, 4, documents, True, True, head_dim, batch, contiguous=True)
        for documents in (False, True)
        for channels, head_dim, batch in (
            (1024, 128, 2), (768, 256, 4), (1536, 256, 8), (768, 256, 2), (384, 128, 1), (128, None, 8), (192, None, 2)
        )
    ),
    # Enough tokens for blocks of many steps, in every row of the table of tilings.
    *(
        Case(2040, channels, 4, documents, False, True, head_dim, batch=8, contiguous=documents)
        for documents in (False, True)
        for channels, head_dim in ((2048, None), (2048, 128), (1536, 256))
    ),
)  # fmt: skip
"""Cases that run on an NVIDIA Hopper GPU."""
TIMED = ((8, 4096, 2048), (1, 16384, 2048))
"""B, T and D of the calls that are timed, with a weight of 4 rows."""
TIMED_HEAD_DIM = 128
"""Channels of a head of those calls that normalise heads."""
