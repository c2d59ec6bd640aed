"""The launches of the Triton kernels of a decay per key channel that come before the scan of linear attention."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.linear_attention.triton.passes import (
    CHUNK,
    LEVELS,
    Decays,
    documents,
    low,
    options_of,
    tiling_of,
)
from pallas_kernels.linear_attention.triton.tilings import TILINGS
from pallas_kernels.triton import launch

_struct = jax.ShapeDtypeStruct
_F32 = jnp.float32


def channel_decays(log_decay, run, initial) -> Decays:
    """Return the decays of tokens for a log decay [B, T, G, K] of key channels.

    `run` [B, T] are document numbers or None, and `initial` the memories before the rows.
    """
    from pallas_kernels.linear_attention.triton import bodies

    batch, length, heads, channels = log_decay.shape
    decays = documents(run, initial, batch)
    tiling = TILINGS["sum_decays"]
    result = launch.call(
        bodies.sum_decays,
        (log_decay,),
        dict(sums=_struct(log_decay.shape, _F32)),
        programs=batch * (length // CHUNK) * heads * (channels // tiling.keys),
        warps=tiling.warps,
        stages=tiling.stages,
        **dict(HEADS=heads, K=channels, C=CHUNK, BK=tiling.keys),
    )
    return decays._replace(sums=result["sums"])


def channel_scores(
    q, k, log_decay, run, initial, *, heads: int, scale: float, bonus=None
) -> tuple[Decays, Any, Any]:
    """Return the decays of tokens for a log decay [B, T, G, K] of key channels; the keys, decayed up to the ends of their chunks, [B, T, G,
    K]; and the decayed scores P of all chunks, [B, N, heads, C, C]: both in the products' dtype.

    `run` [B, T] are document numbers or None, and `initial` the memories before the rows.
    """
    from pallas_kernels.linear_attention.triton import scores

    batch, length, memories, keys = log_decay.shape
    decays, count = documents(run, initial, batch), length // CHUNK
    tiling = tiling_of("channel_scores", decays, q)
    operands, stored = low(q)
    results = launch.call(
        scores.channel_scores,
        (q, k, log_decay, bonus, decays.run, decays.stays, float(scale)),
        dict(
            sums=_struct(log_decay.shape, _F32),
            written=_struct(log_decay.shape, stored),
            scores=_struct((batch, count, heads, CHUNK, CHUNK), stored),
        ),
        programs=batch * count * heads,
        **options_of(tiling),
        **dict(
            Q_HEADS=q.shape[2], K_HEADS=k.shape[2], D_HEADS=memories, HEADS=heads, K=keys, C=CHUNK, BK=tiling.keys,
            LEVELS=LEVELS, LOW=operands, DOCUMENTS=decays.run is not None, EXCLUSIVE=bonus is not None,
        ),
    )  # fmt: skip
    return decays._replace(sums=results["sums"]), results["written"], results["scores"]
