"""Softmax attention with a forget gate, scores `scale q_i . k_j + F_i - F_j`, as one fused kernel (FoX, arXiv 2503.02130, Eq. 3)."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.forgetting_attention.bounds import Rows, find_bounds
from pallas_kernels.residuals import keep

_BACKENDS = {"mosaic_gpu": "hopper", "mosaic_tpu": "tpu"}


def _backend(implementation: str) -> Any:
    # Imported where it is used: a backend that is never asked for costs nothing.
    return importlib.import_module(
        f"pallas_kernels.forgetting_attention.{_BACKENDS[implementation]}"
    )


def reasons(q, k, v) -> dict[str, str | None]:
    """By implementation, what it takes in place of these arguments (arrays or their shapes); None if it serves them."""
    return {name: reason(name, q, k, v) for name in _BACKENDS}


def reason(implementation: str, q, k, v) -> str | None:
    """What one implementation takes in place of these arguments, or None; the others' backends are not imported."""
    if k.shape[2] != v.shape[2] or q.shape[2] % v.shape[2]:
        heads = f"{q.shape[2]}, {k.shape[2]}, {v.shape[2]}"
        return f"as many key as value heads, dividing those of q, not {heads}"
    if q.shape[1] != k.shape[1]:
        if implementation != "mosaic_gpu":
            return "queries of the whole row"
        size = _backend(implementation).tile(k.shape[1])
        if q.shape[1] % (2 * size) or k.shape[1] % size:
            lengths = f"{q.shape[1] / 2:g} and {k.shape[1]}"
            return f"halves of the queries, and keys, a multiple of {size}, not {lengths}"
    return _backend(implementation).reason(q, k, v)


def forgetting_attention(
    q: Float[Array, "B Q H D"],
    k: Float[Array, "B T G D"],
    v: Float[Array, "B T G V"],
    sums: tuple[Float[Array, "B T H"], Float[Array, "B T H"]] | None = None,
    *,
    run: Int[Array, "B T"] | None = None,
    written: Bool[Array, "B T"] | None = None,
    places: Int[Array, " 2"] | None = None,
    window: int | None = None,
    scale: float,
    prune: bool = True,
    implementation: str = "mosaic_gpu",
    interpret: Any = False,
) -> Float[Array, "B Q H V"]:
    """Causal attention whose keys fade by their gates; differentiable once, in reverse.

    Args:
        q: [B, Q, H, D] queries; H is a multiple of G, Q is T, or less with `places`.
        k: [B, T, G, D] keys.
        v: [B, T, G, V] values.
        sums: [B, T, H] twice, float32, high and low part of the sum F of log forget gates up to and with each token, never growing
            along T, through runs too, by at most some thousands a token (past a larger step a float32 bias swallows scores). The gradient is that of F_j in its column, all of it on the high part: a row's F_i has none. None is no gate.
        run: [B, T], growing along T: tokens see those of their own run. None is one run.
        written: [B, T], False where a token is no key. None is all.
        places: [2], the tokens of the row at which the first and the second half of the queries begin, multiples of the backend's tile,
            where a device has only those two parts of the row. Needed where Q < T.
        window: tokens see the last `window` places, their own included; None is all.
        scale: multiplies the scores.
        prune: pass over tiles of keys that together weigh less than e^-10 of a row (arXiv 2504.06949).
        implementation: "mosaic_gpu" (Hopper; bfloat16, D = V of 64 or 128, or of 256 without a gradient) or "mosaic_tpu"
            (bfloat16 or float32, D and V a multiple of 8 up to 256); `reasons` says what each takes.
        interpret: parameters of the backend's interpreter, to run on a CPU.

    Returns:
        The output in q's dtype, 0 where a token sees nothing.

    Raises:
        NotImplementedError: the implementation does not serve these arguments, or the gradient; the message says why.
        ValueError: an implementation that does not exist; queries fewer than keys without places, or as many with.
    """
    if implementation not in _BACKENDS:
        raise ValueError(
            f"forgetting_attention: implementation={implementation!r}; accepted are {tuple(_BACKENDS)}"
        )
    if (places is None) != (q.shape[1] == k.shape[1]):
        raise ValueError(
            f"forgetting_attention: places is {'not ' if places is None else ''}given with {q.shape[1]} queries and {k.shape[1]} keys; accepted are places where queries are fewer"
        )
    why = reason(implementation, q, k, v)
    if why is not None:
        raise NotImplementedError(
            f"forgetting_attention: implementation={implementation!r} takes {why}"
        )
    backend = _backend(implementation)
    (queries, heads), length = q.shape[1:3], k.shape[1]
    gates: Any = None if sums is None else tuple(jnp.swapaxes(x, 1, 2) for x in sums)
    if written is not None and gates is None:
        gates = (jnp.zeros((q.shape[0], heads, length), jnp.float32),) * 2
    size = backend.tile(length)
    padding = -length % size
    if padding:  # keys after all queries that are kept

        def pad(x: Any, axis: int = 1, mode: Any = "constant") -> Any:
            widths = [(0, padding if i == axis else 0) for i in range(x.ndim)]
            return jnp.pad(x, widths, mode=mode)

        q, k, v = pad(q), pad(k), pad(v)
        gates = None if gates is None else tuple(pad(x, 2, "edge") for x in gates)
        run = None if run is None else pad(run, mode="edge")
        written = None if written is None else pad(written)
    static = backend, size, scale, window, prune, interpret
    rows = Rows(gates, run, written, places)
    return _run(static, q, k, v, rows)[:, :queries]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(static, *inputs):
    return _forward(static, *inputs)[0]


def _forward(static, q, k, v, rows: Rows):
    backend, size, scale, window, prune, interpret = static
    bounds = find_bounds(q, k, rows, scale=scale, window=window, prune=prune, tile_size=size)
    output, sums = backend.forward(
        q, k, v, rows, bounds, scale=scale, window=window, interpret=interpret
    )
    bounds, output, sums = keep((bounds, output, sums))
    return output, (q, k, v, rows, bounds, output, sums)


def _backward(static, saved, d_output):
    backend, _, scale, window, _, interpret = static
    q, k, v, rows, bounds, output, sums = saved
    delta = jnp.einsum(
        "bthd,bthd->bht", output, d_output, precision="highest", preferred_element_type=jnp.float32
    )
    dq, dk, dv, d_high = backend.backward(
        q, k, v, rows, bounds, sums, d_output, delta, scale=scale, window=window, interpret=interpret
    )  # fmt: skip

    def shared(x, like):  # by the queries of one key head, summed in float32
        by_head = x.reshape(*like.shape[:3], -1, like.shape[3])
        return jnp.sum(by_head, axis=3, dtype=jnp.float32).astype(like.dtype)

    d_gates = None if rows.gates is None else (d_high, jnp.zeros_like(d_high))
    dk, dv = shared(dk, k), shared(dv, v)
    return dq, dk, dv, Rows(d_gates, None, None, None)


_run.defvjp(_forward, _backward)
