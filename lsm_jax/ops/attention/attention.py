"""Causal softmax attention, whose memory is the keys and values of all tokens; with forget gates,
forgetting attention.
"""

from __future__ import annotations

import functools

from jaxtyping import Array, Float, Int

from lsm_jax.ops.attention.attend import attend, attend_shared_row
from lsm_jax.ops.attention.entrance import axes_of, check_gates, check_tokens, state_or_empty
from lsm_jax.ops.attention.shared_rows import tokens_per_device
from lsm_jax.ops.attention.state import AttentionState, attention_state
from lsm_jax.ops.attention.xla import AttentionOptions
from lsm_jax.ops.backends.run import static_of
from lsm_jax.ops.core import checks
from lsm_jax.parallel import over_mesh, sequence_shards


def attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T G V"],
    *,
    log_forget: Float[Array, ...] | None = None,
    window: int | None = None,
    scale: float | None = None,
    initial_state: AttentionState | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    update_mask: Array | None = None,
    implementation: str | tuple[str, ...] | None = None,
    prune: bool = True,
) -> tuple[Float[Array, "B T max(H,G) V"], AttentionState]:
    """`o_t = Σ_j softmax_j(scale q_t · k_j + F_t - F_j) v_j` over the written tokens j <= t of t's
    document.

    F is the inclusive sum of the document's `log_forget`, and 0 without gates (forgetting attention, arXiv
    2503.02130). The weight of a token does not depend on its own gate, and the first gate of a document has
    no effect.

    Args:
        q: [B, T, H, K] queries; H is a multiple (grouped-query attention) or a divisor of G.
        k: [B, T, Hk, K] keys; Hk divides G.
        v: [B, T, G, V] values.
        log_forget: [N] or [B, T, N], at most 0: the logarithm of each forget gate, with N = max(H, G)
            heads. Constant gates -m_h give ALiBi with slopes m_h (arXiv 2108.12409). A gate below -4096
            (-inf included) removes all earlier tokens and has no gradient. The gates of masked tokens and
            of padding are ignored.
        window: each token attends to the last `window` written tokens, itself included; None means to all
            of them.
        scale: multiplies the scores; None is `K ** -0.5`.
        initial_state: the keys and values to continue from. With keys [B, S, ...] there is one state per
            segment: the tokens of id s use state s - 1. None is an empty state, with a capacity of T tokens
            (of `window` tokens with a window).
        segment_ids: [B, T] integers, 0 for padding; see `lsm_jax.ops.core.segments`.
        update_mask: [B, T], 0 for tokens whose key and value are not written: they attend to the tokens
            before them, but not to themselves.
        implementation: None (the first automatic backend that supports the call; see docs/kernels.md), a
            backend's name ("xla", "cudnn", "mosaic_gpu", "triton", ...), or a tuple of names in order of
            preference. "xla" computes blocks of queries and never stores a [T, T] array. Where rows are split
            over devices, "xla", "mosaic_gpu" and "triton" are supported.
        prune: a fused kernel skips keys whose weights after the gates sum to less than e^-10 of a query's
            total weight (arXiv 2504.06949).

    Returns:
        The output in v's dtype, 0 for tokens that attend to no token, and the final state. Without a
        window, the output of a token beyond the state's capacity is NaN: an array cannot raise.

    Raises:
        ValueError: a shape, number of heads, window or implementation is not accepted, or the state's
            capacity is less than the window.
        NotImplementedError: no backend of the given names supports the call; the message names the
            requirement.
    """
    op = "attention"
    batch, length, _, _, heads, key_dim, value_dim = check_tokens(
        op, q, k, v,
        implementation=implementation, segment_ids=segment_ids, update_mask=update_mask,
    )  # fmt: skip
    gates = None if log_forget is None else max(q.shape[2], heads)
    if gates is not None:
        log_forget = check_gates(op, log_forget, (batch, length, gates))
    if window is not None and not checks.is_count(window):
        raise ValueError(f"{op}: window={window!r}; accepted are None and integers from 1")
    empty = functools.partial(
        attention_state, batch, num_kv_heads=heads, key_dim=key_dim, value_dim=value_dim,
        forget_heads=gates, dtype=k.dtype,
    )  # fmt: skip
    state = state_or_empty(
        op, initial_state, empty, length if window is None else window, segment_ids
    )
    capacity = state.keys.shape[-3]
    if window is not None and capacity < window:
        raise ValueError(
            f"{op}: initial_state has a capacity of {capacity} tokens; accepted are capacities from window={window}"
        )
    no_state = initial_state is None
    options = AttentionOptions(
        window=window,
        scale=checks.scale_or_default(op, scale, key_dim),
        prune=prune,
        no_state=no_state,
        unmasked=no_state and segment_ids is None and update_mask is None,
    )
    batched = dict(
        q=q,
        k=k,
        v=v,
        log_forget=log_forget,
        state=state,
        segment_ids=segment_ids,
        update_mask=update_mask,
    )
    return over_mesh(
        attend,
        batched,
        {},
        static_of(op, options, implementation),
        **axes_of(batched),
        in_sequence=attend_shared_row,
        multiple=tokens_per_device(length, sequence_shards(length)),
    )
