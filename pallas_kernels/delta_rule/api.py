"""The delta rule `S_t = (I - β_t k_tᵀ k_t) e^{g_t} S_{t-1} + β_t k_tᵀ v_t`, `o_t = scale q_t S_t`; g a scalar, or diagonal (KDA)."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from pallas_kernels.residuals import keep

_IMPLEMENTATIONS = ("mosaic_gpu", "mosaic_tpu")


def reasons(q, k, v, log_decay, run, initial) -> dict[str, str | None]:
    """By implementation, what it takes in place of these arguments (arrays or their shapes); None if it serves them."""
    return {name: reason(name, q, k, v, log_decay, run, initial) for name in _IMPLEMENTATIONS}


def reason(implementation, q, k, v, log_decay, run, initial) -> str | None:
    """What one implementation takes in place of these arguments, or None; the others' backends are not imported."""
    return _backend(implementation, log_decay).reason(q, k, v, log_decay, run, initial)


def _backend(implementation: str, log_decay) -> Any:
    # Imported where it is used: a backend that is never asked for costs nothing.
    if implementation == "mosaic_tpu":
        from pallas_kernels.delta_rule import tpu, tpu_channels

        return tpu_channels if jnp.ndim(log_decay) == 4 else tpu
    from pallas_kernels.delta_rule import hopper, hopper_channels

    return hopper_channels if jnp.ndim(log_decay) == 4 else hopper


def delta_rule(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T G V"],
    beta: Float[Array, "B T G"],
    log_decay: Float[Array, "B T G"] | Float[Array, "B T G K"] | None = None,
    *,
    initial: Float[Array, "R G K V"],
    run: Int[Array, "B T"] | None = None,
    scale: float,
    implementation: str = "mosaic_gpu",
    interpret: Any = False,
) -> tuple[Float[Array, "B T max(H,G) V"], Float[Array, "R G K V"]]:
    """Move what decaying memories hold at `k` towards `v` and read them with `q`; differentiable once, in reverse.

    Args:
        q: [B, T, H, K] queries; H is a multiple or a divisor of G.
        k: [B, T, Hk, K] keys, of norm at most 1; Hk divides G.
        v: [B, T, G, V] values, one memory for each of the G heads.
        beta: [B, T, G] float32, from 0 to 2.
        log_decay: [B, T, G] float32, or one a key channel, [B, T, G, K]; natural logarithm, at most 0; None is no decay.
        initial: [B, G, K, V] float32, the memory before the first token; or [B * S, G, K, V], S of them a row.
        run: [B, T], growing along T: a token with a larger run than the one before it finds an empty memory, and run 0 goes on
            from `initial`. None is one run. With S memories a row: every number from 0 to S - 1, each run beginning at a multiple
            of 64 ("mosaic_gpu") or 128 ("mosaic_tpu") tokens, going on from the memory of its number and leaving a final one.
        scale: multiplies q.
        implementation: "mosaic_gpu" (Hopper; bfloat16, K of 64, 128 or 256, V also 512; with a decay a key channel V of
            64 or a multiple of 128) or "mosaic_tpu" (bfloat16 or float32, K and V a multiple of 8 up to 256); `reasons` says what each
            takes.
        interpret: parameters of the backend's interpreter, to run on a CPU.

    Returns:
        The output in v's dtype, and the final memories in float32, as `initial`.

    Raises:
        NotImplementedError: the implementation does not serve these arguments; the message says why.
        ValueError: an implementation that does not exist.
    """
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(
            f"delta_rule: implementation={implementation!r}; accepted are {_IMPLEMENTATIONS}"
        )
    if (why := reason(implementation, q, k, v, log_decay, run, initial)) is not None:
        raise NotImplementedError(f"delta_rule: implementation={implementation!r} takes {why}")
    length = q.shape[1]
    padding = -length % _backend(implementation, log_decay).multiple(q, k, v)
    if padding:  # tokens that write nothing, and whose output is cut off

        def pad(x: Any) -> Any:
            return jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))

        q, k, v, beta = pad(q), pad(k), pad(v), pad(beta)
        log_decay = None if log_decay is None else pad(log_decay)
        run = None if run is None else jnp.pad(run, [(0, 0), (0, padding)], mode="edge")
    static = implementation, scale, interpret
    output, final = _run(*static, q, k, v, beta, log_decay, run, initial)
    return output[:, :length], final


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _run(name, scale, interpret, *inputs):
    unsaved = {"save": False} if name == "mosaic_tpu" else {}  # what it saves costs it writes
    backend = _backend(name, inputs[4])
    return backend.forward(*inputs, scale=scale, interpret=interpret, **unsaved)[:2]


def _forward(name, scale, interpret, *primals):
    wanted = primals[4] is not None and primals[4].perturbed
    inputs = tuple(None if p is None else p.value for p in primals)
    found = _backend(name, inputs[4]).forward(*inputs, scale=scale, interpret=interpret)
    output, final, residuals = keep(found)
    # A decay that is a constant of its head needs no gradient, and the backward is cheaper without. (An array: residuals
    # carry no flags.)
    return (output, final), (inputs, residuals, jnp.zeros((int(wanted), 0)))


def _backward(name, scale, interpret, saved, cotangents):
    inputs, residuals, wanted = saved
    zeros: Any = jnp.zeros
    cotangents = (zeros(x.shape, x.dtype) if isinstance(x, SymbolicZero) else x for x in cotangents)
    dq, dk, dv, d_beta, d_decay, d_initial = _backend(name, inputs[4]).backward(
        *inputs, residuals, *cotangents, scale=scale, interpret=interpret,
        decay_gradient=wanted.shape[0] == 1,
    )  # fmt: skip
    log_decay = inputs[4]
    if log_decay is not None and d_decay is None:
        d_decay = jnp.zeros_like(log_decay)
    return dq, dk, dv, d_beta, d_decay, None, d_initial


_run.defvjp(_forward, _backward, symbolic_zeros=True)
