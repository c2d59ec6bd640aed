"""The end of an RWKV7 layer before its last projection: the norm of heads, the token's own value and the gate."""

from __future__ import annotations

from jaxtyping import Array, Float

from lsm_jax.ops.backends.registry import check_implementation
from lsm_jax.ops.backends.run import run_inline, static_of
from lsm_jax.ops.core import checks
from lsm_jax.ops.rwkv7.backends import OutputOptions
from lsm_jax.parallel import TOKENS, alone, over_mesh

_OP = "rwkv7_output"


def rwkv7_output(
    o: Float[Array, "B T H V"],
    current: Float[Array, "B T H V"],
    gate: Float[Array, "B T H V"],
    *,
    scale: Float[Array, "H V"],
    bias: Float[Array, "H V"],
    eps: float,
    implementation: str | tuple[str, ...] | None = None,
) -> Float[Array, "B T H V"]:
    """Normalise each head of a memory's output, add what does not go through the memory, and multiply by the gate, as RWKV7 (arXiv
    2503.14456, section 4) does: `(norm(o) scale + bias + current) gate`, with `norm(o) = (o - mean(o)) / sqrt(var(o) + eps)` of each
    head, in float32.

    Args:
        o: [B, T, H, V], the memory's output.
        current: [B, T, H, V] in o's dtype, as `rwkv7_gates` returns it.
        gate: [B, T, H, V] in o's dtype.
        scale: [H, V].
        bias: [H, V].
        eps: added to the variance.
        implementation: None (the first automatic backend that supports the call; see docs/kernels.md), a
            backend's name ("xla" or "mosaic_gpu"), or a tuple of names in order of preference.

    Returns:
        [B, T, H, V] in o's dtype.

    Raises:
        NotImplementedError: no backend of the given names supports the call; the message names the
            requirement.
        ValueError: a shape, a dtype or `implementation` is not accepted.
    """
    check_implementation(_OP, implementation)
    if o.ndim != 4:
        raise ValueError(f"{_OP}: o has shape {o.shape}; accepted is [B, T, H, V]")
    batched, weights = dict(o=o, current=current, gate=gate), dict(scale=scale, bias=bias)
    for name, x in batched.items():
        checks.check_shape(_OP, name, x, o.shape, "B, T, H, V")
        if x.dtype != o.dtype:
            raise ValueError(f"{_OP}: {name} has dtype {x.dtype}; accepted is o's, {o.dtype}")
    for name, x in weights.items():
        checks.check_shape(_OP, name, x, o.shape[2:], "H, V")
    tokens = (*TOKENS[:2], "heads")
    return over_mesh(
        run_inline,
        batched,
        weights,
        static_of(_OP, OutputOptions(eps), implementation),
        axes=dict.fromkeys(batched, tokens) | dict.fromkeys(weights, ("heads",)),
        out_axes=tokens,
        in_sequence=alone,
    )
