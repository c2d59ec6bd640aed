"""Run an op where devices have consecutive parts of a row: each device continues from the state after the
earlier devices' tokens.

A state is a value, so that a device needs only one thing from the others: the state that its tokens start
from. An op describes its device's tokens as one update of the state, and how a state advances by an update;
`lsm_jax.parallel.exchange` gathers the updates and gives each device its state. The op then runs as on one
device, in every form and by every backend.

The update is one or two products over the device's tokens if the decays allow it. There are two orders:

* `resume` runs the op from the state that the earlier devices leave. In the XLA forms only the reads of that
  state depend on the gathered updates, so that the compiler may overlap the other work with the communication.
  A fused kernel is one instruction, which would wait for the gather.
* `resume_from_empty` runs the op from an empty state and adds `q · decay · state` to its output: Algorithm 2 of
  LASP-2 (arXiv 2502.07563). A fused kernel then runs while the updates are gathered, and so does its backward
  pass while the gradients of the states are. This costs one more product, and the output is written twice.

`linear_memory` uses the second order for its fused kernels. The delta rules run from an empty state as well
(`lsm_jax.ops.delta.shared_rows`), but their update is a full matrix, which the op itself computes as additional
value channels: the gather waits for the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lsm_jax.ops.core.chunk_scans import per_chunk
from lsm_jax.ops.core.segments import Tokens
from lsm_jax.parallel import TOKENS
from lsm_jax.parallel.sequence import exchange, exchange_while

_WITHOUT_HEADS = ("segment_id", "position", "count")


class Update(NamedTuple):
    """The effect of one device's tokens on a state, composed into one update: a transition, and a state that is added.

    Attributes:
        transition: the factor by which the tokens change the state before them, in the op's representation.
        written: the state after the tokens if the state before them is empty; its segment id is 0 if no token
            has one.
        restarts: [B], True if a document begins after the first token, so that nothing of the state before is
            left. None if no document can begin.
        first_id: [B], the first nonzero segment id, 0 if there is none. None with one state per segment, or
            without ids.
    """

    transition: Any
    written: Any
    restarts: Array | None
    first_id: Array | None


def state_axes(state: Any, *, segments: bool) -> Any:
    """Return the logical axes of each array of an op's state: rows, segments if there is one state per segment, and
    heads.
    """
    rows = ("batch", None) if segments else ("batch",)

    def axes(path, _):
        name = path[-1].name if hasattr(path[-1], "name") else ""
        return ("batch",) if name in _WITHOUT_HEADS else (*rows, "heads")

    return jax.tree_util.tree_map_with_path(axes, state)


def memory_axes(batched: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    """Return the logical axes of the arrays of an op whose state has a `memory`, by argument name, for
    mapping the op over a mesh.

    Args:
        batched: the arguments [B, T, ...] by name, and the op's state as "state".
        shared: the arguments [G, ...], which all rows share, by name.
    """
    axes: dict[str, Any] = dict.fromkeys(batched, TOKENS) | dict.fromkeys(shared, ("heads",))
    state = batched["state"]
    return axes | {"state": state_axes(state, segments=state.memory.ndim == 5)}


def ends_of_documents(
    segment_ids: Array | None, run: Array | None
) -> tuple[Array | None, Array | None]:
    """Return whether a document begins after the first token of this device's part of each row, [B], and the
    part's first nonzero segment id, [B]: the fields `restarts` and `first_id` of an `Update`. Both are None
    if no document can begin.

    `run` [B, T] numbers the documents; it is from `read_tokens` with a state that remembers no id.
    """
    if segment_ids is None or run is None:
        return None, None
    first = jnp.argmax(segment_ids != 0, axis=1)
    return run[:, -1] > 0, jnp.take_along_axis(segment_ids, first[:, None], axis=1)[:, 0]


def staying(tokens: Tokens) -> Any:
    """Return, for one state per row, which tokens write and have no document begin after them, so that their
    writes are in the final memory: [B, T]; None if all do.
    """
    if tokens.run is None or tokens.written is None:
        return tokens.written
    return tokens.written & (tokens.run == tokens.run[:, -1:])


def total_of(x: Array | None, tokens: Tokens, num_segments: int | None, batch: int) -> Any:
    """Return the sum of x [B or 1, T, ...], such as log decays, over the tokens that update each state: [B, ...], or
    [B, S, ...] with one state per segment.
    """
    if x is None:
        return None
    if num_segments is None:
        return jnp.broadcast_to(jnp.sum(x, axis=1), (batch, *x.shape[2:]))
    assert tokens.slot is not None
    member = (tokens.slot[..., None] == jnp.arange(num_segments)).astype(x.dtype)
    highest = jax.lax.Precision.HIGHEST
    return jnp.einsum("bts,bt...->bs...", member, x, precision=highest)


def begins(state: Any, update: Update) -> Array:
    """Return whether the first token of one device's part of each row begins a document, [B]: whether its
    segment id and that of `state` (after the earlier devices' tokens) differ, and neither is 0.
    """
    before, first = state.segment_id, update.first_id
    if first is None:
        return jnp.zeros_like(before, bool)
    return (before != 0) & (first != 0) & (before != first)


def emptied_by(state: Any, update: Update) -> Any:
    """Return the state that the first token of one device's part of each row reads: `state`, that after the
    earlier devices' tokens, with arrays of 0 in rows where the token begins a document.
    """
    if update.first_id is None:
        return state
    new = begins(state, update)
    emptied = jax.tree.map(lambda x: jnp.where(per_chunk(new, x), 0, x), state)
    return emptied._replace(segment_id=state.segment_id)


def unless_restarted(update: Update, x: Any, otherwise: Any = 0) -> Array:
    """Return x [B, ...], which the state before one device's tokens contributes to the state after them; but
    `otherwise` in rows where a document begins after the first of these tokens, so that nothing of the
    earlier state is left.
    """
    if update.restarts is None:
        return x
    return jnp.where(per_chunk(update.restarts, x), otherwise, x)


def newer_id(state: Any, update: Update) -> Array:
    """Return the segment id of the last token that is not padding, [B], after one device's tokens: that of these tokens
    (`update`), or of `state` if all are padding.
    """
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
    """Return an op's output for this device's tokens, computed from the state after the earlier devices'
    tokens; and the state after the complete row.

    Args:
        axis: the mesh axis that rows are split over.
        function: the op on one device: `function(*static, **arguments)`; `state` is one of the arguments.
        static: the function's arguments that are constant when a program is compiled.
        arguments: this device's part of the arrays; `state` is the state before the first device's tokens.
        update: the effect of this device's tokens on the state, composed into one update.
        advance: (state, update) -> the state after it; a module-level function, since it is a key of the
            compiler's cache.
    """
    entering, final = exchange(axis, advance, update, _initial(arguments["state"], update))
    output, _ = function(*static, **(arguments | {"state": entering}))
    return output, final


def resume_from_empty(
    axis: str,
    function: Callable[..., tuple[Array, Any]],
    static: tuple,
    arguments: dict[str, Any],
    update: Update,
    advance: Callable[[Any, Update], Any],
    read: Callable[[Any], Array],
) -> tuple[Array, Any]:
    """Return an op's output for this device's tokens and the state after the complete row, as `resume` does,
    but run the op from an empty state, and then add what the tokens read of the state before them. `update`
    must not depend on the op's result, so that the op runs while the devices' updates are gathered.

    Two barriers fix the order, which XLA's scheduler would otherwise choose by memory: the update is computed
    before the op runs, and the gathered updates are read after it. In the backward pass, the state's gradient is
    computed before the op's backward pass runs, and the update's gradient is used after it.

    Args:
        axis, function, static, arguments, update, advance: the arguments of `resume` with these names.
        read: a function of the state before this device's first token, which returns what the device's tokens
            read of it, in the shape of the output. The state is empty in rows whose first token begins a
            document.
    """
    update, inputs = jax.lax.optimization_barrier((update, {n: arguments[n] for n in "qkv"}))
    empty = jax.tree.map(jnp.zeros_like, arguments["state"])
    output, _ = function(*static, **(arguments | inputs | {"state": empty}))
    initial = _initial(arguments["state"], update)
    entering, final, output = exchange_while(axis, advance, update, initial, output)
    added = read(emptied_by(entering, update))
    return (output + added).astype(output.dtype), final


def _initial(state: Any, update: Update) -> Any:
    """Return the state that the op's caller passed, with its arrays converted to the dtypes of the states in
    the devices' updates, so that the two can be added.
    """
    return jax.tree.map(lambda x, y: x.astype(y.dtype), state, update.written)
