"""Causal softmax attention, whose memory is the keys and values themselves."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lsm_jax.ops import checks, chosen
from lsm_jax.ops.segments import Tokens, finish_output, read_tokens, select
from lsm_jax.parallel import over_batch

_IMPLEMENTATIONS = (None, "xla", "cudnn")


class AttentionState(NamedTuple):
    """Keys and values of the document so far, in a ring of C places: the token of rank r stands at r % C.

    Attributes:
        keys: [B, C, G, K], or [B, S, C, G, K] with one state a segment.
        values: [B, C, G, V] or [B, S, C, G, V].
        count: [B] or [B, S], how many tokens the document has written.
        segment_id: [B], the last nonzero segment id seen, 0 before any.
    """

    keys: Float[Array, ...]
    values: Float[Array, ...]
    count: Int[Array, ...]
    segment_id: Int[Array, " B"]


def attention_state(
    batch_size: int,
    capacity: int,
    num_kv_heads: int,
    key_dim: int,
    value_dim: int,
    *,
    num_segments: int | None = None,
    dtype=jnp.float32,
) -> AttentionState:
    """An empty `AttentionState` for documents of up to `capacity` tokens; a sliding window needs only its own length."""
    rows = (batch_size,) if num_segments is None else (batch_size, num_segments)
    return AttentionState(
        jnp.zeros((*rows, capacity, num_kv_heads, key_dim), dtype),
        jnp.zeros((*rows, capacity, num_kv_heads, value_dim), dtype),
        jnp.zeros(rows, jnp.int32),
        jnp.zeros(batch_size, jnp.int32),
    )


def attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T G V"],
    *,
    window: int | None = None,
    scale: float | None = None,
    initial_state: AttentionState | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    update_mask: Array | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T max(H,G) V"], AttentionState]:
    """`o_t = Σ_j softmax_j(scale q_t · k_j) v_j` over the written tokens j <= t of t's document.

    Args:
        q: [B, T, H, K] queries; H is a multiple (grouped-query attention) or a divisor of G.
        k: [B, T, Hk, K] keys; Hk divides G.
        v: [B, T, G, V] values.
        window: see only the last `window` written tokens, the current one included; None is all of them.
        scale: multiplies the scores; None is `K ** -0.5`.
        initial_state: the keys and values to go on from; with keys [B, S, ...], segment id s has state s - 1. None is
            empty, and the final state then has room for T tokens (`window` with a window).
        segment_ids: [B, T] integers, 0 padding; see `lsm_jax.ops.segments`.
        update_mask: [B, T], 0 where a token's key is not kept: it sees the tokens before it, but not itself.
        implementation: None (cuDNN where it serves: NVIDIA, bfloat16 or float16, whole documents without state or mask;
            else XLA), "xla" (blocks of queries; no [T, T] array is kept) or "cudnn".

    Returns:
        The output in v's dtype, 0 where a token sees nothing, and the final state. Without a window, a token beyond the
        state's capacity gives NaN: an array cannot raise.

    Raises:
        ValueError: shapes, heads, window or implementation that are not accepted; a state smaller than the window.
        NotImplementedError: "cudnn" where it does not serve, with the reason.
    """
    op = "attention"
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(
            f"{op}: implementation={implementation!r}; accepted are {_IMPLEMENTATIONS}"
        )
    batch, length, _, _, heads, key_dim, value_dim = checks.check_qkv(op, q, k, v)
    checks.check_rows(op, batch, length, segment_ids, update_mask)
    if window is not None and not checks.is_count(window):
        raise ValueError(f"{op}: window={window!r}; accepted are None and integers from 1")
    capacity = length if window is None else window
    if isinstance(initial_state, AttentionState) and jnp.ndim(initial_state.keys) >= 4:
        capacity = initial_state.keys.shape[-3]
    empty = functools.partial(
        attention_state, batch, capacity, heads, key_dim, value_dim, dtype=k.dtype
    )
    state = checks.state_or_empty(op, initial_state, empty, segment_ids)
    if window is not None and capacity < window:
        raise ValueError(
            f"{op}: initial_state holds {capacity} tokens; window={window} needs as many"
        )
    plain = initial_state is None and segment_ids is None and update_mask is None
    reason = _why_not_cudnn(q, k, v, plain)
    if implementation == "cudnn" and reason is not None:
        raise NotImplementedError(f"{op}: implementation='cudnn': {reason}")
    if implementation == "xla" or reason is not None:
        chosen.note(op, "xla" if implementation == "xla" else f"xla (cuDNN takes {reason})")
    else:
        chosen.note(op, "cudnn" if implementation else "cudnn on NVIDIA, xla elsewhere")
    options = _Options(
        window=window,
        scale=checks.scale_or_default(op, scale, key_dim),
        cudnn={"cudnn": "always", "xla": "never", None: "maybe"}[implementation]
        if reason is None
        else "never",
        plain=plain,
    )
    batched = dict(q=q, k=k, v=v, state=state, segment_ids=segment_ids, update_mask=update_mask)
    return over_batch(_attention, batched, {}, options)


class _Options(NamedTuple):
    window: int | None
    scale: float
    cudnn: str
    plain: bool


class _Places(NamedTuple):
    """Where tokens stand: a document each, and a rank among its written tokens; [B, T]."""

    document: Array
    rank: Array
    written: Array


# Compiled as a whole also when called outside `jax.jit`, as in a notebook.
@functools.partial(jax.jit, static_argnums=0)
def _attention(options, q, k, v, state, segment_ids, update_mask):
    batch, length, heads, value_dim = v.shape
    num_segments = state.keys.shape[1] if state.keys.ndim == 5 else None
    tokens = read_tokens(segment_ids, update_mask, state.segment_id, num_segments)
    k = checks.spread_keys(k, heads)
    places = _place(tokens, state, batch, length)
    k, v = select(tokens.written, k), select(tokens.written, v)
    final = _remember(state, k, v, places, tokens)
    if options.plain:
        output = _plain(options, q, k, v)
    else:
        output = _with_state(options, select(tokens.real, q), k, v, places, state)
        if options.window is None:
            beyond = places.rank >= state.keys.shape[-3]
            output = jnp.where(beyond[:, :, None, None], jnp.nan, output)
    return finish_output(tokens, output).astype(v.dtype), final


def _place(tokens: Tokens, state: AttentionState, batch: int, length: int) -> _Places:
    written = tokens.written
    if written is None:
        written = jnp.ones((batch, length), bool)
    if tokens.slot is not None:
        own = tokens.slot[:, :, None] == jnp.arange(state.keys.shape[1])
        seen = state.count[:, None] + jnp.cumsum(own & written[:, :, None], axis=1)
        rank = jnp.take_along_axis(seen, tokens.slot[:, :, None], axis=2)[..., 0] - 1
        return _Places(tokens.slot, rank.astype(jnp.int32), written)
    seen = jnp.cumsum(written, axis=1, dtype=jnp.int32)
    if tokens.run is None:
        return _Places(jnp.zeros_like(seen), seen - 1 + state.count[:, None], written)
    begins = jnp.diff(tokens.run, axis=1, prepend=jnp.zeros_like(tokens.run[:, :1])) > 0
    base = jax.lax.cummax(jnp.where(begins, seen - written, 0), axis=1)
    carried = jnp.where(tokens.run == 0, state.count[:, None], 0)
    return _Places(tokens.run, seen - base - 1 + carried, written)


def _remember(state: AttentionState, k, v, places: _Places, tokens: Tokens) -> AttentionState:
    """Write the tokens into the rings; what a new document does not overwrite, its count hides."""
    capacity = state.keys.shape[-3]
    batch = k.shape[0]
    keep = places.written
    if tokens.slot is not None:
        slots = state.keys.shape[1]
        own = (places.document[:, :, None] == jnp.arange(slots)) & places.written[:, :, None]
        count = state.count + jnp.sum(own, axis=1, dtype=jnp.int32)
        total = jnp.take_along_axis(count, places.document, axis=1)
        offset = places.document * capacity
    else:
        slots = 1
        keep = keep & (places.document == places.document[:, -1:])
        count = total = places.rank[:, -1] + 1
        total = total[:, None]
        offset = 0
    keep = keep & (places.rank >= total - capacity)
    index = jnp.where(keep, offset + places.rank % capacity, slots * capacity)

    def write(ring, new):
        flat = ring.reshape(batch, slots * capacity, *ring.shape[-2:])
        put = jax.vmap(lambda row, i, x: row.at[i].set(x, mode="drop"))
        return put(flat, index, new.astype(ring.dtype)).reshape(ring.shape)

    return AttentionState(write(state.keys, k), write(state.values, v), count, tokens.last_id)


def _with_state(options: _Options, q, k, v, places: _Places, state: AttentionState) -> Array:
    """Attend to what the state holds and to the call's own tokens, [B, T, H, V]."""
    batch, capacity = k.shape[0], state.keys.shape[-3]
    rings = state.keys.reshape(batch, -1, *state.keys.shape[-2:])
    held = state.values.reshape(batch, -1, *state.values.shape[-2:])
    slots = rings.shape[1] // capacity
    newest = state.count.reshape(batch, slots, 1) - 1
    ranks = newest - (newest - jnp.arange(capacity)) % capacity  # below 0 where nothing was written
    ranks = ranks.reshape(batch, slots * capacity)
    documents = jnp.broadcast_to(jnp.repeat(jnp.arange(slots), capacity), ranks.shape)
    key_rank = jnp.concatenate([ranks, places.rank], axis=1)
    key_document = jnp.concatenate([documents, places.document], axis=1)
    key_valid = jnp.concatenate([ranks >= 0, places.written], axis=1)
    keys = jnp.concatenate([rings.astype(k.dtype), k], axis=1)
    values = jnp.concatenate([held.astype(v.dtype), v], axis=1)

    def sees(document, rank):
        seen = key_valid[:, None] & (document[:, :, None] == key_document[:, None])
        distance = rank[:, :, None] - key_rank[:, None]
        seen = seen & (distance >= 0)
        return seen if options.window is None else seen & (distance < options.window)

    return _by_query_blocks(
        options, q, (places.document, places.rank), lambda *where: (keys, values, sees(*where))
    )


