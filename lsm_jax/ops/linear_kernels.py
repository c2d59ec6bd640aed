"""Where `linear_memory` runs as a fused kernel, and why it does not elsewhere."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from lsm_jax.ops.segments import finish_output, read_tokens, select
from lsm_jax.ops.states import LinearState

KERNELS = ("mosaic_gpu", "mosaic_tpu")
AUTOMATIC = "mosaic_gpu"  # what None may pick


def why_no_kernel(implementation: str, form: str, q, k, v, memory) -> str | None:
    """What the kernels of any memory take in place of this call, or None."""
    if form != "chunk":
        return f"form='chunk' of more than one token, not {form!r}"
    if memory.ndim == 5:
        return "one state a row, not one a segment"
    if any(jax.typeof(x).manual_axis_type.varying for x in (q, k, v)):
        return "arrays outside jax.shard_map, or inside with check_vma=False"
    if implementation == AUTOMATIC and q.dtype != jnp.bfloat16:
        return f"q in bfloat16, not {q.dtype}"
    if jax.config.jax_enable_x64:
        return "32-bit indices (jax_enable_x64 off)"
    if implementation == AUTOMATIC:
        # Imported where it may serve: elsewhere the backends cost nothing.
        from pallas_kernels import compat

        if not compat.on_hopper():
            return "NVIDIA Hopper"
    return None


def why_not(
    implementation: str, form: str, q, k, v, log_decay, bonus, memory, absent: dict[str, Any]
) -> str | None:
    """What a kernel takes in place of this call, or None. The platform is not asked: lowering decides that.

    Args:
        implementation: one of `KERNELS`.
        form: as `linear_memory`'s, and the arrays.
        q: queries.
        k: keys.
        v: values.
        log_decay: or None.
        bonus: or None.
        memory: the state's.
        absent: other arguments by name; no kernel knows any but `value_log_decay`.
    """
    why = why_no_kernel(implementation, form, q, k, v, memory)
    if why is not None:
        return why
    absent = dict(absent)
    value_log_decay = absent.pop("value_log_decay", None)
    for name, value in absent.items():
        if value is not None:
            return f"no {name}"
    # Imported where it may serve: elsewhere the backends cost nothing.
    from pallas_kernels.linear_attention import reason

    if log_decay is not None:
        log_decay = jax.ShapeDtypeStruct(v.shape[:3] + log_decay.shape[3:], jnp.float32)
    if value_log_decay is not None:
        value_log_decay = jax.ShapeDtypeStruct(v.shape, jnp.float32)
    return reason(implementation, q, k, v, log_decay, None, memory, bonus, value_log_decay)


def run_kernel(
    implementation: str, scale: float, q, k, v, log_decay, bonus, state, segment_ids, update_mask,
    value_log_decay=None,
) -> tuple[jax.Array, LinearState]:  # fmt: skip
    """`linear_memory` as the kernel that `implementation` names; `log_decay` is None, [G], [B, T, G] or [B, T, G, K]."""
    from pallas_kernels.linear_attention import linear_attention

    tokens = read_tokens(segment_ids, update_mask, state.segment_id, None)
    if log_decay is not None:
        shape = v.shape[:3] + log_decay.shape[3:]
        log_decay = jnp.broadcast_to(log_decay.astype(jnp.float32), shape)
        log_decay = select(tokens.written, log_decay)
    if value_log_decay is not None:
        value_log_decay = select(tokens.written, value_log_decay.astype(jnp.float32))
    if bonus is not None:
        bonus = bonus.astype(jnp.float32)
    output, memory = linear_attention(
        select(tokens.real, q), select(tokens.written, k), select(tokens.written, v), log_decay,
        initial=state.memory, run=tokens.run, bonus=bonus, value_log_decay=value_log_decay,
        scale=scale, implementation=implementation,
    )  # fmt: skip
    return finish_output(tokens, output), LinearState(memory, None, None, tokens.last_id)
