"""`delta_memory` and `dplr_memory` on one of the devices that share a row: the tokens are one update
`M -> Θ M + W`, Θ [K, K] per head.

Θ acts on all value channels in the same way. It is therefore computed by the op itself, as K more value
channels that start from the identity matrix and to which nothing is written. Their outputs are `q_t Θ_t`, and
the memory M that a device starts from adds `q_t Θ_t M` to the device's outputs: the op runs once, from an
empty memory, and does not wait for the other devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lsm_jax.ops.backends.registry import Call
from lsm_jax.ops.backends.run import Static
from lsm_jax.ops.backends.select import select
from lsm_jax.ops.core.segments import read_tokens
from lsm_jax.ops.core.shared_rows import Update, emptied_by, ends_of_documents, newer_id, resume
from lsm_jax.ops.core.states import DeltaState
from lsm_jax.parallel.sequence import exchange


def in_sequence(
    axis: str,
    function: Callable[..., Any],
    static: Static,
    by_xla: Callable[..., Any],
    arguments: dict[str, Any],
) -> tuple[jax.Array, DeltaState]:
    """Return the output of `delta_memory` or `dplr_memory` for this device's tokens, computed from the state
    after the earlier devices' tokens; and the state after the complete row.

    Args:
        axis: the mesh axis that rows are split over.
        function: the op on one device, a function of `static` and `arguments`.
        static: the call without its arrays.
        by_xla: the function that computes the op by XLA; it is used with one state per segment.
        arguments: the op's arrays on this device; `state` is the state before the first device's tokens.
    """
    v, state, options = arguments["v"], arguments["state"], static.options
    if state.memory.ndim == 5:
        update = update_of(options._replace(form="chunk"), by_xla, arguments)
        return resume(axis, function, (static,), arguments, update, advance)
    wide, start, no_id, first_id = _with_identity(options.dtype, arguments)
    call = Call(static.op, options, arguments, static.implementation)
    kernels = [b for b in select(call).backends if b.name != "xla"]
    if not kernels:  # the sum below is rounded once
        wide = wide.astype(options.dtype)
    value_dim = v.shape[-1]

    def run(channels):
        begin = DeltaState(start[..., channels], no_id)
        return function(static, **(arguments | {"v": wide[..., channels], "state": begin}))

    widened = call._replace(arguments=arguments | {"v": wide, "state": DeltaState(start, no_id)})
    if all(backend.unsupported(widened) is None for backend in kernels):
        parts = [slice(None)]
    else:
        parts = [slice(value_dim), slice(value_dim, None)]
    outputs, after = zip(*map(run, parts), strict=True)
    output = jnp.concatenate(outputs, axis=-1)
    memory = jnp.concatenate([x.memory for x in after], axis=-1)
    written = DeltaState(memory[..., :value_dim], after[0].segment_id)
    update = Update(memory[..., value_dim:], written, None, first_id)
    initial = jax.tree.map(lambda x, y: x.astype(y.dtype), state, written)
    entering, final = exchange(axis, advance, update, initial)
    batch, length, heads, _ = v.shape
    through = output[..., value_dim:].reshape(batch, length, heads, -1, memory.shape[-2])
    added = jnp.einsum(
        "btgrk,bgkv->btgrv",
        through.astype(options.dtype),
        emptied_by(entering, update).memory,
        precision=options.precision,
    )
    output = output[..., :value_dim]
    return (output + added.reshape(output.shape)).astype(v.dtype), final


def _with_identity(dtype: Any, arguments: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    """Return the values v [B, T, G, V + K] and an empty initial memory [B, G, K, V + K], both with K more
    value channels (0 in v, the identity matrix in the memory), so that the op also computes the transition of
    all tokens; 0 as the state's segment id; and the first segment id of each row.
    """
    v, state, segment_ids = (arguments[name] for name in ("v", "state", "segment_ids"))
    key_dim = state.memory.shape[-2]
    num_segments = state.memory.shape[1] if state.memory.ndim == 5 else None
    no_id = jnp.zeros_like(state.segment_id)
    tokens = read_tokens(segment_ids, None, no_id, num_segments)
    _, first_id = ends_of_documents(segment_ids, tokens.run)
    identity = jnp.broadcast_to(jnp.eye(key_dim, dtype=dtype), (*state.memory.shape[:-1], key_dim))
    start = jnp.concatenate([jnp.zeros_like(state.memory, dtype), identity], axis=-1)
    wide = jnp.concatenate([v, jnp.zeros((*v.shape[:-1], key_dim), v.dtype)], axis=-1)
    return wide, start, no_id, first_id


def update_of(options, by_xla: Callable[..., Any], arguments: dict[str, Any]) -> Update:
    """Return the effect of this device's tokens on the memory of `delta_memory` or `dplr_memory`, as one update:
    transition Θ [B, G, K, K] and write W.

    Θ is 0 if a document begins among the tokens.

    Args:
        options: the op's static options, with the chunk form.
        by_xla: the op's XLA form.
        arguments: the op's arrays on this device.
    """
    value_dim = arguments["v"].shape[-1]
    wide, start, no_id, first_id = _with_identity(options.dtype, arguments)
    given = arguments | {"v": wide, "state": DeltaState(start, no_id)}
    _, after = by_xla(options, **given)
    memory, transition = after.memory[..., :value_dim], after.memory[..., value_dim:]
    return Update(transition, DeltaState(memory, after.segment_id), None, first_id)


def advance(state: DeltaState, update: Update) -> DeltaState:
    """Return the state of `delta_memory` or `dplr_memory` after the tokens of one device: Θ M + W.

    M is the memory [B, G, K, V] before them, and `update` contains their composed transition Θ [B, G, K, K]
    and write W. If a document begins with the first of these tokens, M is emptied first.
    """
    state = emptied_by(state, update)
    kept = jnp.matmul(update.transition, state.memory, precision=jax.lax.Precision.HIGHEST)
    return DeltaState(kept + update.written.memory, newer_id(state, update))
