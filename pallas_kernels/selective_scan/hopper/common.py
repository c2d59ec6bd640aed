"""Code that the Hopper kernels of selective scans with real and with complex memories share: the loop over a chunk's
tokens, and the requirements that follow from CUDA's limits on the size of a grid.
"""

from __future__ import annotations

from typing import Any

from jax import lax

from pallas_kernels.requirements import Requirement

_MAX_GRID = 65535  # CUDA's largest size of a grid's second and third axes
_UNROLL = 4  # tokens of one iteration of the loop


def grid_requirements(chunk_size: int) -> tuple[Requirement, ...]:
    """Return the requirements on a selective scan's numbers of rows and of chunks that follow from CUDA's
    limits on the size of a grid, for chunks of `chunk_size` tokens.
    """
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
    """Run `step(token, carry)`, which returns the next carry, for the `count` tokens of a chunk, 0 to count -
    1, or in the opposite order where `reverse`; return the last carry. `count` is a multiple of 4.
    """

    def unrolled(index, carry):
        for i in range(_UNROLL):
            at = index * _UNROLL + i
            carry = step(count - 1 - at if reverse else at, carry)
        return carry

    return lax.fori_loop(0, count // _UNROLL, unrolled, carry)
