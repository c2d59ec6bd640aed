"""The states of the linear and the delta memories, and the states of one layer in a stack of layers."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Layer(NamedTuple):
    """The memory of one layer in a stack of all layers' memories. An op that is given one updates the stack in place.

    Attributes:
        stack: [L, B, G, K, V].
        index: int32 scalar, the layer's index.
    """

    stack: Float[Array, "L B G K V"]
    index: Int[Array, ""]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the layer's memory."""
        return self.stack.shape[1:]

    def read(self) -> Array:
        """The memory, [B, G, K, V]."""
        return self.stack[self.index]

    def write(self, memory: Array) -> Layer:
        """The layer with `memory` in the place of its own."""
        return Layer(self.stack.at[self.index].set(memory.astype(self.stack.dtype)), self.index)


class LinearState(NamedTuple):
    """State of `linear_memory`.

    Attributes:
        memory: [B, G, K, V], or [B, S, G, K, V] with one state per segment, or a `Layer`; float32.
        normalizer: [B, G, K] or [B, S, G, K], the decayed sum of keys; None unless the op normalises.
        stabilizer: [B, G] or [B, S, G]: memory and normaliser are stored divided by its exponential. None without
            `log_input_gate`.
        segment_id: [B], the last nonzero segment id seen, 0 before any.
    """

    memory: Float[Array, ...]
    normalizer: Float[Array, ...] | None
    stabilizer: Float[Array, ...] | None
    segment_id: Int[Array, " B"]


class DeltaState(NamedTuple):
    """State of `delta_memory`.

    Attributes:
        memory: [B, G, K, V], or [B, S, G, K, V] with one state per segment, or a `Layer`; float32.
        segment_id: [B], the last nonzero segment id seen, 0 before any.
    """

    memory: Float[Array, ...]
    segment_id: Int[Array, " B"]


def unwrap_layer(state: Any) -> tuple[Any, Layer | None]:
    """A state whose memory may be a `Layer`, as a state whose memory is an array; and that layer or None."""
    layer = getattr(state, "memory", None)
    if not isinstance(layer, Layer):
        return state, None
    return state._replace(memory=layer.read()), layer


def store_layer(layer: Layer | None, result: tuple[Array, Any]) -> tuple[Array, Any]:
    """An op's output and final state, with the state's memory stored in the stack that `layer` is one of."""
    output, state = result
    return result if layer is None else (output, state._replace(memory=layer.write(state.memory)))


def _zeros(batch, num_segments, shape, dtype):
    rows = (batch,) if num_segments is None else (batch, num_segments)
    return jnp.zeros(rows + shape, dtype)


def linear_state(
    batch_size: int,
    num_heads: int,
    key_dim: int,
    value_dim: int,
    *,
    normalize: bool = False,
    stabilize: bool = False,
    num_segments: int | None = None,
    dtype=jnp.float32,
) -> LinearState:
    """An empty `LinearState` of `num_heads` memories; each row has `num_segments` states, or one if that is None."""
    memory = _zeros(batch_size, num_segments, (num_heads, key_dim, value_dim), dtype)
    normalizer = (
        _zeros(batch_size, num_segments, (num_heads, key_dim), dtype) if normalize else None
    )
    stabilizer = _zeros(batch_size, num_segments, (num_heads,), dtype) if stabilize else None
    return LinearState(memory, normalizer, stabilizer, jnp.zeros(batch_size, jnp.int32))


def delta_state(
    batch_size: int,
    num_heads: int,
    key_dim: int,
    value_dim: int,
    *,
    num_segments: int | None = None,
    dtype=jnp.float32,
) -> DeltaState:
    """An empty `DeltaState` of `num_heads` memories; each row has `num_segments` states, or one if that is None."""
    memory = _zeros(batch_size, num_segments, (num_heads, key_dim, value_dim), dtype)
    return DeltaState(memory, jnp.zeros(batch_size, jnp.int32))


def layer_of(states: Any, at: Array, *, in_place: bool) -> Any:
    """Layer `at` of states that are stacked along the first axis.

    Args:
        states: a pytree of stacked states.
        at: int32 scalar, the layer's index.
        in_place: give the memories of `LinearState` and `DeltaState` as a `Layer`, which ops update in place.
    """

    def own(x):
        if not isinstance(x, _OF_OPS):
            return x[at]
        state: Any = x
        rest = jax.tree.map(lambda s: s[at], state._replace(memory=None))
        return rest._replace(memory=Layer(state.memory, at))

    def whole(x):
        plain = isinstance(x, _OF_OPS) and getattr(x, "normalizer", None) is None
        return in_place and plain and x.memory.ndim == 5

    return jax.tree.map(own, states, is_leaf=whole)


def put_layer(states: Any, own: Any, at: Array) -> Any:
    """The stacked states with `own` as layer `at`."""

    def put(new, x):
        return new.stack if isinstance(new, Layer) else x.at[at].set(new.astype(x.dtype))

    return jax.tree.map(put, own, states, is_leaf=lambda x: isinstance(x, Layer))


_OF_OPS = (LinearState, DeltaState)
