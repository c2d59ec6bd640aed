"""Where `linear_memory` runs as a fused kernel, and why it does not elsewhere.

With one state a segment, tokens are laid out as in the XLA forms, each segment from a chunk's border on; a kernel then walks over
each segment's chunks from a memory of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lsm_jax.ops.core.segments import Tokens, cut_into_chunks, finish_output, read_tokens, select
from lsm_jax.ops.core.states import LinearState

KERNELS = ("mosaic_gpu", "mosaic_tpu")
_WALKS = 65535  # side by side, by CUDA
AUTOMATIC = "mosaic_gpu"  # what None may pick
_CHUNK = dict(mosaic_gpu=64, mosaic_tpu=128)  # where a kernel's memories take turns


def why_no_kernel(
    implementation: str, form: str, q, k, v, memory, *, narrow: bool = True
) -> str | None:
    """What the kernels of any memory take in place of this call, or None; `narrow`: of many tokens, in bfloat16 alone."""
    if form != "chunk":
        return f"form='chunk' of more than one token, not {form!r}"
    if memory.ndim == 5 and not narrow:
        return "one state a row, not one a segment"
    if implementation == AUTOMATIC and narrow and q.dtype != jnp.bfloat16:
        return f"q in bfloat16, not {q.dtype}"
    if implementation == AUTOMATIC and narrow and memory.ndim == 5:
        columns = -(-v.shape[3] // 128)
        walks = math.prod(memory.shape[:2]) * max(q.shape[2], v.shape[2]) * columns
        if walks > _WALKS:
            return f"at most {_WALKS:,} memories of segments and heads, not {walks:,}"
        if q.shape[1] < _CHUNK[AUTOMATIC]:
            return f"one state a segment in rows of {_CHUNK[AUTOMATIC]} tokens or more"
    return why_not_here(implementation, q, k, v)


def why_not_here(implementation: str, *arrays: Any) -> str | None:
    """What a backend takes in place of where and how arrays are given to any of its kernels, or None."""
    if any(jax.typeof(x).manual_axis_type.varying for x in arrays):
        return "arrays outside jax.shard_map, or inside with check_vma=False"
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


def read(segment_ids, update_mask, state) -> Tokens:
    """`read_tokens` as the state has it."""
    num_segments = state.memory.shape[1] if state.memory.ndim == 5 else None
    return read_tokens(segment_ids, update_mask, state.segment_id, num_segments)


def laid_out(
    implementation: str, tokens: Tokens, memory, arrays: dict[str, Any]
) -> tuple[dict[str, Any], Callable[..., tuple[jax.Array, jax.Array]]]:
    """What a kernel is given, and what makes the call's output and final memory of its own.

    Args:
        implementation: one of `KERNELS`.
        tokens: of the call.
        memory: the state's.
        arrays: by name, [B, T, ...] or None, 0 where nothing is written.
    """
    if tokens.slot is None:
        return arrays | dict(initial=memory, run=tokens.run), lambda *found: found
    length = tokens.slot.shape[1]
    chunks = cut_into_chunks(tokens, length, _CHUNK[implementation], memory.shape[1])
    assert chunks.slot is not None

    def lay(x):
        x = chunks.split(x)
        return x.reshape(len(x), -1, *x.shape[3:])

    def restore(output, final):
        output = output.reshape(len(output), chunks.count, chunks.size, *output.shape[2:])
        return chunks.join(output, length), final.reshape(memory.shape)

    given = {name: None if x is None else lay(x) for name, x in arrays.items()}
    run = jnp.repeat(chunks.slot, chunks.size, axis=1)
    return given | dict(initial=memory.reshape(-1, *memory.shape[2:]), run=run), restore


def run_kernel(
    implementation: str, scale: float, q, k, v, log_decay, bonus, state, segment_ids, update_mask,
    value_log_decay=None, exact: bool = False,
) -> tuple[jax.Array, LinearState]:  # fmt: skip
    """`linear_memory` as the kernel that `implementation` names; `log_decay` is None, [G], [B, T, G] or [B, T, G, K].

    `exact`: the output in float32.
    """
    from pallas_kernels.linear_attention import linear_attention

    tokens = read(segment_ids, update_mask, state)
    if log_decay is not None:
        shape = v.shape[:3] + log_decay.shape[3:]
        log_decay = jnp.broadcast_to(log_decay.astype(jnp.float32), shape)
        log_decay = select(tokens.written, log_decay)
    if value_log_decay is not None:
        value_log_decay = select(tokens.written, value_log_decay.astype(jnp.float32))
    if bonus is not None:
        bonus = bonus.astype(jnp.float32)
    k, v = select(tokens.written, k), select(tokens.written, v)
    arrays = dict(q=select(tokens.real, q), k=k, v=v, log_decay=log_decay)
    arrays |= dict(value_log_decay=value_log_decay)
    given, restore = laid_out(implementation, tokens, state.memory, arrays)
    found = linear_attention(
        **given, bonus=bonus, scale=scale, exact=exact, implementation=implementation
    )
    output, memory = restore(*found)
    return finish_output(tokens, output), LinearState(memory, None, None, tokens.last_id)
