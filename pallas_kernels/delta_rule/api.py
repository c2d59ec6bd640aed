"""The delta rule with no decay or a scalar one, `S_t = (I - β_t k_tᵀ k_t) e^{g_t} S_{t-1} + β_t k_tᵀ v_t`, `o_t = scale q_t S_t`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int


def reasons(q, k, v, log_decay, run, initial) -> dict[str, str | None]:
    """By implementation, what it takes in place of these arguments (arrays or their shapes); None if it serves them."""
    return {"mosaic_gpu": _backend().reason(q, k, v, log_decay, run, initial)}


def _backend() -> Any:
    # Imported where it is used: a backend that is never asked for costs nothing.
    from pallas_kernels.delta_rule import hopper

    return hopper


def delta_rule(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T G V"],
    beta: Float[Array, "B T G"],
    log_decay: Float[Array, "B T G"] | None = None,
    *,
    initial: Float[Array, "B G K V"],
    run: Int[Array, "B T"] | None = None,
    scale: float,
    implementation: str = "mosaic_gpu",
    interpret: Any = False,
) -> tuple[Float[Array, "B T max(H,G) V"], Float[Array, "B G K V"]]:
    """Move what decaying memories hold at `k` towards `v` and read them with `q`; differentiable once, in reverse.

    Args:
        q: [B, T, H, K] bfloat16 queries; H is a multiple or a divisor of G. K is 64, 128 or 256, V also 512.
        k: [B, T, Hk, K] bfloat16 keys, of norm at most 1; Hk divides G.
        v: [B, T, G, V] bfloat16 values, one memory for each of the G heads.
        beta: [B, T, G] float32, from 0 to 2.
        log_decay: [B, T, G] float32, natural logarithm, at most 0; None is no decay.
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
    whys = reasons(q, k, v, log_decay, run, initial)
    if implementation not in whys:
        raise ValueError(
            f"delta_rule: implementation={implementation!r}; accepted are {tuple(whys)}"
        )
    if (why := whys[implementation]) is not None:
        raise NotImplementedError(f"delta_rule: implementation={implementation!r} takes {why}")
    length = q.shape[1]
    padding = -length % _backend().CHUNK
    if padding:  # tokens that write nothing, and whose output is cut off

        def pad(x: Any) -> Any:
            return jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))

        q, k, v, beta = pad(q), pad(k), pad(v), pad(beta)
        log_decay = None if log_decay is None else pad(log_decay)
        run = None if run is None else jnp.pad(run, [(0, 0), (0, padding)], mode="edge")
    output, final = _run(scale, interpret, q, k, v, beta, log_decay, run, initial)
    return output[:, :length], final


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _run(scale, interpret, *inputs):
    return _backend().forward(*inputs, scale=scale, interpret=interpret)[:2]


def _forward(scale, interpret, *primals):
    wanted = primals[4] is not None and primals[4].perturbed
    inputs = tuple(None if p is None else p.value for p in primals)
    output, final, residuals = _backend().forward(*inputs, scale=scale, interpret=interpret)
    # A decay that is a constant of its head needs no gradient, and the backward is cheaper without. (An array: residuals
    # carry no flags.)
    return (output, final), (inputs, residuals, jnp.zeros((int(wanted), 0)))


def _backward(scale, interpret, saved, cotangents):
    inputs, residuals, wanted = saved
    zeros: Any = jnp.zeros
    cotangents = (zeros(x.shape, x.dtype) if isinstance(x, SymbolicZero) else x for x in cotangents)
    dq, dk, dv, d_beta, d_decay, d_initial = _backend().backward(
        *inputs, residuals, *cotangents, scale=scale, interpret=interpret,
        decay_gradient=wanted.shape[0] == 1,
    )  # fmt: skip
    log_decay = inputs[4]
    if log_decay is not None and d_decay is None:
        d_decay = jnp.zeros_like(log_decay)
    return dq, dk, dv, d_beta, d_decay, None, d_initial


_run.defvjp(_forward, _backward, symbolic_zeros=True)
