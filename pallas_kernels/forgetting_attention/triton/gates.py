"""The sums of log forget gates by a Triton kernel, in one launch for a pass."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.triton import launch

_LARGEST_BLOCK = 2048


@jax.custom_vjp
def sum_gates(log_forget: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return F, the sum of the log forget gates [B, T, H] float32 up to and including each token, as its high and its low part, each
    [B, T, H] float32. The derivative is that of the high part, as `forgetting_attention` returns it.
    """
    high, low = _sum(log_forget, reverse=False)
    return jnp.swapaxes(high, 1, 2), jnp.swapaxes(low, 1, 2)


def _sum(x: jax.Array, *, reverse: bool) -> tuple[jax.Array, jax.Array]:
    """Return the two outputs of the kernel `sum_gates` for x [B, T, H], or with `reverse` [B, H, T]; their last two axes are swapped."""
    from pallas_kernels.forgetting_attention.triton import gate_bodies

    batch, heads, length = x.shape if reverse else (x.shape[0], x.shape[2], x.shape[1])
    sums = jax.ShapeDtypeStruct((batch, x.shape[2], x.shape[1]), jnp.float32)
    block = min(_LARGEST_BLOCK, 1 << max(length - 1, 31).bit_length())
    results = launch.call(
        gate_bodies.sum_gates,
        (x,),
        dict(high=sums, low=jax.ShapeDtypeStruct((1,), jnp.float32) if reverse else sums),
        programs=batch * heads,
        warps=max(1, min(8, block // 256)),
        stages=2,
        HEADS=heads,
        LENGTH=length,
        BLOCK=block,
        REVERSE=reverse,
    )
    return results["high"], results["low"]


def _forward(log_forget):
    return sum_gates(log_forget), None


def _backward(saved, d_sums):
    del saved
    return (_sum(jnp.swapaxes(d_sums[0], 1, 2), reverse=True)[0],)


sum_gates.defvjp(_forward, _backward)
