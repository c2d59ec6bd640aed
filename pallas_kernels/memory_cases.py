"""Definitions that the test and benchmark cases of `linear_attention`, `delta_rule` and `dplr` share: the type of a
compiled case, and the timed sizes.
"""

from __future__ import annotations

from typing import NamedTuple


class Compiled(NamedTuple):
    """A call of an op that is compiled, but not run: its sizes and arguments.

    Attributes:
        heads: the numbers of heads of q, of k (and of a and b), and of v.
        key_dim: K, the number of key channels of a head.
        value_dim: V, the number of value channels of a head.
        arguments: words that name optional arguments: "log_decay", with "channel" for one per key channel, "value_log_decay", "bonus",
            "segment_ids"; "undecayed" for the memory that a delta rule's keys read; "memories" if the forward pass saves the memories before
            all chunks.
        spilled: the bytes of registers that the kernels may spill on Hopper, at most.
    """

    heads: tuple[int, int, int]
    key_dim: int
    value_dim: int
    arguments: str
    spilled: int = 0


TIMED = (
    (8, 4096, 16, 128),
    (2, 16384, 16, 128),
    (4, 2048, 16, 128),
    (4, 4096, 64, 128),
    (8, 2048, 32, 256),
    (8, 1024, 8, 64),
    (1, 8192, 96, 128),
)
"""B, T, heads and K = V of the calls that `python -m benchmarks kernels` times, the main one first."""
