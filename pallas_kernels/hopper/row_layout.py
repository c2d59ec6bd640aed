"""Functions that prepare rows of tokens for Hopper's kernels: document boundaries, several memories per row, parts of long rows, and heads
that share an input.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import PROCESSORS
from pallas_kernels.hopper.halving import Documents

CHUNK = 64
_F32 = jnp.float32
_SHORTEST_PART = (
    2048  # tokens; shorter parts save less time than the scan for their initial memories costs
)
_FUSED = 16  # parts up to which XLA computes the initial memories in one kernel


def split_runs(run, initial, batch: int):
    """Return the pair (run, bounds) from which kernels know where documents begin; one of the two is None.

    With one memory per row it is (`run`, None), where `run` [B, T] is the number of each token's document. With S > 1 memories per row
    (`initial` is [B * S, ...]) each document has a memory and starts at a chunk's start; then it is (None, bounds [B, S + 1]), the
    indices of the chunks at which the row's memories begin and end. An `initial` of None is one empty memory per row.
    """
    count = 1 if initial is None else initial.shape[0] // batch
    if count == 1:
        return run, None
    begins = run[:, None, ::CHUNK] < jnp.arange(count + 1)[:, None]
    return None, jnp.sum(begins, axis=-1, dtype=jnp.int32)


def count_parts(rows: int, length: int) -> int:
    """Return the number of parts into which each row of `length` tokens is divided so that all processors of the card compute: a power of
    two. `rows` is the number of rows of the batch times heads.
    """
    parts = 1
    while (
        2 * parts * rows <= PROCESSORS
        and length % (2 * parts * CHUNK) == 0
        and length // (2 * parts) >= _SHORTEST_PART
    ):
        parts *= 2
    return parts


def split_parts(x, parts: int):
    """Reshape x [B, T, ...] so that each of the P = `parts` consecutive parts of a row becomes a separate
    row, [B * P, T / P, ...].
    """
    return x.reshape(x.shape[0] * parts, x.shape[1] // parts, *x.shape[2:])


def sum_heads(x, heads: int, axis: int = 2):
    """Sum groups of consecutive heads of x along `axis`, in float32, so that `heads` heads remain; the result has x's dtype."""
    if x.shape[axis] == heads:
        return x
    shape = (*x.shape[:axis], heads, -1, *x.shape[axis + 1 :])
    return jnp.sum(x.reshape(shape), axis + 1, dtype=_F32).astype(x.dtype)


def exact_sums(x, mask):
    """Return the product of x [..., n] float32 and a boolean mask [n, m], with float32's precision: sums of the entries that each column of the
    mask selects.

    x is split into three terms that bfloat16 represents exactly, side by side, so that one product in bfloat16 adds all of them in float32.
    """
    terms = []
    for _ in range(3):
        terms.append(lax.reduce_precision(x, 8, 7))
        x = x - terms[-1]
    terms = jnp.concatenate(terms, axis=-1).astype(jnp.bfloat16)
    ones = jnp.tile(mask, (3, 1)).astype(jnp.bfloat16)
    return jnp.einsum("...i,ij->...j", terms, ones, preferred_element_type=_F32)


def gradient_by_head(d_final, heads: int):
    """Return the gradient of the final memory of each of `heads` output heads, [B, heads, K, V], from
    `d_final` [B, G, K, V], the gradient of the G final memories.

    `heads` is a multiple of G: several consecutive heads compute the same memory. The first of them receives
    the memory's gradient, and the others receive 0.
    """
    sharing = heads // d_final.shape[1]
    first = (jnp.arange(heads) % sharing == 0)[:, None, None]
    return jnp.where(first, jnp.repeat(d_final, sharing, axis=1), 0)


def memories_before_parts(written, chunk_decay, initial, reverse: bool = False):
    """Compute the memory before each of P parts of the rows, from what each part writes and its decay; or, if
    `reverse`, the gradient of the memory after each part.

    Args:
        written: [B * P, heads, D, V], the memory after each part if the memory before the part is 0; if
            `reverse`, the gradient of the memory before each part if the gradient of the memory after it is
            0.
        chunk_decay: [B * P, G, ..., N / P], the decay of the memory over each of a row's N chunks; None is 1.
        initial: [B, heads, D, V], the memory before the first part; if `reverse`, the gradient of the memory
            after the last part.
        reverse: whether gradients are computed, from the last part to the first.

    Returns:
        The memory before each part, or the gradient of the memory after each part, [B * P, heads, D, V].
    """
    batch, heads = initial.shape[:2]
    chunk_decay = jnp.ones((written.shape[0], 1, 1), _F32) if chunk_decay is None else chunk_decay
    decay = jnp.prod(chunk_decay, axis=-1)
    decay = jnp.repeat(decay, heads // decay.shape[1], axis=1)
    decay = decay.reshape(*decay.shape, *[1] * (written.ndim - decay.ndim))
    by_part = lambda x: jnp.moveaxis(x.reshape(batch, -1, *x.shape[1:]), 1, 0)  # noqa: E731

    def step(memory, part):
        decay, written = part
        return memory * decay + written, memory

    parts = by_part(decay), by_part(written)
    _, starts = lax.scan(step, initial, parts, reverse=reverse, unroll=min(len(parts[0]), _FUSED))
    return jnp.moveaxis(starts, 0, 1).reshape(written.shape)


def documents_of(run, parts: int) -> Documents | None:
    """Return the document boundaries of rows of tokens, as `Documents` with arrays [B * P, T / P], where P =
    `parts` is the number of parts into which each row is divided. `run` [B, T] is the number of each token's
    document; if it is None, return None.
    """
    if run is None:
        return None
    by_chunk = run.reshape(run.shape[0], -1, CHUNK)
    last = by_chunk[..., -1:]
    before = jnp.pad(last[:, :-1], [(0, 0), (1, 0), (0, 0)])
    flags = [(by_chunk == x).astype(_F32).reshape(run.shape) for x in (before, last)]
    return Documents(*(split_parts(x, parts) for x in (run, *flags)))
