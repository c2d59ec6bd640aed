"""How the delta rules' scan over chunks on Hopper uses warpgroups and shared memory: the sizes of a call, and the plan chosen for it."""

from __future__ import annotations

from typing import Any, NamedTuple

from pallas_kernels.compat import pl
from pallas_kernels.hopper.row_layout import CHUNK

BLOCK = 64  # columns of the memory (value channels) that a warpgroup computes
_LARGEST_IN_REGISTERS = 128  # K up to which the memory is a left operand in registers
_STAGES = 3  # chunks that are loaded or in use at once, if shared memory is large enough
_SMEM = 226 * 1024  # bytes of shared memory that a thread block uses, of 227 KiB
KEY_INPUTS = ("q", "k", "a", "written")  # inputs that have K numbers for each token


class Call(NamedTuple):
    """The sizes and options of one run of the delta rules' scan kernel.

    Attributes:
        shapes: the shapes of the inputs that are loaded chunk by chunk, by name.
        outs: the names of the outputs.
        length: T, the number of tokens in a row.
        heads: the number of heads of the outputs.
        depth: K, the number of key channels of a memory.
        count: the number of chunks in each part of a row.
        parts: the number of parts of a row, which are computed in parallel.
        checkpoints: the number of memories along each row that are returned, or 1 for none.
        reverse: whether the chunks are computed from the last to the first.
        save: whether the memory S before each chunk is returned.
        from_zero: whether there is no initial memory.
        interpret: parameters of the interpreter, or False.
    """

    shapes: dict[str, tuple[int, ...]]
    outs: tuple[str, ...]
    length: int
    heads: int
    depth: int
    count: int
    parts: int
    checkpoints: int
    reverse: bool
    save: bool
    from_zero: bool
    interpret: Any

    @property
    def in_smem(self) -> bool:
        """Whether matrix products read their left operand, the memory S, from shared memory, in tiles of 64
        key channels; otherwise from registers, as one tile.
        """
        return bool(self.interpret) or self.depth > _LARGEST_IN_REGISTERS

    @property
    def size(self) -> int:
        """The number of key channels in each of the tiles into which the scan divides a warpgroup's memory [64 value channels, K]: 64, or
        all K.
        """
        return BLOCK if self.in_smem else self.depth

    @property
    def pieces(self) -> int:
        """The number of tiles, along the key channels, into which the scan divides a warpgroup's memory [64 value channels, K]."""
        return self.depth // self.size

    @property
    def row_count(self) -> int:
        """n, the number of values for each token in the scan's input `rows` [B, heads, T * n]: 1 (beta), 3 (beta
        and the decays of the token's read and of its write) or 4 (and that of its erase); 0 if the scan has no such
        input.
        """
        return self.shapes["rows"][2] // self.length if "rows" in self.shapes else 0


class Plan(NamedTuple):
    """How the delta rules' scan kernel uses the warpgroups and the shared memory of a thread block.

    Attributes:
        groups: the number of computing warpgroups of a thread block, which use the same loaded inputs: 1 or
            2.
        buffers: the number of [64, 64] buffers in shared memory of each of these warpgroups.
        separate: whether there is one buffer for every tile of the memory S and every output; otherwise they
            use the same buffers in turn.
        stages: the number of chunks whose inputs are loaded or in use at once.
    """

    groups: int
    buffers: int
    separate: bool
    stages: int


def make_plan(call: Call, programs: int, blocks: int, processors: int) -> Plan:
    """Choose how many warpgroups a thread block of the delta rules' scan has, and how it uses shared memory.

    Args:
        call: the sizes and options of the scan.
        programs: the number of computing warpgroups of all thread blocks; each has 64 value channels of one
            memory.
        blocks: the number of these warpgroups that compute one memory: V / 64.
        processors: the number of streaming multiprocessors of the card.
    """
    # Two warpgroups of a thread block take 1.7 times as long as one that has a processor of its own. So two share a block if that fills all
    # processors less often, and if shared memory is large enough to load ahead.
    alone = 10 * pl.cdiv(programs, processors) < 17 * pl.cdiv(programs, 2 * processors)
    buffers, ahead = 2 if call.in_smem else max(1, len(call.outs)), min(2, call.count)
    share = blocks % 2 == 0 and not alone and _count_stages(call, 2, buffers) >= ahead
    groups = 2 if share else 1
    # One warpgroup alone may have buffers for all tiles of S at once, and for outputs, so that it does not wait for their copies.
    every = call.pieces + len(call.outs)
    separate = call.in_smem and groups == 1 and _count_stages(call, 1, every) >= ahead
    buffers = every if separate else buffers
    return Plan(groups, buffers, separate, _count_stages(call, groups, buffers))


def _count_stages(call: Call, groups: int, buffers: int) -> int:
    """Return the number of chunks whose inputs fit into a thread block's shared memory at once, at most
    `_STAGES`, in addition to `buffers` buffers [64, 64] for each of its `groups` computing warpgroups.
    """
    sizes = dict.fromkeys(call.shapes, CHUNK) | dict.fromkeys(KEY_INPUTS, call.depth)
    sizes |= dict(v=groups * BLOCK, rows=8, chunk_decay=8)  # vectors are aligned to 1024 bytes
    chunk_bytes = sum(2 * CHUNK * sizes[name] for name in call.shapes)
    saved = call.depth * (call.save and not call.in_smem)
    buffer_bytes = 2 * groups * BLOCK * (CHUNK * buffers + saved)
    return min(_STAGES, call.count, (_SMEM - buffer_bytes) // chunk_bytes)
