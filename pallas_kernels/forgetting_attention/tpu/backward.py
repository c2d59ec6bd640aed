"""Forget-gated softmax attention on Mosaic TPU: the two backward kernels. `hopper.backward` lists the
gradients.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.compat import pl
from pallas_kernels.forgetting_attention.bounds import Bounds, Rows
from pallas_kernels.forgetting_attention.tpu.call import Call, Step
from pallas_kernels.tiles.scalar_decay import dot


def backward(
    q,
    k,
    v,
    rows: Rows,
    bounds: Bounds,
    sums,
    d_out,
    delta,
    *,
    scale: float,
    window: int | None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Return the gradients of the queries q [B, T, H, D], the keys k [B, T, G, D], the values v [B, T, G, V],
    and of F, the running sum of the log forget gates, as a bias of the keys ([B, H, T], or None without
    gates).

    Args:
        q: [B, T, H, D] queries, T a multiple of the number of tokens of a tile of `bounds`.
        k: [B, T, G, D] keys.
        v: [B, T, G, V] values.
        rows: the forget gates and documents of the tokens, and which tokens are keys.
        bounds: which tiles of queries see which tiles of keys.
        sums: [B, H, T] float32, the base-2 logarithm of the sum of each query's weights: the second result of
            `forward`.
        d_out: [B, T, H, V], the gradient of the output.
        delta: [B, H, T] float32, the scalar product of each query's output and its gradient.
        scale: the factor by which the scores q . k are multiplied.
        window: the number of last tokens that a query sees, or None for all.
        interpret: False to compile the kernel; True or `pltpu.InterpretParams` for the interpreter.
    """
    call = Call(q, k, v, rows, bounds, scale, window)
    inputs = dict(q=call.tokens(q, "query"), k=call.tokens(k, "key"), v=call.tokens(v, "key"))
    inputs |= call.masks() | dict(d_out=call.tokens(d_out, "query"), sums=call.line(sums, "query"))
    dq, error = _backward_of_queries(call, q, inputs, delta, scale, interpret)
    # `delta` is computed from the rounded output, and differs a little from its exact value. A gate's gradient sums these
    # differences over all later tokens, and nearly everything else in that sum cancels.
    return dq, *_backward_of_keys(call, k, v, inputs, delta + error, scale, interpret)


def _backward_of_queries(call: Call, q, inputs, delta, scale, interpret):
    """Return the gradient of the queries q [B, T, H, D], and for each query the sum over keys of the
    gradients dS of its scores, [B, H, T], which is 0 except for the rounding of `delta`, the scalar product
    of the output and its gradient.
    """

    def kernel(step: Step):
        refs = step.refs

        @pl.when(step.first)
        def _():
            refs["sum"][...] = jnp.zeros_like(refs["sum"])
            refs["error sum"][...] = jnp.zeros_like(refs["error sum"])

        def add(masked):
            k = refs["k"][...]
            weights = jnp.exp2(call.scores(step, masked) - refs["sums"][...].T)
            d_weights = dot(refs["d_out"][...], refs["v"][...], "nt")
            d_scores = weights * (d_weights - refs["delta"][...].T)
            refs["sum"][...] += dot(d_scores.astype(k.dtype), k)
            refs["error sum"][...] += jnp.sum(d_scores, axis=1, keepdims=True)

        call.run(step, add)

        @pl.when(step.last)
        def _():
            refs["dq"][...] = (refs["sum"][...] * scale).astype(refs["dq"].dtype)
            refs["error"][...] = refs["error sum"][...].T

    dq, error = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, delta))
    result = call.launch(
        kernel,
        inputs | dict(delta=call.line(delta, "query")),
        dict(dq=call.tokens(dq, "query"), error=call.line(error, "query")),
        {"sum": (call.tile, q.shape[3]), "error sum": (call.tile, 1)},
        over="key",
        interpret=interpret,
    )
    return call.from_tokens(result["dq"], dq), result["error"].reshape(error.shape)


def _backward_of_keys(call: Call, k, v, inputs, delta, scale, interpret):
    """Return the gradients of the keys k [B, T, G, D] and of the values v [B, T, G, V], and the gradient of
    F, the running sum of the log forget gates, as a bias of the keys ([B, H, T]; None without gates).
    """
    gated = "key high" in inputs

    def kernel(step: Step):
        refs = step.refs

        @pl.when(step.first & step.first_head)
        def _():
            refs["dk sum"][...] = jnp.zeros_like(refs["dk sum"])
            refs["dv sum"][...] = jnp.zeros_like(refs["dv sum"])

        if gated:

            @pl.when(step.first)
            def _():
                refs["d sum"][...] = jnp.zeros_like(refs["d sum"])

        def add(masked):
            q, d_out = refs["q"][...], refs["d_out"][...]
            weights = jnp.exp2(call.scores(step, masked, keys_in_rows=True) - refs["sums"][...])
            refs["dv sum"][...] += dot(weights.astype(d_out.dtype), d_out)
            d_weights = dot(refs["v"][...], d_out, "nt")
            d_scores = weights * (d_weights - refs["delta"][...])
            refs["dk sum"][...] += dot(d_scores.astype(q.dtype), q)
            if gated:
                refs["d sum"][...] -= jnp.sum(d_scores, axis=1, keepdims=True)

        call.run(step, add)

        @pl.when(step.last & step.last_head)
        def _():
            refs["dk"][...] = (refs["dk sum"][...] * scale).astype(refs["dk"].dtype)
            refs["dv"][...] = refs["dv sum"][...].astype(refs["dv"].dtype)

        if gated:

            @pl.when(step.last)
            def _():
                refs["d high"][...] = refs["d sum"][...].T

    dk, dv, d_high = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v, delta))
    outputs = dict(dk=call.tokens(dk, "key"), dv=call.tokens(dv, "key"))
    scratch = {"dk sum": (call.tile, k.shape[3]), "dv sum": (call.tile, v.shape[3])}
    if gated:
        outputs["d high"] = call.line(d_high, "key")
        scratch["d sum"] = (call.tile, 1)
    inputs = inputs | dict(delta=call.line(delta, "query"))
    result = call.launch(kernel, inputs, outputs, scratch, over="query", interpret=interpret)
    dk, dv = call.from_tokens(result["dk"], dk), call.from_tokens(result["dv"], dv)
    return dk, dv, result["d high"].reshape(d_high.shape) if gated else None
