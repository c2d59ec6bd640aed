"""Linear attention whose decay has a value for every key channel (GLA, HGRN2, RWKV6), on Mosaic GPU (Hopper).

The parallel work is separate from the sequential. `chunk_forward` computes every chunk's decayed scores P of queries with keys by
itself, and its queries and keys with their decay from and to the chunk's boundaries (read and written). `channel_scan` then
computes one chunk after another, with the memory S:

    out = read S + P values,    S <- chunk_decay S + writtenᵀ values

Its three products start at the same time, so that the sequential part of a chunk is one copy of S and one wait for products.

In the backward pass, the same scan from the last chunk to the first, with the transposed scores, `read` and `written` exchanged and
the output's gradient dO for the values, gives dv and the gradient of the memory. This scan and a second one over the writes (or,
with `save_memories`, the scan of the forward pass) save the gradient and the memory at each chunk's boundary, from which
`chunk_backward` computes dq, dk and the gradient of the decay, again for each chunk by itself.
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

__all__ = [
    "CHUNK", "REQUIREMENTS", "SAVES_MEMORIES", "Residuals", "backward", "forward", "scan_writes",
]  # fmt: skip

SAVES_MEMORIES = True
"""`forward` has the argument `save_memories`."""
_LARGEST_PIECE = 128  # value channels of a piece
REQUIREMENTS = (
    FLOAT32_DECAY,
    in_bfloat16("q", "k", "v"),
    KEYS_IN_SLICES,
    VALUES_IN_SLICES,
)


class Residuals(NamedTuple):
    """The arrays that `forward` of linear attention with a decay per key channel saves for `backward`, for rows split
    into P parts.

    Computing the arrays of the chunks again would take a quarter of the time of both passes.

    Attributes:
        chunks: the scores of all chunks, and their queries and keys multiplied by their decays.
        starts: [B * P, h, K, V] float32, the memories of h heads before each part of a row.
        states: [B * P, h, N / P, K, V] bfloat16, the memories before each of a row's N chunks with `save_memories`, or None, if
            `backward` computes them again.
    """

    chunks: Chunks
    starts: jax.Array
    states: jax.Array | None = None


def forward(
    q, k, v, log_decay, run, initial, *, scale: float, bonus=None, save: bool = True, save_memories: bool = False,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, Residuals]:  # fmt: skip
    """Compute linear attention with a decay per key channel, and what its backward pass requires.

    Return the output [B, T, max(H, G), V], the final memories, shaped as `initial`, and the residuals, which are computed whether
    or not `save` is set. With `save_memories` they contain the memories before all chunks, which the scan of the output stores, also
    of rows in parts and of several memories. The other arguments are those of `linear_attention`, with T a multiple of `CHUNK`.
    """
    del save
    pieces, slices = _count_pieces(q, v), count_key_slices(q, k, v)
    q, k, log_decay, bonus = (_split_keys(x, slices) for x in (q, k, log_decay, bonus))
    v, initial = _split_values(v, pieces), _split_memory(initial, pieces, slices)
    batch, length, _, _ = v.shape
    memories = initial.shape[1]
    heads = max(q.shape[2], memories)
    run, chunk_bounds = row_layout.split_runs(run, initial, batch)
    parts = 1 if chunk_bounds is not None else row_layout.count_parts(batch * heads, length)
    split = functools.partial(row_layout.split_parts, parts=parts)
    chunks = chunk_forward(
        split(q), split(k), split(log_decay), row_layout.documents_of(run, parts), heads=heads // pieces, scale=scale, bonus=bonus,
        interpret=interpret,
    )  # fmt: skip
    values = split(v)
    scan = functools.partial(
        channel_scan, chunk_bounds=chunk_bounds, key_slices=slices, interpret=interpret
    )
    # Each of several query heads that read one memory computes that memory.
    starts = initial = jnp.repeat(initial, heads // memories, axis=1)
    if parts > 1:
        (written,) = scan(None, chunks.written, values, None, chunks.chunk_decay)
        starts = row_layout.memories_before_parts(written, _chunk_decay_by_channel(chunks), initial)
    output, ends, *states = scan(
        chunks.read, chunks.written, values, chunks.scores, chunks.chunk_decay, initial=starts, save=save_memories,
    )  # fmt: skip
    final = ends.reshape(-1, parts, heads, *ends.shape[2:])[:, -1, :: heads // memories]
    output = output.reshape(batch, length, heads // slices // pieces, -1)
    return output, _join_memory(final, pieces, slices), Residuals(chunks, starts, *states)


def scan_writes(k, v, log_decay, run, initial, *, heads: int, interpret: Any = False):
    """Compute the memories before all chunks under a decay per key channel, into which keys k and values v are written; nothing
    is read from them.

    Args:
        k: [B, T, *, K] keys, bfloat16 or float32.
        v: [B, T, *, V] values.
        log_decay: [B, T, *, K] float32, the log decay of each key channel.
        run: [B, T], the number of each token's document, or None for one document per row.
        initial: [B * S, *, K, V] float32, the memories before the first token, S for each row.
        heads: number of memories that are computed for each row; the numbers of heads written as * divide it.
        interpret: parameters of the Pallas interpreter, or False to compile the kernels.

    Returns:
        For rows split into P parts: the `Chunks` without scores (the keys and the chunks' decays), the memories before each chunk
        [B * P, heads, N / P, K, V], the memories after the last chunk [B * P, heads, K, V], and the `Documents`, which say where
        documents begin, or None.
    """
    run, chunk_bounds = row_layout.split_runs(run, initial, len(v))
    parts = 1 if chunk_bounds is not None else row_layout.count_parts(len(v) * heads, v.shape[1])
    split = functools.partial(row_layout.split_parts, parts=parts)
    values, documents = split(v), row_layout.documents_of(run, parts)
    chunks = chunk_forward(
        None, split(k), split(log_decay), documents, heads=heads, scale=1.0, interpret=interpret
    )
    write = functools.partial(
        channel_scan, None, chunks.written, values, None, chunks.chunk_decay, chunk_bounds=chunk_bounds,
        interpret=interpret,
    )  # fmt: skip
    starts = jnp.repeat(initial, heads // initial.shape[1], axis=1)
    if parts > 1:
        starts = row_layout.memories_before_parts(
            write()[0], _chunk_decay_by_channel(chunks), starts
        )
    ends, states = write(initial=starts, save=True)
    return chunks, states, ends, documents


def backward(
    q, k, v, log_decay, run, initial, residuals: Residuals, d_output, d_final, *, scale: float,
    bonus=None, decay_gradient: bool = True, interpret: Any = False,
):  # fmt: skip
    """Return the gradients of q, k, v, log_decay and initial of linear attention with a decay per key channel, and with a bonus,
    as the sixth, the bonus' gradient [G, K].

    The arguments are those of `forward`, the residuals that it returned, and the gradients of its output and of its final
    memories. The gradient of log_decay is computed whether or not `decay_gradient` is set.
    """
    del decay_gradient
    pieces, slices = _count_pieces(q, v), count_key_slices(q, k, v)
    query_heads, key_heads, memories_in_full, _ = q.shape[2], *k.shape[2:3], *v.shape[2:]
    q, k, log_decay, bonus = (_split_keys(x, slices) for x in (q, k, log_decay, bonus))
    v, d_output = _split_values(v, pieces), _split_values(d_output, pieces)
    d_final = _split_memory(d_final, pieces, slices)
    batch, length, _, _ = v.shape
    memories = d_final.shape[1]
    heads, (chunks, starts, states) = d_output.shape[2] * slices, residuals
    run, chunk_bounds = row_layout.split_runs(run, initial, batch)
    parts = starts.shape[0] // initial.shape[0]
    split = functools.partial(row_layout.split_parts, parts=parts)
    values, d_out = split(v), split(d_output)
    scan = functools.partial(
        channel_scan, chunk_bounds=chunk_bounds, key_slices=slices, interpret=interpret
    )
    d_ends = row_layout.gradient_by_head(d_final, heads)
    if parts > 1:
        (read,) = scan(None, chunks.read, d_out, None, chunks.chunk_decay, reverse=True)
        d_ends = row_layout.memories_before_parts(
            read, _chunk_decay_by_channel(chunks), d_ends, reverse=True
        )
    if states is None:
        _, states = scan(
            None, chunks.written, values, None, chunks.chunk_decay, initial=starts, save=True
        )
    dv, d_starts, d_states = scan(
        chunks.written, chunks.read, d_out, chunks.scores, chunks.chunk_decay,
        initial=d_ends, save=True, reverse=True,
    )  # fmt: skip
    dq, dk, d_decay, *d_bonus = chunk_backward(
        split(q), split(k), values, split(log_decay), d_out, states, d_states, chunks.chunk_decay,
        row_layout.documents_of(run, parts), scale=scale, bonus=bonus, pieces=1 if pieces % 2 else pieces, interpret=interpret,
    )  # fmt: skip
    d_bonus = [
        jnp.sum(x.reshape(x.shape[0], memories_in_full * slices, -1, x.shape[-1]), (0, 2)).reshape(
            memories_in_full, -1
        )
        for x in d_bonus
    ]
    d_initial = d_starts.reshape(-1, parts, *d_starts.shape[1:])[:, 0]

    def join(x, heads):  # the parts, the slices of key channels, and the heads that share an input
        return row_layout.sum_heads(x.reshape(batch, length, x.shape[2] // slices, -1), heads)

    dv = row_layout.sum_heads(
        dv.reshape(batch, length, dv.shape[2] // pieces, -1), memories_in_full
    )
    d_initial = _join_memory(row_layout.sum_heads(d_initial, memories, axis=1), pieces, slices)
    return (
        join(dq, query_heads),
        join(dk, key_heads),
        dv,
        join(d_decay, memories_in_full),
        d_initial,
        *d_bonus,
    )


def count_key_slices(q, k, v) -> int:
    """Return the number of slices into which the key channels of each head of q [B, T, H, K] are split; the kernels compute each as a
    head of its own, and their outputs are added.

    A slice has 128 key channels. Where heads share queries, keys or memories, or have 3, 5, 7, ... slices of value channels, they are
    not split here, and K is at most 128.
    """
    return max(1, q.shape[3] // _LARGEST_PIECE) if q.shape[2] == k.shape[2] == v.shape[2] else 1


def _split_keys(x, slices: int) -> Any:
    """Split each head of queries, keys or log decays [..., H, K] into `slices` heads, [..., H * slices, K / slices]; None remains
    None.
    """
    return x if x is None else x.reshape(*x.shape[:-2], x.shape[-2] * slices, -1)


def _count_pieces(q, v) -> int:
    """Return the number of slices of value channels into which each head's values [B, T, G, V] are split; each slice is then a head
    of its own.

    A slice has 128 value channels. If several query heads read one memory, values are not split.
    """
    return max(1, v.shape[3] // _LARGEST_PIECE) if q.shape[2] <= v.shape[2] else 1


def _split_values(x, pieces: int):
    """Split each head of the values into `pieces` heads, one for each slice of its value channels: [B, T, G, V] -> [B, T, G *
    pieces, V / pieces].
    """
    return x.reshape(*x.shape[:2], x.shape[2] * pieces, -1)


def _split_memory(memory, pieces: int, slices: int):
    """Split each memory into `slices` of its key channels, and each of these into `pieces` of its value channels: [B, G, K, V] ->
    [B, G * slices * pieces, K / slices, V / pieces].
    """
    batch, memories, depth, width = memory.shape
    by_piece = memory.reshape(batch, memories * slices, depth // slices, pieces, -1).swapaxes(2, 3)
    return by_piece.reshape(batch, memories * slices * pieces, depth // slices, width // pieces)


def _join_memory(memory, pieces: int, slices: int):
    """Join the slices of one memory: [B, G * slices * pieces, K / slices, V / pieces] -> [B, G, K, V]. The inverse of
    `_split_memory`.
    """
    batch, count, depth, width = memory.shape
    by_slice = memory.reshape(batch, count // pieces, pieces, depth, width).swapaxes(2, 3)
    return by_slice.reshape(batch, count // pieces // slices, depth * slices, pieces * width)


def _chunk_decay_by_channel(chunks: Chunks):
    """Return the decay of each key channel over each of the N chunks, stored as [B, h, N * K], with the chunks last: [B, h, K, N]."""
    batch, _, heads, depth = chunks.written.shape
    return jnp.swapaxes(chunks.chunk_decay.reshape(batch, heads, -1, depth), 2, 3)
