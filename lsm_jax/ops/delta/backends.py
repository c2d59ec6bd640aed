"""The backends of `delta_memory` and `dplr_memory`: fused kernels for Hopper and TPU, Triton kernels for
other NVIDIA cards, and XLA."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lsm_jax.ops.backends import memory_kernels, one_token
from lsm_jax.ops.backends.registry import TRITON, Backend, Call, register
from lsm_jax.ops.core.segments import finish_output, select
from lsm_jax.ops.core.states import DeltaState
from lsm_jax.ops.delta import delta_xla, dplr_xla


def _delta_unsupported(name: str, call: Call) -> str | None:
    # Imported here, so that a backend that is not used adds no time to `import lsm_jax`.
    from pallas_kernels.delta_rule import unsupported

    given = call.arguments
    q, k, v = (given[n] for n in "qkv")
    log_decay = _decay_of(given)
    if log_decay is not None:
        log_decay = jax.ShapeDtypeStruct(v.shape[:3] + log_decay.shape[3:], jnp.float32)
    return unsupported(name, q, k, v, log_decay, call.options.erase)


def _decay_of(given: dict[str, Any]) -> Any:
    """Return the log decay of a call of `delta_memory` or `dplr_memory`, [B, T, G], [B, T, G, K] or [G], or None,
    whichever argument contains it.
    """
    constant = given["constant_log_decay"]
    return given["log_decay"] if constant is None else constant


def run_delta_kernel(name: str, call: Call) -> tuple[jax.Array, DeltaState]:
    """Compute `delta_memory` by the fused kernel of the backend called `name`: return the output [B, T, H, V] and the
    state after the last token.
    """
    from pallas_kernels.delta_rule import delta_rule

    given, log_decay = call.arguments, _decay_of(call.arguments)
    q, k, v, beta, state = (given[n] for n in ("q", "k", "v", "beta", "state"))
    tokens = memory_kernels.tokens_of(given)
    if log_decay is not None:
        shape = v.shape[:3] + log_decay.shape[3:]
        log_decay = jnp.broadcast_to(log_decay.astype(jnp.float32), shape)
        log_decay = select(tokens.written, log_decay)
    k, v, beta = (select(tokens.written, x) for x in (k, v, beta.astype(jnp.float32)))
    arrays = dict(q=select(tokens.real, q), k=k, v=v, beta=beta, log_decay=log_decay)
    memory = None if call.options.fresh and state.memory.ndim == 4 else state.memory
    laid_out, restore = memory_kernels.lay_out(name, tokens, memory, arrays)
    options: dict[str, Any] = dict(scale=call.options.scale, erase=call.options.erase)
    options |= dict(save_memories=call.save_memories)
    output, memory = restore(*delta_rule(**laid_out, **options, implementation=name))
    return finish_output(tokens, output), DeltaState(memory, tokens.last_id)


def _dplr_unsupported(name: str, call: Call) -> str | None:
    from pallas_kernels.dplr import unsupported

    given = call.arguments
    q, k, v, a, b = (given[n] for n in "qkvab")
    log_decay = jax.ShapeDtypeStruct((*v.shape[:3], k.shape[-1]), jnp.float32)
    return unsupported(name, q, k, v, a, b, log_decay)


def run_dplr_kernel(name: str, call: Call) -> tuple[jax.Array, DeltaState]:
    """Compute `dplr_memory` by the fused kernel of the backend called `name`: return the output [B, T, H, V] and the
    state after the last token.
    """
    from pallas_kernels.dplr import dplr

    given, log_decay = call.arguments, _decay_of(call.arguments)
    q, k, v, a, b, state = (given[n] for n in ("q", "k", "v", "a", "b", "state"))
    tokens = memory_kernels.tokens_of(given)
    log_decay = log_decay if log_decay.ndim == 4 else log_decay[..., None]
    log_decay = jnp.broadcast_to(log_decay.astype(jnp.float32), (*v.shape[:3], k.shape[-1]))
    k, v, a, b, log_decay = (select(tokens.written, x) for x in (k, v, a, b, log_decay))
    arrays = dict(q=select(tokens.real, q), k=k, v=v, a=a, b=b, log_decay=log_decay)
    laid_out, restore = memory_kernels.lay_out(name, tokens, state.memory, arrays)
    options = dict(scale=call.options.scale, save_memories=call.save_memories)
    output, memory = restore(*dplr(**laid_out, **options, implementation=name))
    return finish_output(tokens, output), DeltaState(memory, tokens.last_id)


def _backends(
    by_xla: Callable[..., Any],
    run_kernel: Callable[[str, Call], Any],
    unsupported: Callable[[str, Call], str | None],
    *others: Backend,
) -> tuple[Backend, ...]:
    """Return the backends of `delta_memory` or `dplr_memory`, in order of preference: fused kernels, the backends
    `others`, and XLA.
    """

    def run_xla(call: Call) -> Any:
        return by_xla(call.options._replace(form=call.form), **call.arguments)

    return (
        one_token.decode_backend(run_xla),
        one_token.decode_backend(run_xla, name="triton"),
        Backend(
            name="mosaic_gpu",
            run=functools.partial(run_kernel, "mosaic_gpu"),
            requirements=memory_kernels.HOPPER,
            more=functools.partial(unsupported, "mosaic_gpu"),
            platforms=("cuda",),
            compute_capabilities=("9.0",),
        ),
        Backend(
            name="mosaic_tpu",
            run=functools.partial(run_kernel, "mosaic_tpu"),
            requirements=memory_kernels.TPU,
            more=functools.partial(unsupported, "mosaic_tpu"),
            platforms=("tpu",),
            automatic=False,
        ),
        *others,
        Backend(name="xla", run=run_xla),
    )


def _triton(
    run_kernel: Callable[[str, Call], Any], unsupported: Callable[[str, Call], str | None]
) -> Backend:
    """Return the backend of an op's Triton kernels."""
    return Backend(
        name="triton",
        run=functools.partial(run_kernel, "triton"),
        requirements=memory_kernels.TRITON,
        more=functools.partial(unsupported, "triton"),
        **TRITON,
    )


register(
    "delta_memory",
    *_backends(
        delta_xla.by_xla,
        run_delta_kernel,
        _delta_unsupported,
        _triton(run_delta_kernel, _delta_unsupported),
    ),
)
register(
    "dplr_memory",
    *_backends(
        dplr_xla.by_xla,
        run_dplr_kernel,
        _dplr_unsupported,
        _triton(run_dplr_kernel, _dplr_unsupported),
    ),
)
