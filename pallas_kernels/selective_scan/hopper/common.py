"""The loop over a chunk's tokens and the limits of CUDA's grids, for real and for complex memories."""

from __future__ import annotations

from typing import Any

from jax import lax

from pallas_kernels.requirements import Requirement

_MAX_GRID = 65535  # CUDA's largest size of a grid's second and third axes
_UNROLL = 4  # tokens of one iteration of the loop


def grid_requirements(chunk_size: int) -> tuple[Requirement, ...]:
    """Return the requirements of CUDA's grids on an `api.Call`, for chunks of `chunk_size` tokens."""
    return (
        Requirement(
            f"at most {_MAX_GRID:,} rows",
            lambda c: c.u.shape[0] <= _MAX_GRID,
            lambda c: f"{c.u.shape[0]:,}",
        ),
        Requirement(
            f"at most {_MAX_GRID:,} chunks of {chunk_size} tokens",
            lambda c: -(-c.u.shape[1] // chunk_size) <= _MAX_GRID,
            lambda c: f"{-(-c.u.shape[1] // chunk_size):,}",
        ),
    )


def for_tokens(count: int, step, carry, *, reverse: bool = False) -> Any:
    """Return the carry after `step(token, carry)` for the tokens 0 to count - 1, or from count - 1 to 0 where
    `reverse`.
    """

    def unrolled(index, carry):
        for i in range(_UNROLL):
            at = index * _UNROLL + i
            carry = step(count - 1 - at if reverse else at, carry)
        return carry

    return lax.fori_loop(0, count // _UNROLL, unrolled, carry)
