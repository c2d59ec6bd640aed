"""Causal softmax attention, whose memory is the keys and values themselves; with forget gates, forgetting attention."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lsm_jax.ops.attention import cudnn as attention_cudnn
from lsm_jax.ops.attention import kernels as attention_kernels
from lsm_jax.ops.attention import shared_rows as attention_sequence
from lsm_jax.ops.attention.forget_gates import GateSum, sum_gates
from lsm_jax.ops.attention.query_blocks import attend_causally, attend_in_blocks
from lsm_jax.ops.backends import chosen
from lsm_jax.ops.core import checks
from lsm_jax.ops.core.segments import Tokens, finish_output, read_tokens, select
from lsm_jax.parallel import TOKENS, over_mesh, sequence_shards

_IMPLEMENTATIONS = (None, "xla", *attention_kernels.PLATFORMS)


class AttentionState(NamedTuple):
    """Keys and values of the document so far, in a ring of C places: the token of rank r stands at r % C.

    Attributes:
        keys: [B, C, G, K], or [B, S, C, G, K] with one state a segment.
        values: [B, C, G, V] or [B, S, C, G, V].
        count: [B] or [B, S], how many tokens the document has written.
        segment_id: [B], the last nonzero segment id seen, 0 before any.
        log_forget: with forget gates, the sum of the document's log gates up to and with each token: high and low part
            [B, C, N] or [B, S, C, N] each, float32, N the output's heads. None without.
    """

    keys: Float[Array, ...]
    values: Float[Array, ...]
    count: Int[Array, ...]
    segment_id: Int[Array, " B"]
    log_forget: GateSum | None = None


def attention_state(
    batch_size: int,
    capacity: int,
    num_kv_heads: int,
    key_dim: int,
    value_dim: int,
    *,
    num_segments: int | None = None,
    forget_heads: int | None = None,
    dtype=jnp.float32,
) -> AttentionState:
    """An empty `AttentionState` for documents of up to `capacity` tokens; a sliding window needs only its own length.

    `forget_heads` is the number of forget gates, one a head of the output; None is for attention without.
    """
    rows = (batch_size,) if num_segments is None else (batch_size, num_segments)
    sums = None
    if forget_heads is not None:
        wide = jnp.promote_types(dtype, jnp.float32)
        sums = GateSum(*(jnp.zeros((*rows, capacity, forget_heads), wide) for _ in range(2)))
    return AttentionState(
        jnp.zeros((*rows, capacity, num_kv_heads, key_dim), dtype),
        jnp.zeros((*rows, capacity, num_kv_heads, value_dim), dtype),
        jnp.zeros(rows, jnp.int32),
        jnp.zeros(batch_size, jnp.int32),
        sums,
    )


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
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(
            f"{op}: implementation={implementation!r}; accepted are {_IMPLEMENTATIONS}"
        )
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
    fresh, whole = initial_state is None, segment_ids is None and update_mask is None
    options = _Options(
        window=window,
        scale=checks.scale_or_default(op, scale, key_dim),
        backends=_choose(op, implementation, q, k, v, fresh, whole, window, gates is not None),
        sure=implementation is not None,
        plain=fresh and whole,
        fresh=fresh,
        prune=prune,
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
        _attention, batched, {}, options,
        axes=axes, out_axes=(TOKENS, "state"), in_sequence=_in_sequence,
        multiple=attention_sequence.tokens_a_device(length, sequence_shards(length)),
    )  # fmt: skip


def _in_sequence(
    axis, function, options, q, k, v, log_forget, state, segment_ids, update_mask
) -> tuple[Array, AttentionState]:
    """`_attention` where devices hold parts of a row; every device finds the final state for itself."""
    del function
    batch, own_length, heads, _ = v.shape
    num_segments = state.keys.shape[1] if state.keys.ndim == 5 else None
    k, v, log_forget, segment_ids, update_mask = attention_sequence.gather_tokens(
        axis, (k, v, log_forget, segment_ids, update_mask)
    )
    length = v.shape[1]
    tokens = read_tokens(segment_ids, update_mask, state.segment_id, num_segments)
    places = _place(tokens, state, batch, length)
    k, v = select(tokens.written, checks.spread_keys(k, heads)), select(tokens.written, v)
    sums = None if log_forget is None else sum_gates(log_forget, tokens, _newest_sum(state))
    final = _remember(state, k, v, sums, places, tokens)

    def own(x):
        here = jax.lax.axis_index(axis)
        return jax.lax.dynamic_slice_in_dim(x, here * own_length, own_length, axis=1)

    no_id: Any = None
    mine = jax.tree.map(own, tokens._replace(last_id=no_id))
    # Tokens that fill a row up come after all others: where nothing else is masked, nobody sees them.
    whole = options.plain or (segment_ids is None and update_mask is None)
    seen = tokens._replace(written=None) if options.plain else tokens
    backends = _instead_of_cudnn(options, q, k, v, whole, "rows that are not cut")

    def fused(name, q, k, v, log_forget):
        def run(q, where):
            return attention_kernels.run_kernel(
                name, q, k, v, log_forget, seen, places=where,
                scale=options.scale, window=options.window, prune=options.prune,
            )  # fmt: skip

        return attention_sequence.attend_fused(axis, run, q)

    output = attention_kernels.on_platform(
        options.sure,
        {name: functools.partial(fused, name) for name in backends},
        lambda q, k, v, _: _in_blocks(axis, options, q, (k, v, sums), places, state, whole),
        select(mine.real, q), k, v, log_forget,
    )  # fmt: skip
    if options.window is None and not options.plain:
        beyond = own(places.rank) >= state.keys.shape[-3]
        output = jnp.where(beyond[:, :, None, None], jnp.nan, output)
    return finish_output(mine, output).astype(v.dtype), final


def _in_blocks(
    axis: str, options: _Options, q, kept: tuple, places: _Places, state: AttentionState, whole
) -> Array:
    """`_in_sequence` in XLA: this device's outputs, `kept` and `places` those of the whole row."""
    sums, length = kept[2], places.rank.shape[1]
    block, held = attention_sequence.block_size(q.shape[1]), 0
    there: Any = places
    dtype, precision = checks.compute_dtype(q, *kept[:2]), checks.matmul_precision(q, *kept[:2])
    if not options.fresh:
        there, kept = _after_held(state, places, kept)
        held = -(-(there.rank.shape[1] - length) // block)
        ahead = (
            held * block + length - there.rank.shape[1]
        )  # places to fill, where nothing is written
        there, kept = jax.tree.map(
            lambda x: jnp.pad(x, [(0, 0), (ahead, 0)] + [(0, 0)] * (x.ndim - 2)), (there, kept)
        )
    plan = attention_sequence.Plan(
        block=block,
        held=held,
        window=options.window,
        whole=options.plain and whole,
        scale=options.scale,
        dtype=dtype,
        precision=precision,
    )
    keys = attention_sequence.Keys(*kept, *there)
    where = (sums, places.document, places.rank)
    return attention_sequence.attend(axis, plan, q, where, keys)


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


class _Options(NamedTuple):
    window: int | None
    scale: float
    backends: tuple[str, ...]  # in XLA's place, one a platform
    sure: bool
    plain: bool
    fresh: bool
    prune: bool


def _choose(op: str, implementation, q, k, v, fresh, whole, window, gated) -> tuple[str, ...]:
    """What runs in XLA's place: the one asked for, or at most one a platform."""
    if implementation == "xla":
        chosen.note(op, "xla")
        return ()
    kernel = functools.partial(
        attention_kernels.why_not, q=q, k=k, v=v, fresh=fresh, window=window, whole=whole,
        sure=implementation is not None,
    )  # fmt: skip
    why = {
        "cudnn": lambda: attention_cudnn.why_not(q, k, v, fresh and whole, gated),
        "mosaic_gpu": lambda: kernel("mosaic_gpu"),
        "mosaic_tpu": lambda: kernel("mosaic_tpu"),
    }
    if implementation is not None:
        if (reason := why[implementation]()) is not None:
            raise NotImplementedError(f"{op}: implementation={implementation!r} takes {reason}")
        chosen.note(op, implementation)
        return (implementation,)
    reasons = {name: ask() for name, ask in why.items()}
    best: dict[str, str] = {}
    for name, reason in reasons.items():
        if reason is None:
            best.setdefault(attention_kernels.PLATFORMS[name], name)
    if best:
        where = dict(cuda="NVIDIA", tpu="TPU")
        picked = ", ".join(f"{name} on {where[platform]}" for platform, name in best.items())
        chosen.note(op, f"{picked}, xla elsewhere")
    else:
        whys = "; ".join(f"{n} takes {why}" for n, why in reasons.items())
        chosen.note(op, f"xla ({whys})")
    return tuple(best.values())


def _instead_of_cudnn(options: _Options, q, k, v, whole: bool, takes: str) -> tuple[str, ...]:
    """`options.backends` where cuDNN does not serve, which takes `takes`."""
    if not options.backends:
        return ()
    name = options.backends[0] if options.sure else "mosaic_gpu"
    why = takes
    if name != "cudnn":
        why = attention_kernels.why_not(
            name, q=q, k=k, v=v, fresh=options.fresh, window=options.window, whole=whole,
            sure=options.sure,
        )  # fmt: skip
    if why is not None and options.sure:
        raise NotImplementedError(f"attention: implementation={name!r} takes {why}")
    also = "" if why in (None, takes) else f"; {name} takes {why}"
    where = "" if options.sure else f" on NVIDIA (cudnn takes {takes}{also})"
    chosen.note("attention", f"{name if why is None else 'xla'}{where}")
    return () if why is not None else (name,)


class _Places(NamedTuple):
    """Where tokens stand: a document each, and a rank among its written tokens; [B, T]."""

    document: Array
    rank: Array
    written: Array


# Compiled as a whole also when called outside `jax.jit`, as in a notebook.
@functools.partial(jax.jit, static_argnums=0)
def _attention(options, q, k, v, log_forget, state, segment_ids, update_mask):
    batch, length, heads, value_dim = v.shape
    num_segments = state.keys.shape[1] if state.keys.ndim == 5 else None
    tokens = read_tokens(segment_ids, update_mask, state.segment_id, num_segments)
    k = checks.spread_keys(k, heads)
    places = _place(tokens, state, batch, length)
    k, v = select(tokens.written, k), select(tokens.written, v)
    sums = None if log_forget is None else sum_gates(log_forget, tokens, _newest_sum(state))
    final = _remember(state, k, v, sums, places, tokens)
    backends = options.backends
    if "cudnn" in backends and attention_cudnn.half_mapped():
        whole = segment_ids is None and update_mask is None
        backends = _instead_of_cudnn(options, q, k, v, whole, attention_cudnn.MAPPED)
    output = attention_kernels.on_platform(
        options.sure,
        {name: functools.partial(_fused, name, options, tokens) for name in backends},
        lambda q, k, v, _: _in_xla(options, q, k, v, sums, tokens, places, state),
        select(tokens.real, q), k, v, log_forget,
    )  # fmt: skip
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
    if tokens.written is None:  # a sum of constants, which XLA's compiler adds up for seconds
        seen = jnp.broadcast_to(jnp.arange(1, length + 1, dtype=jnp.int32), (batch, length))
    else:
        seen = jnp.cumsum(written, axis=1, dtype=jnp.int32)
    if tokens.run is None:
        return _Places(jnp.zeros_like(seen), seen - 1 + state.count[:, None], written)
    begins = jnp.diff(tokens.run, axis=1, prepend=jnp.zeros_like(tokens.run[:, :1])) > 0
    base = jax.lax.cummax(jnp.where(begins, seen - written, 0), axis=1)
    carried = jnp.where(tokens.run == 0, state.count[:, None], 0)
    return _Places(tokens.run, seen - base - 1 + carried, written)


def _newest_sum(state: AttentionState) -> GateSum:
    """The gates' sum with the newest token of each document, 0 before any: [B, N] or [B, S, N]."""
    place = (state.count - 1) % state.keys.shape[-3]

    def newest(ring):
        own = jnp.take_along_axis(ring, place[..., None, None], axis=-2)[..., 0, :]
        return jnp.where(state.count[..., None] > 0, own, 0)

    return jax.tree.map(newest, state.log_forget)


def _remember(
    state: AttentionState, k, v, sums: GateSum | None, places: _Places, tokens: Tokens
) -> AttentionState:
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
        flat = ring.reshape(batch, slots * capacity, *new.shape[2:])
        put = jax.vmap(lambda row, i, x: row.at[i].set(x, mode="drop"))
        return put(flat, index, new.astype(ring.dtype)).reshape(ring.shape)

    rings = (state.keys, state.values, state.log_forget)
    keys, values, log_forget = jax.tree.map(write, rings, (k, v, sums))
    return AttentionState(keys, values, count, tokens.last_id, log_forget)


def _with_state(
    options: _Options, q, k, v, sums: GateSum | None, places: _Places, state: AttentionState
) -> Array:
    """Attend to what the state holds and to the call's own tokens, [B, T, H, V]."""
    there, kept = places, (k, v, sums)
    if not options.fresh:
        there, kept = _after_held(state, places, kept)

    def sees(document, rank):
        seen = there.written[:, None] & (document[:, :, None] == there.document[:, None])
        distance = rank[:, :, None] - there.rank[:, None]
        seen = seen & (distance >= 0)
        return seen if options.window is None else seen & (distance < options.window)

    where = (places.document, places.rank)
    return attend_in_blocks((q, sums), where, lambda *w: (kept, sees(*w)), options.scale)


def _after_held(state: AttentionState, places: _Places, new: tuple) -> tuple[_Places, tuple]:
    """The call's places, keys, values and sums after those that the state holds."""
    batch, capacity = new[0].shape[0], state.keys.shape[-3]
    slots = state.count[0].size
    newest = state.count.reshape(batch, slots, 1) - 1
    ranks = newest - (newest - jnp.arange(capacity)) % capacity  # below 0 where nothing was written
    ranks = ranks.reshape(batch, slots * capacity)
    documents = jnp.broadcast_to(jnp.repeat(jnp.arange(slots), capacity), ranks.shape)
    held = _Places(documents, ranks, ranks >= 0)

    def join(ring, new):
        ring = ring.reshape(batch, slots * capacity, *new.shape[2:])
        return jnp.concatenate([ring.astype(new.dtype), new], axis=1)

    rings = (state.keys, state.values, state.log_forget)
    return jax.tree.map(join, held, places), jax.tree.map(join, rings, new)


def _fused(
    name: str, options: _Options, tokens: Tokens, q, k, v, log_forget: Array | None
) -> Array:
    if name == "cudnn":
        return attention_cudnn.run(q, k, v, scale=options.scale, window=options.window)
    return attention_kernels.run_kernel(
        name, q, k, v, log_forget, tokens,
        scale=options.scale, window=options.window, prune=options.prune,
    )  # fmt: skip


def _in_xla(
    options: _Options, q, k, v, sums, tokens: Tokens, places: _Places, state: AttentionState
) -> Array:
    if options.plain:
        return attend_causally(q, k, v, sums, window=options.window, scale=options.scale)
    output = _with_state(options, q, k, v, sums, places, state)
    if options.window is None:
        beyond = places.rank >= state.keys.shape[-3]
        output = jnp.where(beyond[:, :, None, None], jnp.nan, output)
    return output
