"""The backends of `attention`: cuDNN, fused kernels for Hopper and TPU, and XLA."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from lsm_jax.ops.attention import cudnn, shared_rows
from lsm_jax.ops.attention.forget_gates import GateSum, sum_gates
from lsm_jax.ops.attention.xla import no_ids, run_xla
from lsm_jax.ops.backends.registry import PALLAS, Backend, Call, register
from pallas_kernels.requirements import Requirement

NO_STATE = Requirement("no initial_state", lambda call: call.options.no_state)
REQUIREMENTS = (
    NO_STATE,
    Requirement(
        "no window together with segment_ids or update_mask",
        lambda call: call.options.window is None or no_ids(call),
    ),
)
BFLOAT16 = Requirement(
    "q in bfloat16",
    lambda call: call.arguments["q"].dtype == jnp.bfloat16,
    lambda call: str(call.arguments["q"].dtype),
)


def _unsupported_by_kernel(name: str, call: Call) -> str | None:
    # Imported here, so that a backend that is not used adds no time to `import lsm_jax`.
    from pallas_kernels.forgetting_attention import unsupported

    return unsupported(name, *(call.arguments[n] for n in "qkv"))


def _without_gradient(call: Call) -> str | None:
    """The reason why None does not select Hopper's kernel: no gradient for the call; None if it has one."""
    width = call.arguments["q"].shape[-1]
    return f"the kernel has no gradient for heads of {width} channels" if width > 128 else None


def run_kernel(name: str, call: Call) -> jax.Array:
    """The output [B, T, H, V] of the fused kernel of the backend `name`; 0 if a token attends to no token."""
    from pallas_kernels.forgetting_attention import forgetting_attention

    arguments, options = call.arguments, call.options
    tokens, log_forget = arguments["tokens"], arguments["log_forget"]
    sums = None
    if log_forget is not None:
        # Summed over documents too, which the kernel separates by `run`: it requires sums that never
        # increase.
        zero = jnp.zeros((log_forget.shape[0], log_forget.shape[2]), jnp.float32)
        sums = sum_gates(log_forget, tokens._replace(run=None), GateSum(zero, zero))
    keywords: dict[str, Any] = dict(
        run=tokens.run,
        written=tokens.written,
        window=options.window,
        scale=options.scale,
        prune=options.prune,
        implementation=name,
    )
    q, k, v = (arguments[n] for n in "qkv")
    if options.axis is None:
        return forgetting_attention(q, k, v, sums, **keywords)

    def attend(q, starts):
        return forgetting_attention(q, k, v, sums, places=starts, **keywords)

    return shared_rows.attend_fused(options.axis, attend, q)


register(
    "attention",
    Backend(
        name="cudnn",
        run=cudnn.run,
        requirements=cudnn.REQUIREMENTS,
        platforms=("cuda",),
    ),
    Backend(
        name="mosaic_gpu",
        run=functools.partial(run_kernel, "mosaic_gpu"),
        requirements=(*REQUIREMENTS, BFLOAT16, *PALLAS),
        more=functools.partial(_unsupported_by_kernel, "mosaic_gpu"),
        platforms=("cuda",),
        compute_capabilities=("9.0",),
        declined=_without_gradient,
    ),
    Backend(
        name="mosaic_tpu",
        run=functools.partial(run_kernel, "mosaic_tpu"),
        requirements=(*REQUIREMENTS, *PALLAS),
        more=functools.partial(_unsupported_by_kernel, "mosaic_tpu"),
        platforms=("tpu",),
        automatic=False,
    ),
    Backend(name="xla", run=run_xla),
)
