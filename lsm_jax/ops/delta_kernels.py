"""Where `delta_memory` runs as a fused kernel, and why it does not elsewhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from lsm_jax.ops import linear_kernels
from lsm_jax.ops.segments import finish_output, read_tokens, select
from lsm_jax.ops.states import DeltaState

KERNEL = linear_kernels.AUTOMATIC


def why_not(form: str, q, k, v, log_decay, memory) -> str | None:
    """What the kernel takes in place of this call, or None. The platform is not asked: lowering decides that."""
    why = linear_kernels.why_no_kernel(KERNEL, form, q, k, v, memory)
    if why is not None:
        return why
    if jnp.ndim(log_decay) == 4:
        return "log_decay [G] or [B, T, G], not [B, T, G, K]"
    # Imported where it may serve: elsewhere the backends cost nothing.
    from pallas_kernels.delta_rule import reasons

    return reasons(q, k, v, log_decay, None, memory)[KERNEL]


def run_kernel(
    scale: float, q, k, v, beta, log_decay, state, segment_ids, update_mask
) -> tuple[jax.Array, DeltaState]:
    """`delta_memory` as the kernel; `log_decay` is None, [G] or [B, T, G]."""
    from pallas_kernels.delta_rule import delta_rule

    tokens = read_tokens(segment_ids, update_mask, state.segment_id, None)
    if log_decay is not None:
        log_decay = jnp.broadcast_to(log_decay.astype(jnp.float32), v.shape[:3])
        log_decay = select(tokens.written, log_decay)
    output, memory = delta_rule(
        select(tokens.real, q), select(tokens.written, k), select(tokens.written, v),
        select(tokens.written, beta.astype(jnp.float32)), log_decay,
        initial=state.memory, run=tokens.run, scale=scale, implementation=KERNEL,
    )  # fmt: skip
    return finish_output(tokens, output), DeltaState(memory, tokens.last_id)
