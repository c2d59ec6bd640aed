"""Sizes and tolerances of gated norms, which their tests and benchmarks use.

- `INTERPRETED`: small cases for the interpreter, on a CPU.
- `COMPILED`: cases that are compiled for the card, and that run on it.
- `TIMED`: cases that `python -m benchmarks gated_norm` checks and times.
"""

from __future__ import annotations

from typing import NamedTuple

TOLERANCES = {"interpreted": 3e-3, "card": 5e-3}
"""Largest difference of the output and of each gradient from those in float32, relative to the largest entry."""


class Case(NamedTuple):
    """The sizes and options of one call of `gated_rms_norm`.

    Attributes:
        batch: B, the number of rows.
        length: T, the number of tokens of a row.
        heads: H.
        channels: V, the number of channels of a head.
        group: consecutive heads that are normalised together.
        gate_first: whether the gate multiplies before the norm.
        skip: whether there is a skip.
        activation: of the gate: "silu" or "sigmoid".
        wide_gate: whether the gate is float32 instead of bfloat16.
    """

    batch: int
    length: int
    heads: int
    channels: int
    group: int = 1
    gate_first: bool = False
    skip: bool = False
    activation: str = "silu"
    wide_gate: bool = False

    @property
    def id(self) -> str:
        """The name of this case of `gated_rms_norm` in the tests' output and in rows: its sizes and options."""
        flags = [name for name in ("gate_first", "skip", "wide_gate") if getattr(self, name)]
        sizes = "x".join(map(str, self[:4]))
        return "-".join([sizes, f"group={self.group}", *flags, self.activation])


INTERPRETED = (
    Case(1, 4, 4, 64, gate_first=True, skip=True),
    Case(1, 10, 2, 512, 2, gate_first=True, skip=True),
    Case(2, 6, 16, 64),
    Case(1, 70, 4, 256, activation="sigmoid", wide_gate=True),
    Case(1, 8, 8, 128, skip=True, gate_first=True),
    Case(1, 6, 2, 512),
    Case(1, 4, 1, 1536, activation="sigmoid"),
    Case(1, 6, 64, 64, 64, skip=True),
)
"""Cases for the interpreter; the one of the fast tests comes first."""
COMPILED = (
    Case(2, 1024, 64, 64, 64, gate_first=True, skip=True),
    Case(2, 1024, 64, 64, 64, gate_first=True),
    Case(2, 1024, 64, 64, 64, skip=True),
    Case(2, 1024, 32, 64, 32, gate_first=True, skip=True),
    Case(2, 1024, 24, 64, 24, gate_first=True, skip=True),
    Case(2, 1024, 16, 64),
    Case(2, 1024, 16, 128),
    Case(2, 1024, 16, 128, activation="sigmoid", wide_gate=True),
    Case(2, 1024, 8, 256),
    Case(2, 1024, 6, 512),
    Case(2, 1024, 1, 2048),
)
"""Cases that are compiled for, and run on, an NVIDIA Hopper GPU."""
TIMED = (
    Case(8, 4096, 64, 64, 64, gate_first=True, skip=True),
    Case(8, 4096, 64, 64, 64, gate_first=True),
    Case(8, 4096, 16, 128),
    Case(8, 4096, 16, 128, activation="sigmoid", wide_gate=True),
    Case(8, 4096, 16, 256),
    Case(8, 4096, 6, 512),
)
"""Cases that are timed: the norm of Mamba2 with 1.3B parameters, with the skip and where its op has added that, and heads of 128 (also with KDA's gate), 256 and 512 (Gated DeltaNet
with 1.3B parameters).
"""
