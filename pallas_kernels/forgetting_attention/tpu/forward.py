"""The forward kernel of softmax attention with forget gates (FoX) on Mosaic TPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.compat import pl
from pallas_kernels.forgetting_attention.bounds import NEVER, Bounds, Rows
from pallas_kernels.forgetting_attention.tpu.call import LOG2E, Call, Step
from pallas_kernels.tiles.scalar_decay import dot

_F32 = jnp.float32


def forward(
    q, k, v, rows: Rows, bounds: Bounds, *, scale: float, window: int | None, interpret: Any = False
) -> tuple[jax.Array, jax.Array]:
    """Compute attention with forget gates on a TPU; return its output for each query, and the logarithm of
    the sum of the query's weights, which the backward pass needs.

    Args:
        q: [B, T, H, D] queries, T a multiple of the number of tokens of a tile of `bounds`.
        k: [B, T, G, D] keys.
        v: [B, T, G, V] values.
        rows: the forget gates and documents of the tokens, and which tokens are keys.
        bounds: which tiles of queries see which tiles of keys.
        scale: the factor by which the scores q . k are multiplied.
        window: the number of last tokens that a query sees, or None for all.
        interpret: False to compile the kernel; True or `pltpu.InterpretParams` for the interpreter.

    Returns:
        The output [B, T, H, V], 0 where a query sees no key; and [B, H, T] float32, the base-2 logarithm of
        the sum of each query's weights. In these weights, the running sum F of the log forget gates at the
        query is replaced by F at the first query of its tile.
    """
    call = Call(q, k, v, rows, bounds, scale, window)

    def kernel(step: Step):
        refs = step.refs

        @pl.when(step.first)
        def _():
            refs["sum"][...] = jnp.zeros_like(refs["sum"])
            refs["top"][...] = jnp.full_like(refs["top"], NEVER)
            refs["total"][...] = jnp.zeros_like(refs["total"])

        def add(masked):
            scores, v = call.scores(step, masked), refs["v"][...]
            top = refs["top"][...]
            new_top = jnp.maximum(top, jnp.max(scores, axis=1, keepdims=True))
            factor = jnp.exp2(top - new_top)
            weights = jnp.exp2(scores - new_top)
            refs["top"][...] = new_top
            refs["total"][...] = refs["total"][...] * factor + jnp.sum(weights, 1, keepdims=True)
            refs["sum"][...] = refs["sum"][...] * factor + dot(weights.astype(v.dtype), v)

        call.run(step, add)

        @pl.when(step.last)
        def _():
            top, total = refs["top"][...], refs["total"][...]
            sees_none = top < 0.5 * NEVER
            inverse = jnp.where(sees_none, 0.0, 1 / total)
            refs["out"][...] = (refs["sum"][...] * inverse).astype(refs["out"].dtype)
            refs["sums"][...] = jnp.where(sees_none, -NEVER, top + jnp.log(total) * LOG2E).T

    inputs = dict(q=call.tokens(q, "query"), k=call.tokens(k, "key"), v=call.tokens(v, "key"))
    inputs |= call.masks()
    if bounds.first_of_query is not None:
        inputs["first of query"] = call.line(bounds.first_of_query, "query")
    struct = jax.ShapeDtypeStruct
    out = struct((*q.shape[:3], v.shape[3]), v.dtype)
    sums = struct((*q.shape[:1], q.shape[2], q.shape[1]), _F32)
    outputs = dict(out=call.tokens(out, "query"), sums=call.line(sums, "query"))
    column = (call.tile, 1)
    scratch = dict(sum=(call.tile, v.shape[3]), top=column, total=column)
    result = call.launch(kernel, inputs, outputs, scratch, over="key", interpret=interpret)
    return call.from_tokens(result["out"], out), result["sums"].reshape(sums.shape)
