"""Where `linear_memory` runs as a fused kernel, and why it does not elsewhere."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from lsm_jax.ops.segments import finish_output, read_tokens, select
from lsm_jax.ops.states import LinearState

KERNELS = ("mosaic_gpu", "mosaic_tpu")
AUTOMATIC = "mosaic_gpu"  # what None may pick


def why_not(
    implementation: str, form: str, q, k, v, log_decay, memory, absent: dict[str, Any]
) -> str | None:
    """What a kernel takes in place of this call, or None. The platform is not asked: lowering decides that.

    Args:
        implementation: one of `KERNELS`.
        form: as `linear_memory`'s, and the arrays.
        q: queries.
        k: keys.
        v: values.
        log_decay: or None.
        memory: the state's.
        absent: arguments, by name, that no kernel knows.
    """
    if form != "chunk":
        return f"form='chunk', not {form!r}"
    for name, value in absent.items():
        if value is not None:
            return f"no {name}"
    if jnp.ndim(log_decay) == 4:
        return "log_decay [G] or [B, T, G], not [B, T, G, K]"
    if memory.ndim == 5:
        return "one state a row, not one a segment"
    if any(jax.typeof(x).manual_axis_type.varying for x in (q, k, v)):
        return "arrays outside jax.shard_map, or inside with check_vma=False"
    if implementation == AUTOMATIC and q.dtype != jnp.bfloat16:
        return f"q in bfloat16, not {q.dtype}"
    # Imported where it may serve: elsewhere the backends cost nothing.
    from pallas_kernels import compat
    from pallas_kernels.linear_attention import reasons

    if implementation == AUTOMATIC and not compat.on_hopper():
        return "NVIDIA Hopper"
    if log_decay is not None:
        log_decay = jax.ShapeDtypeStruct(v.shape[:3], jnp.float32)
    return reasons(q, k, v, log_decay, None, memory)[implementation]


def run_kernel(
    implementation: str, scale: float, q, k, v, log_decay, state, segment_ids, update_mask
) -> tuple[jax.Array, LinearState]:
    """`linear_memory` as the kernel that `implementation` names; `log_decay` is None, [G] or [B, T, G]."""
    from pallas_kernels.linear_attention import linear_attention

    tokens = read_tokens(segment_ids, update_mask, state.segment_id, None)
    if log_decay is not None:
        log_decay = jnp.broadcast_to(log_decay.astype(jnp.float32), v.shape[:3])
        log_decay = select(tokens.written, log_decay)
    output, memory = linear_attention(
        select(tokens.real, q), select(tokens.written, k), select(tokens.written, v), log_decay,
        initial=state.memory, run=tokens.run, scale=scale, implementation=implementation,
    )  # fmt: skip
    return finish_output(tokens, output), LinearState(memory, None, None, tokens.last_id)
