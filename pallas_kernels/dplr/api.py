"""Memories under a diagonal-plus-low-rank transition, `S_t = diag(e^{g_t}) S_{t-1} + b_tᵀ (a_t S_{t-1}) + k_tᵀ v_t`, `o_t = scale q_t S_t`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.residuals import keep

_IMPLEMENTATIONS = ("mosaic_gpu", "mosaic_tpu")


def reasons(q, k, v, a, b, log_decay, run, initial) -> dict[str, str | None]:
    """By implementation, what it takes in place of these arguments (arrays or their shapes); None if it serves them."""
    return {n: reason(n, q, k, v, a, b, log_decay, run, initial) for n in _IMPLEMENTATIONS}


def reason(implementation, q, k, v, a, b, log_decay, run, initial) -> str | None:
    """What one implementation takes in place of these arguments, or None; the others' backends are not imported."""
    return _backend(implementation).reason(q, k, v, a, b, log_decay, run, initial)


def _backend(implementation: str) -> Any:
    # Imported where it is used: a backend that is never asked for costs nothing.
    if implementation == "mosaic_tpu":
        from pallas_kernels.dplr import tpu

        return tpu
    from pallas_kernels.dplr import hopper

    return hopper


def dplr(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T G V"],
    a: Float[Array, "B T Ha K"],
    b: Float[Array, "B T Hb K"],
    log_decay: Float[Array, "B T G K"],
    *,
    initial: Float[Array, "R G K V"],
    run: Int[Array, "B T"] | None = None,
    scale: float,
    implementation: str = "mosaic_gpu",
    interpret: Any = False,
) -> tuple[Float[Array, "B T max(H,G) V"], Float[Array, "R G K V"]]:
    """Decay memories, write back at `b` what `a` read of them before, write `kᵀ v`, read with `q`; differentiable once, in reverse.

    RWKV7, arXiv 2503.14456.

    Args:
        q: [B, T, H, K] queries; H is a multiple or a divisor of G.
        k: [B, T, Hk, K] keys; Hk divides G.
        v: [B, T, G, V] values, one memory for each of the G heads.
        a: [B, T, Ha, K]; Ha divides G.
        b: [B, T, Hb, K]; Hb divides G.
        log_decay: [B, T, G, K] float32, natural logarithm, at most 0.
        initial: [B, G, K, V] float32, the memory before the first token; or [B * S, G, K, V], S of them a row.
        run: [B, T], growing along T: a token with a larger run than the one before it finds an empty memory, and run 0 goes on
            from `initial`. None is one run. With S memories a row: every number from 0 to S - 1, each run beginning at a multiple
            of 64 ("mosaic_gpu") or 128 ("mosaic_tpu") tokens, going on from the memory of its number and leaving a final one.
        scale: multiplies q.
        implementation: "mosaic_gpu" (Hopper; bfloat16, K of 64, 128 or 256, V of 64 or a multiple of 128) or "mosaic_tpu" (bfloat16 or
            float32, K and V a multiple of 8 up to 256); `reasons` says what each takes.
        interpret: parameters of the backend's interpreter, to run on a CPU.

    Returns:
        The output in v's dtype, and the final memories in float32, as `initial`.

    Raises:
        NotImplementedError: the implementation does not serve these arguments; the message says why.
        ValueError: an implementation that does not exist.
    """
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(
            f"dplr: implementation={implementation!r}; accepted are {_IMPLEMENTATIONS}"
        )
    why = reason(implementation, q, k, v, a, b, log_decay, run, initial)
    if why is not None:
        raise NotImplementedError(f"dplr: implementation={implementation!r} takes {why}")
    length = q.shape[1]
    padding = -length % _backend(implementation).multiple(q, k, v)
    if padding:  # tokens that write nothing, and whose output is cut off

        def pad(x: Any) -> Any:
            return jnp.pad(x, [(0, 0), (0, padding), (0, 0), (0, 0)])

        q, k, v, a, b, log_decay = (pad(x) for x in (q, k, v, a, b, log_decay))
        run = None if run is None else jnp.pad(run, [(0, 0), (0, padding)], mode="edge")
    output, final = _run(implementation, scale, interpret, q, k, v, a, b, log_decay, run, initial)
    return output[:, :length], final


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _run(name, scale, interpret, *inputs):
    unsaved = {"save": False} if name == "mosaic_tpu" else {}  # what it saves costs it writes
    return _backend(name).forward(*inputs, scale=scale, interpret=interpret, **unsaved)[:2]


def _forward(name, scale, interpret, *inputs):
    found = _backend(name).forward(*inputs, scale=scale, interpret=interpret)
    output, final, residuals = keep(found)
    return (output, final), (inputs, residuals)


def _backward(name, scale, interpret, saved, cotangents):
    inputs, residuals = saved
    *grads, d_initial = _backend(name).backward(
        *inputs, residuals, *cotangents, scale=scale, interpret=interpret
    )
    return *grads, None, d_initial


_run.defvjp(_forward, _backward)
