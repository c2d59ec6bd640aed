"""Requirements and layout that the fused kernels of `linear_memory`, `delta_memory` and `dplr_memory` share: the
requirements that a call must meet, and the layout of arrays that they read.

With one state per segment, tokens are laid out as in the XLA forms, each segment starting at a chunk's
boundary; a kernel then scans the chunks of each segment from the memory of that segment.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lsm_jax.ops.backends.registry import PALLAS, Call
from lsm_jax.ops.core.segments import Tokens, cut_into_chunks, read_tokens
from pallas_kernels.requirements import Requirement

_GRID = 65535  # blocks along the slowest axis of CUDA's grid
# Tokens between which the memories of a kernel may change.
_CHUNK = dict(mosaic_gpu=64, mosaic_tpu=128, triton=64)


def _per_segment(call: Call) -> bool:
    return call.arguments["state"].memory.ndim == 5


def _scans(call: Call) -> int:
    """Return the number of scans over chunks that a kernel runs in parallel when a call has one state per segment."""
    q, v, memory = (call.arguments[n] for n in ("q", "v", "state"))
    columns = -(-v.shape[3] // 128)
    return math.prod(memory.memory.shape[:2]) * max(q.shape[2], v.shape[2]) * columns


CHUNK_FORM = Requirement(
    "form='chunk' of more than one token",
    lambda call: call.form == "chunk",
    lambda call: repr(call.form),
)
HOPPER = (
    CHUNK_FORM,
    Requirement(
        "q in bfloat16",
        lambda call: call.arguments["q"].dtype == jnp.bfloat16,
        lambda call: str(call.arguments["q"].dtype),
    ),
    Requirement(
        f"at most {_GRID:,} memories of segments and heads",
        lambda call: not _per_segment(call) or _scans(call) <= _GRID,
        lambda call: f"{_scans(call):,}",
    ),
    Requirement(
        f"rows of {_CHUNK['mosaic_gpu']} tokens or more with one state per segment",
        lambda call: not _per_segment(call) or call.length >= _CHUNK["mosaic_gpu"],
        lambda call: str(call.length),
    ),
    *PALLAS,
)
"""Requirements of every kernel of these ops for Hopper."""
TPU = (CHUNK_FORM, *PALLAS)
"""Requirements of every kernel of these ops for TPU."""
TRITON = (CHUNK_FORM, *PALLAS)
"""Requirements of every Triton kernel of these ops."""


def tokens_of(arguments: dict[str, Any]) -> Tokens:
    """Return which tokens of a call are written and to which document or segment each belongs, from the call's segment
    ids, mask and state.
    """
    state = arguments["state"]
    num_segments = state.memory.shape[1] if state.memory.ndim == 5 else None
    return read_tokens(
        arguments["segment_ids"], arguments["update_mask"], state.segment_id, num_segments
    )


def lay_out(
    name: str, tokens: Tokens, memory: jax.Array | None, arrays: dict[str, Any]
) -> tuple[dict[str, Any], Callable[..., tuple[jax.Array, jax.Array]]]:
    """Return a call's arrays in the layout that a fused kernel reads, and a function that brings the kernel's
    results back into the order of the call's tokens.

    Args:
        name: the name of the kernel's backend.
        tokens: which of the call's tokens write, and the document or segment of each.
        memory: the memory in the call's state: [B, G, K, V], of which None is an empty one, or [B, S, G, K, V] with one state per segment.
        arrays: [B, T, ...] or None, by name; 0 at tokens that write nothing.

    Returns:
        The kernel's arguments by name: `arrays`, the memory as `initial`, and the number of each token's
        document or segment as `run`; and a function of the kernel's output and final memory, which returns
        both in the call's layout.
    """
    if tokens.slot is None or memory is None:
        return arrays | dict(initial=memory, run=tokens.run), lambda *results: results
    length = tokens.slot.shape[1]
    chunks = cut_into_chunks(tokens, length, _CHUNK[name], memory.shape[1])
    assert chunks.slot is not None

    def in_chunks(x):
        x = chunks.split(x)
        return x.reshape(len(x), -1, *x.shape[3:])

    def restore(output, final):
        output = output.reshape(len(output), chunks.count, chunks.size, *output.shape[2:])
        return chunks.join(output, length), final.reshape(memory.shape)

    given = {name: None if x is None else in_chunks(x) for name, x in arrays.items()}
    run = jnp.repeat(chunks.slot, chunks.size, axis=1)
    return given | dict(initial=memory.reshape(-1, *memory.shape[2:]), run=run), restore
