"""Where `delta_memory` and `dplr_memory` run as fused kernels, and why they do not elsewhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from lsm_jax.ops.core.segments import finish_output, select
from lsm_jax.ops.core.states import DeltaState
from lsm_jax.ops.linear import kernels as linear_kernels

KERNELS = linear_kernels.KERNELS


def why_not(implementation: str, form: str, q, k, v, log_decay, memory) -> str | None:
    """What one of `KERNELS` takes in place of this call, or None. The platform is not asked: lowering decides that."""
    why = linear_kernels.why_no_kernel(implementation, form, q, k, v, memory)
    if why is not None:
        return why
    # Imported where it may serve: elsewhere the backends cost nothing.
    from pallas_kernels.delta_rule import reason

    if log_decay is not None:
        log_decay = jax.ShapeDtypeStruct(v.shape[:3] + log_decay.shape[3:], jnp.float32)
    return reason(implementation, q, k, v, log_decay, None, memory)


def run_kernel(
    implementation: str, scale: float, q, k, v, beta, log_decay, state, segment_ids, update_mask
) -> tuple[jax.Array, DeltaState]:
    """`delta_memory` as the kernel that `implementation` names; `log_decay` is None, [G], [B, T, G] or [B, T, G, K]."""
    from pallas_kernels.delta_rule import delta_rule

    tokens = linear_kernels.read(segment_ids, update_mask, state)
    if log_decay is not None:
        shape = v.shape[:3] + log_decay.shape[3:]
        log_decay = jnp.broadcast_to(log_decay.astype(jnp.float32), shape)
        log_decay = select(tokens.written, log_decay)
    k, v, beta = (select(tokens.written, x) for x in (k, v, beta.astype(jnp.float32)))
    arrays = dict(q=select(tokens.real, q), k=k, v=v, beta=beta, log_decay=log_decay)
    given, restore = linear_kernels.laid_out(implementation, tokens, state.memory, arrays)
    output, memory = restore(*delta_rule(**given, scale=scale, implementation=implementation))
    return finish_output(tokens, output), DeltaState(memory, tokens.last_id)


def why_not_dplr(implementation: str, form: str, q, k, v, a, b, memory) -> str | None:
    """As `why_not`, for `dplr_memory`."""
    why = linear_kernels.why_no_kernel(implementation, form, q, k, v, memory)
    if why is not None:
        return why
    from pallas_kernels.dplr import reason

    log_decay = jax.ShapeDtypeStruct((*v.shape[:3], k.shape[-1]), jnp.float32)
    return reason(implementation, q, k, v, a, b, log_decay, None, memory)


def run_dplr(
    implementation: str, scale: float, q, k, v, a, b, log_decay, state, segment_ids, update_mask
) -> tuple[jax.Array, DeltaState]:
    """`dplr_memory` as the kernel that `implementation` names; `log_decay` is [G], [B, T, G] or [B, T, G, K]."""
    from pallas_kernels.dplr import dplr

    tokens = linear_kernels.read(segment_ids, update_mask, state)
    log_decay = log_decay if log_decay.ndim == 4 else log_decay[..., None]
    log_decay = jnp.broadcast_to(log_decay.astype(jnp.float32), (*v.shape[:3], k.shape[-1]))
    k, v, a, b, log_decay = (select(tokens.written, x) for x in (k, v, a, b, log_decay))
    arrays = dict(q=select(tokens.real, q), k=k, v=v, a=a, b=b, log_decay=log_decay)
    given, restore = linear_kernels.laid_out(implementation, tokens, state.memory, arrays)
    output, memory = restore(*dplr(**given, scale=scale, implementation=implementation))
    return finish_output(tokens, output), DeltaState(memory, tokens.last_id)
