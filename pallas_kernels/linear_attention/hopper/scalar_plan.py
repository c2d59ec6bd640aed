"""The sizes of a call of Hopper's scan with a scalar decay (`scalar_scan`), its decays, and how its thread blocks divide the work."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax import lax

from pallas_kernels.compat import PROCESSORS, pl

BLOCK = 64  # columns of the memory that a warpgroup has


class Decays(NamedTuple):
    """The decays and documents of linear attention with a scalar decay, as the Hopper scan reads them.

    Each row of T tokens and N chunks is split into P parts, which are rows of the batch here. G is the number of memories.

    Attributes:
        cum: [B * P, G, T / P], sums of the log decay from each chunk's start; None without decay.
        read_decay: [B * P, G, T / P], the factor of the memory before the chunk in what each token reads: the exponential of `cum`, or 0 for
            a token of a later document. None is 1, as are `write_decay` and `chunk_decay` then: there is one document and no decay; or
            these are sums that a scan stored (`stored_by_scan`).
        write_decay: [B * P, G, T / P], the factor of each token's write in the memory after the chunk.
        chunk_decay: [B * P, G, N / P], the factor of the memory before the chunk in the memory after it: `read_decay` of the chunk's last token.
        run: [B * P, T / P], document numbers, or None.
        write_cum: [B * P, G, T / P], `cum` minus the logarithm of the factor of each token's write, which `write_decay` contains; None is
            `cum`: all factors are 1.
        log_decay: [B, T, G], the log decays themselves, if the scan computes the sums; then all other arrays are None.
        cum_low: [B * P, G, T / P], what is to be added to `cum`, for exact scans (`exact_decays`); None is 0.
        write_cum_low: [B * P, G, T / P], the same for `write_cum`.
    """

    cum: jax.Array | None
    read_decay: jax.Array | None
    write_decay: jax.Array | None
    chunk_decay: jax.Array | None
    run: jax.Array | None
    write_cum: jax.Array | None = None
    log_decay: jax.Array | None = None
    cum_low: jax.Array | None = None
    write_cum_low: jax.Array | None = None

    @property
    def stored_by_scan(self) -> bool:
        """Whether `cum` and `write_decay` are what a scan of rows with one document stored; the two others follow from `cum`, and are None."""
        return self.cum is not None and self.read_decay is None


def chunks_of_interval(count: int) -> int:
    """Return how many chunks (1, 2 or 4) are in an interval, for a row of `count` chunks; memories are saved at the start of each
    interval.
    """
    return max(n for n in (1, 2, 4) if count % n == 0)


def pairs(x: jax.Array, y: jax.Array, z: jax.Array, heads: int) -> bool:
    """Return whether a thread block can compute the memories of two consecutive heads of `heads`, which share x and y [B, T, *, D]
    and each have one block of columns of z [B, T, heads, 64].
    """
    shared = not any(heads // a.shape[2] % 2 for a in (x, y))
    return shared and z.shape[2] == heads and z.shape[3] == BLOCK


def count_groups(blocks: int, memories: int) -> int:
    """Return the number of warpgroups of a thread block, 1 or 2, each with one of the `blocks` slices of 64 columns of one of `memories`
    slices of memories.

    A chunk takes 1.2 times as long beside a second warpgroup as alone on a processor, so that one has a thread block for itself where
    processors are left over.
    """
    count = blocks * memories
    alone = 10 * pl.cdiv(count, PROCESSORS) < 12 * pl.cdiv(count, 2 * PROCESSORS)
    return 1 if blocks % 2 or alone else 2


class Call(NamedTuple):
    """Sizes and options of one call of `scalar_scan`, which carries memories S [D, V] with a scalar decay through the chunks of all
    rows.

    Attributes:
        shapes: shapes of the inputs, by name.
        streams: names of the arrays that a thread block has chunk by chunk; all but `sums` are inputs.
        sums: names of the vectors that it computes from the log decays: sums up to each token, and exponentials of sums after it.
        heads: number of heads of the output.
        depth: number of rows of a memory (key channels) that a warpgroup computes, at most 128.
        slices: number of slices of `depth` rows of a memory.
        blocks: number of slices of 64 columns of a memory (value channels).
        count: number of chunks of a row, N.
        interval: number of consecutive chunks in an interval; memories are saved at the start of each interval.
        groups: number of warpgroups of a thread block that compute, each 64 columns of a memory.
        paired: whether these warpgroups compute the memories of two consecutive heads.
        reverse: whether the last chunk is computed first.
        save_states: whether the memory at the start of each interval is returned.
        read_scale: the factor by which what tokens read is multiplied.
        write_scale: the factor by which writes are multiplied.
        rank: number of consecutive rows that are one token.
        terms: number of terms of bfloat16, 1 to 3, whose sum each of the weights, memories and decayed writes is.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.
    """

    shapes: dict[str, tuple[int, ...]]
    streams: tuple[str, ...]
    sums: tuple[str, ...]
    heads: int
    depth: int
    slices: int
    blocks: int
    count: int
    interval: int
    groups: int
    paired: bool
    reverse: bool
    save_states: bool
    read_scale: float
    write_scale: float
    rank: int
    terms: int
    interpret: Any

    @property
    def loads(self) -> tuple[str, ...]:
        """The names of the inputs that are loaded chunk by chunk."""
        return tuple(name for name in self.streams if name not in self.sums)

    def grid(self, rows: int) -> dict[str, int]:
        """Return the numbers of thread blocks of a scan of B * S = `rows` rows of memories, by axis: row and head (or pair of heads), slice
        of key channels, and columns.
        """
        if self.paired:
            return dict(row=rows * self.heads // 2, slice=self.slices, column=1)
        return dict(row=rows * self.heads, slice=self.slices, column=self.blocks // self.groups)

    def input_head(self, name: str, h):
        """Return the index of the head of the input `name` that head h of the output uses; several heads of the output may share
        it.
        """
        heads = self.shapes[name][2 if name in ("x", "y", "z", "partner") else 1]
        return lax.div(h * heads, self.heads)
