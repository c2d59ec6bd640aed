"""Rows of tokens as the TPU kernels see them: documents, several memories per row, heads that share a memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.compat import pl

CHUNK = 128


def first_and_last(slots, at):
    """Whether this chunk is the first, and whether it is the last, that updates its memory; `slots` as in `memory_of`."""
    n, count = pl.program_id(2), pl.num_programs(2)
    first, last = n == 0, n == count - 1
    if slots:
        own = lambda n: slots[0][pl.program_id(0) * count + at(n)]  # noqa: E731
        first |= own(n) != own(jnp.maximum(n - 1, 0))
        last |= own(n) != own(jnp.minimum(n + 1, count - 1))
    return first, last


def memory_of(b, n, slots, runs: int, count: int):
    """The index of the memory that chunk n of row b updates.

    With several memories per row, `slots` holds which of the `runs` memories of a row each of its `count` chunks updates.
    """
    return b * runs + slots[0][b * count + n] if slots else b


def document_rows(run, chunk: int = CHUNK) -> jax.Array:
    """The document indices [B, T] as [B, 8, T] float32, of which `tiles.read_chunk` reads a chunk's part."""
    last = run.reshape(len(run), -1, chunk)[:, :, -1]
    before = jnp.pad(last[:, :-1], [(0, 0), (1, 0)])
    before, last = (jnp.repeat(x, chunk, axis=1) for x in (before, last))
    rows = jnp.stack([run, run == before, run == last], axis=1).astype(jnp.float32)
    return jnp.pad(rows, [(0, 0), (0, 5), (0, 0)])


def repeat_heads(x, heads: int, axis: int):
    """x with its heads along `axis` repeated until they are `heads`."""
    return x if x.shape[axis] == heads else jnp.repeat(x, heads // x.shape[axis], axis=axis)


def sum_heads(x, heads: int, axis: int):
    """Sum over the heads along `axis` that share one of `heads`, in float32."""
    if x.shape[axis] == heads:
        return x
    shape = (*x.shape[:axis], heads, -1, *x.shape[axis + 1 :])
    return jnp.sum(x.reshape(shape), axis + 1, dtype=jnp.float32)
