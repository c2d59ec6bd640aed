"""Causal softmax attention, whose memory is the keys and values themselves; with forget gates, forgetting attention."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lsm_jax.ops.attention.attend import attend, attend_shared_row
from lsm_jax.ops.attention.shared_rows import tokens_a_device
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
    implementation: str | None = None,
    prune: bool = True,
) -> tuple[Float[Array, "B T max(H,G) V"], AttentionState]:
    """`o_t = Σ_j softmax_j(scale q_t · k_j + F_t - F_j) v_j` over the written tokens j <= t of t's document.

    F is the sum of the document's `log_forget` up to and with a token, 0 without (forgetting attention, arXiv
    2503.02130): a token's own gate does not weaken it, and the first gate of a document has no effect.

    Args:
        q: [B, T, H, K] queries; H is a multiple (grouped-query attention) or a divisor of G.
        k: [B, T, Hk, K] keys; Hk divides G.
        v: [B, T, G, V] values.
        log_forget: [N] or [B, T, N], at most 0: the logarithm of each forget gate, N = max(H, G) heads. Constant gates -m_h are
            ALiBi's slopes m_h (arXiv 2108.12409). A gate under -4096 (-inf, too) leaves nothing and has no gradient. The gate of a
            token that is not written is not applied.
        window: see only the last `window` written tokens, the current one included; None is all of them.
        scale: multiplies the scores; None is `K ** -0.5`.
        initial_state: the keys and values to go on from; with keys [B, S, ...], segment id s has state s - 1. None is
            empty, and the final state then has room for T tokens (`window` with a window).
        segment_ids: [B, T] integers, 0 padding; see `lsm_jax.ops.core.segments`.
        update_mask: [B, T], 0 where a token's key is not kept: it sees the tokens before it, but not itself.
        implementation: None (cuDNN where it serves: NVIDIA, bfloat16 or float16, whole documents without state, mask or
            gates; the fused kernel where that serves: bfloat16 on Hopper, no state, no window along with ids
            or mask; else XLA), "xla" (blocks of queries; no [T, T] array is kept), "cudnn", "mosaic_gpu" or "mosaic_tpu"
            (the fused kernels). Where devices share a row, "mosaic_gpu" alone of the three serves, where a device has a
            multiple of 256 tokens.
        prune: a fused kernel passes over keys that gates have left less than e^-10 of a row, all together (arXiv 2504.06949).

    Returns:
        The output in v's dtype, 0 where a token sees nothing, and the final state. Without a window, a token beyond the
        state's capacity gives NaN: an array cannot raise.

    Raises:
        ValueError: shapes, heads, window or implementation that are not accepted; a state smaller than the window.
        NotImplementedError: "cudnn", "mosaic_gpu" or "mosaic_tpu" where it does not serve, with the reason.
    """
    op = "attention"
    check_implementation(op, implementation)
    batch, length, _, _, heads, key_dim, value_dim = checks.check_qkv(op, q, k, v)
    checks.check_rows(op, batch, length, segment_ids, update_mask)
    gates = None if log_forget is None else max(q.shape[2], heads)
    if gates is not None:
        log_forget = _check_gates(op, log_forget, (batch, length, gates))
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
            f"{op}: initial_state holds {capacity} tokens; window={window} needs as many"
        )
    fresh = initial_state is None
    options = AttentionOptions(
        window=window,
        scale=checks.scale_or_default(op, scale, key_dim),
        prune=prune,
        fresh=fresh,
        plain=fresh and segment_ids is None and update_mask is None,
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
        multiple=tokens_a_device(length, sequence_shards(length)),
    )


_CLOSED = -4096.0  # e to it is 0, in float64 too


def _check_gates(op: str, log_forget, shape: tuple[int, int, int]) -> Array:
    """Log gates of every token, [B, T, N], in float32 or wider ahead of the sum that a constant gate's gradient is."""
    if jnp.shape(log_forget) not in (shape, shape[2:]):
        raise ValueError(
            f"{op}: log_forget has shape {jnp.shape(log_forget)}; accepted are [N] and [B, T, N] = {shape[2:]} and {shape}"
        )
    if not jnp.issubdtype(jnp.result_type(log_forget), jnp.floating):
        raise ValueError(
            f"{op}: log_forget has dtype {jnp.result_type(log_forget)}; accepted are floating ones"
        )
    wide = jnp.promote_types(jnp.result_type(log_forget), jnp.float32)
    # Sums of larger ones would cost the other gates their digits, and in a tile of a kernel the scores.
    return jnp.broadcast_to(jnp.maximum(jnp.asarray(log_forget, wide), _CLOSED), shape)
