"""Compute `attention` on one device: the positions of the tokens, the output by the selected backend, and the
final state.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lsm_jax.ops.attention import backends, shared_rows  # noqa: F401  (the backends are registered)
from lsm_jax.ops.attention.forget_gates import sum_gates
from lsm_jax.ops.attention.state import AttentionState
from lsm_jax.ops.attention.token_positions import newest_sum, token_positions, write_tokens
from lsm_jax.ops.backends.registry import Call
from lsm_jax.ops.backends.run import Static
from lsm_jax.ops.backends.select import select as select_backends
from lsm_jax.ops.core import checks
from lsm_jax.ops.core.segments import finish_output, read_tokens, select


# Compiled as one program also when called outside `jax.jit`, as in a notebook.
@functools.partial(jax.jit, static_argnums=0)
def attend(
    static: Static, q, k, v, log_forget, state: AttentionState, segment_ids, update_mask
) -> tuple[Array, AttentionState]:
    """Compute softmax attention on a device that has complete rows: return the output [B, T, H, V] and the state with
    the new keys and values.
    """
    batch, length, heads, _ = v.shape
    num_segments = state.keys.shape[1] if state.keys.ndim == 5 else None
    tokens = read_tokens(segment_ids, update_mask, state.segment_id, num_segments)
    k = checks.spread_keys(k, heads)
    positions = token_positions(tokens, state, batch, length)
    k, v = select(tokens.written, k), select(tokens.written, v)
    sums = None if log_forget is None else sum_gates(log_forget, tokens, newest_sum(state))
    final = write_tokens(state, k, v, sums, positions, tokens)
    arguments: dict[str, Any] = dict(
        q=select(tokens.real, q),
        k=k,
        v=v,
        log_forget=log_forget,
        sums=sums,
        tokens=tokens,
        positions=positions,
        state=state,
        final=final,
        segment_ids=segment_ids,
        update_mask=update_mask,
    )
    call = Call(static.op, static.options, arguments, static.implementation)
    with jax.named_scope(static.op):
        output = select_backends(call).function(lambda b: functools.partial(b.run, call))()
    return finish_output(tokens, output).astype(v.dtype), final


def attend_shared_row(
    axis: str,
    function: Any,
    static: Static,
    q,
    k,
    v,
    log_forget,
    state: AttentionState,
    segment_ids,
    update_mask,
) -> tuple[Array, AttentionState]:
    """Return softmax attention's output [B, T, H, V] for this device's tokens, and the state after the
    complete row, where devices have consecutive parts of each row; every device computes the same state.
    """
    del function
    options = static.options._replace(axis=axis)
    batch, device_length, heads, _ = v.shape
    num_segments = state.keys.shape[1] if state.keys.ndim == 5 else None
    k, v, log_forget, segment_ids, update_mask = shared_rows.gather_tokens(
        axis, (k, v, log_forget, segment_ids, update_mask)
    )
    length = v.shape[1]
    tokens = read_tokens(segment_ids, update_mask, state.segment_id, num_segments)
    positions = token_positions(tokens, state, batch, length)
    k, v = select(tokens.written, checks.spread_keys(k, heads)), select(tokens.written, v)
    sums = None if log_forget is None else sum_gates(log_forget, tokens, newest_sum(state))
    final = write_tokens(state, k, v, sums, positions, tokens)

    part = functools.partial(shared_rows.part_of_device, axis, device_length)
    no_id: Any = None
    device_tokens = part(tokens._replace(last_id=no_id))
    # If nothing else is masked, no token attends to the padding at a row's end, since it comes last.
    if options.unmasked:
        tokens = tokens._replace(written=None)
    arguments: dict[str, Any] = dict(
        q=select(device_tokens.real, q),
        k=k,
        v=v,
        log_forget=log_forget,
        sums=sums,
        tokens=tokens,
        positions=positions,
        state=state,
        segment_ids=segment_ids,
        update_mask=update_mask,
    )
    call = Call(static.op, options, arguments, static.implementation)
    with jax.named_scope(static.op):
        output = select_backends(call).function(lambda b: functools.partial(b.run, call))()
    if options.window is None and not options.unmasked:
        beyond = part(positions.rank) >= state.keys.shape[-3]
        output = jnp.where(beyond[:, :, None, None], jnp.nan, output)
    return finish_output(device_tokens, output).astype(v.dtype), final
