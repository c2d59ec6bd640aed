"""Memories under a diagonal-plus-low-rank transition, `S_t = diag(e^{g_t}) S_{t-1} + b_tᵀ (a_t S_{t-1}) + k_tᵀ v_t`, `o_t = scale q_t S_t`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def reasons(q, k, v, a, b, log_decay, run, initial) -> dict[str, str | None]:
    """By implementation, what it takes in place of these arguments (arrays or their shapes); None if it serves them."""
    return {"mosaic_gpu": _backend().reason(q, k, v, a, b, log_decay, run, initial)}


def _backend() -> Any:
    # Imported where it is used: a backend that is never asked for costs nothing.
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
    initial: Float[Array, "B G K V"],
    run: Int[Array, "B T"] | None = None,
    scale: float,
    implementation: str = "mosaic_gpu",
    interpret: Any = False,
) -> tuple[Float[Array, "B T max(H,G) V"], Float[Array, "B G K V"]]:
    """Decay memories, write back at `b` what `a` read of them before, write `kᵀ v`, read with `q`; differentiable once, in reverse.

    RWKV7, arXiv 2503.14456.

    Args:
        q: [B, T, H, K] bfloat16 queries; H is a multiple or a divisor of G. K and V are 64 or 128.
        k: [B, T, Hk, K] bfloat16 keys; Hk divides G.
        v: [B, T, G, V] bfloat16 values, one memory for each of the G heads.
        a: [B, T, Ha, K] bfloat16; Ha divides G.
        b: [B, T, Hb, K] bfloat16; Hb divides G.
        log_decay: [B, T, G, K] float32, natural logarithm, at most 0.
        initial: [B, G, K, V] float32, the memory before the first token.
        run: [B, T], growing along T: a token with a larger run than the one before it finds an empty memory, and run 0 goes on
            from `initial`. None is one run.
        scale: multiplies q.
        implementation: "mosaic_gpu" (Hopper); `reasons` says what it takes.
        interpret: parameters of the backend's interpreter, to run on a CPU.

    Returns:
        The output in v's dtype, and the final memory in float32.

    Raises:
        NotImplementedError: the implementation does not serve these arguments; the message says why.
        ValueError: an implementation that does not exist.
    """
    whys = reasons(q, k, v, a, b, log_decay, run, initial)
    if implementation not in whys:
        raise ValueError(f"dplr: implementation={implementation!r}; accepted are {tuple(whys)}")
    if (why := whys[implementation]) is not None:
        raise NotImplementedError(f"dplr: implementation={implementation!r} takes {why}")
    length = q.shape[1]
    padding = -length % _backend().CHUNK
    if padding:  # tokens that write nothing, and whose output is cut off

        def pad(x: Any) -> Any:
            return jnp.pad(x, [(0, 0), (0, padding), (0, 0), (0, 0)])

        q, k, v, a, b, log_decay = (pad(x) for x in (q, k, v, a, b, log_decay))
        run = None if run is None else jnp.pad(run, [(0, 0), (0, padding)], mode="edge")
    output, final = _run(scale, interpret, q, k, v, a, b, log_decay, run, initial)
    return output[:, :length], final


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _run(scale, interpret, *inputs):
    return _backend().forward(*inputs, scale=scale, interpret=interpret)[:2]


def _forward(scale, interpret, *inputs):
    output, final, residuals = _backend().forward(*inputs, scale=scale, interpret=interpret)
    return (output, final), (inputs, residuals)


def _backward(scale, interpret, saved, cotangents):
    inputs, residuals = saved
    *grads, d_initial = _backend().backward(
        *inputs, residuals, *cotangents, scale=scale, interpret=interpret
    )
    return *grads, None, d_initial


_run.defvjp(_forward, _backward)
