"""MesaNet's memory (arXiv 2506.05233): the ridge regression of values on keys over the past, solved for each query.

`S_t = α_t S_{t-1} + β_t k_tᵀ k_t`, `M_t = α_t M_{t-1} + β_t k_tᵀ v_t`, `(S_t + diag Λ) x_t = q_t`, `o_t = x_t M_t`.

The system is solved by conjugate gradients. Their gradient is implicit: for the gradient dx of the solution they solve
`(S + Λ) u = dx`, and then dq = u, dS = -uᵀ x, dΛ = -u ⊙ x; no step is stored.

flash-linear-attention starts from 0 in training and from q / (diag S + Λ) in decoding, so that few steps have different
results there. Here `start` is the same in every form and at every length; it is 0 unless the caller says otherwise.
It also adds 1e-5 to the denominators, at which the solution stalls at an error of 4e-4; here `epsilon` is 0.
"""

from __future__ import annotations

import functools
from typing import Any

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
    staying,
    total_of,
    unless_restarted,
)
from lsm_jax.ops.linear.shared_rows import weighed_writes
from lsm_jax.ops.mesa.state import MesaState, mesa_state
from lsm_jax.ops.mesa.xla import Options
from lsm_jax.parallel import TOKENS, over_mesh

STARTS = ("zero", "diagonal")
GRADIENTS = ("implicit", "unrolled")


def mesa_memory(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T G V"],
    beta: Float[Array, "B T G"],
    regularizer: Float[Array, "G K"],
    log_decay: Float[Array, "B T G"] | None = None,
    *,
    steps: int = 30,
    start: str = "zero",
    epsilon: float = 0.0,
    gradient: str = "implicit",
    initial_state: MesaState | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    update_mask: Array | None = None,
    form: str = "chunk",
    implementation: str | tuple[str, ...] | None = None,
    chunk_size: int | None = None,
) -> tuple[Float[Array, "B T max(H,G) V"], MesaState]:
    """Regress values on keys with the weights β and a decay, and predict the value of each query.

    Args:
        q: [B, T, H, K] queries, which are not scaled; H is a multiple or a divisor of G.
        k: [B, T, Hk, K] keys; Hk divides G.
        v: [B, T, G, V] values; two memories for each of the G heads.
        beta: [B, T, G], the weight of each token, at least 0.
        regularizer: [G, K], Λ, above 0.
        log_decay: [B, T, G], log α, natural logarithm, at most 0. None means no decay.
        steps: steps of conjugate gradients for each query.
        start: the first x, "zero" or "diagonal", q / (diag S + Λ).
        epsilon: added to both denominators of a step, at least 0.
        gradient: "implicit" (that of the solution, by as many steps again) or "unrolled" (that of the steps, which are
            stored); both are equal once the steps have converged.
        initial_state: the state to continue from; None is an empty one. With keys [B, S, ...] there is one
            state per segment: the tokens of id s use state s - 1.
        segment_ids: [B, T] integers, 0 for padding; see `lsm_jax.ops.core.segments`.
        update_mask: [B, T], 0 for tokens that do not change the memory (they still read it).
        form: "recurrent" (token by token), "chunk" (matrix products in each chunk, and a scan over chunks) or
            "associative" (an associative scan over chunks).
        implementation: None or "xla"; there is no fused kernel.
        chunk_size: tokens in a chunk, a power of two; None is 64.

    Returns:
        The output in v's dtype, and the final state in float32 (float64 if an input is).

    Raises:
        ValueError: a shape, number of heads or steps, start, gradient, form, implementation or chunk size is not
            accepted.
    """
    op = "mesa_memory"
    checks.check_form(op, form)
    check_implementation(op, implementation)
    batch, length, _, _, heads, key_dim, value_dim = checks.check_qkv(op, q, k, v)
    checks.check_rows(op, batch, length, segment_ids, update_mask)
    checks.check_shape(op, "beta", beta, (batch, length, heads), "B, T, G")
    checks.check_shape(op, "regularizer", regularizer, (heads, key_dim), "G, K")
    if log_decay is not None:
        checks.check_shape(op, "log_decay", log_decay, (batch, length, heads), "B, T, G")
    checks.check_logarithm(op, "log_decay", log_decay)
    for name, value, accepted in (("start", start, STARTS), ("gradient", gradient, GRADIENTS)):
        if value not in accepted:
            raise ValueError(
                f"{op}: {name}={value!r}; accepted are {accepted[0]!r}, {accepted[1]!r}"
            )
    if not checks.is_count(steps):
        raise ValueError(f"{op}: steps={steps!r}; accepted are integers from 1")
    size = checks.check_chunk_size(op, chunk_size, length)
    dtype = checks.compute_dtype(q, k, v, beta, regularizer, log_decay)
    empty = functools.partial(mesa_state, batch, heads, key_dim, value_dim, dtype=dtype)
    state = checks.state_or_empty(op, initial_state, empty, segment_ids)
    batched = dict(
        q=q, k=k, v=v, beta=beta, log_decay=log_decay, state=state, segment_ids=segment_ids,
        update_mask=update_mask,
    )  # fmt: skip
    options = Options(
        steps=int(steps),
        start=start,
        epsilon=checks.check_number(op, "epsilon", epsilon, at_least=0),
        gradient=gradient,
        form=form,
        size=size,
        dtype=dtype,
        precision=checks.matmul_precision(q, k, v),
    )
    axes: dict[str, Any] = dict.fromkeys(batched, TOKENS) | {"regularizer": ("heads",)}
    axes["state"] = state_axes(state, segments=state.keys.ndim == 5)
    return over_mesh(
        run,
        batched,
        dict(regularizer=regularizer),
        static_of(op, options, implementation),
        axes=axes,
        out_axes=(TOKENS, "state"),
        in_sequence=_in_sequence,
    )


