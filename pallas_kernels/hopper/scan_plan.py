"""The use of warpgroups and shared memory of the scan over chunks that the delta rules share, on Mosaic GPU (Hopper)."""

from __future__ import annotations

from typing import Any, NamedTuple

from pallas_kernels.compat import pl
from pallas_kernels.hopper.row_layout import CHUNK

BLOCK = 64  # columns of the memory (value channels) that a warpgroup has
_LARGEST_IN_REGISTERS = 128  # K up to which the memory is a left operand in registers
_STAGES = 3  # chunks that are loaded or in use at once, if shared memory is large enough
_SMEM = 226 * 1024  # bytes of shared memory, of 227
KEY_INPUTS = ("q", "k", "a", "written")  # inputs that have K numbers for each token


class Call(NamedTuple):
    """Sizes and options of one call.

    Attributes:
        shapes: of the inputs that are loaded chunk by chunk, by name.
        outs: names of the outputs.
        length: T.
        heads: number of heads of the outputs.
        depth: K.
        count: chunks of a part.
        parts: of the sequence.
        checkpoints: memories that are returned, or 1.
        reverse: whether the last chunk is the first.
        save: whether S before each chunk is returned.
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
        """Whether S is read as a left operand from shared memory, in pieces of 64 keys; otherwise from registers, as one piece."""
        return bool(self.interpret) or self.depth > _LARGEST_IN_REGISTERS

    @property
    def size(self) -> int:
        """Keys of a piece of S."""
        return BLOCK if self.in_smem else self.depth

    @property
    def pieces(self) -> int:
        """Pieces of S."""
        return self.depth // self.size

    @property
    def row_count(self) -> int:
        """Vectors in `rows`."""
        return self.shapes["rows"][2] // self.length if "rows" in self.shapes else 0


class Plan(NamedTuple):
    """The use of warpgroups and of shared memory.

    Attributes:
        groups: computing warpgroups of a thread block, which use the same loaded inputs: 1 or 2.
        buffers: [64, 64] buffers of a warpgroup.
        separate: whether every piece of S and every output has a buffer of its own.
        stages: chunks that are loaded or in use at once.
    """

    groups: int
    buffers: int
    separate: bool
    stages: int


def make_plan(call: Call, programs: int, blocks: int, processors: int) -> Plan:
    """Choose the plan.

    Args:
        call: the call.
        programs: number of warpgroups that compute memories.
        blocks: of these, the number for the columns of one memory.
        processors: of the card.
    """
    # Two warpgroups of a block take 1.7 times as long as one that has a processor of its own. So two share a block if that fills all
    # processors less often, and if shared memory is large enough to load ahead.
    alone = 10 * pl.cdiv(programs, processors) < 17 * pl.cdiv(programs, 2 * processors)
    buffers, ahead = 2 if call.in_smem else max(1, len(call.outs)), min(2, call.count)
    share = blocks % 2 == 0 and not alone and _count_stages(call, 2, buffers) >= ahead
    groups = 2 if share else 1
    # One warpgroup alone may have buffers for all pieces of S at once, and for outputs, so that it does not wait for their copies.
    every = call.pieces + len(call.outs)
    separate = call.in_smem and groups == 1 and _count_stages(call, 1, every) >= ahead
    buffers = every if separate else buffers
    return Plan(groups, buffers, separate, _count_stages(call, groups, buffers))


def _count_stages(call: Call, groups: int, buffers: int) -> int:
    """The number of chunks whose inputs fit into shared memory, at most `_STAGES`, next to the buffers of the warpgroups."""
    sizes = dict.fromkeys(call.shapes, CHUNK) | dict.fromkeys(KEY_INPUTS, call.depth)
    sizes |= dict(v=groups * BLOCK, rows=8, chunk_decay=8)  # vectors are aligned to 1024 bytes
    chunk_bytes = sum(2 * CHUNK * sizes[name] for name in call.shapes)
    saved = call.depth * (call.save and not call.in_smem)
    buffer_bytes = 2 * groups * BLOCK * (CHUNK * buffers + saved)
    return min(_STAGES, call.count, (_SMEM - buffer_bytes) // chunk_bytes)
