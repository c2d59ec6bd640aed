"""The options of `delta_memory` and `dplr_memory` that are constant when a program is compiled."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax


class MatrixOptions(NamedTuple):
    """The options of `delta_memory` or `dplr_memory`, whose transition is a matrix, that are constant when a program is
    compiled.

    Attributes:
        scale: multiplies the queries.
        form: "recurrent", "chunk" or "associative", how the op is computed.
        size: tokens in a chunk.
        dtype: the dtype of the state and of all sums.
        precision: the precision of matrix products.
        erase: "decayed" or "undecayed", the memory that a key of `delta_memory` reads to erase: after its token's decay
            or before it.
        fresh: whether the state is empty, so that a kernel need not load its memories.
    """

    scale: float
    form: str
    size: int
    dtype: Any
    precision: jax.lax.Precision
    erase: str = "decayed"
    fresh: bool = False