def _plain(options: _Options, q, k, v) -> Array:
    def xla(q, k, v):
        return _causal(options, q, k, v).astype(v.dtype)

    def cudnn(q, k, v):
        local = None if options.window is None else (options.window - 1, 0)
        return jax.nn.dot_product_attention(
            q, k, v, scale=options.scale, is_causal=True, local_window_size=local,
            implementation="cudnn",
        )  # fmt: skip

    if options.cudnn == "always":
        return cudnn(q, k, v)
    if options.cudnn == "never":
        return xla(q, k, v)
    return jax.lax.platform_dependent(q, k, v, cuda=cudnn, default=xla)


def _causal(options: _Options, q, k, v) -> Array:
    """Whole documents: masks from positions alone; with a window, only the keys in reach of a block are read."""
    length = q.shape[1]
    block = _block_size(length, length)
    position = jnp.arange(length)[None]
    if options.window is None or options.window + block >= length:

        def near(start):
            distance = start[:, :, None] - position[:, None]
            seen = distance >= 0
            return k, v, seen if options.window is None else seen & (distance < options.window)

        return _by_query_blocks(options, q, (position,), near)

    reach = options.window - 1
    padding = [(0, 0), (reach, block), (0, 0), (0, 0)]
    keys, values = jnp.pad(k, padding), jnp.pad(v, padding)

    def band(start):
        first = start[0, 0]
        cut = functools.partial(
            jax.lax.dynamic_slice_in_dim, start_index=first, slice_size=reach + block, axis=1
        )
        there = first - reach + jnp.arange(reach + block)
        distance = start[:, :, None] - there
        seen = (distance >= 0) & (distance < options.window) & (there >= 0)
        return cut(keys), cut(values), seen

    return _by_query_blocks(options, q, (position,), band, block)


