"""The requirements of the Triton kernels of attention with forget gates on shapes and dtypes, and the number of tokens of their
tiles.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.requirements import Requirement, first_unmet
from pallas_kernels.triton import launch

TILE = 128


def _dtypes(call) -> set[str]:
    return {jnp.dtype(x.dtype).name for x in call[:3]}


def _accepted_dtypes() -> set[str]:
    """Return the names of the dtypes of q, k and v that the kernels support here; float32 only if the caller allows products in tf32."""
    allowed = jax.config.jax_default_matmul_precision == "tensorfloat32"
    return {"bfloat16", "float16"} | ({"float32"} if allowed else set())


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
        "q, k and v all in bfloat16, all in float16, or, with jax.default_matmul_precision('tensorfloat32'), all in float32",
        lambda c: len(_dtypes(c)) == 1 and _dtypes(c) <= _accepted_dtypes(),
        lambda c: ", ".join(sorted(_dtypes(c))),
    ),
    Requirement(
        "heads of 64, 128 or 256 channels, with values of the same size",
        lambda c: c.q.shape[-1] in (64, 128, 256) and c.v.shape[-1] == c.q.shape[-1],
        lambda c: f"{c.q.shape[-1]} and {c.v.shape[-1]}",
    ),
    launch.INSTALLED,  # last, so that it is the reason only for calls that the kernels support
)


def unsupported(call) -> str | None:
    """Return the first requirement of the Triton kernels that a call of `forgetting_attention` does not meet, or None if they support
    it.
    """
    return first_unmet(REQUIREMENTS, call)


def tile(length: int) -> int:
    """Return the number of tokens in a tile of queries or keys, by which ranges of visible tiles are counted: 128 for rows of any
    `length`.
    """
    del length
    return TILE
