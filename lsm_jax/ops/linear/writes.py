"""Factors of the writes of `linear_memory` and the skip of its output, as passes over the values and the output."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lsm_jax.ops.backends.registry import Call
from lsm_jax.ops.core.segments import select


@functools.partial(jax.checkpoint, prevent_cse=False)
def scale_values(v: Array, log_write: Array) -> Array:
    """Return values v [B, T, G, V] times `e^log_write`, log_write [B, T, G], computed in float32 and returned in v's dtype."""
    wide = jnp.promote_types(v.dtype, jnp.float32)
    return (v.astype(wide) * jnp.exp(log_write.astype(wide))[..., None]).astype(v.dtype)


@functools.partial(jax.checkpoint, prevent_cse=False)
def add_skip(output: Array, skip: Array, v: Array) -> Array:
    """Return a memory's output [B, T, H, V] plus each memory's skip [G] times its v [B, T, G, V], which H / G heads share; computed in
    float32 and returned in the output's dtype."""
    wide = jnp.promote_types(output.dtype, jnp.float32)
    added = skip.astype(wide)[:, None] * v.astype(wide)
    added = jnp.repeat(added, output.shape[2] // v.shape[2], axis=2)
    return (output.astype(wide) + added).astype(output.dtype)


def apart(run: Callable[[Call], Any]) -> Callable[[Call], Any]:
    """Return the function that computes a call of `linear_memory` by `run`, a backend without `log_write` and `skip`: it multiplies
    the values of a call that has them before, and adds to the output after."""

    def run_apart(call: Call) -> Any:
        given = dict(call.arguments)
        log_write, skip = given.pop("log_write", None), given.pop("skip", None)
        if log_write is None:
            return run(call)
        ids = given["segment_ids"]
        real = None if ids is None else ids != 0
        v = select(real, given["v"])
        given["v"] = scale_values(v, select(real, log_write))
        output, state = run(call._replace(arguments=given))
        return add_skip(output, skip, v), state

    return run_apart
