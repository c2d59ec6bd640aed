"""Compute the arguments of RWKV7's memory from its projections, channel by channel and head by head."""

from __future__ import annotations

from jaxtyping import Array, Float

from lsm_jax.ops.backends.registry import check_implementation
from lsm_jax.ops.backends.run import run_inline, static_of
from lsm_jax.ops.core import checks
from lsm_jax.ops.rwkv7 import backends  # noqa: F401  (registers the backends)
from lsm_jax.ops.rwkv7.xla import RWKV7Gates
from lsm_jax.parallel import TOKENS, alone, over_mesh

_OP = "rwkv7_gates"


def rwkv7_gates(
    r: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H K"],
    rate: Float[Array, "B T H K"],
    decay: Float[Array, "B T H K"],
    *,
    removal: Float[Array, "H K"],
    rate_of_key: Float[Array, "H K"],
    bonus: Float[Array, "H K"],
    rate_bias: Float[Array, "H K"] | None = None,
    decay_bias: Float[Array, "H K"] | None = None,
    implementation: str | tuple[str, ...] | None = None,
) -> RWKV7Gates:
    """Return the keys, removals and decays with which RWKV7 (arXiv 2503.14456, section 4) updates its memory, and the part of its
    output that does not go through the memory, in float32 inside.

    With σ the sigmoid, κ = k ⊙ removal divided by its length: the added keys are `k ⊙ (1 + (σ(rate) - 1) ⊙ rate_of_key)`, the
    removal is `-κ` and `κ ⊙ σ(rate)`, the log decay `-exp(-1/2) σ(decay)`, and the rest `(Σ r ⊙ added keys ⊙ bonus) v`.

    Args:
        r: [B, T, H, K], the receptance.
        k: [B, T, H, K], the keys as they are projected.
        v: [B, T, H, K], the values.
        rate: [B, T, H, K] in float32 (or float64), the in-context rate before its sigmoid.
        decay: [B, T, H, K] in rate's dtype, before its sigmoid.
        removal: [H, K], the weights of the keys that are removed.
        rate_of_key: [H, K], how much the rate changes the keys that are added.
        bonus: [H, K], the weights of the receptance for the token itself.
        rate_bias: [H, K], added to rate, or None.
        decay_bias: [H, K], added to decay, or None.
        implementation: None (the first automatic backend that supports the call; see docs/kernels.md), a
            backend's name ("xla" or "mosaic_gpu"), or a tuple of names in order of preference.

    Returns:
        `RWKV7Gates`: r itself, and five arrays [B, T, H, K], log_decay in rate's dtype and the others in v's.

    Raises:
        NotImplementedError: no backend of the given names supports the call; the message names the
            requirement.
        ValueError: a shape, a dtype or `implementation` is not accepted.
    """
    check_implementation(_OP, implementation)
    if k.ndim != 4:
        raise ValueError(f"{_OP}: k has shape {k.shape}; accepted is [B, T, H, K]")
    batched = dict(r=r, k=k, v=v, rate=rate, decay=decay)
    weights = dict(removal=removal, rate_of_key=rate_of_key, bonus=bonus)
    biases = dict(rate_bias=rate_bias, decay_bias=decay_bias)
    weights |= {name: x for name, x in biases.items() if x is not None}
    for name, x in batched.items():
        checks.check_shape(_OP, name, x, k.shape, "B, T, H, K")
    for name, x in weights.items():
        checks.check_shape(_OP, name, x, k.shape[2:], "H, K")
    if rate.dtype not in ("float32", "float64"):
        raise ValueError(f"{_OP}: rate has dtype {rate.dtype}; accepted are float32 and float64")
    if decay.dtype != rate.dtype:
        raise ValueError(f"{_OP}: decay has dtype {decay.dtype}; accepted is rate's, {rate.dtype}")
    tokens = (*TOKENS[:2], "heads")
    return over_mesh(
        run_inline,
        batched,
        weights,
        static_of(_OP, None, implementation),
        axes=dict.fromkeys(batched, tokens) | dict.fromkeys(weights, ("heads",)),
        out_axes=RWKV7Gates(*(tokens,) * 6),  # pyrefly: ignore
        in_sequence=alone,
    )
