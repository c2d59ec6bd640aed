"""Where `attention` runs as a fused kernel of this library, and why it does not elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from lsm_jax.ops.attention.forget_gates import GateSum, sum_gates
from lsm_jax.ops.backends import chosen
from lsm_jax.ops.core.segments import Tokens

PLATFORMS = {"cudnn": "cuda", "mosaic_gpu": "cuda", "mosaic_tpu": "tpu"}
"""Of what may run in XLA's place."""


def on_platform(
    sure: bool, fused: dict[str, Callable], default: Callable, q, k, v, log_forget
) -> jax.Array:
    """The output in v's dtype: by the only one of `fused` if that is `sure`, else by the platform's, or by `default`."""
    if sure and fused:
        (only,) = fused.values()
        return only(q, k, v, log_forget)

    def otherwise(*inputs):
        return default(*inputs).astype(v.dtype)

    if not fused:
        return otherwise(q, k, v, log_forget)
    by_platform = {PLATFORMS[name]: run for name, run in fused.items()}
    return chosen.by_platform(q, k, v, log_forget, **by_platform, default=otherwise)


def why_not(
    implementation: str, q, k, v, *, fresh: bool, window: int | None, whole: bool, sure: bool = True
) -> str | None:
    """What a kernel takes in place of this call, or None. The platform is not asked: lowering decides that.

    Args:
        implementation: "mosaic_gpu" or "mosaic_tpu".
        q: queries, [B, T, H, K].
        k: keys.
        v: values.
        fresh: there is no state to go on from.
        window: the call's.
        whole: there are no segment_ids and no update_mask.
        sure: the kernel is asked for by name. If not, Hopper's is out where it has no gradient, and the TPU's altogether: nobody has
            run it on one.
    """
    if not fresh:
        return "no initial_state"
    if window is not None and not whole:
        return "no window together with segment_ids or update_mask"
    if any(jax.typeof(x).manual_axis_type.varying for x in (q, k, v)):
        return "arrays outside jax.shard_map, or inside with check_vma=False"
    # Said before a backend need be imported.
    if implementation == "mosaic_gpu" and q.dtype != jnp.bfloat16:
        return f"q in bfloat16, not {q.dtype}"
    if jax.config.jax_enable_x64:
        return "32-bit indices (jax_enable_x64 off)"
    if implementation == "mosaic_tpu" and not sure:
        return "calls that name it"
    from pallas_kernels import compat
    from pallas_kernels.forgetting_attention import unsupported

    if implementation == "mosaic_gpu" and not compat.on_hopper():
        return "NVIDIA Hopper"
    if implementation == "mosaic_gpu" and not sure and q.shape[-1] > 128:
        return "heads of 64 or 128, not 256, whose gradient it has not"
    return unsupported(implementation, q, k, v)


def run_kernel(
    implementation: str, q, k, v, log_forget: jax.Array | None, tokens: Tokens, *, scale: float,
    window: int | None, prune: bool, places: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """Attention of whole documents, [B, T, H, V], 0 where a token sees nothing; q may be two parts of the row, beginning at `places`."""
    from pallas_kernels.forgetting_attention import forgetting_attention

    sums = None
    if log_forget is not None:
        # On through documents, which `run` keeps apart: the kernel takes sums that never grow.
        zero = jnp.zeros((log_forget.shape[0], log_forget.shape[2]), jnp.float32)
        sums = sum_gates(log_forget, tokens._replace(run=None), GateSum(zero, zero))
    return forgetting_attention(
        q, k, v, sums, run=tokens.run, written=tokens.written, places=places, window=window,
        scale=scale, prune=prune, implementation=implementation,
    )  # fmt: skip
