"""The backends of `slot_memory`: each computes two linear memories by the backend of `linear_memory` with
the same name.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from lsm_jax.ops.backends.registry import Backend, Call, register
from lsm_jax.ops.core.states import LinearState
from lsm_jax.ops.linear import backends as linear
from lsm_jax.ops.slots.state import SlotState


def _linear_call(call: Call, memory: Any, options: Any, **arrays: Any) -> Call:
    """Return the call of `linear_memory` that computes one of the two linear memories of gated slot
    attention, whose memory before the call is `memory`; `arrays` are its q, k, v and decay, by name.
    """
    arguments = call.arguments
    state = LinearState(memory, None, None, arguments["state"].segment_id)
    absent = dict.fromkeys(
        ("log_decay", "value_log_decay", "log_input_gate", "constant_log_decay", "bonus")
    )
    rows = {name: arguments[name] for name in ("segment_ids", "update_mask")}
    arguments = absent | rows | dict(state=state) | arrays
    saves = call.save_memories
    return Call("linear_memory", options, arguments, call.implementation, save_memories=saves)


def _unsupported(backend: Backend, call: Call) -> str | None:
    """Return, in words, the first requirement of the `linear_memory` backend that one of the two memories of
    `slot_memory` does not meet; None if both meet all.
    """
    q, k, v, s, log_decay, state = (
        call.arguments[n] for n in ("q", "k", "v", "s", "log_decay", "state")
    )
    shape = (*q.shape[:2], max(q.shape[2], v.shape[2]), s.shape[3])
    weights, strengths = (jax.ShapeDtypeStruct(x, q.dtype) for x in (shape, s.shape))
    keys_call = _linear_call(
        call, state.keys, call.options, q=q, k=k, v=strengths, value_log_decay=log_decay
    )
    values_call = _linear_call(
        call, state.values, call.options, q=weights, k=strengths, v=v, log_decay=log_decay
    )
    for name, linear_call in (("keys (K x M)", keys_call), ("values (M x V)", values_call)):
        if (reason := backend.unsupported(linear_call)) is not None:
            return f"{reason} in the memory of {name}"
    return None


def _run(backend: Backend, call: Call) -> tuple[jax.Array, SlotState]:
    """Compute `slot_memory`: read the memory of slot keys with the queries, apply the softmax over slots, and read the
    memory of slot values with the weights.

    The slots are the value channels of the first memory and the key channels of the second. The softmax
    multiplies rounding errors of the scores by up to their range, which may be 16: all scores are float32,
    and the kernels of NVIDIA cards read the strengths in float32.
    """
    q, k, v, s, log_decay, state = (
        call.arguments[n] for n in ("q", "k", "v", "s", "log_decay", "state")
    )
    options = call.options._replace(form=call.form)
    dtype = options.dtype if backend.name == "xla" else q.dtype
    unrounded = backend.name in ("mosaic_gpu", "triton")
    strengths = s.astype(jnp.float32 if unrounded else dtype)
    s = s.astype(dtype)
    scores, keys = backend.run(
        _linear_call(
            call,
            state.keys,
            options._replace(exact=True),
            q=q,
            k=k,
            v=strengths,
            value_log_decay=log_decay,
        )
    )
    weights = jax.nn.softmax(scores, axis=-1).astype(dtype)
    output, values = backend.run(
        _linear_call(
            call,
            state.values,
            options._replace(scale=1.0),
            q=weights,
            k=s,
            v=v,
            log_decay=log_decay,
        )
    )
    return output, SlotState(keys.memory, values.memory, values.segment_id)


def _slot_backend(backend: Backend) -> Backend:
    """Return the backend of `slot_memory` that computes both of its memories, that of keys and that of values, by the
    given backend of `linear_memory`.
    """
    supports_all = backend.name == "xla"
    return Backend(
        name=backend.name,
        run=functools.partial(_run, backend),
        more=lambda call: None if supports_all else _unsupported(backend, call),
        platforms=backend.platforms,
        compute_capabilities=backend.compute_capabilities,
        automatic=backend.automatic,
    )


register("slot_memory", *map(_slot_backend, (linear.HOPPER, linear.TPU, linear.TRITON, linear.XLA)))
