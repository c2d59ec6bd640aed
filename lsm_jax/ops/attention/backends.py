"""The backends of `attention`: cuDNN, fused kernels for Hopper and TPU, Triton kernels for other NVIDIA cards, and XLA."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from lsm_jax.ops.attention import cudnn, shared_rows
from lsm_jax.ops.attention.forget_gates import GateSum, add_sums, sum_gates
from lsm_jax.ops.attention.state import AttentionState
from lsm_jax.ops.attention.token_positions import newest_sum, stored_in_order
from lsm_jax.ops.attention.xla import no_ids, run_xla
from lsm_jax.ops.backends.registry import PALLAS, TRITON, Backend, Call, register
from lsm_jax.ops.core.segments import Tokens, select
from pallas_kernels.requirements import Requirement

NO_STATE = Requirement("no initial_state", lambda call: call.options.no_state)
ONE_STATE = Requirement("one state per row", lambda call: call.arguments["tokens"].slot is None)
REQUIREMENTS = (
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


_FEWEST_QUERIES = 64  # half a tile, after which the kernel has less padding than queries


def _declined(call: Call) -> str | None:
    """Return the reason, in words, why the fused kernel for Hopper is not selected automatically
    (`implementation=None`) for a call that it supports; None if it is.
    """
    if not call.options.no_state and call.length < _FEWEST_QUERIES:
        return (
            f"XLA continues from a state with fewer than {_FEWEST_QUERIES} tokens, as in decoding"
        )
    return None


def _sums(name: str, log_forget, tokens: Tokens, state: AttentionState | None) -> GateSum:
    """Return the sums of the log forget gates [B, T, N] from the state on, or from 0 without one, for the kernel called `name`."""
    if state is not None:
        return sum_gates(log_forget, tokens, newest_sum(state))
    if name == "triton":
        from pallas_kernels.forgetting_attention import triton

        return GateSum(*triton.sum_gates(select(tokens.written, log_forget.astype(jnp.float32))))
    zero = jnp.zeros((log_forget.shape[0], log_forget.shape[2]), jnp.float32)
    return sum_gates(log_forget, tokens, GateSum(zero, zero))


def run_kernel(name: str, call: Call) -> jax.Array:
    """Compute softmax attention's output [B, T, H, V] by the fused kernel of the backend called `name`; it is 0 for a
    token that attends to no token, and NaN beyond the state's capacity.
    """
    from pallas_kernels.forgetting_attention import forgetting_attention

    arguments, options = call.arguments, call.options
    tokens, log_forget = arguments["tokens"], arguments["log_forget"]
    state = None if options.no_state else arguments["state"]
    sums, (q, k, v) = None, (arguments[n] for n in "qkv")
    run, written, earlier = tokens.run, tokens.written, 0
    if log_forget is not None:
        # Summed over documents too, which the kernel separates by `run`: it requires sums that never
        # increase.
        sums = _sums(name, log_forget, tokens._replace(run=None), state)
    if state is not None:
        k, v, sums, run, written = _after_stored_tokens(state, k, v, sums, run, written)
        earlier = state.keys.shape[1]
    keywords: dict[str, Any] = dict(
        run=run,
        written=written,
        window=options.window,
        scale=options.scale,
        prune=options.prune,
        implementation=name,
    )
    if earlier:
        keywords["earlier"] = earlier
    if options.axis is not None:

        def attend(q, starts):
            return forgetting_attention(q, k, v, sums, places=starts, **keywords)

        return shared_rows.attend_fused(options.axis, attend, q)
    output = forgetting_attention(q, k, v, sums, **keywords)
    if state is None or options.window is not None:
        return output
    beyond = arguments["positions"].rank >= earlier
    return jnp.where(beyond[:, :, None, None], jnp.nan, output)


def _has_gradient(call: Call) -> bool:
    """Return whether the fused kernel for Hopper has a gradient for heads of the call's size."""
    return call.arguments["q"].shape[-1] <= 128


def run_kernel_forward(name: str, call: Call) -> jax.Array:
    """Compute softmax attention's output [B, T, H, V] as `run_kernel` does, and where it is differentiated, output and
    derivatives by XLA: for a kernel without a gradient.
    """
    attend = jax.custom_jvp(lambda x: run_kernel(name, call._replace(arguments=x)))

    @attend.defjvp
    def _(primals, tangents):
        return jax.jvp(lambda x: run_xla(call._replace(arguments=x)), primals, tangents)

    return attend(call.arguments)


def _after_stored_tokens(state: AttentionState, k, v, sums: GateSum | None, run, written) -> tuple:
    """Return a call's keys, values, sums of log forget gates, document numbers (`run`) and flags of written
    tokens, each preceded by those of the state's tokens, for a fused kernel of `attention`.

    Places of the state's ring buffer without a token have the document number -1, before all others, so that
    the kernel skips them.
    """
    stored = stored_in_order(state)
    if sums is not None:  # the sum with 0 has the derivative of `high` for `low`, too
        zero = jax.tree.map(jnp.zeros_like, stored.sums)
        before = add_sums(stored.sums, zero)
        sums = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), before, sums)

    def join(before, new):
        return jnp.concatenate([before.astype(new.dtype), new], axis=1)

    if run is None:
        run = jnp.zeros(k.shape[:2], jnp.int32)
    if written is not None:
        written = join(stored.stored, written)
    return (
        join(stored.keys, k),
        join(stored.values, v),
        sums,
        join(jnp.where(stored.stored, 0, -1), run),
        written,
    )


_HOPPER: dict[str, Any] = dict(
    name="mosaic_gpu",
    requirements=(ONE_STATE, *REQUIREMENTS, BFLOAT16, *PALLAS),
    more=functools.partial(_unsupported_by_kernel, "mosaic_gpu"),
    platforms=("cuda",),
    compute_capabilities=("9.0",),
    declined=_declined,
)

register(
    "attention",
    Backend(
        name="cudnn",
        run=cudnn.run,
        requirements=cudnn.REQUIREMENTS,
        platforms=("cuda",),
    ),
    Backend(
        run=functools.partial(run_kernel, "mosaic_gpu"),
        concerns=_has_gradient,
        **_HOPPER,
    ),
    Backend(
        run=functools.partial(run_kernel_forward, "mosaic_gpu"),
        label="mosaic_gpu (xla where differentiated)",
        concerns=lambda call: not _has_gradient(call),
        **_HOPPER,
    ),
    Backend(
        name="mosaic_tpu",
        run=functools.partial(run_kernel, "mosaic_tpu"),
        requirements=(NO_STATE, *REQUIREMENTS, *PALLAS),
        more=functools.partial(_unsupported_by_kernel, "mosaic_tpu"),
        platforms=("tpu",),
        automatic=False,
    ),
    Backend(
        name="triton",
        run=functools.partial(run_kernel, "triton"),
        requirements=(ONE_STATE, *REQUIREMENTS, *PALLAS),
        more=functools.partial(_unsupported_by_kernel, "triton"),
        **TRITON,
    ),
    Backend(name="xla", run=run_xla),
)
