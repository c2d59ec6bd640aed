"""The requirements of the TPU kernels of attention with forget gates on shapes and dtypes, and the number of
tokens of their tiles.
"""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.requirements import Requirement, first_unmet

TILES = (128, 256, 512)
"""Accepted tile sizes; the first that is as long as the row is used, or the last."""


def _fits(x) -> bool:
    return x.shape[-1] % 8 == 0 and 0 < x.shape[-1] <= 256


REQUIREMENTS = (
    Requirement(
        "as many queries as keys", lambda c: c.q.shape[1] == c.k.shape[1] and not c.earlier
    ),
    Requirement(
        "q, k and v all in bfloat16 or all in float32",
        lambda c: (
            len({jnp.dtype(x.dtype) for x in c[:3]}) == 1
            and c.q.dtype in (jnp.bfloat16, jnp.float32)
        ),
        lambda c: ", ".join(sorted({jnp.dtype(x.dtype).name for x in c[:3]})),
    ),
    Requirement("K a multiple of 8 up to 256", lambda c: _fits(c.q), lambda c: str(c.q.shape[-1])),
    Requirement("V a multiple of 8 up to 256", lambda c: _fits(c.v), lambda c: str(c.v.shape[-1])),
)


def unsupported(call) -> str | None:
    """Return the first requirement of the TPU kernels that a call of `forgetting_attention` does not meet, or
    None if they support it.
    """
    return first_unmet(REQUIREMENTS, call)


def tile(length: int) -> int:
    """Return the number of queries, and of keys, that a program of the TPU kernels computes at a time, for
    rows of `length` tokens: 128, 256 or 512.
    """
    return next((size for size in TILES if length <= size), TILES[-1])
