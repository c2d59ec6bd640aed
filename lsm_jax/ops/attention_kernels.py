"""Where `attention` runs as a fused kernel of this library, and why it does not elsewhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from lsm_jax.ops.forgetting import GateSum, sum_gates
from lsm_jax.ops.segments import Tokens


def why_not(q, k, v, *, fresh: bool, window: int | None, whole: bool) -> str | None:
    """What the kernel takes in place of this call, or None. The platform is not asked: lowering decides that.

    Args:
        q: queries, [B, T, H, K].
        k: keys.
        v: values.
        fresh: there is no state to go on from.
        window: the call's.
        whole: there are no segment_ids and no update_mask.
    """
    if not fresh:
        return "no initial_state"
    if window is not None and not whole:
        return "no window together with segment_ids or update_mask"
    if any(jax.typeof(x).manual_axis_type.varying for x in (q, k, v)):
        return "arrays outside jax.shard_map, or inside with check_vma=False"
    if q.dtype != jnp.bfloat16:  # asked first: the backend need not be imported to say no
        return f"q in bfloat16, not {q.dtype}"
    from pallas_kernels import compat
    from pallas_kernels.forgetting_attention import reasons

    return reasons(q, k, v)["mosaic_gpu"] if compat.on_hopper() else "NVIDIA Hopper"


def run_kernel(
    q, k, v, log_forget: jax.Array | None, tokens: Tokens, *, scale: float, window: int | None
) -> jax.Array:
    """Attention of whole documents, [B, T, H, V], 0 where a token sees nothing."""
    from pallas_kernels.forgetting_attention import forgetting_attention

    sums = None
    if log_forget is not None:
        # On through documents, which `run` keeps apart: the kernel takes sums that never grow.
        zero = jnp.zeros((log_forget.shape[0], log_forget.shape[2]), jnp.float32)
        sums = sum_gates(log_forget, tokens._replace(run=None), GateSum(zero, zero))
    return forgetting_attention(
        q, k, v, sums, run=tokens.run, written=tokens.written, window=window, scale=scale
    )
