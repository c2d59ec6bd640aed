"""How an op runs where devices hold consecutive parts of a row: a device resumes from the state that the earlier ones leave.

A state is a value, so all that a device needs of the others is the state its tokens start from. An op says how its tokens make
one update of a state, and how a state takes it (`lsm_jax.parallel.exchange` does the rest), and then runs as it always does, in
every form and on every kernel. The update is a product or two over the device's tokens where the decays allow it; everything
inside a shard but the reading of the state it starts from is independent of the gathered updates, so that the compiler may
overlap it with their travel. The other order, to run from an empty state and add `q · decay · state` later, would spare that
product, but would write the outputs twice, and no fused kernel gives out its decays. The delta rules alone take it
(`matrix_sequence`): their update is a full matrix, which costs a second run of the op, and a kernel gives it out as values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lsm_jax.ops.core.segments import Tokens
from lsm_jax.ops.core.states import per_chunk
from lsm_jax.parallel import TOKENS
from lsm_jax.parallel.sequence import exchange

_WITHOUT_HEADS = ("segment_id", "position", "count")


class Update(NamedTuple):
    """A device's tokens as one update of a state.

    Attributes:
        transition: what becomes of the state before, in the op's own terms.
        written: the state after the tokens if it was empty before; its segment id is 0 where no token has one.
        restarts: [B], True where a document begins behind the first token, so that nothing of the state before is left.
            None where none can.
        first_id: [B], the first nonzero segment id, 0 where there is none; None with one state a segment, or without ids.
    """

    transition: Any
    written: Any
    restarts: Array | None
    first_id: Array | None


def state_axes(state: Any, *, segments: bool) -> Any:
    """The logical axes of an op's state: rows (and segments), then heads where there are any."""
    rows = ("batch", None) if segments else ("batch",)

    def axes(path, _):
        name = path[-1].name if hasattr(path[-1], "name") else ""
        return ("batch",) if name in _WITHOUT_HEADS else (*rows, "heads")

    return jax.tree_util.tree_map_with_path(axes, state)


def memory_axes(batched: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    """The logical axes of the arguments of an op whose state has a `memory`.

    Args:
        batched: arrays [B, T, ...] by name, and the state.
        shared: arrays [G, ...] by name.
    """
    axes: dict[str, Any] = dict.fromkeys(batched, TOKENS) | dict.fromkeys(shared, ("heads",))
    state = batched["state"]
    return axes | {"state": state_axes(state, segments=state.memory.ndim == 5)}


def ends_of_documents(
    segment_ids: Array | None, run: Array | None
) -> tuple[Array | None, Array | None]:
    """`restarts` and `first_id` of an `Update`; `run` is of `read_tokens` with a state that remembers no id."""
    if segment_ids is None or run is None:
        return None, None
    first = jnp.argmax(segment_ids != 0, axis=1)
    return run[:, -1] > 0, jnp.take_along_axis(segment_ids, first[:, None], axis=1)[:, 0]


def staying(tokens: Tokens) -> Any:
    """[B, T], where tokens write and no document begins behind them; None where that is everywhere. One state a row."""
    if tokens.run is None or tokens.written is None:
        return tokens.written
    return tokens.written & (tokens.run == tokens.run[:, -1:])


def total_of(x: Array | None, tokens: Tokens, num_segments: int | None, batch: int) -> Any:
    """The sum of x [B or 1, T, ...] over time, of each state: [B, ...] or [B, S, ...]."""
    if x is None:
        return None
    if num_segments is None:
        return jnp.broadcast_to(jnp.sum(x, axis=1), (batch, *x.shape[2:]))
    assert tokens.slot is not None
    own = (tokens.slot[..., None] == jnp.arange(num_segments)).astype(x.dtype)
    highest = jax.lax.Precision.HIGHEST
    return jnp.einsum("bts,bt...->bs...", own, x, precision=highest)


def begins(state: Any, update: Update) -> Array:
    """[B], whether the update's first token begins a document."""
    before, first = state.segment_id, update.first_id
    if first is None:
        return jnp.zeros_like(before, bool)
    return (before != 0) & (first != 0) & (before != first)


def emptied_by(state: Any, update: Update) -> Any:
    """`state` as the update's first token finds it: empty in the rows where that begins a document."""
    if update.first_id is None:
        return state
    new = begins(state, update)
    emptied = jax.tree.map(lambda x: jnp.where(per_chunk(new, x), 0, x), state)
    return emptied._replace(segment_id=state.segment_id)


def unless_restarted(update: Update, x: Any, otherwise: Any = 0) -> Array:
    """`x` [B, ...], but `otherwise` in the rows where nothing of the state before is left."""
    if update.restarts is None:
        return x
    return jnp.where(per_chunk(update.restarts, x), otherwise, x)


def newer_id(state: Any, update: Update) -> Array:
    """The last nonzero id after the update, [B]."""
    last = update.written.segment_id
    return jnp.where(last != 0, last, state.segment_id)


def resume(
    axis: str,
    function: Callable[..., tuple[Any, Any]],
    static: tuple,
    arguments: dict[str, Any],
    update: Update,
    advance: Callable[[Any, Update], Any],
) -> tuple[Any, Any]:
    """The op on this device's tokens, from the state that the earlier devices leave; and the last one's final state.

    Args:
        axis: mesh axis the devices stand along.
        function: the op on a device of its own, of `static`, and `arguments`, among them `state`.
        static: its static arguments.
        arguments: this device's part of its arrays; `state` is ahead of the first device's tokens.
        update: of this device's tokens.
        advance: (state, update) -> the state after; a function defined once.
    """
    like = update.written
    initial = jax.tree.map(lambda x, y: x.astype(y.dtype), arguments["state"], like)
    entering, final = exchange(axis, advance, update, initial)
    output, _ = function(*static, **(arguments | {"state": entering}))
    return output, final
