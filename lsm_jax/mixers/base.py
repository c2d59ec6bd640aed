"""The base class of mixers: it computes a mixer's layer from its methods `read`, `write` and `finish` and one op.

Training, prefill, chunked prefill and decoding are the same call, since all that a mixer remembers of a row
is in one state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax import ops
from lsm_jax.mixers.clock import advance, fresh_clock
from lsm_jax.mixers.context import Context
from lsm_jax.mixers.tails import Pointwise, ShortConvolution, TokenShift, short_convolution
from lsm_jax.ops.core import checks
from lsm_jax.ops.core.states import Layer

__all__ = [
    "Context",
    "Mixer",
    "MixerOutput",
    "MixerState",
    "Pointwise",
    "ShortConvolution",
    "TokenShift",
    "short_convolution",
]


class MixerState(NamedTuple):
    """The state of a mixer between calls, of static shape.

    Attributes:
        memory: the op's state.
        tails: the states of short convolutions and token shifts, which contain their last inputs, by name.
        clock: a `Clock`; None unless the mixer uses positions.
    """

    memory: Any
    tails: dict[str, Any]
    clock: Any

    @property
    def matrix(self) -> jax.Array:
        """The memory M as one array, such as [B, H, K, V] in float32: the field `memory` of the op's state.

        Raises:
            AttributeError: the op's state has other fields, as that of attention, whose memory is keys and values.
        """
        if not hasattr(self.memory, "memory"):
            fields = ", ".join(getattr(self.memory, "_fields", ()))
            raise AttributeError(
                f"matrix: the memory of this mixer is not one array; accepted are the fields of state.memory: {fields}"
            )
        return self.memory.memory


class MixerOutput(NamedTuple):
    """The results of a call of a mixer: `y, state, aux = mixer(x)`, or by name.

    Attributes:
        y: the output [B, T, D].
        state: the `MixerState` after the last token.
        aux: losses and statistics by name; empty for most methods.
    """

    y: jax.Array
    state: MixerState
    aux: dict[str, jax.Array]


class Mixer(nnx.Module):
    """A layer that mixes tokens through a memory.

    A subclass sets `op` and defines `write`, `read`, `finish`, `options` and `init_memory`; it holds parameters and nothing
    mutable.

    Attributes:
        op: the function of `lsm_jax.ops` that updates and reads the memory.
        uses_positions: whether it needs tokens' positions, as rotary embeddings do.
        positions_in_memory: whether its positions, of which it uses only the remainder by its mini-batch,
            count the tokens that a memory of a Mixture-of-Memories has received, instead of the row's tokens.
            The state of its op contains this count as `position`.
        uses_depth: whether `__init__` accepts `layer`, the index of the layer in the model (possibly traced, so only initial
            parameters may depend on it), and `num_layers`, the model's depth.
        has_losses: whether it reports losses, and `__init__` accepts `loss_layers`, the number of layers over which they are
            averaged (None for `num_layers`).
        memory_parts: its submodules, `Dense` layers or made of them, of which each memory of a Mixture-of-Memories has a copy
            (keys, values, gates); the memories share the others. Empty where it cannot be one of several memories.
        single_because: why `memory_parts` is empty, for error messages; it continues "cannot be one of several memories: ".
        token_parts: the names of its `Dense` layers that multiply in `read` and `write` the input `x` itself,
            not an output of other layers. Mixture-of-Memories computes those once for each token (and
            memory), not once for each row. A layer that is missing here is only slower there; the outputs of
            a layer that is listed wrongly are wrong.
        shared_by_token: the entries of `shared` that are [B, T, ...].
        memories_in_place: whether its ops read and return memories in the layout in which its state stores
            them; the decoder then lets the ops update the stack of all layers' memories in place
            (`lsm_jax.ops.core.states.Layer`).
    """

    op: ClassVar[Callable]
    uses_positions: bool = False
    positions_in_memory: ClassVar[bool] = False
    uses_depth: ClassVar[bool] = False
    has_losses: ClassVar[bool] = False
    memory_parts: ClassVar[tuple[str, ...]] = ()
    single_because: ClassVar[str] = "its module lists no memory_parts"
    token_parts: ClassVar[tuple[str, ...]] = ()
    shared_by_token: ClassVar[tuple[str, ...]] = ()
    memories_in_place: ClassVar[bool] = True

    def __init__(self, config: Any, hidden_size: int):
        config.validate(hidden_size)
        self.config = copy.deepcopy(config)
        self.hidden_size = hidden_size

    def read(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return the op's queries [B, T, H, K], with which tokens x [B, T, D] read the memory, and the
        context.
        """
        raise NotImplementedError

    def write(self, x: jax.Array, context: Context) -> tuple[dict[str, Any], Context]:
        """Return the arguments by which the op updates its memory for tokens x [B, T, D], by name (k, v, and
        gates), and the context.
        """
        raise NotImplementedError

    def finish(self, o: jax.Array, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return the mixer's output y [B, T, D] and the context: y is computed from the op's output o
        [B, T, H, V] and the mixer's input x [B, T, D] by a norm, a gate and a projection.
        """
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of the mixer's op that do not depend on the input, by name: form, backends and
        chunk size.
        """
        return self.config.op.arguments()

    def apply(self, query: jax.Array, written: dict[str, Any], **call) -> tuple[jax.Array, Any]:
        """Run the mixer's op on one call's arrays, and return its output [B, T, H, V] and its final state.

        Args:
            query: the queries that `read` returned.
            written: the arguments that `write` returned.
            call: the arguments that `options` returned, `initial_state`, `segment_ids` and `update_mask`.
        """
        return type(self).op(query, **written, **call)

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> Any:
        """Return the state of the mixer's op before any token, for `batch_size` rows.

        `max_length`, the largest number of stored tokens, and `dtype`, the dtype of stored keys and values,
        affect only softmax attention.
        """
        raise NotImplementedError

    def remembering(self) -> tuple[ShortConvolution | TokenShift, ...]:
        """Return the mixer's short convolutions and token shifts, the layers whose state is a tail of tokens
        that is carried from call to call.
        """
        kinds = (ShortConvolution, TokenShift)
        return tuple(v for v in vars(self).values() if isinstance(v, kinds))

    def init_state(self, batch_size: int, max_length: int, dtype: Any) -> MixerState:
        """Return the mixer's state before any token: the op's empty state, and empty tails of its convolutions and
        token shifts.

        Args:
            batch_size: B.
            max_length: the largest number of tokens of a row; only the size of softmax attention's state
                depends on it.
            dtype: the dtype of activations in the state (convolution inputs, keys and values).
        """
        tails = {
            part.name: ops.shift_state(batch_size, part.remembered, part.channels, dtype=dtype)
            for part in self.remembering()
        }
        clock = fresh_clock(batch_size) if self.uses_positions else None
        return MixerState(self.init_memory(batch_size, max_length, dtype), tails, clock)

    @classmethod
    def init_shared(cls, x: jax.Array, stacks: list[tuple[jax.Array, Any]]) -> dict[str, jax.Array]:
        """Return the entries of `shared` that this kind of mixer reads or sets; called once per call, before
        the first layer.

        Args:
            x: [B, T, D], the embeddings.
            stacks: all mixers of this kind in the model, each as the indices of its layers [P] and the mixer
                with parameters [P, ...].
        """
        return {}

    def model_losses(self, statistics: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Return the losses of a model, by name, that are computed from the statistics of all its layers of this kind.

        Args:
            statistics: those of the model, by name; each layer's are stacked along the first axis.
        """
        return {}

    def output_projections(self) -> tuple[Any, ...]:
        """Return the projections whose outputs are added to the residual stream."""
        last: Any = self.innermost()
        return (last.o_proj,)

    def innermost(self) -> Mixer:
        """Return the mixer whose `init_shared` the model calls: this one, or, if it wraps another, the innermost."""
        return self

    def through_memory(
        self, x: jax.Array, context: Context, memory: Any
    ) -> tuple[jax.Array, Any, Context]:
        """Read the memory and update it with the tokens x, by the methods `read`, `write` and `apply` in this
        order.

        Args:
            x: [B, T, D].
            context: the context of the call.
            memory: the op's state, None for an empty one.

        Returns:
            The output of the memory [B, T, ...], the op's state after the last token, and the context after `write`.
        """
        query, context = self.read(x, context)
        written, context = self.write(x, context)
        o, memory = self.apply(
            query,
            written,
            **self.options(),
            initial_state=memory,
            segment_ids=context.segment_ids,
            update_mask=context.update_mask,
        )
        return o, memory, context

    def __call__(
        self,
        x: jax.Array,
        *,
        layer: jax.Array | int | None = None,
        shared: Mapping[str, jax.Array] | None = None,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        update_mask: jax.Array | None = None,
        contiguous: bool = False,
        state: MixerState | None = None,
    ) -> MixerOutput:
        """Mix the tokens of x [B, T, D] through the mixer's memory: return y [B, T, D] and the state after the call.

        Args:
            x: [B, T, D].
            layer: the index of the layer in its model.
            shared: values that travel from layer to layer, by name.
            segment_ids: int [B, T], 0 for padding; None for one document that continues.
            positions: int [B, T], in the document; None counts them from the state.
            update_mask: [B, T], 0 where a token must not change the memory.
            contiguous: whether every token between two tokens of one document is known to be written (see
                `ops.short_convolution`).
            state: the state that the previous call returned; None is the state before any token.

        Returns:
            A `MixerOutput`: y [B, T, D], the state after the last token, and losses and statistics by name (`aux`).

        Raises:
            ValueError: an argument has a shape or type that is not accepted, or the state is of another batch
                size or mixer.
        """
        y, state, context = self.run(
            x,
            layer=layer,
            shared=shared,
            segment_ids=segment_ids,
            positions=positions,
            update_mask=update_mask,
            contiguous=contiguous,
            state=state,
        )
        return MixerOutput(y, state, dict(context.aux))

    def run(
        self,
        x: jax.Array,
        *,
        layer: jax.Array | int | None = None,
        shared: Mapping[str, jax.Array] | None = None,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        update_mask: jax.Array | None = None,
        contiguous: bool = False,
        state: MixerState | None = None,
    ) -> tuple[jax.Array, MixerState, Context]:
        """Mix the tokens of x [B, T, D] as `__call__` does; return y [B, T, D], the state after the call, and
        the call's context, whose `shared` goes to the next layer.
        """
        self._check(x, segment_ids, positions, update_mask, state)
        clock = None
        if self.uses_positions:
            clock = fresh_clock(x.shape[0]) if state is None else state.clock
            positions, clock = advance(clock, x.shape[:2], segment_ids, update_mask, positions)
        tails = {} if state is None else state.tails
        context = Context(
            layer, shared or {}, segment_ids, positions, update_mask, tails, contiguous=contiguous
        )
        o, memory, context = self.through_memory(
            x, context, None if state is None else state.memory
        )
        y, context = self.finish(o, x, context)
        return y, MixerState(memory, dict(context.tails), clock), context

    def op_arguments(
        self,
        x: jax.Array,
        *,
        layer: jax.Array | int | None = None,
        shared: Mapping[str, jax.Array] | None = None,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> dict[str, Any]:
        """Return the arguments with which the mixer's op is called for tokens x [B, T, D] without a state, by name: the
        queries `q` [B, T, H, K] and what `write` returns, such as `k`, `v` and `log_decay`; for plots and analyses.

        Args:
            x, layer, shared, segment_ids, positions: as in `__call__`.
        """
        self._check(x, segment_ids, positions, None, None)
        if self.uses_positions:
            clock = fresh_clock(x.shape[0])
            positions, _ = advance(clock, x.shape[:2], segment_ids, None, positions)
        context = Context(layer, shared or {}, segment_ids, positions)
        query, context = self.read(x, context)
        written, _ = self.write(x, context)
        return {"q": query, **written}

    def _check(self, x, segment_ids, positions, update_mask, state) -> None:
        """Raise ValueError if the input, ids, positions, mask or state of a call of the mixer are not accepted; the op
        checks its memory itself.
        """
        name = type(self).__name__
        checks.check_shape(name, "x", x, (None, None, self.hidden_size), "B, T, D")
        checks.check_filled(name, "x", x)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name}: x has dtype {x.dtype}; accepted are floating ones")
        batch, length, _ = x.shape
        checks.check_rows(name, batch, length, segment_ids, update_mask)
        if positions is not None:
            checks.check_shape(name, "positions", positions, (batch, length), "B, T")
            if not jnp.issubdtype(jnp.result_type(positions), jnp.integer):
                raise ValueError(
                    f"{name}: positions has dtype {positions.dtype}; accepted are integers"
                )
        if state is None:
            return
        if not isinstance(state, MixerState):
            raise ValueError(
                f"{name}: state is a {type(state).__name__}; accepted are None and a MixerState of init_state"
            )
        wanted = sorted(part.name for part in self.remembering())
        if sorted(state.tails) != wanted or (state.clock is None) == self.uses_positions:
            clock = "a clock" if self.uses_positions else "no clock"
            raise ValueError(
                f"{name}: state holds tails {sorted(state.tails)} and {'no' if state.clock is None else 'a'} clock; "
                f"accepted are tails {wanted} and {clock}, as init_state gives"
            )
        for path, leaf in jax.tree_util.tree_leaves_with_path(
            state, is_leaf=lambda x: isinstance(x, Layer)
        ):
            if jnp.shape(leaf)[:1] != (batch,):
                raise ValueError(
                    f"{name}: state{jax.tree_util.keystr(path)} has shape {jnp.shape(leaf)}; accepted are {batch} rows, as many as x has"
                )
