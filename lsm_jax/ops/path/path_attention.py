"""PaTH attention (arXiv 2505.16381): softmax attention whose positions are products of the matrices of the tokens between
query and key.

`logit(t, j) = scale q_t H_t H_{t-1} ... H_{j+1} k_jᵀ + F_t - F_j`, `H_s = I - β_s w_sᵀ w_s`, with |w| = 1 and β in (0, 2).

F is the sum of the document's log forget gates, as in `attention`. The authors' code multiplies the gates by the scale
too; whoever wants their numbers passes `scale * log_forget`, as the mixer does.

In decoding all stored keys are multiplied by the new token's H, so that a token costs as much as it does to read them.
"""

from __future__ import annotations

import functools

from jaxtyping import Array, Float, Int

from lsm_jax.ops.attention.entrance import (
    axes_of,
    check_form,
    check_gates,
    check_tokens,
    state_or_empty,
)
from lsm_jax.ops.attention.shared_rows import run_in_shared_row
from lsm_jax.ops.attention.state import AttentionState
from lsm_jax.ops.backends.run import run, static_of
from lsm_jax.ops.core import checks
from lsm_jax.ops.path.state import path_attention_state
from lsm_jax.ops.path.xla import Options
from lsm_jax.parallel import over_mesh, sequence_shards


def path_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T G V"],
    w: Float[Array, "B T Hk K"],
    beta: Float[Array, "B T G"],
    *,
    log_forget: Float[Array, ...] | None = None,
    scale: float | None = None,
    initial_state: AttentionState | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    update_mask: Array | None = None,
    form: str = "chunk",
    implementation: str | tuple[str, ...] | None = None,
    chunk_size: int | None = None,
) -> tuple[Float[Array, "B T max(H,G) V"], AttentionState]:
    """Attend to all earlier tokens of the document, and turn what lies between by each token's own direction.

    Args:
        q: [B, T, H, K] queries; H is a multiple (grouped-query attention) or a divisor of G.
        k: [B, T, Hk, K] keys; Hk divides G.
        v: [B, T, G, V] values.
        w: [B, T, Hk, K], the directions of the matrices, of L2 norm at most 1.
        beta: [B, T, G], from 0 to 2: 1 removes the direction w of earlier keys, 2 reflects it.
        log_forget: [N] or [B, T, N], at most 0: the logarithm of each forget gate, with N = max(H, G) heads; None has
            no gates. The gates of masked tokens and of padding are ignored.
        scale: multiplies the scores of queries with keys; None is `K ** -0.5`.
        initial_state: the keys and values to continue from; with keys [B, S, ...] there is one state per
            segment: the tokens of id s use state s - 1. None is an empty state, with a capacity of T tokens.
        segment_ids: [B, T] integers, 0 for padding; see `lsm_jax.ops.core.segments`.
        update_mask: [B, T], 0 for tokens whose key, value and matrix are not written: they attend to the tokens before
            them, but not to themselves.
        form: "recurrent" (token by token) or "chunk" (one triangular solve a chunk, and queries that go back from chunk
            to chunk). Single tokens are always computed by the first.
        implementation: None or "xla"; there is no fused kernel.
        chunk_size: tokens in a chunk, a power of two; None is 64.

    Returns:
        The output in v's dtype, 0 for tokens that attend to no token and NaN for tokens beyond the state's capacity, and
        the final state. On a mesh whose devices share rows, every device receives the keys, values and matrices of all
        chunks, and computes its own tokens' outputs; complete rows in the recurrent form and with one state per segment.

    Raises:
        ValueError: a shape, number of heads, form, implementation or chunk size is not accepted.
    """
    op = "path_attention"
    check_form(op, form)
    batch, length, _, key_heads, heads, key_dim, value_dim = check_tokens(
        op, q, k, v,
        implementation=implementation, segment_ids=segment_ids, update_mask=update_mask,
    )  # fmt: skip
    checks.check_shape(op, "w", w, (batch, length, key_heads, key_dim), "B, T, Hk, K")
    checks.check_shape(op, "beta", beta, (batch, length, heads), "B, T, G")
    gates = None if log_forget is None else max(q.shape[2], heads)
    if gates is not None:
        log_forget = check_gates(op, log_forget, (batch, length, gates))
    size = checks.check_chunk_size(op, chunk_size, -(-length // sequence_shards(length)))
    dtype = checks.compute_dtype(q, k, v, w, beta, log_forget)
    empty = functools.partial(
        path_attention_state, batch, num_kv_heads=heads, key_dim=key_dim, value_dim=value_dim,
        forget_heads=gates, dtype=v.dtype,
    )  # fmt: skip
    state = state_or_empty(op, initial_state, empty, length, segment_ids)
    options = Options(
        scale=checks.scale_or_default(op, scale, key_dim),
        by_token=form == "recurrent" or length == 1,
        size=size,
        no_state=initial_state is None,
        dtype=dtype,
        precision=checks.matmul_precision(q, k, v),
    )
    batched = dict(
        q=q, k=k, v=v, w=w, beta=beta, log_forget=log_forget, state=state,
        segment_ids=segment_ids, update_mask=update_mask,
    )  # fmt: skip
    return over_mesh(
        run, batched, {}, static_of(op, options, implementation), **axes_of(batched), in_sequence=run_in_shared_row,
        multiple=size,
    )  # fmt: skip
