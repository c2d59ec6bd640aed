"""The delta rule without decay or with a scalar decay on Mosaic GPU (Hopper), in chunks of 64 tokens.

The forward pass has two kernels: `chunk_forward` solves the triangular systems of all chunks in parallel,
`scan_forward` carries the memory through the chunks in order, for some calls by `split_scan`, which may also compute the chunks' scores.
The backward pass has three: `scan_forward`
recomputes the memory before each chunk and x, the error of the memory's prediction of each token's value,
unless the forward pass has saved them (`save_memories`);
`scan_backward` carries the gradient of the memory in the opposite order and computes dv; `chunk_backward`
computes the other gradients, for all chunks in parallel. `pallas_kernels.tiles.delta` has the formulas.

Long rows of a small batch are split into parts that are scanned in parallel (`pallas_kernels.hopper.parts`).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.delta_rule.hopper import scan, split_scan
from pallas_kernels.delta_rule.hopper.chunk_backward import chunk_backward
from pallas_kernels.delta_rule.hopper.chunk_forward import CHUNK, SolvedChunks, chunk_forward
from pallas_kernels.delta_rule.hopper.scan import SavedMemories, scan_backward, scan_forward
from pallas_kernels.hopper import parts as hopper_parts
from pallas_kernels.hopper import row_layout
from pallas_kernels.hopper.parts import length_multiple
from pallas_kernels.memory_calls import in_bfloat16, key_dims, or_in_parts, value_dims

__all__ = [
    "CHUNK", "FROM_ZERO", "REQUIREMENTS", "SAVES_MEMORIES", "Residuals", "backward", "forward", "length_multiple",
]  # fmt: skip

FROM_ZERO = True
"""`forward` accepts an `initial` of None, and `backward` a gradient of the final memories of None."""
SAVES_MEMORIES = True
"""`forward` has the argument `save_memories`."""
REQUIREMENTS = (
    key_dims(64, 128, 256),
    in_bfloat16("q", "k", "v"),
    or_in_parts(value_dims(64, 128, 256, 512)),
)


class Residuals(NamedTuple):
    """The arrays that `forward` of the delta rule with a scalar decay or none saves for `backward`.

    Unless asked for, the memories before all chunks are not saved but recomputed: at K = V = 128 they would be
    twice as large as the other arrays.

    Attributes:
        solved: inverses of the triangular systems, scores, beta and decays of all chunks.
        parts: the memories before each part of a row, if `backward` scans rows in parts that run in parallel;
            None if it scans each row in one.
        memories: the memories before all chunks with `save_memories`, or None, if `backward` computes them
            again.
    """

    solved: SolvedChunks
    parts: hopper_parts.Parts | None
    memories: SavedMemories | None = None


def forward(
    q, k, v, beta, log_decay, run, initial, *, scale: float, save: bool = True, save_memories: bool = False,
    erase: str = "decayed", interpret: Any = False,
) -> tuple[jax.Array, jax.Array, Residuals]:  # fmt: skip
    """Compute the delta rule with a scalar decay or none, and the arrays that `backward` requires.

    Return the output [B, T, max(H, G), V], the final memories in the shape of `initial`, and the residuals,
    which are complete if `save` is set. With `save_memories` they contain the memories before all
    chunks, which the scan of the output stores, also of rows in parts and of several memories. The other
    arguments are those of the op `delta_rule`; T is divisible by `length_multiple(q, k, v)`. An `initial` of None
    is one empty memory per row.
    """
    memories = v.shape[2]
    heads = max(q.shape[2], memories)
    run, chunk_bounds = row_layout.split_runs(run, initial, len(v))
    checkpoints = 1 if save_memories else hopper_parts.count_checkpoints(q, k, v, chunk_bounds)
    in_parts = chunk_bounds is None and hopper_parts.count_parts(q, k, v) > 1
    ran = erase == "decayed" and _sizes_ran(q, k, v)
    split = ran and k.shape[-1] <= 128
    version = scan.FORWARD or ("scored" if split and not in_parts else "joint")
    scored = version == "scored" and not (save or save_memories or in_parts or checkpoints > 1)
    scored = scored and split_scan.fits(k.shape[-1], v.shape[-1])
    solved = chunk_forward(
        None if scored else q,
        k,
        beta,
        log_decay,
        run,
        heads=heads,
        scale=scale,
        erase=erase,
        method="blocks" if ran else "doubled",
        interpret=interpret,
    )
    initial = _by_head(initial, heads, k, v, required=in_parts)
    options: dict[str, Any] = dict(
        heads=heads, scale=scale, chunk_bounds=chunk_bounds, interpret=interpret
    )
    if scored:
        output, ends = split_scan.split_scan_forward(
            q, k, v, solved, initial, documents=run is not None, **options
        )
        return output, ends[:, :: heads // memories], Residuals(solved, None)
    scan_part = functools.partial(scan_forward, None, k, solved=solved, initial=None, **options)
    parts = hopper_parts.split(scan_part, q, k, v, initial, chunk_bounds, interpret)
    starts, count = hopper_parts.part_starts(parts, initial)
    # Memories at checkpoints are for the scan that computes the others again.
    output, *saved, ends = scan_forward(
        q,
        k,
        v,
        solved,
        starts,
        save=save_memories,
        parts=count,
        checkpoints=checkpoints,
        forward=version,
        **options,
    )
    residuals = Residuals(solved, parts)
    if save_memories:
        residuals = residuals._replace(memories=SavedMemories(*saved))
    elif saved:
        residuals = residuals._replace(parts=hopper_parts.Parts(None, *saved))
    return output, ends[:, count - 1 :: count * heads // memories], residuals


def _sizes_ran(q, k, v) -> bool:
    """Return whether a card has run the inverse by blocks with these sizes, and the split scan with those of up to 128 channels: as many
    heads of each array, as many key as value channels, 64, 128 or 256. docs/delta_forward.jsonl has their rows (without a decay of 128 alone),
    docs/kernels.jsonl those of 256, which are times alone. No card has run them with an undecayed erase.
    """
    sizes = {x.shape[2:] for x in (q, k, v)}
    return len(sizes) == 1 and k.shape[-1] in (64, 128, 256)


def backward(
    q, k, v, beta, log_decay, run, initial, residuals: Residuals, d_output, d_final, *,
    scale: float, decay_gradient: bool = True, erase: str = "decayed", interpret: Any = False,
):  # fmt: skip
    """Return the gradients of q, k, v, beta, log_decay and initial of the delta rule with a scalar decay or
    none, each in the shape of its input.

    The arguments are the inputs of `forward`, the residuals that `forward` returned, and the gradients of the
    output, `d_output`, and of the final memories, `d_final`, of which None is 0. The gradient of log_decay is None if
    there is no decay or `decay_gradient` is False, and that of an `initial` of None, too.
    """
    memories, heads = v.shape[2], d_output.shape[2]
    solved, parts, saved = residuals
    run, chunk_bounds = row_layout.split_runs(run, initial, len(v))
    options: dict[str, Any] = dict(scale=scale, interpret=interpret)
    by_head = _by_head(initial, heads, k, v, required=parts is not None)
    starts, count = hopper_parts.part_starts(parts, by_head)
    scans: dict[str, Any] = options | dict(heads=heads, chunk_bounds=chunk_bounds)
    if saved is None:
        scanned = scan_forward(None, k, v, solved, starts, save=True, parts=count, **scans)
        saved = SavedMemories(*scanned[:2])
    missing, states = saved
    if d_final is not None:
        d_final = row_layout.gradient_by_head(d_final, heads)
    elif parts is not None and parts.transitions is not None:
        d_final = jnp.zeros((len(v), heads, k.shape[-1], v.shape[-1]), jnp.float32)
    scan_part = functools.partial(scan_backward, q, k, d_output, solved, **scans)
    d_ends, count = hopper_parts.part_end_gradients(parts, scan_part, d_final, interpret)
    dv, d_states, d_starts = scan_part(d_ends, parts=count)
    decay_gradient = decay_gradient and log_decay is not None
    dq, dk, d_beta, *d_decay = chunk_backward(
        q, k, missing, d_output, dv, states, d_states, beta, log_decay, run,
        decay_gradient=decay_gradient, erase=erase, **options,
    )  # fmt: skip
    sum_heads = row_layout.sum_heads
    return (
        sum_heads(dq, q.shape[2]),
        sum_heads(dk, k.shape[2]),
        sum_heads(dv, memories),
        sum_heads(d_beta, memories),
        sum_heads(d_decay[0], memories) if decay_gradient else None,
        None if initial is None else sum_heads(d_starts[:, ::count], memories, axis=1),
    )


def _by_head(initial, heads: int, k, v, *, required: bool):
    """Return the initial memory of each of the heads, [B * S, heads, K, V]: each of the heads that share a memory computes it.

    An `initial` of None, which is one empty memory per row, remains None unless an array is `required`, or keys are so wide that a scan that
    begins with zeros in registers would spill more of them.
    """
    if initial is not None:
        return jnp.repeat(initial, heads // v.shape[2], axis=1)
    shape = len(v), heads, k.shape[-1], v.shape[-1]
    return jnp.zeros(shape, jnp.float32) if required or k.shape[-1] > 128 else None