def _block_size(length: int, keys: int) -> int:
    """Queries a block: about a million scores a head, so that memory does not grow with T squared."""
    return min(length, max(128, (1 << 20) // keys))


def _by_query_blocks(options: _Options, q, where, lookup, block: int | None = None) -> Array:
    """Softmax attention of blocks of queries, scanned; the backward pass recomputes the scores.

    `where` holds [B or 1, T] descriptions of the queries; `lookup(*where of a block)` gives keys [B, S, G, K], values and
    which of them each query sees, [B or 1, block, S].
    """
    batch, length, query_heads, key_dim = q.shape

    def attend(q, *where):
        keys, values, seen = lookup(*where)
        heads = values.shape[2]
        queries = checks.group_queries(q, heads)
        dtype = checks.compute_dtype(q, keys, values)
        precision = checks.matmul_precision(q, keys, values)
        scores = options.scale * jnp.einsum(
            "btgrk,bsgk->bgrts", queries.astype(dtype), keys.astype(dtype), precision=precision
        )
        seen = seen[:, None, None]
        top = jnp.max(jnp.where(seen, scores, -jnp.inf), axis=-1, keepdims=True)
        top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
        weights = jnp.where(seen, jnp.exp(jnp.where(seen, scores - top, 0)), 0)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        weights = weights / jnp.where(total > 0, total, 1)
        output = jnp.einsum("bgrts,bsgv->btgrv", weights, values.astype(dtype), precision=precision)
        return output.reshape(*output.shape[:2], -1, output.shape[-1])

    block = block or _block_size(length, lookup_length(lookup, where))
    if block >= length:
        return attend(q, *where)
    count = -(-length // block)

    def blocks(x):
        x = jnp.pad(x, [(0, 0), (0, count * block - length)] + [(0, 0)] * (x.ndim - 2), mode="edge")
        return jnp.moveaxis(x.reshape(x.shape[0], count, block, *x.shape[2:]), 1, 0)

    body = jax.checkpoint(lambda _, x: (None, attend(*x)))
    _, output = jax.lax.scan(body, None, (blocks(q), *map(blocks, where)))
    output = jnp.moveaxis(output, 0, 1).reshape(batch, count * block, *output.shape[3:])
    return output[:, :length]


def lookup_length(lookup, where) -> int:
    """How many keys `lookup` gives."""
    return jax.eval_shape(lambda *w: lookup(*w)[0], *where).shape[1]


def _why_not_cudnn(q, k, v, plain: bool) -> str | None:
    """Why cuDNN does not serve these inputs, or None. The platform is not asked: lowering decides that."""
    if not plain:
        return "only whole documents: no initial_state, segment_ids or update_mask"
    if {q.dtype, k.dtype, v.dtype} not in ({jnp.dtype(jnp.bfloat16)}, {jnp.dtype(jnp.float16)}):
        return f"bfloat16 or float16 inputs, not {q.dtype}"
    if k.shape[2] != v.shape[2] or q.shape[2] % v.shape[2]:
        return "as many key as value heads, dividing the query heads"
    if q.shape[3] != v.shape[3] or q.shape[3] % 8 or q.shape[3] > 128:
        return "key_dim = value_dim, a multiple of 8 up to 128"
    if q.shape[1] < 2:
        return "T of at least 2"
    return _cudnn_missing()


@functools.cache
def _cudnn_missing() -> str | None:
    try:
        version = jax.local_devices(backend="cuda")[0].client.platform_version
    except RuntimeError:
        return "an NVIDIA device, and this host has none"
    return None if version else "no cuDNN"
