"""A diagonal-plus-low-rank memory (RWKV7) on Mosaic GPU (Hopper), in chunks of 64 tokens.

The forward pass has three kernels: `chunk_forward` computes the products of each chunk's tokens in parallel,
`solve_chunks` inverts the chunks' triangular systems, `scan_forward` carries the memory through the chunks in
order. The backward pass has four: `scan_forward` recomputes the memory before each chunk and u, what the
vectors `a` read of the memory, unless the forward pass has saved them (`save_memories`); `scan_backward`
carries the gradient of the memory in the opposite order and computes du; `values_backward` and
`chunk_backward` compute the gradients of the inputs, for all chunks in parallel. Long rows of a small batch are split into parts that are scanned in parallel
(`pallas_kernels.hopper.parts`).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.dplr.hopper.chunk_backward import chunk_backward
from pallas_kernels.dplr.hopper.chunk_forward import DecayedChunks, chunk_forward
from pallas_kernels.dplr.hopper.scan import scan_backward, scan_forward, values_backward
from pallas_kernels.dplr.hopper.solve import SolvedChunks, solve_chunks
from pallas_kernels.hopper import channel_slices, row_layout
from pallas_kernels.hopper import parts as hopper_parts
from pallas_kernels.hopper.halving import CHUNK
from pallas_kernels.hopper.parts import length_multiple
from pallas_kernels.memory_calls import FLOAT32_DECAY, VALUES_IN_SLICES, in_bfloat16, key_dims

__all__ = [
    "CHUNK", "REQUIREMENTS", "SAVES_MEMORIES", "Residuals", "backward", "forward", "length_multiple",
]  # fmt: skip

SAVES_MEMORIES = True
"""`forward` has the argument `save_memories`."""
_F32 = jnp.float32
REQUIREMENTS = (
    in_bfloat16("a", "b"),
    key_dims(64, 128, 256),
    VALUES_IN_SLICES,
    FLOAT32_DECAY,
    in_bfloat16("q", "k", "v"),
)


class Residuals(NamedTuple):
    """The arrays that `forward` of a diagonal-plus-low-rank memory saves for `backward`: some seven arrays of
    the size of q.

    Attributes:
        decayed: the decayed scores, q, b and k of all chunks; the fields that only `solve_chunks` reads are
            None.
        solved: the inverses of the chunks' triangular systems, and their products.
        parts: the memories before each part of a row, if rows are scanned in parts that run in parallel; None
            if each row is scanned in one.
        memories: with `save_memories`, u [B, T, h, V], what the vectors `a` read of the memory, and the
            transposed memories before each of the N chunks [B, h, N, V, K], both bfloat16; or None, if
            `backward` computes them again.
    """

    decayed: DecayedChunks
    solved: SolvedChunks
    parts: hopper_parts.Parts | None
    memories: tuple[jax.Array, ...] | None = None


def forward(
    q, k, v, a, b, log_decay, run, initial, *, scale: float, save: bool = True, save_memories: bool = False,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, Residuals]:  # fmt: skip
    """Compute diagonal-plus-low-rank memories (RWKV7), and the arrays that `backward` requires.

    Return the output [B, T, max(H, G), V], the final memories in the shape of `initial`, and the residuals,
    which are computed whether or not `save` is set. With `save_memories` they contain the memories before all
    chunks, which the scan of the output stores, also of rows in parts and of several memories. The other
    arguments are those of the op `dplr`; T is divisible by `length_multiple(q, k, v)`.
    """
    del save
    memories = v.shape[2]
    heads = max(q.shape[2], memories)
    run, chunk_bounds = row_layout.split_runs(run, initial, len(v))
    documents = row_layout.documents_of(run, 1)
    chunks = functools.partial(
        chunk_forward, documents=documents, heads=heads, scale=scale, interpret=interpret
    )
    products = "upper", "upper_values", "scores", "scores_values"
    decayed = channel_slices.compute_by_key_slice(chunks, (q, k, a, b, log_decay), products)
    solved = solve_chunks(
        decayed.upper, decayed.upper_values, decayed.decayed_a, interpret=interpret
    )
    decayed = decayed._replace(upper=None, upper_values=None, decayed_a=None)
    # Each of the heads that share a memory computes it.
    initial = jnp.repeat(initial, heads // memories, axis=1)
    scan_part = functools.partial(
        scan_forward, decayed, solved, initial=None, read=False, interpret=interpret
    )
    parts = hopper_parts.split(scan_part, q, k, v, initial, chunk_bounds, interpret)
    starts, count = hopper_parts.part_starts(parts, initial)
    output, *saved, ends = scan_forward(
        decayed, solved, v, starts, save=save_memories, parts=count, chunk_bounds=chunk_bounds, interpret=interpret
    )  # fmt: skip
    final = ends[:, count - 1 :: count * heads // memories]
    return output, final, Residuals(decayed, solved, parts, tuple(saved) or None)


def backward(
    q, k, v, a, b, log_decay, run, initial, residuals: Residuals, d_output, d_final, *,
    scale: float, decay_gradient: bool = True, interpret: Any = False,
):  # fmt: skip
    """Return the gradients of q, k, v, a, b, log_decay and initial of diagonal-plus-low-rank memories
    (RWKV7), each in the shape of its input.

    The arguments are the inputs of `forward`, the residuals that `forward` returned, and the gradients of the
    output, `d_output`, and of the final memories, `d_final`. The gradient of log_decay is computed whether or
    not `decay_gradient` is set.
    """
    del decay_gradient
    memories, heads = v.shape[2], d_output.shape[2]
    decayed, solved, parts, saved = residuals
    run, chunk_bounds = row_layout.split_runs(run, initial, len(v))
    initial = jnp.repeat(initial, heads // memories, axis=1)
    starts, count = hopper_parts.part_starts(parts, initial)
    options: dict[str, Any] = dict(chunk_bounds=chunk_bounds, interpret=interpret)
    if saved is None:
        saved = scan_forward(
            decayed, solved, v, starts, save=True, read=False, parts=count, **options
        )[:2]
    a_read, states = saved
    d_final = row_layout.gradient_by_head(d_final, heads)
    scan_part = functools.partial(scan_backward, decayed, solved, d_output, **options)
    d_ends, count = hopper_parts.part_end_gradients(parts, scan_part, d_final, interpret)
    d_a_read, d_states, d_starts = scan_part(d_ends, parts=count)
    documents, depth = row_layout.documents_of(run, 1), q.shape[-1]

    def slice_gradients(values):
        """Return the terms of the gradients of a diagonal-plus-low-rank memory's inputs that come through the
        value channels `values`, a slice: the gradient of v in these channels, and a list with, for each slice
        of key channels, the terms of the gradients of q, k, `a`, b and the log decay.
        """
        before, d_after = states[..., values, :], d_states[..., values, :]
        d_out = d_output[..., values]
        dv, d_right_side = values_backward(
            decayed, solved, d_out, d_a_read[..., values], d_after, interpret=interpret
        )
        through_memory = jnp.einsum(
            "bhnvk,bhnvk->bhnk", before, d_after, preferred_element_type=_F32
        )
        through_memory = through_memory.reshape(decayed.chunk_decay.shape) * decayed.chunk_decay
        gradients = [
            chunk_backward(
                q[..., keys], k[..., keys], a[..., keys], b[..., keys], log_decay[..., keys], v[..., values],
                a_read[..., values], d_out, d_right_side, before[..., keys], d_after[..., keys],
                channel_slices.slice_chunk_decay(through_memory, depth, keys), documents, scale=scale, interpret=interpret,
            ) for keys in channel_slices.split_channels(depth)
        ]  # fmt: skip
        return dv, gradients

    value_slices = channel_slices.split_channels(v.shape[-1])
    dvs, gradients = zip(*map(slice_gradients, value_slices), strict=True)
    dv = jnp.concatenate(dvs, axis=-1)
    of_keys = zip(*channel_slices.sum_trees(*gradients), strict=True)
    dq, dk, da, db, d_decay = (jnp.concatenate(x, axis=-1) for x in of_keys)
    sum_heads = row_layout.sum_heads
    return (
        sum_heads(dq, q.shape[2]),
        sum_heads(dk, k.shape[2]),
        sum_heads(dv, memories),
        sum_heads(da, a.shape[2]),
        sum_heads(db, b.shape[2]),
        sum_heads(d_decay, memories),
        sum_heads(d_starts[:, ::count], memories, axis=1),
    )
