"""Apply the updates of a row's chunks or tokens to a memory: one after another, in consecutive parts of the
row in parallel, or by an associative scan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lsm_jax.ops.core.platforms import by_platform
from lsm_jax.ops.core.segments import Chunks

_STEP = 2**21  # numbers of memories that a GPU updates in about the time of one kernel launch
_MIN_STEPS = 16  # of a part
_UNROLL = 8  # a loop's own kernels take a GPU as long as a step


def run_masks(chunks: Chunks) -> tuple[Any, Any, Any]:
    """Return the masks for documents that begin inside a chunk, or three times None if no document can.

    Returns:
        [B, N, C, C], whether two tokens are of one document; [B, N, C], whether a token is of the document
        that the chunk begins in; [B, N, C], whether a token is of the document that the chunk ends in.
    """
    if chunks.run is None:
        return None, None, None
    run = chunks.run
    before = jnp.concatenate([jnp.zeros_like(run[:, :1, -1]), run[:, :-1, -1]], axis=1)
    same = run[..., :, None] == run[..., None, :]
    return same, run == before[..., None], run == run[..., -1:]


def per_chunk(condition: Array, x: Array) -> Array:
    """Add trailing axes of size 1 to `condition`, an array with leading axes such as [B, N] of chunks, so that it
    broadcasts against `x`.
    """
    return condition.reshape(condition.shape + (1,) * (x.ndim - condition.ndim))


def _state_of(initial: Array, slot: Array) -> Array:
    """Return, for each chunk, the state of its segment: the entries with the indices `slot` [B, ...] of the states
    `initial` [B, S, ...].
    """
    return jax.vmap(lambda states, index: states[index])(initial, slot)


def _last_of_each_segment(after: Array, initial: Array, chunks: Chunks) -> Array:
    """Return the final memory of each segment, [B, S, ...]: the memory after the segment's last chunk, from
    the chunks' memories `after` [B, N, ...]; or `initial` [B, S, ...] for a segment without chunks.
    """
    assert chunks.last is not None
    last = _state_of(after, jnp.maximum(chunks.last, 0))
    return jnp.where(per_chunk(chunks.last >= 0, last), last, initial)


def scan_chunks(
    update: Callable[[Array, Any], Array], arrays: Any, initial: Array, chunks: Chunks
) -> tuple[Array, Array]:
    """Apply the updates of a row's chunks to the memory in order; return the memory that each chunk starts from, and
    the memory after the last.

    Args:
        update: a function of the memory [B, ...] and the entries of `arrays` for one chunk, which returns the
            memory after that chunk.
        arrays: a pytree of [B, N, ...], the inputs of the update for each of N chunks.
        initial: the memory before the first chunk, [B, ...], or [B, S, ...] with one state per segment.
        chunks: the layout of tokens in chunks, which says the segment that each chunk belongs to.

    Returns:
        The memory that each chunk starts from, [B, N, ...], and the final state, in the shape of `initial`.
    """
    arrays = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), arrays)
    if chunks.slot is None:
        final, entering = jax.lax.scan(lambda m, x: (update(m, x), m), initial, arrays)
        return jnp.moveaxis(entering, 0, 1), final

    def step(memory, inputs):
        x, slot, first = inputs
        memory = jnp.where(per_chunk(first, memory), _state_of(initial, slot), memory)
        after = update(memory, x)
        return after, (memory, after)

    assert chunks.first is not None
    layout = (chunks.slot.T, chunks.first.T)
    _, (entering, after) = jax.lax.scan(step, jnp.zeros_like(initial[:, 0]), (arrays, *layout))
    after = jnp.moveaxis(after, 0, 1)
    return jnp.moveaxis(entering, 0, 1), _last_of_each_segment(after, initial, chunks)


def fold_chunks(
    apply: Callable[[Array, Array], Array],
    compose: Callable[[Array, Array], Array],
    transition: Array,
    write: Array,
    initial: Array,
    chunks: Chunks,
    *,
    add: Callable[[Array, Array], Array] = jnp.add,
) -> tuple[Array, Array]:
    """Return the memory that each of N chunks starts from, [B, N, ...], and the final memory, for the chunks'
    updates `M -> add(apply(transition, M), write)`, with transition and write [B, N, ...].

    With few memories and many chunks, a step on an NVIDIA GPU takes no longer than the launch of its kernels.
    There the row is divided into parts that are scanned in parallel: the updates of each part are composed
    one after another, and the composed updates are then applied to the memory after the earlier parts. Packed
    rows are not divided: the index of a chunk may depend on later tokens (Mixture-of-Memories), and the
    rounding would depend on that index. `compose(later, earlier)` is the product of two transitions.
    """

    def step(memory, update):
        return add(apply(update[0], memory), update[1])

    def scanned(transition, write, initial):
        return scan_chunks(step, (transition, write), initial, chunks)

    parts = _parts(chunks.count, write.size // chunks.count)
    if parts == 1 or chunks.slot is not None or chunks.run is not None:
        return scanned(transition, write, initial)
    cut = functools.partial(_fold_parts, step, compose, parts)
    return by_platform(transition, write, initial, cuda=cut, default=scanned)


def _fold_parts(step, compose, parts: int, transition, write, initial) -> tuple[Array, Array]:
    """Apply the chunks' updates to the memory in order, with each row divided into `parts` consecutive parts that are
    scanned in parallel.

    Arguments and results are as in `fold_chunks`: `transition` and `write` [B, N, ...] are the updates of N chunks, and
    `initial` is the memory before them.
    """
    count = write.shape[1]
    steps = -(-count // parts)
    short = parts * steps - count

    def in_parts(x):  # -> [steps, B, parts, ...]
        # The padding of the last part comes after all chunks that are read.
        x = jnp.pad(x, [(0, 0), (0, short)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], parts, steps, *x.shape[2:]), 2, 0)

    def grow(before, update):
        update = compose(update[0], before[0]), step(before[1], update)
        return update, update

    updates = jax.tree.map(in_parts, (transition, write))
    first, later = jax.tree.map(lambda x: x[0], updates), jax.tree.map(lambda x: x[1:], updates)
    total, grown = jax.lax.scan(grow, first, later, unroll=_UNROLL)
    grown = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), first, grown)
    by_part = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), total)
    over_parts = lambda m, update: (step(m, update), m)  # noqa: E731
    _, starts = jax.lax.scan(over_parts, initial, by_part, unroll=_UNROLL)
    after = step(jnp.moveaxis(starts, 0, 1), grown)
    after = jnp.moveaxis(after, 0, 2).reshape(initial.shape[0], parts * steps, *initial.shape[1:])
    entering = jnp.concatenate([initial[:, None], after[:, : count - 1]], axis=1)
    return entering, after[:, count - 1]


def _parts(count: int, numbers: int) -> int:
    """Return the number of parts into which the N chunks of a row are split, to be scanned in parallel, so that one
    step updates at most `_STEP` numbers.

    Args:
        count: N, the number of chunks in a row.
        numbers: how many numbers the memories have that one chunk of each row updates.
    """
    parts = 1
    while 2 * parts * numbers <= _STEP and 2 * parts * _MIN_STEPS <= count:
        parts *= 2
    return parts


def associate_chunks(
    apply: Callable[[Array, Array], Array],
    compose: Callable[[Array, Array], Array],
    transition: Array,
    write: Array,
    initial: Array,
    chunks: Chunks,
    *,
    add: Callable[[Array, Array], Array] = jnp.add,
    zero: float = 0.0,
) -> tuple[Array, Array]:
    """Return the memory that each of N chunks starts from, [B, N, ...], and the final memory, by an
    associative scan over the chunks' updates `M -> add(apply(transition, M), write)`, with transition and
    write [B, N, ...].

    `compose(later, earlier)` is the product of two transitions; a transition of `zero` replaces M by nothing.
    With one state per segment the index of a chunk depends on later tokens. A scan of log2(N) passes is used
    then, whose rounding does not depend on that index.
    """
    if chunks.slot is None:
        first = jnp.broadcast_to(jnp.arange(chunks.count) == 0, write.shape[:2])
        first_memory = jnp.broadcast_to(initial[:, None], write.shape)
    else:
        assert chunks.first is not None
        first, first_memory = chunks.first, _state_of(initial, chunks.slot)
    first_write = add(apply(transition, first_memory), write)
    write = jnp.where(per_chunk(first, write), first_write, write)
    transition = jnp.where(per_chunk(first, transition), zero, transition)

    def combine(earlier, later):
        return (
            compose(later[0], earlier[0]),
            add(apply(later[0], earlier[1]), later[1]),
        )

    scan = associative_scan if chunks.slot is None else doubling_scan
    _, after = scan(combine, (transition, write))
    before = jnp.concatenate([after[:, :1], after[:, :-1]], axis=1)
    entering = jnp.where(per_chunk(first, first_memory), first_memory, before)
    if chunks.slot is None:
        return entering, after[:, -1]
    return entering, _last_of_each_segment(after, initial, chunks)


def associative_scan(combine: Callable[[Any, Any], Any], x: Any) -> Any:
    """Compute `jax.lax.associative_scan` over axis 1, without combining empty arrays.

    The residuals of a product of empty arrays crash XLA's partitioner if they leave a `jax.shard_map` (jaxlib
    0.11.2).
    """

    def combine_some(earlier, later):
        return combine(earlier, later) if jax.tree.leaves(later)[0].size else later

    return jax.lax.associative_scan(combine_some, x, axis=1)


def doubling_scan(combine: Callable[[Any, Any], Any], x: Any) -> Any:
    """Return the combinations of the first 1, 2, 3, ... entries of x along axis 1, as `associative_scan` does, by
    combining 1, 2, 4, ... entries; the rounding of an entry depends only on the entries before it, not on its index.
    """
    span, count = 1, jax.tree.leaves(x)[0].shape[1]
    while span < count:
        earlier, later = (
            jax.tree.map(lambda a, s=s: a[:, s], x) for s in (slice(-span), slice(span, None))
        )
        combined = combine(earlier, later)
        first = jax.tree.map(lambda a, s=span: a[:, :s], x)
        x = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), first, combined)
        span *= 2
    return x


def scan_tokens(
    step: Callable[[Any, Any], tuple[Any, Any]],
    arrays: Any,
    initial: Any,
    run: Array | None,
    slot: Array | None,
) -> tuple[Any, Any]:
    """Apply `step(memory, token) -> (memory, output)` token by token: the recurrent form.

    Args:
        step: the update and read of one token; memory and output may be pytrees.
        arrays: a pytree of [B, T, ...].
        initial: the memory before the first token.
        run: [B, T], as in `Tokens`: a token that begins a document reads an empty memory.
        slot: [B, T], as in `Tokens`: the index of the state that the token updates.

    Returns:
        The outputs [B, T, ...], and the final memory.
    """
    length = jax.tree.leaves(arrays)[0].shape[1]
    begins = None
    if run is not None:
        begins = jnp.diff(run, axis=1, prepend=jnp.zeros_like(run[:, :1])) > 0

    def body(memory, inputs):
        x, begin, index = inputs
        if index is not None:
            updated, output = step(jax.tree.map(lambda m: _state_of(m, index), memory), x)
            store = jax.vmap(lambda states, i, new: states.at[i].set(new))
            return jax.tree.map(lambda m, new: store(m, index, new), memory, updated), output
        if begin is not None:
            memory = jax.tree.map(lambda m: jnp.where(per_chunk(begin, m), 0, m), memory)
        return step(memory, x)

    def time_first(x):
        return None if x is None else jnp.moveaxis(x, 1, 0)

    inputs = (jax.tree.map(time_first, arrays), time_first(begins), time_first(slot))
    final, outputs = jax.lax.scan(body, initial, inputs, length=length)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), outputs), final
