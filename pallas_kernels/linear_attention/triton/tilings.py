"""The tiles of the Triton kernels of linear attention, and how each kernel is compiled."""

from __future__ import annotations

from typing import NamedTuple


class Tiling(NamedTuple):
    """The size of the tiles that a program of one kernel computes, and how it is compiled.

    Attributes:
        keys: number of key channels of a tile.
        values: number of value channels of a tile.
        warps: number of warps of a program.
        stages: number of iterations of the kernel's loop whose loads are in flight.
        registers: largest number of registers of a thread, or 0 for the compiler's choice.
    """

    keys: int
    values: int
    warps: int
    stages: int
    registers: int = 0


TILINGS = {
    "sum_decays": Tiling(64, 64, 4, 1),
    "scalar_sums": Tiling(32, 0, 4, 1),
    "scan": Tiling(64, 128, 4, 2),
    "narrow_scan": Tiling(32, 64, 4, 3),
    "channel_scan": Tiling(64, 64, 4, 3),
    "decayed_scan": Tiling(64, 64, 4, 3),
    "channel_scores": Tiling(32, 64, 4, 1),
    "outputs": Tiling(64, 128, 4, 3),
    "narrow_outputs": Tiling(64, 64, 4, 2),
    "channel_outputs": Tiling(64, 128, 4, 2),
    "decayed_outputs": Tiling(64, 128, 4, 2),
    "score_gradients": Tiling(64, 64, 4, 2),
    "value_gradients": Tiling(64, 128, 4, 2),
    "channel_value_gradients": Tiling(64, 128, 4, 2),
    "scalar_gradients": Tiling(64, 64, 4, 1),
    "channel_gradients": Tiling(32, 64, 4, 1),
    "bonus_gradients": Tiling(32, 64, 4, 1),
    "query_gradients": Tiling(64, 64, 4, 1),
    "exact_query_gradients": Tiling(32, 64, 4, 1),
    "plain_joined_gradients": Tiling(32, 64, 4, 1),
    "constant_joined_gradients": Tiling(32, 64, 4, 2),
    "joined_gradients": Tiling(64, 64, 4, 1),
}
"""The tiling of each kernel for bfloat16, by the name of the kernel, with "channel_" where a kernel differs with a decay per key
channel, and "narrow_" where it differs for 64 key channels without one. "decayed_outputs" is `outputs` of decayed queries, and "decayed_scan" `scan` of decayed keys; the keys of
"scalar_sums" are heads;
`channel_gradients` has the tiling "query_gradients" for the queries alone ("exact_query_gradients" with keys in two terms), and
"bonus_gradients" with a bonus; `joined_gradients` has others
without a decay and with a constant one. None spills more than
64 bytes on 8.x at 64 and 128 channels (tests/kernels/triton_registers.json)."""
WIDE_TILINGS = {
    name: tiling._replace(values=64, warps=8, stages=1, registers=0)
    for name, tiling in TILINGS.items()
}
WIDE_TILINGS["narrow_scan"] = WIDE_TILINGS["scan"]
WIDE_TILINGS["bonus_gradients"] = Tiling(16, 64, 8, 1)
"""The tilings for products in tf32, of float16 and float32 inputs."""
FLOAT32_TILINGS = WIDE_TILINGS | {
    "scalar_gradients": Tiling(32, 64, 8, 1),
    "value_gradients": Tiling(32, 64, 8, 1),
}
"""Those of float32 inputs, whose tiles need more registers: with 64 key channels `scalar_gradients` spills 144 to 2,800 bytes on 8.x, and
`value_gradients` of 256 channels 480."""
TABLES = {"bfloat16": TILINGS, "float16": WIDE_TILINGS, "float32": FLOAT32_TILINGS}
"""The tilings by the dtype of a call's tokens."""
JOINED = {"bfloat16": (64,)}
"""The numbers of key channels, by dtype, for which one kernel, `joined_gradients`, computes all gradients with a scalar decay or none."""
