"""The requirements of the Hopper kernels of attention with forget gates on shapes and dtypes, and the number
of tokens of their tiles.
"""

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
            c.q.shape[1] == c.row_length
            or (c.q.shape[1] % (2 * TILE) == 0 and c.row_length % TILE == 0)
        ),
        lambda c: f"{c.q.shape[1] / 2:g} and {c.row_length}",
    ),
    Requirement(
        "q, k and v in bfloat16",
        lambda c: all(x.dtype == jnp.bfloat16 for x in c[:3]),
        lambda c: ", ".join(sorted({jnp.dtype(x.dtype).name for x in c[:3]} - {"bfloat16"})),
    ),
    Requirement(
        "heads of 64, 128 or 256 channels, with values of the same size",
        lambda c: c.q.shape[-1] in (64, 128, 256) and c.v.shape[-1] == c.q.shape[-1],
        lambda c: f"{c.q.shape[-1]} and {c.v.shape[-1]}",
    ),
)


def unsupported(call) -> str | None:
    """Return the first requirement of the Hopper kernels that a call of `forgetting_attention` does not meet,
    or None if they support it.
    """
    return first_unmet(REQUIREMENTS, call)


def tile(length: int) -> int:
    """Return the number of tokens in a tile of queries or keys, by which ranges of visible tiles are counted:
    128 for rows of any `length`.
    """
    del length
    return TILE
