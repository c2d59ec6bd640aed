"""Sums of decays and logarithms of factors of writes for exact scans (`scalar_columns`) on Mosaic GPU (Hopper), in two terms each.

The weight of token j at token i is the exponential of cum_i - cum_j + w_j. After a few strong decays cum is in the hundreds, whose float32 has 3e-5
left; where a normaliser cancels, that is amplified a thousandfold. So every logarithm is a multiple of 2^-8 and a rest: sums of the
multiples have no rounding error, and sums of the rests are small.
"""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.hopper.row_layout import CHUNK
from pallas_kernels.linear_attention.hopper.decay_sums import LEAST
from pallas_kernels.linear_attention.hopper.scalar_plan import Decays

_F32 = jnp.float32
_STEP = 2.0**-8


def exact_decays(log_decay, log_write, run) -> Decays:
    """Return the decays by which an exact scan of whole rows multiplies, with the low terms of `cum` and `write_cum`.

    Args:
        log_decay: [B, T, G] float32, at most 0.
        log_write: [B, T, G] float32, the logarithm of the factor of each token's write.
        run: [B, T], document numbers, or None.
    """
    batch, length, heads = log_decay.shape
    decay = two_terms(_by_chunk(jnp.maximum(log_decay, LEAST)))
    write = two_terms(_by_chunk(log_write))
    earlier = jnp.arange(CHUNK) <= jnp.arange(CHUNK)[:, None]
    cum = [jnp.sum(jnp.where(earlier, x[..., None, :], 0), axis=-1) for x in decay]
    # The differences of high terms are exact, and those of low ones as precise as the sums.
    after = [x[..., -1:] - x + w for x, w in zip(cum, write, strict=True)]
    read_decay, write_decay = (jnp.exp(high) * jnp.exp(low) for high, low in (cum, after))
    chunk_decay = read_decay[..., -1]
    if run is not None:
        of_chunk = run.reshape(batch, 1, -1, CHUNK)
        last = of_chunk[..., -1]
        before = jnp.pad(last[..., :-1], [(0, 0), (0, 0), (1, 0)])
        read_decay = jnp.where(of_chunk == before[..., None], read_decay, 0)
        write_decay = jnp.where(of_chunk == last[..., None], write_decay, 0)
        chunk_decay = jnp.where(last == before, chunk_decay, 0)
    high, low = (x - w for x, w in zip(cum, write, strict=True))
    cum_high, cum_low, read_decay, write_decay, high, low = (
        x.reshape(batch, heads, length) for x in (*cum, read_decay, write_decay, high, low)
    )
    return Decays(
        cum_high, read_decay, write_decay, chunk_decay, run, high, cum_low=cum_low, write_cum_low=low
    )  # fmt: skip


def two_terms(x):
    """Return a multiple of 2^-8 for each number of x float32, and the rest of it."""
    high = jnp.round(x / _STEP) * _STEP
    return high, x - high


def _by_chunk(x):
    """Return x [B, T, G] as [B, G, N, 64]."""
    batch, length, heads = x.shape
    return jnp.moveaxis(x, 1, 2).reshape(batch, heads, length // CHUNK, CHUNK)