def _in_sequence(axis, function, static, **arguments):
    """Compute `mesa_memory` on one of several devices that have consecutive parts of each row: the outputs of its
    tokens, and the state after the whole row. Both memories are linear, so that only they are exchanged.
    """
    update = _update(function, static, **arguments)
    return resume(axis, function, (static,), arguments, update, _advance)


def _update(
    function, static, q, k, v, beta, log_decay, state, segment_ids, update_mask, regularizer
) -> Update:
    """Return the effect of this device's tokens on both memories as one update: the sum of their log decays, and what
    they write.
    """
    batch, _, heads, _ = v.shape
    num_segments = state.keys.shape[1] if state.keys.ndim == 5 else None
    empty = jax.tree.map(jnp.zeros_like, state)
    tokens = read_tokens(segment_ids, update_mask, empty.segment_id, num_segments)
    restarts, first_id = ends_of_documents(segment_ids, tokens.run)
    dtype, precision = static.options.dtype, static.options.precision
    decay = None if log_decay is None else select(tokens.written, log_decay.astype(dtype))
    total = total_of(decay, tokens, num_segments, batch)
    if num_segments is not None:
        _, written = function(
            static, q=q, k=k, v=v, beta=beta, log_decay=log_decay, state=empty,
            segment_ids=segment_ids, update_mask=update_mask, regularizer=regularizer,
        )  # fmt: skip
        return Update(total, written, restarts, first_id)
    stays = staying(tokens)
    k = checks.spread_keys(k, heads).astype(dtype)
    weighed = select(stays, beta.astype(dtype)[..., None] * k)
    decay = None if decay is None else decay[..., None]
    keys, values = (
        weighed_writes(weighed, select(stays, x.astype(dtype)), decay, None, stays, precision)
        for x in (k, v)
    )
    return Update(total, MesaState(keys, values, tokens.last_id), restarts, first_id)


def _advance(state: MesaState, update: Update) -> MesaState:
    """Return the state after the tokens of one device: the memories before them, decayed by the sum of their log decays
    (`update.transition`), plus what these tokens write.

    Where a document begins among these tokens, nothing of the state before is left.
    """
    state, decay = emptied_by(state, update), update.transition
    keys, values = state.keys, state.values
    if decay is not None:
        keys, values = (forget(x, decay[..., None, None]) for x in (keys, values))
    return MesaState(
        unless_restarted(update, keys) + update.written.keys,
        unless_restarted(update, values) + update.written.values,
        newer_id(state, update),
    )
