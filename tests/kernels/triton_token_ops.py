"""Cases of the Triton kernels of `selective_memory`, `short_convolution` and one-token steps, whose programs are compiled by
`tests/kernels/triton_compiled.py`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

_STRUCT = jax.ShapeDtypeStruct


def trace_selective_memory(batch: int, states: int, dtype: str, documents: bool) -> Any:
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

    return jax.jit(both).trace(x, ids)


def trace_short_convolution(width: int, dtype: str, head_dim: int | None, documents: bool) -> Any:
    """Trace a call of `short_convolution` with SiLU and 1024 channels, and the gradients of all its inputs."""
    from lsm_jax import ops

    rows, channels = (2, 256), 1024
    x = dict(
        x=_STRUCT((*rows, channels), jnp.dtype(dtype)),
        weight=_STRUCT((width, channels), jnp.float32),
        bias=_STRUCT((channels,), jnp.float32),
    )
    ids = _STRUCT(rows, jnp.int32) if documents else None
    options: dict[str, Any] = dict(silu=True, head_dim=head_dim, implementation="triton")

    def both(x, ids):
        output, pull = jax.vjp(
            lambda x: ops.short_convolution(**x, segment_ids=ids, **options)[0], x
        )
        return pull(output)

    return jax.jit(both).trace(x, ids)


def trace_one_token(op: str, batch: int, heads: int, dim: int, dtype: str, extra: str) -> Any:
    """Trace a step of `decode_step` with 4 memories in a row.

    Args:
        op: "linear", "delta" or "dplr".
        batch: number of rows.
        heads: number of heads of q.
        dim: K and V.
        dtype: dtype of q, k and v.
        extra: names of optional arguments; "log_decay" with "key" has a value per key channel.
    """
    from pallas_kernels.decode_step import decode_step

    memories, given = 4, extra.split()
    wide = functools.partial(_STRUCT, dtype=jnp.dtype(dtype))
    x: dict[str, Any] = dict(
        memory=_STRUCT((3, batch, memories, dim, dim), jnp.float32),
        q=wide((batch, heads, dim)),
        k=wide((batch, memories, dim)),
        v=wide((batch, memories, dim)),
        layer=_STRUCT((), jnp.int32),
    )
    if op == "delta":
        x["beta"] = _STRUCT((batch, memories), jnp.float32)
    if op == "dplr":
        x |= dict(a=x["k"], b=x["k"])
    if "log_decay" in given:
        x["log_decay"] = _STRUCT((batch, memories, *[dim] * ("key" in given)), jnp.float32)
    if "bonus" in given:
        x["bonus"] = _STRUCT((memories, dim), jnp.float32)
    if "emptied" in given:
        x["emptied"] = _STRUCT((batch,), jnp.bool_)
    return jax.jit(lambda x: decode_step(**x, scale=1.0, implementation="triton")).trace(x)


_token = functools.partial(functools.partial, trace_one_token)
_convolution = functools.partial(functools.partial, trace_short_convolution)
_selective = functools.partial(functools.partial, trace_selective_memory)
COMPILED = {
    "selective, 16": _selective(2, 16, "bfloat16", True),
    "selective, 16, full": _selective(16, 16, "bfloat16", False),
    "selective, 8": _selective(2, 8, "float32", False),
    "selective, 32": _selective(2, 32, "float16", True),
    "one token, linear": _token("linear", 128, 8, 128, "bfloat16", "key log_decay bonus"),
    "one token, delta": _token("delta", 128, 4, 128, "bfloat16", "log_decay emptied"),
    "one token, delta, 256": _token("delta", 4, 4, 256, "float16", "key log_decay"),
    "one token, dplr": _token("dplr", 4, 4, 64, "float32", "key log_decay"),
    "convolution": _convolution(4, "bfloat16", None, False),
    "convolution, documents": _convolution(4, "bfloat16", None, True),
    "convolution, heads of 64": _convolution(4, "bfloat16", 64, True),
    "convolution, heads of 128": _convolution(4, "bfloat16", 128, True),
    "convolution, heads of 256": _convolution(3, "float16", 256, False),
    "convolution, float32": _convolution(2, "float32", None, False),
}
"""Functions, by name, that trace the programs whose kernels are compiled, and return them."""
