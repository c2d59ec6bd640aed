"""Functions that prepare rows of tokens for the TPU kernels: document boundaries, the memory that each chunk updates, and heads that share
a memory.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.compat import pl

CHUNK = 128


def first_and_last(slots, at):
    """Return whether this program's chunk is the first that updates its memory, and whether it is the last.

    Args:
        slots: with several memories per row, a list with the index [B * N] of the row's memory that each chunk updates; else empty.
        at: a function from n to the index in the row of the n-th chunk in the order of computation.
    """
    n, count = pl.program_id(2), pl.num_programs(2)
    first, last = n == 0, n == count - 1
    if slots:
        memory = lambda n: slots[0][pl.program_id(0) * count + at(n)]  # noqa: E731
        first |= memory(n) != memory(jnp.maximum(n - 1, 0))
        last |= memory(n) != memory(jnp.minimum(n + 1, count - 1))
    return first, last


def memory_of(b, n, slots, runs: int, count: int):
    """Return the index among all memories [B * S, ...] of the memory that chunk n of row b updates.

    Args:
        b: index of the row of the batch.
        n: index of the chunk in the row.
        slots: with several memories per row, a list with the index [B * N] of the row's memory that each chunk updates; else empty.
        runs: S, the number of memories of each row.
        count: N, the number of chunks in each row.
    """
    return b * runs + slots[0][b * count + n] if slots else b


def document_rows(run, chunk: int = CHUNK) -> jax.Array:
    """Return the document boundaries of all rows of tokens as float32 [B, 8, T], as `tiles.scalar_decay.read_chunk` requires them, from
    the tokens' document numbers `run` [B, T].

    For each row of the batch, the 8 vectors [T] are: the number of each token's document; 1 where it is that of the last token before the
    token's chunk; 1 where it is that of the chunk's last token; and zeros.
    """
    last = run.reshape(len(run), -1, chunk)[:, :, -1]
    before = jnp.pad(last[:, :-1], [(0, 0), (1, 0)])
    before, last = (jnp.repeat(x, chunk, axis=1) for x in (before, last))
    rows = jnp.stack([run, run == before, run == last], axis=1).astype(jnp.float32)
    return jnp.pad(rows, [(0, 0), (0, 5), (0, 0)])


def repeat_heads(x, heads: int, axis: int):
    """Return x with each head along `axis` repeated, so that there are `heads` heads: one for each of the consecutive heads that
    share it.
    """
    return x if x.shape[axis] == heads else jnp.repeat(x, heads // x.shape[axis], axis=axis)


def sum_heads(x, heads: int, axis: int):
    """Return x with groups of consecutive heads along `axis` summed in float32, so that `heads` heads remain; x itself if it has
    `heads` heads.
    """
    if x.shape[axis] == heads:
        return x
    shape = (*x.shape[:axis], heads, -1, *x.shape[axis + 1 :])
    return jnp.sum(x.reshape(shape), axis + 1, dtype=jnp.float32)
