"""Causal softmax attention, whose memory is the keys and values of all tokens; with forget gates,
forgetting attention.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lsm_jax.ops.attention.attend import attend, attend_shared_row
from lsm_jax.ops.attention.shared_rows import tokens_per_device
from lsm_jax.ops.attention.state import AttentionState, attention_state
from lsm_jax.ops.attention.xla import AttentionOptions
from lsm_jax.ops.backends.registry import check_implementation
from lsm_jax.ops.backends.run import static_of
from lsm_jax.ops.core import checks
from lsm_jax.parallel import TOKENS, over_mesh, sequence_shards


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
    check_implementation(op, implementation)
    batch, length, _, _, heads, key_dim, value_dim = checks.check_qkv(op, q, k, v)
    checks.check_rows(op, batch, length, segment_ids, update_mask)
    gates = None if log_forget is None else max(q.shape[2], heads)
    if gates is not None:
        log_forget = check_gates(op, log_forget, (batch, length, gates))
    if window is not None and not checks.is_count(window):
        raise ValueError(f"{op}: window={window!r}; accepted are None and integers from 1")
    capacity = length if window is None else window
    if isinstance(initial_state, AttentionState) and jnp.ndim(initial_state.keys) >= 4:
        capacity = initial_state.keys.shape[-3]
    empty = functools.partial(
        attention_state,
        batch,
        capacity,
        heads,
        key_dim,
        value_dim,
        forget_heads=gates,
        dtype=k.dtype,
    )
    state = checks.state_or_empty(op, initial_state, empty, segment_ids)
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
    axes: dict[str, Any] = dict.fromkeys(batched, TOKENS)
    rows = ("batch",) if state.count.ndim == 1 else ("batch", None)
    axes["state"] = jax.tree.map(lambda _: (*rows, None, "heads"), state)._replace(
        count=rows, segment_id=("batch",)
    )
    return over_mesh(
        attend,
        batched,
        {},
        static_of(op, options, implementation),
        axes=axes,
        out_axes=(TOKENS, "state"),
        in_sequence=attend_shared_row,
        multiple=tokens_per_device(length, sequence_shards(length)),
    )


_CLOSED_GATE = -4096.0  # its exponential is 0, in float64 too


def check_gates(op: str, log_forget, shape: tuple[int, int, int]) -> Array:
    """Raise ValueError if the argument `log_forget` of `attention` is not accepted; return the log gates of
    all tokens, [B, T, N], in at least float32: the gradient of a constant gate is a sum over tokens.
    """
    if jnp.shape(log_forget) not in (shape, shape[2:]):
        raise ValueError(
            f"{op}: log_forget has shape {jnp.shape(log_forget)}; accepted are [N] and [B, T, N] = {shape[2:]} and {shape}"
            f"{checks.heads_first(log_forget, *shape)}"
        )
    if not jnp.issubdtype(jnp.result_type(log_forget), jnp.floating):
        raise ValueError(
            f"{op}: log_forget has dtype {jnp.result_type(log_forget)}; accepted are floating dtypes"
        )
    checks.check_logarithm(op, "log_forget", log_forget)
    wide = jnp.promote_types(jnp.result_type(log_forget), jnp.float32)
    # Larger numbers in a sum would cost the other gates their digits, and in a kernel's tile the scores.
    return jnp.broadcast_to(jnp.maximum(jnp.asarray(log_forget, wide), _CLOSED_GATE), shape)
