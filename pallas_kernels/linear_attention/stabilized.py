"""Memories with exponential input gates and a normaliser (mLSTM), stored stabilised, as fused kernels."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from pallas_kernels.linear_attention.hopper import stabilized
from pallas_kernels.linear_attention.hopper.stabilized import Initial
from pallas_kernels.memory_calls import MemoryCall, pad_to_multiple
from pallas_kernels.requirements import first_unmet
from pallas_kernels.residuals import name_residuals

__all__ = ["Initial", "stabilized_attention", "unsupported"]


def unsupported(q, k, v) -> str | None:
    """Return the first requirement of the kernel for Hopper that these arguments of `stabilized_attention`, as arrays or as their shapes and
    dtypes, do not meet, in words; None if it supports them.
    """
    return first_unmet(stabilized.REQUIREMENTS, MemoryCall(q, k, v))


def stabilized_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T G V"],
    log_decay: Float[Array, "B T G"],
    log_input_gate: Float[Array, "B T G"],
    m: Float[Array, "B T G"],
    *,
    initial: Initial | None = None,
    run: Int[Array, "B T"] | None = None,
    scale: float,
    eps: float,
    exact: bool = False,
    interpret: Any = False,
) -> tuple[Float[Array, "B T max(H,G) V"], Float[Array, "B G K V"], Float[Array, "B G K"]]:
    """Write `e^log_input_gate kᵀ v` into decaying memories and `e^log_input_gate k` into their normalisers, and read their quotient with q, on
    Hopper; differentiable once, in reverse.

    Args:
        q: [B, T, H, K] queries in bfloat16, as are k and v; H is a multiple or a divisor of G.
        k: [B, T, Hk, K] keys; Hk divides G.
        v: [B, T, G, V] values, one memory for each of the G heads.
        log_decay: [B, T, G] float32, the natural logarithm of each memory's decay, at most 0.
        log_input_gate: [B, T, G] float32, the natural logarithm of the factor of each token's write, of any size; -1e30 writes nothing.
        m: [B, T, G] float32, the stabiliser after each token: the greater of `log_input_gate` and of `log_decay` plus the stabiliser before
            it, which is that of `initial`, or 0 for the first token of a document and without `initial`.
        initial: the state before the first token; None is an empty one.
        run: [B, T], the number of documents that have begun up to and with each token, never decreasing; number 0 continues `initial`.
            None is one document.
        scale: the factor by which the queries q are multiplied.
        eps: the number that is added to the divisor, at least 0.
        exact: whether the output is float32.
        interpret: parameters of the interpreter, to run on a CPU.

    Returns:
        The output `q M / (max(|q n|, e^-m) + eps)` in v's dtype (float32 if `exact`), and the final memories M and normalisers n, divided by
        the exponential of the last m, in float32.

    Raises:
        NotImplementedError: the kernel does not support these arguments; the message says which requirement they do not meet.
    """
    reason = unsupported(q, k, v)
    if reason is not None:
        raise NotImplementedError(f"stabilized_attention: requires {reason}")
    length, padding = q.shape[1], -q.shape[1] % stabilized.CHUNK
    run, q, k, v, log_decay = pad_to_multiple(stabilized.CHUNK, run, q, k, v, log_decay)
    if padding:
        after = [(0, 0), (0, padding), (0, 0)]
        log_input_gate = jnp.pad(log_input_gate, after, constant_values=stabilized.NEVER)
        m = jnp.pad(m, after, mode="edge")
    options = _Options(float(scale), float(eps), interpret)
    output, *final = _call(options, (q, k, v, log_decay, log_input_gate, m, run, initial))
    output = output if exact else output.astype(v.dtype)
    return output[:, :length], *final


class _Options(NamedTuple):
    """The arguments of `stabilized_attention` that are not arrays."""

    scale: float
    eps: float
    interpret: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _call(options: _Options, arrays: tuple[Any, ...]) -> Any:
    """Return the output in float32, the final memories and the final normalisers."""
    *results, _ = stabilized.forward(*arrays, **options._asdict())
    return tuple(results)


def _run_forward(options, arrays):
    arrays = jax.tree.map(lambda primal: primal.value, arrays)
    *results, residuals = name_residuals(stabilized.forward(*arrays, **options._asdict()))
    return tuple(results), (arrays, residuals)


def _run_backward(options, saved, cotangents):
    arrays, residuals = saved
    d_output, d_memory, d_normalizer = (
        None if isinstance(x, SymbolicZero) else x for x in cotangents
    )
    if d_output is None:
        d_output = jnp.zeros_like(residuals.h)
    *of_tokens, d_initial = stabilized.backward(
        *arrays, residuals=residuals, d_output=d_output, d_memory=d_memory, d_normalizer=d_normalizer, **options._asdict(),
    )  # fmt: skip
    return ((*of_tokens, None, d_initial),)


_call.defvjp(_run_forward, _run_backward, symbolic_zeros=True)
