"""Sizes and tolerances of selective scans that the tests of all backends share.

- `HOPPER_INTERPRETED`, `TPU_INTERPRETED`: small cases for the interpreters, on a CPU.
- `HOPPER`: cases that run on the card.
- `HOPPER_COMPILED`, `TPU_COMPILED`: cases that are compiled for chips that need not be here.
- `TIMED_CHANNELS`, `TIMED_ROWS`: sizes that `python -m benchmarks scans` times.
"""

from __future__ import annotations

from typing import NamedTuple

OUTPUT_TOLERANCE = 5e-3
"""Largest difference of the output and the final memory from the recurrence in float32, relative to the largest entry."""
GRADIENT_TOLERANCES = {"bfloat16": 3e-3, "float32": 1e-5}
"""Largest difference of a gradient, by its dtype."""


class Case(NamedTuple):
    """The sizes of one tested call of `selective_scan` or `complex_scan`, and its documents and decays.

    Attributes:
        length: T, the number of tokens of a row.
        channels: D, the number of channels.
        states: N, the number of entries of a channel's memory; 0 is one complex number, for `complex_scan`.
        documents: whether rows contain several documents, padding and masked tokens.
        strong: whether some tokens have decays of about e^-30.
        batch: B, the number of rows.
        real: whether the number of a channel without entries (`states` is 0) is real.
    """

    length: int
    channels: int
    states: int
    documents: bool
    strong: bool = False
    batch: int = 2
    real: bool = False

    @property
    def id(self) -> str:
        """The name of this case of a selective scan in the tests' output: its sizes and options."""
        states = f"N={self.states}" if self.states else "real" if self.real else "complex"
        options = [name for name in ("documents", "strong") if getattr(self, name)]
        return "-".join([f"{self.batch}x{self.length}x{self.channels}", states, *options])


HOPPER_INTERPRETED = (
    Case(400, 64, 16, True, batch=1),  # more chunks than `scan` loads ahead
    Case(550, 128, 0, True, batch=1),
    Case(100, 128, 16, True, batch=1),
    Case(200, 64, 16, True),
    Case(40, 128, 0, True),
    Case(70, 128, 0, True, batch=1, real=True),
    Case(128, 64, 16, False, strong=True),
    Case(70, 128, 8, False, batch=1),
    Case(64, 256, 0, False, strong=True),
)
"""Cases for the Hopper interpreter; those of the fast tests come first."""
HOPPER = (
    Case(1000, 256, 16, True),
    Case(4096, 512, 16, False),
    Case(700, 128, 16, True, strong=True),
    Case(500, 64, 8, True),
    Case(1000, 256, 0, True),
    Case(4096, 512, 0, False),
    Case(700, 128, 0, True, strong=True),
    Case(1000, 256, 0, True, real=True),
)
"""Cases that run on an NVIDIA Hopper GPU."""
TPU_INTERPRETED = (  # programs of 128 or 256 channels, or three programs
    Case(140, 128, 16, True),
    Case(150, 128, 0, True),
    Case(128, 128, 16, False, strong=True),
    Case(300, 256, 8, False, batch=1),
    Case(40, 128, 32, True, batch=1),
    Case(128, 384, 24, False, strong=True, batch=1),
    Case(130, 384, 0, False, strong=True, batch=1),
    Case(60, 1024, 0, True, batch=1),
)
"""Cases for the TPU interpreter; those of the fast tests come first."""
TPU_COMPILED = (
    Case(1000, 2048, 16, True),
    Case(1000, 1024, 8, False),
    Case(1000, 384, 24, True),
    Case(1000, 512, 32, False),
    Case(1000, 1024, 0, True),
    Case(1000, 384, 0, False),
)
"""Cases that are compiled for TPUs."""
TIMED_CHANNELS = {"mamba": (2048, 16), "gateloop": (1024, 1)}
"""D, and numbers of a channel's memory, of the layers of models with 340M parameters that are timed."""
TIMED_ROWS = ((16, 2048), (2, 16384))
"""B and T of the calls that are timed."""
