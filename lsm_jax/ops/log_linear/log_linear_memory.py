"""Log-linear attention (arXiv 2506.04761): a memory for each power of two of tokens into the past.

Let p be a token's position in its document. The memory of level 0 contains the present token; that of level l from 1
on, if bit l - 1 of p is 1, contains the 2^(l-1) tokens just below, and is empty otherwise:

`level(t, s) = 0 if s = t, else 1 + place of the highest bit in which p_t and p_s differ`
`o_t = Σ_{s ≤ t} λ_t[level(t, s)] q_t A_t ... A_{s+1} w_s`

Without `beta`, A = α and w = kᵀ v (log-linear Mamba-2); with it, A = α (I - β kᵀ k) and w = β kᵀ v (log-linear Gated
DeltaNet). Token by token, with z the number of trailing zero bits of p_t: the memories of levels 0 to z are added to
that of level z + 1, all levels go through A_t, and w_t is written to level 0. So T tokens require log2(T) + 2 memories.

The last of L levels contains all tokens further back, so that documents of any length are accepted; the published
definition is that of documents of at most 2^(L-1) tokens.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lsm_jax.ops.backends.registry import check_implementation
from lsm_jax.ops.backends.run import run, static_of
from lsm_jax.ops.core import checks
from lsm_jax.ops.core.decays import forget
from lsm_jax.ops.core.segments import read_tokens, select
from lsm_jax.ops.core.shared_rows import (
    Update,
    emptied_by,
    ends_of_documents,
    newer_id,
    resume,
    state_axes,
    total_of,
    unless_restarted,
)
from lsm_jax.ops.core.states import DeltaState
from lsm_jax.ops.delta import shared_rows as delta_rows
from lsm_jax.ops.delta.delta_xla import by_xla
from lsm_jax.ops.delta.options import MatrixOptions
from lsm_jax.ops.log_linear.levels import level_between, merge_levels, positions_of
from lsm_jax.ops.log_linear.state import LogLinearState, log_linear_state
from lsm_jax.ops.log_linear.xla import Options
from lsm_jax.parallel import TOKENS, over_mesh
from lsm_jax.parallel.sequence import exchange

FORMS = ("recurrent", "chunk")
_MOST_TOKENS = 256  # of a chunk: the inverse of the delta rule costs their square for each token


def log_linear_memory(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T G V"],
    level_scales: Float[Array, "B T max(H,G) L"],
    beta: Float[Array, "B T G"] | None = None,
    log_decay: Float[Array, "B T G"] | None = None,
    *,
    scale: float | None = None,
    initial_state: LogLinearState | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    update_mask: Array | None = None,
    form: str = "chunk",
    implementation: str | tuple[str, ...] | None = None,
    chunk_size: int | None = None,
) -> tuple[Float[Array, "B T max(H,G) V"], LogLinearState]:
    """Write keys and values into memories of levels, and read each level with a weight of its own.

    Args:
        q: [B, T, H, K] queries; H is a multiple or a divisor of G.
        k: [B, T, Hk, K] keys, with `beta` of L2 norm at most 1; Hk divides G.
        v: [B, T, G, V] values; L memories for each of the G heads.
        level_scales: [B, T, max(H, G), L], λ, the weight of each level in the output of each head.
        beta: [B, T, G], from 0 to 2: the delta rule. None adds kᵀ v without erasing.
        log_decay: [B, T, G], log α, natural logarithm, at most 0. None means no decay.
        scale: multiplies q; None is `K ** -0.5`.
        initial_state: the state to continue from; None is an empty one. With position [B, S] there is one
            state per segment: the tokens of id s use state s - 1.
        segment_ids: [B, T] integers, 0 for padding; see `lsm_jax.ops.core.segments`.
        update_mask: [B, T], 0 for tokens that do not change the memory and have no position (they still read it).
        form: "recurrent" (token by token) or "chunk" (masked matrix products in each chunk, and a scan over chunks,
            which stores L memories for each chunk).
        implementation: None or "xla"; there is no fused kernel.
        chunk_size: tokens in a chunk, a power of two; None selects 64, 128 or 256 by the size of a memory.

    Returns:
        The output in v's dtype, and the final state in float32 (float64 if an input is).

    Raises:
        ValueError: a shape, number of heads, form, implementation or chunk size is not accepted.
    """
    op = "log_linear_memory"
    if form not in FORMS:
        raise ValueError(
            f"{op}: form={form!r}; accepted are 'recurrent', 'chunk' (levels depend on positions)"
        )
    check_implementation(op, implementation)
    batch, length, q_heads, _, heads, key_dim, value_dim = checks.check_qkv(op, q, k, v)
    checks.check_rows(op, batch, length, segment_ids, update_mask)
    shape = (batch, length, max(heads, q_heads), None)
    checks.check_shape(op, "level_scales", level_scales, shape, "B, T, H, L")
    checks.check_filled(op, "level_scales", level_scales)
    for name, gate in (("beta", beta), ("log_decay", log_decay)):
        if gate is not None:
            checks.check_shape(op, name, gate, (batch, length, heads), "B, T, G")
    checks.check_logarithm(op, "log_decay", log_decay)
    dtype = checks.compute_dtype(q, k, v, level_scales, beta, log_decay)
    empty = functools.partial(
        log_linear_state, batch, heads, level_scales.shape[3], key_dim, value_dim, dtype=dtype
    )
    state = checks.state_or_empty(op, initial_state, empty, segment_ids)
    batched = dict(
        q=q, k=k, v=v, level_scales=level_scales, beta=beta, log_decay=log_decay, state=state,
        segment_ids=segment_ids, update_mask=update_mask,
    )  # fmt: skip
    if chunk_size is None and state.position.ndim == 1:
        chunk_size = _default_chunk_size(key_dim * value_dim)
    size = checks.check_chunk_size(op, chunk_size, length)
    options = Options(
        scale=checks.scale_or_default(op, scale, key_dim),
        form=form,
        size=size,
        dtype=dtype,
        precision=checks.matmul_precision(q, k, v),
        fresh=initial_state is None,
    )
    axes: dict[str, Any] = dict.fromkeys(batched, TOKENS)
    axes["state"] = state_axes(state, segments=state.position.ndim == 2)
    return over_mesh(
        run,
        batched,
        {},
        static_of(op, options, implementation),
        axes=axes,
        out_axes=(TOKENS, "state"),
        in_sequence=_in_sequence,
    )


def _default_chunk_size(memory: int) -> int:
    """Return the number of tokens in a chunk for memories of `memory` numbers each: the greatest power of two for which
    the chunk's scores are at most twice as many, from 64 to 256.

    With one state per segment the default stays 64, since a segment's last chunk is padded.
    """
    size = checks.DEFAULT_CHUNK_SIZE
    while size < _MOST_TOKENS and (2 * size) ** 2 <= 2 * memory:
        size *= 2
    return size


class _Count(NamedTuple):
    """How many tokens of the document a row has had: the fields of `LogLinearState` without the memory."""

    position: Array
    segment_id: Array


class _Transition(NamedTuple):
    """The update that one device's tokens are to the memories before them: the log decay (None without) or, with `beta`, the matrix
    [B, G, K, K] that all levels go through, and the level [B] into which lower ones are merged.
    """

    log_decay: Array | None
    matrix: Array | None
    level: Array


def _in_sequence(axis, function, static, **arguments):
    """Compute `log_linear_memory` on one of several devices that have consecutive parts of each row: the outputs of its
    tokens, and the state after the whole row.

    The devices first exchange the numbers of their tokens, from which each knows its tokens' positions.
    """
    state, ids, mask = (arguments[n] for n in ("state", "segment_ids", "update_mask"))
    # A row's later devices begin with the state after the earlier ones.
    options = static.options._replace(fresh=False)
    static = static._replace(options=options)
    levels = arguments["level_scales"].shape[-1]
    batch, length = arguments["v"].shape[:2]
    num_segments = state.position.shape[1] if state.position.ndim == 2 else None
    tokens = read_tokens(ids, mask, jnp.zeros_like(state.segment_id), num_segments)
    restarts, first_id = ends_of_documents(ids, tokens.run)
    *_, count = positions_of(tokens, batch, length, jnp.zeros_like(state.position))
    counted = Update((), _Count(count, tokens.last_id), restarts, first_id)
    initial = _Count(state.position, state.segment_id.astype(tokens.last_id.dtype))
    entering, _ = exchange(axis, _count_on, counted, initial)
    position = emptied_by(entering, counted).position

    no_id = jnp.zeros_like(state.segment_id)
    start = LogLinearState(jnp.zeros_like(state.memory, options.dtype), position, no_id)
    _, written = function(static, **(arguments | {"state": start}))
    level = level_between(written.position - 1, position - 1, levels)
    decay, matrix = arguments["log_decay"], None
    if decay is not None:
        decay = select(tokens.written, decay.astype(options.dtype))
        decay = total_of(decay, tokens, num_segments, batch)
    if arguments["beta"] is not None:
        rows = arguments | {"state": DeltaState(start.memory[..., 0, :, :], no_id)}
        del rows["level_scales"]
        how = MatrixOptions(1.0, "chunk", options.size, options.dtype, options.precision)
        rows["constant_log_decay"] = None
        matrix, decay = delta_rows.update_of(how, by_xla, rows).transition, None
    update = Update(_Transition(decay, matrix, level), written, restarts, first_id)
    return resume(axis, function, (static,), arguments, update, _advance)


def _count_on(count: _Count, update: Update) -> _Count:
    """Return the number of tokens after one device's tokens, from that before them."""
    before = unless_restarted(update, emptied_by(count, update).position)
    return _Count(before + update.written.position, newer_id(count, update))


def _advance(state: LogLinearState, update: Update) -> LogLinearState:
    """Return the state after one device's tokens: the memories before them, decayed or multiplied by the transition and
    merged, plus what the tokens write. Where a document begins among these tokens, nothing of the state before is left.
    """
    state = emptied_by(state, update)
    how, memory = update.transition, state.memory
    if how.log_decay is not None:
        memory = forget(memory, how.log_decay[..., None, None, None])
    if how.matrix is not None:
        highest = jax.lax.Precision.HIGHEST
        memory = jnp.matmul(how.matrix[..., None, :, :], memory, precision=highest)
    level: Any = how.level[..., None, None, None, None]
    memory = unless_restarted(update, merge_levels(memory, level, -3))
    written: LogLinearState = update.written
    return LogLinearState(memory + written.memory, written.position, newer_id(state, update))
