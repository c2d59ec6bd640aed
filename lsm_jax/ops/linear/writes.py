"""Factors of the writes of `linear_memory`, the skip of its output, and reads of a token's later rows, as passes over the values and the
output."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lsm_jax.ops.backends.memory_kernels import tokens_of
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


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(4, 5))
def add_later_rows(output: Array, q: Array, k: Array, v: Array, rank: int, scale: float) -> Array:
    """Return the output [B, T, H, V] of a memory that is read row by row, plus what each row of a token of `rank` rows reads from the rows
    after it in the token; computed in float32 and returned in the output's dtype.

    Keys k [B, T, Hk, K] and values v [B, T, G, V] are 0 in rows that are not written.
    """
    wide = jnp.promote_types(output.dtype, jnp.float32)
    heads = output.shape[2]

    def by_token(x):  # [B, T, n, D] to [B, T / rank, rank, H, D]
        x = jnp.repeat(x.astype(wide), heads // x.shape[2], axis=2)
        return x.reshape(x.shape[0], -1, rank, *x.shape[2:])

    q, k, v = (by_token(x) for x in (q, k, v))
    later = jnp.triu(jnp.ones((rank, rank), wide), 1)[..., None] * scale
    # As a sum XLA fuses it with what makes its operands; it stores the operands of a dot.
    scores = later * jnp.sum(q[:, :, :, None] * k[:, :, None], axis=-1)
    added = jnp.sum(scores[..., None] * v[:, :, None], axis=3)
    return (output.astype(wide) + added.reshape(output.shape)).astype(output.dtype)


def apart(run: Callable[[Call], Any]) -> Callable[[Call], Any]:
    """Return the function that computes a call of `linear_memory` by `run`, a backend without `log_write`, `skip` and `rank`: it
    multiplies the values of a call that has them before, and adds to the output after."""

    def run_apart(call: Call) -> Any:
        given = dict(call.arguments)
        log_write, skip = given.pop("log_write", None), given.pop("skip", None)
        options = call.options
        if options.rank > 1:
            output, state = run(call._replace(options=options._replace(rank=1)))
            tokens = tokens_of(given)
            q, k, v = (
                given["q"],
                select(tokens.written, given["k"]),
                select(tokens.written, given["v"]),
            )
            q = select(tokens.real, q)
            return add_later_rows(output, q, k, v, options.rank, options.scale), state
        if log_write is None:
            return run(call)
        ids = given["segment_ids"]
        real = None if ids is None else ids != 0
        v = select(real, given["v"])
        given["v"] = scale_values(v, select(real, log_write))
        output, state = run(call._replace(arguments=given))
        return add_skip(output, skip, v), state

    return run_apart
