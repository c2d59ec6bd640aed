"""The requirements of the TPU kernels, and their tile size."""

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
    """Return the first of `REQUIREMENTS` that an `api.Call` does not meet, or None."""
    return first_unmet(REQUIREMENTS, call)


def tile(length: int) -> int:
    """The queries or keys of a program, for rows of `length` tokens."""
    return next((size for size in TILES if length <= size), TILES[-1])
