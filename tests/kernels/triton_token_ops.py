"""Cases of the Triton kernels of `selective_memory`, `short_convolution` and one-token steps, whose programs are compiled by
`tests/kernels/triton_compiled.py`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

_STRUCT = jax.ShapeDtypeStruct


def trace_selective_memory(batch: int, states: int, dtype: str, documents: bool) -> None:
    """Trace a call of `selective_memory` with 1024 channels, and the gradients of all its inputs."""
    from lsm_jax import ops

    rows, channels = (batch, 256), 1024
    x: dict[str, Any] = dict(
        u=_STRUCT((*rows, channels), jnp.dtype(dtype)),
        delta=_STRUCT((*rows, channels), jnp.float32),
        A=_STRUCT((channels, states), jnp.float32),
        B=_STRUCT((*rows, states), jnp.float32),
        C=_STRUCT((*rows, states), jnp.float32),
        D=_STRUCT((channels,), jnp.float32),
    )
    ids = _STRUCT(rows, jnp.int32) if documents else None

    def both(x, ids):
        output, pull = jax.vjp(
            lambda x: ops.selective_memory(**x, segment_ids=ids, implementation="triton")[0], x
        )
        return pull(output)

    jax.eval_shape(both, x, ids)


_selective = functools.partial(functools.partial, trace_selective_memory)
COMPILED = {
    "selective, 16": _selective(2, 16, "bfloat16", True),
    "selective, 16, full": _selective(16, 16, "bfloat16", False),
    "selective, 8": _selective(2, 8, "float32", False),
    "selective, 32": _selective(2, 32, "float16", True),
}
"""Functions, by name, that trace the programs whose kernels are compiled."""
