"""One token of any memory here: `M ← decay ⊙ M + kᵀ v` with the delta rule's or RWKV7's correction, `o = scale q M`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.decode_step import hopper

_IMPLEMENTATIONS = ("mosaic_gpu",)


def reason(q, v, memory) -> str | None:
    """What the kernel takes in place of these arguments (arrays or their shapes), or None if it serves them."""
    return hopper.reason(q, v, memory)


def decode_step(
    memory: Float[Array, "... B G K V"],
    q: Float[Array, "B H K"],
    k: Float[Array, "B Hk K"],
    v: Float[Array, "B G V"],
    *,
    beta: Float[Array, "B G"] | None = None,
    log_decay: Float[Array, "B G"] | Float[Array, "B G K"] | None = None,
    value_log_decay: Float[Array, "B G V"] | None = None,
    a: Float[Array, "B Ha K"] | None = None,
    b: Float[Array, "B Hb K"] | None = None,
    bonus: Float[Array, "G K"] | None = None,
    emptied: Bool[Array, " B"] | None = None,
    layer: Int[Array, ""] | None = None,
    scale: float,
    implementation: str = "mosaic_gpu",
    interpret: Any = False,
) -> tuple[Float[Array, "B max(H,G) V"], Float[Array, "... B G K V"]]:
    """Decay, write and read each memory. Not differentiable, and not for `jax.vmap`.

    Args:
        memory: [B, G, K, V] float32, or [L, B, G, K, V] with `layer`. Where its buffer may be reused, it is.
        q: [B, H, K] queries, bfloat16 or float32; H is a multiple or a divisor of G.
        k: [B, Hk, K] keys; Hk divides G.
        v: [B, G, V] values.
        beta: [B, G]; if given, the write is `beta (v - k M)` with M decayed (the delta rule).
        log_decay: [B, G] or [B, G, K], natural logarithm, at most 0; None is no decay.
        value_log_decay: [B, G, V], a decay of the value channels; multiplies `log_decay`'s.
        a: [B, Ha, K]; if given, `bᵀ (a M)` is written too, of the memory before its decay (RWKV7). Ha divides G.
        b: [B, Hb, K], given with `a`; Hb divides G.
        bonus: [G, K]. If given, the read comes first and sees its own token through `q diag(bonus) kᵀ v` (RWKV6).
        emptied: [B], True where the memory is 0 before the token.
        layer: int32 scalar, which of L memories is stepped; the others stay as they are.
        scale: multiplies q.
        implementation: "mosaic_gpu" (Hopper; K a multiple of 16 up to 256, V one of 32).
        interpret: parameters of the backend's interpreter, to run on a CPU.

    Returns:
        The output in v's dtype, and `memory` after the token.

    Raises:
        NotImplementedError: the kernel does not serve these arguments; the message says why.
        ValueError: an implementation that does not exist.
    """
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(
            f"decode_step: implementation={implementation!r}; accepted are {_IMPLEMENTATIONS}"
        )
    if (why := reason(q, v, memory)) is not None:
        raise NotImplementedError(f"decode_step: implementation='mosaic_gpu' takes {why}")

    def wide(x) -> Any:
        return None if x is None else x.astype(jnp.float32)

    return hopper.step(
        memory, q, k, v, wide(beta), _factor(log_decay), _factor(value_log_decay), a, b, wide(bonus),
        None if emptied is None else emptied.astype(jnp.int32),
        None if layer is None else jnp.reshape(layer, 1).astype(jnp.int32),
        scale=scale, interpret=interpret,
    )  # fmt: skip


def _factor(log_decay) -> Any:
    """What a slow decay takes away, at most 0, whose digits `exp` would lose; what another leaves, above 0."""
    if log_decay is None:
        return None
    log_decay = jnp.minimum(log_decay.astype(jnp.float32), 0)  # a mixer's rounding may pass 0
    left = jnp.maximum(jnp.exp(log_decay), jnp.finfo(jnp.float32).tiny)
    return jnp.where(log_decay > -0.5, jnp.expm1(log_decay), left)
