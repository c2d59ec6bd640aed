"""Linear attention whose decay has a value for every key channel (GLA, HGRN2, RWKV6), on Mosaic GPU (Hopper).

What is parallel is apart from what is sequential. `chunk_forward` resolves every chunk by itself: its scores, for rows that the decay
since the chunk's beginning leaves within reach all at once, for others by halving (see `tiles_channels`); and its queries and keys
with their decay to the chunk's chunk_bounds. `channel_scan` then walks over the chunks with a [K, 64] piece of the memory S in the registers of
a warpgroup:

    out = read S + scores values,    S <- keep S + writtenᵀ values

all three products at once, so that a chunk's chain is one store and one round of products. Run against time with the transposed
scores, read and written exchanged and dO for values it gives dv and the memory's gradient. Both sweeps of the backward save what
they hold at each chunk's border, and `chunk_backward` gives dq, dk and the decay's gradient, again chunk by chunk.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.hopper import row_layout
from pallas_kernels.hopper.halving import CHUNK
from pallas_kernels.linear_attention.hopper.channel_scan import channel_scan
from pallas_kernels.linear_attention.hopper.chunk_backward import chunk_backward
from pallas_kernels.linear_attention.hopper.chunk_forward import Chunks, chunk_forward
from pallas_kernels.memory_calls import FLOAT32_DECAY, KEYS_IN_SLICES, VALUES_IN_SLICES, in_bfloat16

__all__ = ["CHUNK", "REQUIREMENTS", "Residuals", "backward", "forward", "scan_writes"]

_SIZES = (64, 128)
REQUIREMENTS = (
    FLOAT32_DECAY,
    in_bfloat16("q", "k", "v"),
    KEYS_IN_SLICES,
    VALUES_IN_SLICES,
)


class Residuals(NamedTuple):
    """What `forward` leaves for `backward`: the chunks, and the memory before each of P parts [B * P, h, K, V].

    To resolve the chunks again would take a quarter of the time of both.
    """

    chunks: Chunks
    starts: jax.Array


def _pieces(q, v) -> int:
    return max(1, v.shape[3] // _SIZES[-1]) if q.shape[2] <= v.shape[2] else 1


def _cut(x, pieces: int):
    """[B, T, G, V] -> [B, T, G * pieces, V / pieces]."""
    return x.reshape(*x.shape[:2], x.shape[2] * pieces, -1)


def _cut_memory(memory, pieces: int):
    """[B, G, K, V] -> [B, G * pieces, K, V / pieces]."""
    batch, memories, depth, width = memory.shape
    by_piece = jnp.swapaxes(memory.reshape(batch, memories, depth, pieces, -1), 2, 3)
    return by_piece.reshape(batch, memories * pieces, depth, width // pieces)


def _join_memory(memory, pieces: int):
    """Back from `_cut_memory`."""
    batch, count, depth, width = memory.shape
    by_piece = jnp.swapaxes(memory.reshape(batch, count // pieces, pieces, depth, width), 2, 3)
    return by_piece.reshape(batch, count // pieces, depth, pieces * width)


def forward(
    q, k, v, log_decay, run, initial, *, scale: float, bonus=None, save: bool = True,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, Residuals]:  # fmt: skip
    """The output [B, T, max(H, G), V], the final memories as `initial` and the residuals. T is a multiple of `CHUNK`.

    With a bonus [G, K] reads come before writes.
    """
    del save  # the residuals are there in any case
    pieces = _pieces(q, v)
    v, initial = _cut(v, pieces), _cut_memory(initial, pieces)
    batch, length, memories, _ = v.shape
    heads = max(q.shape[2], memories)
    run, chunk_bounds = row_layout.split_runs(run, initial, batch)
    parts = 1 if chunk_bounds is not None else row_layout.count_parts(batch * heads, length)
    split = functools.partial(row_layout.split_parts, parts=parts)
    chunks = chunk_forward(
        split(q), split(k), split(log_decay), row_layout.documents_of(run, parts), heads=heads // pieces, scale=scale, bonus=bonus,
        interpret=interpret,
    )  # fmt: skip
    values = split(v)
    scan = functools.partial(channel_scan, chunk_bounds=chunk_bounds, interpret=interpret)
    # Several heads that read one memory each carry it along.
    starts = initial = jnp.repeat(initial, heads // memories, axis=1)
    if parts > 1:
        (written,) = scan(None, chunks.written, values, None, chunks.keep)
        starts = row_layout.memories_before_parts(written, _by_channel(chunks), initial)
    output, ends = scan(
        chunks.read, chunks.written, values, chunks.scores, chunks.keep, initial=starts
    )
    final = ends.reshape(-1, parts, heads, *ends.shape[2:])[:, -1, :: heads // memories]
    output = output.reshape(batch, length, heads // pieces, -1)
    return output, _join_memory(final, pieces), Residuals(chunks, starts)


def scan_writes(k, v, log_decay, run, initial, *, heads: int, interpret: Any = False):
    """What `heads` heads hold of keys k and values v: chunks that are only written, the memories before and after, documents.

    For P parts of the sequence: memories before each chunk [B * P, heads, N / P, K, V], and the last [B * P, heads, K, V].
    """
    run, chunk_bounds = row_layout.split_runs(run, initial, len(v))
    parts = 1 if chunk_bounds is not None else row_layout.count_parts(len(v) * heads, v.shape[1])
    split = functools.partial(row_layout.split_parts, parts=parts)
    values, documents = split(v), row_layout.documents_of(run, parts)
    chunks = chunk_forward(
        None, split(k), split(log_decay), documents, heads=heads, scale=1.0, interpret=interpret
    )
    write = functools.partial(
        channel_scan, None, chunks.written, values, None, chunks.keep, chunk_bounds=chunk_bounds,
        interpret=interpret,
    )  # fmt: skip
    starts = jnp.repeat(initial, heads // initial.shape[1], axis=1)
    if parts > 1:
        starts = row_layout.memories_before_parts(write()[0], _by_channel(chunks), starts)
    ends, states = write(initial=starts, save=True)
    return chunks, states, ends, documents


def backward(
    q, k, v, log_decay, run, initial, residuals: Residuals, d_output, d_final, *, scale: float,
    bonus=None, decay_gradient: bool = True, interpret: Any = False,
):  # fmt: skip
    """Gradients of q, k, v, log_decay and initial, and of a bonus if there is one."""
    del decay_gradient
    pieces = _pieces(q, v)
    v, d_output, d_final = _cut(v, pieces), _cut(d_output, pieces), _cut_memory(d_final, pieces)
    batch, length, memories, _ = v.shape
    heads, (chunks, starts) = d_output.shape[2], residuals
    run, chunk_bounds = row_layout.split_runs(run, initial, batch)
    parts = starts.shape[0] // initial.shape[0]
    split = functools.partial(row_layout.split_parts, parts=parts)
    values, d_out = split(v), split(d_output)
    scan = functools.partial(channel_scan, chunk_bounds=chunk_bounds, interpret=interpret)
    # Of several heads that carry one memory, the first hands on the gradient from outside.
    first = (jnp.arange(heads) % (heads // memories) == 0)[:, None, None]
    d_ends = jnp.where(first, jnp.repeat(d_final, heads // memories, axis=1), 0)
    if parts > 1:
        (read,) = scan(None, chunks.read, d_out, None, chunks.keep, reverse=True)
        d_ends = row_layout.memories_before_parts(read, _by_channel(chunks), d_ends, reverse=True)
    _, states = scan(None, chunks.written, values, None, chunks.keep, initial=starts, save=True)
    dv, d_starts, d_states = scan(
        chunks.written, chunks.read, d_out, chunks.scores, chunks.keep,
        initial=d_ends, save=True, reverse=True,
    )  # fmt: skip
    dq, dk, d_decay, *d_bonus = chunk_backward(
        split(q), split(k), values, split(log_decay), d_out, states, d_states, chunks.keep,
        row_layout.documents_of(run, parts), scale=scale, bonus=bonus, pieces=1 if pieces % 2 else 2, interpret=interpret,
    )  # fmt: skip
    given = memories // pieces
    d_bonus = [jnp.sum(x.reshape(x.shape[0], given, -1, x.shape[-1]), (0, 2)) for x in d_bonus]
    d_initial = d_starts.reshape(-1, parts, *d_starts.shape[1:])[:, 0]
    whole = lambda x, n: row_layout.sum_heads(x.reshape(batch, length, *x.shape[2:]), n)  # noqa: E731
    dv = whole(dv, memories).reshape(batch, length, given, -1)
    d_initial = _join_memory(row_layout.sum_heads(d_initial, memories, axis=1), pieces)
    return (
        whole(dq, q.shape[2]),
        whole(dk, k.shape[2]),
        dv,
        whole(d_decay, given),
        d_initial,
        *d_bonus,
    )


def _by_channel(chunks: Chunks):
    """`keep` with chunks last, [B, h, K, N]."""
    batch, _, heads, depth = chunks.written.shape
    return jnp.swapaxes(chunks.keep.reshape(batch, heads, -1, depth), 2, 3)
