"""Sizes and tolerances of residual streams and their norms, of the gradients and of the values, which their tests and benchmarks use.

- `INTERPRETED`: small cases for the interpreter, on a CPU.
- `COMPILED`: cases that are compiled for the card, and that run on it.
- `TIMED`: cases that `python -m benchmarks residual_norm` checks and times.

`FORWARD_INTERPRETED`, `FORWARD_COMPILED` and `FORWARD_TIMED` are the same for sums and their norms.
"""

from __future__ import annotations

from typing import NamedTuple

TOLERANCES = {"interpreted": 4e-3, "card": 5e-3}
"""Largest difference of each gradient from that in float32, relative to the largest entry."""


class Case(NamedTuple):
    """The sizes of one call of `residual_norm_gradients`.

    Attributes:
        batch: B, the number of rows.
        length: T, the number of tokens of a row.
        channels: D.
        norms: the number of gradients of the norm.
        stream: whether the stream has a gradient of its own.
    """

    batch: int
    length: int
    channels: int
    norms: int
    stream: bool = True

    @property
    def id(self) -> str:
        """The name of this case in the tests' output and in rows: its sizes."""
        alone = "" if self.stream else "-alone"
        return f"{self.batch}x{self.length}x{self.channels}-norms={self.norms}{alone}"


class ForwardCase(NamedTuple):
    """The sizes of one call of `residual_norm_forward`: rows, tokens of a row and channels, and the dtype of the arrays."""

    batch: int
    length: int
    channels: int
    dtype: str = "bfloat16"

    @property
    def id(self) -> str:
        """The name of this case in the tests' output and in rows: its sizes."""
        return f"{self.batch}x{self.length}x{self.channels}-forward{'-float32' * (self.dtype == 'float32')}"


INTERPRETED = (
    Case(1, 18, 256, 2),
    Case(2, 5, 768, 5),
    Case(1, 6, 2048, 3, False),
    Case(1, 4, 4096, 1),
    Case(1, 70, 512, 6),
)
"""Cases for the interpreter; the one of the fast tests comes first."""
COMPILED = (
    Case(2, 1024, 768, 2),
    Case(2, 1024, 768, 5),
    Case(2, 1024, 1024, 1),
    Case(2, 1024, 1024, 2),
    Case(2, 1024, 1024, 5),
    Case(2, 1024, 1024, 6),
    Case(2, 1024, 1536, 3),
    Case(2, 1024, 2048, 1),
    Case(2, 1024, 2048, 3),
    Case(2, 1024, 2048, 6),
    Case(2, 1024, 2048, 3, False),
    Case(2, 1024, 3072, 3),
    Case(2, 1024, 4096, 3),
    Case(2, 1024, 4096, 6),
)
"""Cases that are compiled for, and run on, an NVIDIA Hopper GPU."""
TIMED = (
    Case(16, 2048, 1024, 1),
    Case(16, 2048, 1024, 2),
    Case(16, 2048, 1024, 5),
    Case(8, 4096, 2048, 1),
    Case(8, 4096, 2048, 2),
    Case(8, 4096, 2048, 3),
    Case(8, 4096, 2048, 5),
)
"""Cases that are timed: feedforwards with one product of the norm (1) and with two (2), and the mixers of softmax attention and Mamba2 (3)
and GLA (5), with 340M and 1.3B parameters."""
FORWARD_INTERPRETED = (
    ForwardCase(3, 7, 1024),
    ForwardCase(1, 18, 256),
    ForwardCase(1, 35, 768),
    ForwardCase(2, 5, 768, "float32"),
    ForwardCase(1, 6, 1024, "float32"),
    ForwardCase(2, 9, 2048),
    ForwardCase(1, 5, 2048, "float32"),
    ForwardCase(1, 4, 4096),
)
FORWARD_COMPILED = (
    ForwardCase(2, 1024, 768),
    ForwardCase(2, 1024, 1024),
    ForwardCase(1, 1023, 1024),
    ForwardCase(2, 1024, 1536),
    ForwardCase(8, 4096, 2048),
    ForwardCase(1, 1023, 2048),
    ForwardCase(2, 1024, 3072),
    ForwardCase(2, 1024, 4096),
    ForwardCase(2, 1024, 768, "float32"),
    ForwardCase(2, 1024, 2048, "float32"),
    ForwardCase(2, 1024, 4096, "float32"),
)
FORWARD_TIMED = (ForwardCase(16, 2048, 1024), ForwardCase(8, 4096, 2048))
