"""Short causal convolutions and token shift: what mixes a token with the few before it."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lsm_jax.ops.backends import chosen
from lsm_jax.ops.core import checks
from lsm_jax.ops.core.segments import Tokens, finish_output, read_tokens, select
from lsm_jax.ops.core.shared_rows import (
    Update,
    emptied_by,
    ends_of_documents,
    newer_id,
    resume,
    unless_restarted,
)
from lsm_jax.ops.core.states import per_chunk
from lsm_jax.parallel import TOKENS, mesh_axes, over_mesh, sum_along

_KERNEL, _FEWEST = "mosaic_gpu", 64


class ShiftState(NamedTuple):
    """The last tokens written, oldest first.

    Attributes:
        tail: [B, W - 1, D], or [B, S, W - 1, D] with one state a segment; 0 where there was no token.
        segment_id: [B], the last nonzero segment id seen, 0 before any.
    """

    tail: Float[Array, ...]
    segment_id: Int[Array, " B"]


def shift_state(
    batch_size: int,
    width: int,
    channels: int,
    *,
    num_segments: int | None = None,
    dtype=jnp.float32,
) -> ShiftState:
    """An empty `ShiftState` that remembers `width` tokens (a convolution's W - 1; 1 for `token_shift`)."""
    rows = (batch_size,) if num_segments is None else (batch_size, num_segments)
    return ShiftState(jnp.zeros((*rows, width, channels), dtype), jnp.zeros(batch_size, jnp.int32))


def short_convolution(
    x: Float[Array, "B T D"],
    weight: Float[Array, "W D"],
    bias: Float[Array, " D"] | None = None,
    *,
    silu: bool = False,
    head_dim: int | None = None,
    initial_state: ShiftState | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    update_mask: Array | None = None,
    contiguous: bool = False,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T D"], ShiftState]:
    """Causal depthwise convolution, `y_t = Σ_d weight[W - 1 - d] x_{t-d} + bias`, over a document's written tokens.

    What surrounds it in the layers of delta rules follows where it is asked for: SiLU, then the unit length of each head.

    Args:
        x: [B, T, D].
        weight: [W, D]; the last row multiplies the current token.
        bias: [D].
        silu: whether `z * sigmoid(z)` follows.
        head_dim: channels of a head, whose L2 norm is made 1 at the end (`l2_normalize`); None leaves it.
        initial_state: W - 1 remembered tokens; with tail [B, S, ...], segment id s has state s - 1. None is empty.
        segment_ids: [B, T] integers, 0 padding; see `lsm_jax.ops.core.segments`.
        update_mask: [B, T], 0 where a token is not remembered: later tokens look past it, and it sees itself and the
            written tokens before it.
        contiguous: whether every token between two of one document is written, as the caller knows; with one state a row the
            convolution then is plain shifts, several times as fast on accelerators. Where it is not so, the output is wrong.
        implementation: None (the fused kernel where it serves: NVIDIA Hopper, bfloat16, 64 tokens or more, D a multiple of 256,
            W of 2 to 4, no `update_mask`, one state a row; else XLA), "xla" or "mosaic_gpu".

    Returns:
        [B, T, D] in x's dtype, and the state, its tail in x's dtype.

    Raises:
        NotImplementedError: the kernel asked for by name does not serve the call; the message says why.
        ValueError: shapes that do not fit.
    """
    op = "short_convolution"
    if implementation not in (None, "xla", _KERNEL):
        raise ValueError(
            f"{op}: implementation={implementation!r}; accepted are None, 'xla' and {_KERNEL!r}"
        )
    checks.check_row_channels(op, "x", x)
    checks.check_shape(op, "weight", weight, (None, x.shape[2]), "W, D")
    if bias is not None:
        checks.check_shape(op, "bias", bias, (x.shape[2],), "D")
    if weight.shape[0] < 2:
        raise ValueError(f"{op}: weight has {weight.shape[0]} rows; accepted are 2 or more")
    if head_dim is not None and (head_dim < 1 or x.shape[2] % head_dim):
        raise ValueError(f"{op}: head_dim={head_dim!r}; accepted are divisors of x's {x.shape[2]}")
    batched = _arguments(op, x, weight.shape[0] - 1, initial_state, segment_ids, update_mask)
    shared = dict(weight=weight, bias=bias)
    axes = dict(weight=(None, "heads"), bias=("heads",))
    # Where devices may get parts of heads, these are normalised when they are together again.
    meshes = jax.sharding.get_abstract_mesh(), jax.typeof(x).sharding.mesh
    parts = [math.prod(dict(m.shape).get(n, 1) for n in mesh_axes("heads")) for m in meshes]
    whole = head_dim and not any(x.shape[2] // head_dim % n for n in parts)
    serves = functools.partial(_why_not, x, weight, tail=batched["state"].tail, mask=update_mask)
    why = serves(head_dim if whole else None)
    if whole and why is not None and implementation is None and serves(None) is None:
        whole, why = False, None  # the kernel convolves, and XLA normalises
    fused = chosen.choose(op, "shifts", implementation, _KERNEL, why)
    options = _Options(contiguous, silu, head_dim if whole else None, fused)
    y, state = _run(_convolve, batched, shared, options, axes, "heads")
    return (y if whole or head_dim is None else l2_normalize(y, head_dim)), state


def l2_normalize(x: Array, head_dim: int | None = None, eps: float = 1e-6) -> Array:
    """`x / sqrt(sum(x²) + eps)` over the last axis, or over each `head_dim` of it, in float32, returned in x's dtype."""
    heads = x if head_dim is None else x.reshape(*x.shape[:-1], -1, head_dim)
    wide = heads.astype(jnp.promote_types(x.dtype, jnp.float32))
    scale = jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype).reshape(x.shape)


class _Options(NamedTuple):
    contiguous: bool = False
    silu: bool = False
    head_dim: int | None = None
    fused: chosen.Fused = "never"


def _why_not(x, weight, head_dim, tail, mask) -> str | None:
    """What the kernel takes in place of this call, or None. The platform is not asked: lowering decides that."""
    if mask is not None:
        return "no update_mask"
    if tail.ndim == 4:
        return "one state a row, not one a segment"
    if x.shape[1] < _FEWEST:
        return f"{_FEWEST} tokens or more, not {x.shape[1]}"
    if any(jax.typeof(a).manual_axis_type.varying for a in (x, weight)):
        return "arrays outside jax.shard_map, or inside with check_vma=False"
    if x.dtype != jnp.bfloat16:
        return f"x in bfloat16, not {x.dtype}"
    if jax.config.jax_enable_x64:
        return "32-bit indices (jax_enable_x64 off)"
    # Imported where it may serve: elsewhere the backends cost nothing.
    from pallas_kernels import compat
    from pallas_kernels.short_convolution import unsupported

    return unsupported(x, weight, head_dim) if compat.on_hopper() else "NVIDIA Hopper"


def _convolve(options: _Options, x, weight, bias, **rest) -> tuple[Array, ShiftState]:
    def xla(x, weight, bias, rest):
        return _by_xla(options, x, weight, bias, **rest)

    def kernel(x, weight, bias, rest):
        return _by_kernel(options, x, weight, bias, **rest)

    if options.fused == "never":
        return xla(x, weight, bias, rest)
    # A device's own part may be one that the kernel does not serve. (A mask made here hides the padding at the end alone.)
    why = _why_not(x, weight, options.head_dim, rest["state"].tail, None)
    if why is not None and options.fused == "always":
        raise NotImplementedError(f"short_convolution: on a device {_KERNEL!r} takes {why}")
    if why is not None:
        return xla(x, weight, bias, rest)
    if options.fused == "always":
        return kernel(x, weight, bias, rest)
    return chosen.by_platform(x, weight, bias, rest, cuda=kernel, default=xla)


def _by_kernel(options, x, weight, bias, state, segment_ids, update_mask):
    from pallas_kernels.short_convolution import short_convolution as fused

    width = weight.shape[0] - 1
    # Of these only what is remembered is used, and computed.
    _, tokens, after = _previous_tokens(
        options.contiguous, x, state, segment_ids, update_mask, width
    )
    y = fused(
        x, weight, bias, initial=state.tail, run=tokens.run, real=tokens.real,
        silu=options.silu, head_dim=options.head_dim,
    )  # fmt: skip
    return y, after


def _by_xla(options, x, weight, bias, **rest) -> tuple[Array, ShiftState]:
    dtype = checks.compute_dtype(x)
    width = weight.shape[0] - 1
    taps, tokens, state = _previous_tokens(options.contiguous, x, width=width, **rest)
    kernel = weight.astype(dtype)
    y = select(tokens.real, x).astype(dtype) * kernel[-1]
    for distance, tap in enumerate(taps, start=1):
        y = y + tap.astype(dtype) * kernel[-1 - distance]
    if bias is not None:
        y = y + bias.astype(dtype)
    y = finish_output(tokens, y).astype(x.dtype)
    y = jax.nn.silu(y) if options.silu else y
    return (y if options.head_dim is None else l2_normalize(y, options.head_dim)), state


def token_shift(
    x: Float[Array, "B T D"],
    *,
    initial_state: ShiftState | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    update_mask: Array | None = None,
    contiguous: bool = False,
) -> tuple[Float[Array, "B T D"], ShiftState]:
    """The written token before each token of its document, 0 before the first (RWKV's time shift).

    Arguments, state and errors are `short_convolution`'s, with one remembered token.
    """
    op = "token_shift"
    checks.check_row_channels(op, "x", x)
    batched = _arguments(op, x, 1, initial_state, segment_ids, update_mask)
    # Whole channels: these are a model's, which no axis shards.
    return _run(_shift, batched, {}, _Options(contiguous), {}, None)


def _run(function, batched, shared, options: _Options, axes: dict[str, Any], channels: str | None):
    """`function` over the mesh; `channels` is the logical axis of x's last one."""
    rows = ("batch",) if batched["state"].tail.ndim == 3 else ("batch", None)
    axes |= dict.fromkeys(("segment_ids", "update_mask"), TOKENS[:2])
    kept: Any = ((*rows, None, channels), ("batch",))
    axes |= dict(x=(*TOKENS[:2], channels), state=ShiftState(*kept))
    return over_mesh(
        function, batched, shared, options,
        axes=axes, out_axes=(axes["x"], "state"), in_sequence=_in_sequence,
    )  # fmt: skip


def _in_sequence(axis, function, options, **arguments):
    """The op on one of the devices that share a row."""
    x, state = arguments["x"], arguments["state"]
    ids, mask = arguments["segment_ids"], arguments["update_mask"]
    width = state.tail.shape[-2]
    whole = ids is None and mask is None
    if not (whole or options.contiguous) or state.tail.ndim == 4 or x.shape[1] < width:
        update = _update(x, state, ids, mask)
        return resume(axis, function, (options,), arguments, update, _advance)
    # Nothing but the last tokens of the device before can be in reach.
    devices, here = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    onwards = functools.partial(
        jax.lax.ppermute, axis_name=axis, perm=[(i, i + 1) for i in range(devices - 1)]
    )
    tokens = read_tokens(ids, mask, jnp.zeros_like(state.segment_id), None)
    tail, newest = _newest(x, width, ids, tokens)
    before = ShiftState(onwards(tail), state.segment_id if newest is None else onwards(newest))
    entering = jax.tree.map(lambda a, b: jnp.where(here == 0, a.astype(b.dtype), b), state, before)
    output, after = function(options, **(arguments | {"state": entering}))
    last = jnp.full(x.shape[:1], devices - 1)
    if tokens.written is not None:
        # The last device that wrote; the first, where none did, still has the state.
        last = jax.lax.pmax(jnp.where(jnp.any(tokens.written, axis=1), here, 0), axis)
    final = jax.tree.map(
        lambda a: sum_along(axis, jnp.where(per_chunk(here == last, a), a, 0)), after
    )
    return output, final


def _newest(x, width: int, ids, tokens: Tokens) -> tuple[Array, Array | None]:
    """The last tokens of a row without gaps, 0 where they are not of its last one's document, and that one's id."""
    tail = x[:, -width:]
    if tokens.written is None:
        return tail, None
    live = tokens.written[:, -width:]
    if tokens.run is None:
        return select(live, tail), None
    own = live & live[:, -1:] & (tokens.run[:, -width:] == tokens.run[:, -1:])
    return select(own, tail), jnp.where(live[:, -1], ids[:, -1], 0)


def _update(x, state: ShiftState, segment_ids, update_mask) -> Update:
    """This device's tokens as an update: what it would remember, and of how many tokens."""
    width = state.tail.shape[-2]
    num_segments = state.tail.shape[1] if state.tail.ndim == 4 else None
    empty = jax.tree.map(jnp.zeros_like, state)
    _, tokens, written = _previous_tokens(False, x, empty, segment_ids, update_mask, width)
    counted = tokens.written
    if counted is None:
        counted = jnp.ones(x.shape[:2], bool)
    if tokens.run is not None:
        counted = counted & (tokens.run == tokens.run[:, -1:])
    if tokens.slot is not None:
        own = tokens.slot[..., None] == jnp.arange(num_segments)
        counted = own & counted[..., None]
    count = jnp.minimum(jnp.sum(counted, axis=1, dtype=jnp.int32), width)
    return Update(count, written, *ends_of_documents(segment_ids, tokens.run))


def _advance(state: ShiftState, update: Update) -> ShiftState:
    """The last tokens of those held and those written."""
    state = emptied_by(state, update)
    width = state.tail.shape[-2]
    held = unless_restarted(update, state.tail)
    both = jnp.concatenate([held, update.written.tail], axis=-2)
    count = update.transition[..., None]
    place = count + jnp.arange(width)
    place = jnp.where(place < width, place, place + width - count)
    tail = jnp.take_along_axis(both, place[..., None], axis=-2)
    return ShiftState(tail, newer_id(state, update))


def _shift(options: _Options, **batched) -> tuple[Array, ShiftState]:
    (tap,), tokens, state = _previous_tokens(options.contiguous, width=1, **batched)
    return finish_output(tokens, tap), state


def _arguments(op, x, width, state, segment_ids, update_mask):
    batch, length, channels = x.shape
    checks.check_rows(op, batch, length, segment_ids, update_mask)
    empty = functools.partial(shift_state, batch, width, channels, dtype=x.dtype)
    state = checks.state_or_empty(op, state, empty, segment_ids)
    return dict(x=x, state=state, segment_ids=segment_ids, update_mask=update_mask)


def _previous_tokens(
    contiguous: bool, x: Array, state: ShiftState, segment_ids, update_mask, width: int
) -> tuple[list[Array], Tokens, ShiftState]:
    """For each token the written ones 1, 2, ..., `width` before it in its document, each [B, T, D]."""
    batch, length, channels = x.shape
    num_segments = state.tail.shape[1] if state.tail.ndim == 4 else None
    tokens = read_tokens(segment_ids, update_mask, state.segment_id, num_segments)
    tail = state.tail.astype(x.dtype)
    if tokens.written is None:
        padded = jnp.concatenate([tail, x], axis=1)
        taps = [padded[:, width - d : width - d + length] for d in range(1, width + 1)]
        return taps, tokens, ShiftState(padded[:, length:], tokens.last_id)

    # Follow pointers to the previous written token. -1 - i is the i-th newest of the tail; `nothing` is before that.
    nothing = -1 - width
    slots = 1 if num_segments is None else num_segments
    tails = tail.reshape(batch, slots * width, channels)
    x = jnp.where(tokens.written[..., None], x, 0)
    held = jnp.concatenate([jnp.zeros_like(x[:, :1]), tails, x], axis=1)
    slot = jnp.zeros((batch, length), jnp.int32) if tokens.slot is None else tokens.slot
    previous, last = _pointers(tokens, slots, nothing)

    def follow(pointer):
        behind = jnp.take_along_axis(previous, jnp.maximum(pointer, 0), axis=1)
        return jnp.where(pointer >= 0, behind, jnp.maximum(pointer - 1, nothing))

    def fetch(pointer, slot):
        in_tail = jnp.where(pointer == nothing, 0, 1 + slot * width + width + pointer)
        place = jnp.where(pointer >= 0, 1 + slots * width + pointer, in_tail)
        return jax.vmap(lambda row, index: row[index])(held, place)

    taps, pointer = [], previous
    if contiguous and tokens.slot is None:
        taps = _shifted(x, tail, tokens)
    else:
        for _ in range(width):
            taps.append(fetch(pointer, slot))
            pointer = follow(pointer)
    newest = []
    for _ in range(width):
        newest.append(fetch(last, jnp.broadcast_to(jnp.arange(slots), last.shape)))
        last = follow(last)
    tail = jnp.stack(newest[::-1], axis=2)
    tail = tail[:, 0] if num_segments is None else tail
    return taps, tokens, ShiftState(tail, tokens.last_id)


def _shifted(x: Array, tail: Array, tokens: Tokens) -> list[Array]:
    """The tokens 1, 2, ... before each, 0 ahead of its document's first; all between are written."""
    width, length = tail.shape[1], x.shape[1]
    padded = jnp.concatenate([tail, x], axis=1)
    if tokens.run is None:
        return [padded[:, width - d : width - d + length] for d in range(1, width + 1)]
    run = jnp.pad(tokens.run, ((0, 0), (width, 0)))
    taps = []
    for distance in range(1, width + 1):
        piece = slice(width - distance, width - distance + length)
        own = run[:, piece] == tokens.run
        taps.append(jnp.where(own[..., None], padded[:, piece], 0))
    return taps


def _pointers(tokens: Tokens, slots: int, nothing: int) -> tuple[Array, Array]:
    """The index of the written token before each, [B, T], and of the last one of each state, [B, S]."""
    assert tokens.written is not None
    length = tokens.written.shape[1]
    index = jnp.arange(length, dtype=jnp.int32)
    if tokens.slot is not None:
        own = tokens.slot[:, :, None] == jnp.arange(slots)
        newest = jnp.where(own & tokens.written[:, :, None], index[:, None], -1)
        newest = jax.lax.cummax(newest, axis=1)
        before = jnp.concatenate([jnp.full_like(newest[:, :1], -1), newest[:, :-1]], axis=1)
        before = jnp.take_along_axis(before, tokens.slot[:, :, None], axis=2)[..., 0]
        return before, newest[:, -1]
    newest = jax.lax.cummax(jnp.where(tokens.written, index, -1), axis=1)
    before = jnp.concatenate([jnp.full_like(newest[:, :1], -1), newest[:, :-1]], axis=1)
    last = newest[:, -1:]
    if tokens.run is not None:
        runs = tokens.run

        def own(pointer, run):  # keep to the document; its first token has nothing before it
            found = jnp.take_along_axis(runs, jnp.maximum(pointer, 0), axis=1)
            found = jnp.where(pointer >= 0, found, 0)
            return jnp.where(found == run, pointer, nothing)

        before, last = own(before, runs), own(last, runs[:, -1:])
    return before, last
