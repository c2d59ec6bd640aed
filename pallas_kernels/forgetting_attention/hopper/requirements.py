"""The requirements of the Hopper kernels, and their tile size."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.forgetting_attention.hopper.schedule import (
    TILE,
)
from pallas_kernels.requirements import Requirement, first_unmet

REQUIREMENTS = (
    Requirement(
        f"q, k and v of the same tokens, or halves of the queries, and keys, in multiples of {TILE} tokens",
        lambda c: (
            c.q.shape[1] == c.k.shape[1]
            or (c.q.shape[1] % (2 * TILE) == 0 and c.k.shape[1] % TILE == 0)
        ),
        lambda c: f"{c.q.shape[1] / 2:g} and {c.k.shape[1]}",
    ),
    Requirement(
        "q, k and v in bfloat16",
        lambda c: all(x.dtype == jnp.bfloat16 for x in c),
        lambda c: ", ".join(sorted({jnp.dtype(x.dtype).name for x in c} - {"bfloat16"})),
    ),
    Requirement(
        "heads of 64, 128 or 256 channels, with values of the same size",
        lambda c: c.q.shape[-1] in (64, 128, 256) and c.v.shape[-1] == c.q.shape[-1],
        lambda c: f"{c.q.shape[-1]} and {c.v.shape[-1]}",
    ),
)


def unsupported(call) -> str | None:
    """Return the first of `REQUIREMENTS` that an `api.Call` does not meet, or None."""
    return first_unmet(REQUIREMENTS, call)


def tile(length: int) -> int:
    """The tokens of a tile of `Bounds`; the same for every T."""
    del length
    return TILE
