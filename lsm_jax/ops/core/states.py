"""The states that the linear and the delta memories return and continue from; and `Layer`, one layer's memory in an array
[L, ...] of all layers' memories, with functions that read it there and replace it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Layer(NamedTuple):
    """The memory of one layer in a stack of all layers' memories; an op whose state contains it updates the
    stack in place.

    Attributes:
        stack: [L, B, G, K, V], the memories of all layers.
        index: int32 scalar, the layer's index.
    """

    stack: Float[Array, "L B G K V"]
    index: Int[Array, ""]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [B, G, K, V] of this layer's memory, an entry of the stack of all layers' memories."""
        return self.stack.shape[1:]

    def read(self) -> Array:
        """Return the memory [B, G, K, V] of this layer from the stack [L, B, G, K, V] of all layers'
        memories.
        """
        return self.stack[self.index]

    def write(self, memory: Array) -> Layer:
        """Return the stack [L, B, G, K, V] of all layers' memories in which `memory` [B, G, K, V] replaces
        that of this layer.
        """
        return Layer(self.stack.at[self.index].set(memory.astype(self.stack.dtype)), self.index)


class LinearState(NamedTuple):
    """The state of `linear_memory` between calls: the memory, its normaliser and stabiliser if any, and the segment id
    of the last token.

    Attributes:
        memory: [B, G, K, V], or [B, S, G, K, V] with one state per segment, or a `Layer`; float32.
        normalizer: [B, G, K] or [B, S, G, K], the decayed sum of keys; None unless the op normalises.
        stabilizer: [B, G] or [B, S, G]: memory and normaliser are stored divided by its exponential. None
            without `log_input_gate`.
        segment_id: [B], the last nonzero segment id seen, 0 before any.
    """

    memory: Float[Array, ...]
    normalizer: Float[Array, ...] | None
    stabilizer: Float[Array, ...] | None
    segment_id: Int[Array, " B"]


class DeltaState(NamedTuple):
    """The state of `delta_memory` and `dplr_memory` between calls: the memory, and the segment id of the last token.

    Attributes:
        memory: [B, G, K, V], or [B, S, G, K, V] with one state per segment, or a `Layer`; float32.
        segment_id: [B], the last nonzero segment id seen, 0 before any.
    """

    memory: Float[Array, ...]
    segment_id: Int[Array, " B"]


def unwrap_layer(state: Any) -> tuple[Any, Layer | None]:
    """Return an op's state with the memory as an array: if it is a `Layer`, one layer of a stack of memories,
    its array is read from the stack; and return that `Layer`, or None.
    """
    layer = getattr(state, "memory", None)
    if not isinstance(layer, Layer):
        return state, None
    return state._replace(memory=layer.read()), layer


def store_layer(layer: Layer | None, result: tuple[Array, Any]) -> tuple[Array, Any]:
    """Return an op's output and final state, with the state's memory stored in the stack of `layer`; None
    changes nothing.
    """
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
    """Return a `LinearState` of zeros, for `num_heads` memories in each of `batch_size` rows; each row has
    `num_segments` states, or one if that is None.
    """
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
    """Return a `DeltaState` of zeros, for `num_heads` memories in each of `batch_size` rows; each row has
    `num_segments` states, or one if that is None.
    """
    memory = _zeros(batch_size, num_segments, (num_heads, key_dim, value_dim), dtype)
    return DeltaState(memory, jnp.zeros(batch_size, jnp.int32))


def layer_of(states: Any, at: Array, *, in_place: bool) -> Any:
    """Return the states of the layer with index `at` from states that are stacked along the first axis.

    Args:
        states: a pytree of stacked states.
        at: int32 scalar, the layer's index.
        in_place: whether the memories of `LinearState` and `DeltaState` are returned as a `Layer`, which ops
            update in place.
    """

    def one_layer(x):
        if not isinstance(x, _IN_PLACE):
            return x[at]
        state: Any = x
        rest = jax.tree.map(lambda s: s[at], state._replace(memory=None))
        return rest._replace(memory=Layer(state.memory, at))

    def updated_in_place(x):
        supported = isinstance(x, _IN_PLACE) and getattr(x, "normalizer", None) is None
        return in_place and supported and x.memory.ndim == 5

    return jax.tree.map(one_layer, states, is_leaf=updated_in_place)


def put_layer(states: Any, layer: Any, at: Array) -> Any:
    """Return the states of all layers, stacked along the first axis, in which those of the layer with index `at` are
    replaced by `layer`.
    """

    def replace(new, x):
        return new.stack if isinstance(new, Layer) else x.at[at].set(new.astype(x.dtype))

    return jax.tree.map(replace, layer, states, is_leaf=lambda x: isinstance(x, Layer))


_IN_PLACE = (LinearState, DeltaState)
