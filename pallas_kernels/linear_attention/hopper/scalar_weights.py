"""Factors of a chunk's scores, reads and writes in linear attention with a scalar decay, on Mosaic GPU (Hopper)."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.compat import plgpu
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.hopper.row_layout import CHUNK

SQUARE = CHUNK, CHUNK


def token_weights(chunk, reverse: bool, scale: float, rank: int = 1):
    """Return the weights [64, 64] of a chunk's scores: the decay from token j to token i times `scale`, and 0 where token i does not read
    token j.

    `chunk` has references to the chunk's decays and documents by name; if `reverse`, tokens read their own and later tokens. A
    token is `rank` rows.
    """
    i = plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=wg.LAYOUT.reduce(1))
    j = plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=wg.LAYOUT.reduce(0))
    if rank > 1:
        i, j = i & -rank, j & -rank  # the first rows of their tokens
    i, j = wg.spread_rows(i, SQUARE), wg.spread_columns(j, SQUARE)
    reads = i <= j if reverse else i >= j
    if "run" in chunk:
        reads &= wg.row_differences(chunk["run"], SQUARE) == 0
    if "cum" not in chunk:
        return jnp.where(reads, scale, 0.0)

    def differences(cum: str, write_cum: str):
        read, written = chunk[cum], chunk.get(write_cum, chunk[cum])
        if reverse:
            read, written = written, read
        return wg.row_differences(read, SQUARE, written)

    sums = differences("cum", "write_cum")
    if "cum_low" in chunk:
        sums += differences("cum_low", "write_cum_low")
    return jnp.exp(jnp.where(reads, -sums if reverse else sums, wg.NEVER)) * scale


def times_rows(tile, chunk, name: str, scale: float):
    """Return a tile [64, *] in registers whose rows are multiplied by a chunk's `read_decay` or `write_decay`, which `name` says, times
    `scale`. Without such an input they are the exponentials of `cum`, or 1 if there is no decay.
    """
    if name in chunk:
        factors = wg.load_rows(chunk[name])
    elif "cum" in chunk:
        factors = jnp.exp(wg.load_rows(chunk["cum"]))
    else:
        return tile if scale == 1 else tile * scale
    return tile * wg.spread_rows(factors if scale == 1 else factors * scale, tile.shape)
