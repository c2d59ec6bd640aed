"""The decoder, a causal language model: embedding, pre-norm residual layers, a final norm and a head; a scan runs over
repetitions of the layers' pattern.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lsm_jax import mixers
from lsm_jax.mixers import Clock
from lsm_jax.mixers.layers import Dense, matmul_to_float32, parameter
from lsm_jax.models.block import ACTIVATIONS, new_norm, stack_periods
from lsm_jax.models.config import ModelConfig
from lsm_jax.models.joined_stacks import join_stacks
from lsm_jax.models.loss import capped
from lsm_jax.models.narrow import cast_stacks
from lsm_jax.models.periods import (
    entries_by_row,
    gather_statistics,
    rematerialized,
    run_period,
    run_unrolled,
    together,
)
from lsm_jax.models.stages import apply_in_stages
from lsm_jax.ops.core.states import layer_of, put_layer
from lsm_jax.parallel import constrain, pipelined, shards_of


class DecoderState(NamedTuple):
    """The state of a decoder between calls: that of every layer, and the clock of positions; its shapes do not depend
    on the number of tokens read.

    Attributes:
        layers: a tuple with (mixer state, feedforward state) for each letter of the period, stacked over the
            periods.
        clock: the position of each row's next token.
    """

    layers: Any
    clock: Clock


class PeriodStates(NamedTuple):
    """The states of layers that are decoded without a loop: for each period what `DecoderState.layers` has for all of them."""

    each: tuple[Any, ...]


class Decoder(nnx.Module):
    """A causal language model: an embedding, the layers of the config's pattern, a norm, and a head that returns
    logits.

    It contains only parameters and nothing mutable, so that plain `jax.jit` and `jax.grad` of its parameters
    work after `nnx.split`.

    Args:
        config: the model's config, which is validated and copied.
        rngs: source of the initial parameters.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        config.validate()
        config = copy.deepcopy(config)
        self.dtype, self.remat, self.vocab_size = config.dtype, config.remat, config.vocab_size
        self.loss_chunk_size = config.loss_chunk_size
        self.unroll_layers = bool(config.unroll_layers)
        self.embedding_scale, self.logits_scale = config.embedding_scale, config.logits_scale
        self.logits_cap = config.logits_cap
        self.num_periods = config.num_layers // len(config.period())
        draw = jax.random.normal(rngs.params(), (config.vocab_size, config.hidden_size))
        self.embedding = parameter(config.init_std * draw, ("vocab", "embed"), weight_decay=True)
        self.periods = stack_periods(config, jax.random.split(rngs.params(), self.num_periods))
        self.embedding_norm = new_norm(config) if config.embedding_norm else None
        self.norm = new_norm(config)
        shape = (config.hidden_size, config.vocab_size)
        untied = dict(axes=("embed", "vocab"), rngs=rngs, init_std=config.init_std)
        self.lm_head = None if config.tie_embeddings else Dense(*shape, **untied)
        zeros = jnp.zeros(config.vocab_size, jnp.float32)
        biased = config.head_bias
        self.head_bias = parameter(zeros, ("vocab",), weight_decay=False) if biased else None

    def head(self) -> jax.Array:
        """Return the matrix [D, vocab] that multiplies hidden states to give logits, in float32: the embedding's
        transpose if they are tied. With a bias the matrix is [D + 1, vocab], and the last row is the bias.
        """
        head = self.embedding[...].T if self.lm_head is None else self.lm_head.kernel[...]
        if self.head_bias is None:
            return head
        return jnp.concatenate([head, self.head_bias[...][None].astype(head.dtype)])

    def init_state(self, batch_size: int, max_length: int) -> DecoderState:
        """Return the state of all layers before any token, from which the model reads or generates token by token.

        Args:
            batch_size: B.
            max_length: the largest number of tokens of a row; only the states of softmax layers depend on it.
        """
        for name, value in (("batch_size", batch_size), ("max_length", max_length)):
            if value < 1:
                raise ValueError(f"{name}={value}: it must be at least 1")

        def stack(x):
            return jnp.broadcast_to(x, (self.num_periods, *x.shape))

        layers = tuple(
            jax.tree.map(stack, block.init_state(batch_size, max_length, jnp.dtype(self.dtype)))
            for block in self.periods.blocks
        )
        return DecoderState(layers, mixers.fresh_clock(batch_size))

    def __call__(
        self,
        tokens: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        update_mask: jax.Array | None = None,
        contiguous: bool = False,
        state: DecoderState | None = None,
    ) -> tuple[jax.Array, DecoderState | None, dict[str, jax.Array]]:
        """Return the logits [B, T, vocab] in float32 for tokens int [B, T], the state after the call, and
        statistics by name; the other arguments are those of `Decoder.hidden`.
        """
        x, state, aux = self.hidden(
            tokens,
            segment_ids=segment_ids,
            positions=positions,
            update_mask=update_mask,
            contiguous=contiguous,
            state=state,
        )
        return self.logits(x), state, aux

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Return the residual stream [B, T, D] before the first layer, for tokens int [B, T]: the embedding, scaled and
        normalised as the config says; NaN for ids outside the vocabulary.
        """
        x = self.embedding[...].at[tokens].get(mode="fill", fill_value=jnp.nan)
        x = x if self.embedding_scale == 1 else self.embedding_scale * x
        x = constrain(x.astype(self.dtype), ACTIVATIONS)
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def init_shared(self, x: jax.Array) -> dict[str, jax.Array]:
        """Return the values by name that travel from layer to layer during a call, as they are before the first layer;
        x is the tokens' embedding [B, T, D].
        """
        firsts = len(self.periods.blocks) * np.arange(self.num_periods)
        kinds: dict[type[mixers.Mixer], list] = {}
        for place, block in enumerate(self.periods.blocks):
            mixer = block.mixer.innermost()
            kinds.setdefault(type(mixer), []).append((firsts + place, mixer))
        shared = {}
        for kind, stacks in kinds.items():
            shared.update(kind.init_shared(x, stacks))
        return shared

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Return the logits [..., vocab] in float32 of hidden states [..., D]: their product with the model's
        head, capped if the config says so.
        """
        return capped(matmul_to_float32(hidden, self.head().astype(hidden.dtype)), self.logits_cap)

    def hidden(
        self,
        tokens: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        update_mask: jax.Array | None = None,
        contiguous: bool = False,
        state: DecoderState | None = None,
        microbatches: int = 0,
        rounds: int = 1,
        periods: tuple[Any, ...] | None = None,
    ) -> tuple[jax.Array, DecoderState | None, dict[str, jax.Array]]:
        """Return the hidden states [B, T, D] of tokens after the final norm, from which the head computes logits.

        Args:
            tokens: int [B, T]; an id outside the vocabulary has hidden states of NaN, since compiled code
                cannot raise.
            segment_ids: int [B, T], 0 for padding; None for one document that continues.
            positions: int [B, T], in the document; None counts them.
            update_mask: [B, T], 0 where a token must not change any memory.
            contiguous: whether every token between two tokens of one document is written, as in rows that
                `lsm_jax.data` packs. Short convolutions and token shifts then load only neighbouring tokens,
                and only those of one other device on a sequence axis. If True although it does not hold,
                outputs are wrong.
            state: from `init_state` or an earlier call; None starts without a state, and returns none.
            microbatches: the number of parts into which the rows are divided for a mesh's pipeline stages;
                each part has its own balance losses, whose mean is the loss, as in gradient accumulation. 0 means one for
                each stage.
                Ignored with a state, or with one stage.
            rounds: how often each part passes through all stages.
            periods: what `unstack_periods` returns, for one token of each row with a state from `unstack_state`, on one device. The
                layers then run one after the other with these parameters, not in a loop. A loop copies each layer's parameters and
                caches out of the stack of all before it multiplies by them; products of one token do little else than load them.

        Returns:
            [B, T, D] in the config's dtype, or [B, T, D + 1] with a last channel of ones if the head has a bias, which
            multiplies that channel; the state after the call (None if none was given); and statistics
            by name. Those whose names end in `_loss` or `_count` are summed over the layers, and the others
            are stacked. Those with `/tokens/` in their name have one value for each token, and are absent
            with pipeline stages.

        Raises:
            ValueError: `periods` is not from `unstack_periods`, `state` not from `unstack_state`, or there is more than one token.
        """
        self._check_periods(periods, state, tokens.shape)
        with jax.named_scope("embedding"):
            x = self.embed(tokens)
        clock = mixers.fresh_clock(tokens.shape[0]) if state is None else state.clock
        positions, clock = mixers.advance(clock, tokens.shape, segment_ids, update_mask, positions)
        shared = self.init_shared(x)
        in_loop = not self.unroll_layers
        apply_period = functools.partial(
            run_period, self._layer_function(contiguous, in_loop=in_loop)
        )
        rows = (segment_ids, positions, update_mask)
        if state is None and (stages := shards_of("layers")) > 1:
            microbatches = microbatches or stages
            if self.num_periods % stages and rounds == 1:
                x, aux = self._pipelined_at_layers(contiguous, x, shared, rows, microbatches)
            else:
                x, aux = self._pipelined(apply_period, x, shared, rows, microbatches, rounds)
            return self.last_norm(x), None, self._statistics_of_microbatches(aux)
        unsharded = jax.sharding.get_abstract_mesh().empty and jax.typeof(x).sharding.mesh.empty
        if state is not None and tokens.shape[1] == 1 and unsharded:
            x, layers, aux = self._decode(apply_period, x, shared, rows, state.layers, periods)
            return self.last_norm(x), DecoderState(layers, clock), self._statistics(aux)
        if periods is not None:
            raise ValueError("periods: accepted is None on a mesh of devices")
        index = np.arange(self.num_periods)
        scanned = functools.partial(apply_period, rows)
        casts = state is None and self._casts_stacks()
        stacks = join_stacks(self.periods, self.remat) if casts else self.periods
        pair = state is None and self._adds_later(x)
        x = (x, jnp.zeros_like(x)) if pair else x
        layers = None
        if casts:
            first = functools.partial(scanned, (x, shared))
            stacks = cast_stacks(stacks, self.dtype, lambda period: first((period, None, index[0])))
            x, aux = run_unrolled(scanned, (x, shared), stacks, self.num_periods)
        else:
            inputs = (stacks, None if state is None else state.layers, index)
            (x, _), (layers, aux) = jax.lax.scan(
                scanned, (x, shared), inputs, unroll=self.unroll_layers
            )
        x = constrain(x[0] + x[1], ACTIVATIONS) if pair else x
        after = None if state is None else DecoderState(layers, clock)
        return self.last_norm(x), after, self._statistics(aux)

    def _adds_later(self, x: jax.Array) -> bool:
        """Return whether each layer leaves the sum of the residual stream x [B, T, D] to the next one (`Block.adds_later`). A layer
        that is computed again from its inputs alone would have two of them to store, and a loop copies sums from the kernel to its stack.
        """
        each = all(b.adds_later(x) for b in self.periods.blocks)
        return self.unroll_layers and self.remat != "full" and each

    def _casts_stacks(self) -> bool:
        """Return whether parameters are cast before the layers (`cast_stacks`): those of layers that one device computes one after
        the other, unless rematerialisation is to use as little memory as possible."""
        one_device = all(n == 1 for n in jax.sharding.get_abstract_mesh().shape.values())
        narrow = jnp.dtype(self.dtype).itemsize == 2
        return self.unroll_layers and one_device and narrow and self.remat != "full"

    def last_norm(self, x: jax.Array) -> jax.Array:
        """Return the residual stream x [B, T, D] after the last norm, as `hidden` returns it: times `logits_scale`, so that its
        product with the head has that scale.
        """
        x = self.norm(x, factor=self.logits_scale)
        if self.head_bias is None:
            return x
        return jnp.concatenate([x, jnp.ones_like(x[..., :1])], axis=-1)

    def _statistics(self, aux: list[dict[str, jax.Array]]) -> dict[str, jax.Array]:
        """Return the statistics of all layers by name, together with the losses that are computed from
        statistics of several layers.
        """
        gathered = gather_statistics(aux)
        losses = {type(block.mixer): block.mixer.model_losses for block in self.periods.blocks}
        for model_losses in losses.values():
            gathered |= model_losses(gathered)
        return gathered

    def _statistics_of_microbatches(self, aux: list[dict[str, jax.Array]]) -> dict[str, jax.Array]:
        """Return the statistics of all layers by name, from those of each layer of the period and each microbatch, arrays
        [periods, M, ...]: losses are computed for each microbatch. Counts are sums over microbatches, other
        statistics means, as in gradient accumulation.
        """
        if not jax.tree.leaves(aux):  # `vmap` requires an array
            return self._statistics(aux)
        each = jax.vmap(self._statistics, in_axes=1)(aux)
        return {
            name: (jnp.sum if name.endswith("_count") else jnp.mean)(x, axis=0)
            for name, x in each.items()
        }

    def _layer_function(self, contiguous: bool, *, in_loop: bool) -> Callable:
        """Return the function that applies one layer (a `Block`) to the residual stream, wrapped in rematerialisation
        as the config's `remat` says; `in_loop` is that of `rematerialized`.
        """
        grouped = len(self.periods.blocks) > 1 and self.remat == "full"

        def layer(x, shared, block, state, index, segment_ids, positions, update_mask):
            if grouped:
                x, block = together((x, block))
            return block(
                x,
                shared,
                state,
                layer=index,
                segment_ids=segment_ids,
                positions=positions,
                update_mask=update_mask,
                contiguous=contiguous,
            )

        return rematerialized(layer, self.remat, in_loop=in_loop)

    def _pipelined(self, apply_period, x, shared, rows, microbatches: int, rounds: int):
        """Apply all layers of the decoder over the stages of the mesh's pipeline, without states.

        Args:
            apply_period: the function that applies one period of layers: `periods.run_period` with a layer
                function.
            x: [B, T, D], the residual stream before the first layer.
            shared: the values that travel from layer to layer, by name.
            rows: segment ids, positions and update mask, each [B, T] or None.
            microbatches: the number of parts, at least 1, into which the rows of the batch are divided.
            rounds: how often each part passes through all stages.

        Returns:
            x after the layers, and the statistics of each layer of the period, stacked over the periods and over the
            microbatches.
        """
        index = jnp.arange(self.num_periods)
        by_rows = entries_by_row(self.init_shared, x)

        def stage(layers, carry, rows, constant):
            periods, index = layers
            x, shared = carry
            scanned = functools.partial(apply_period, rows)
            (x, shared), (_, aux) = jax.lax.scan(
                scanned, (x, shared | constant), (periods, None, index)
            )
            travelling = {name: shared[name] for name in by_rows}
            aux = [{n: a[n] for n in a if "/tokens/" not in n} for a in aux]
            return (x, travelling), aux

        constant = {name: value for name, value in shared.items() if name not in by_rows}
        shared = {name: shared[name] for name in by_rows}
        (x, _), aux = pipelined(
            stage,
            (self.periods, index),
            (x, shared),
            rows,
            constant,
            microbatches=microbatches,
            rounds=rounds,
        )
        return x, aux

    def _pipelined_at_layers(self, contiguous: bool, x, shared, rows, microbatches: int):
        """Apply all layers of the decoder over pipeline stages that are not whole periods, without states.

        The arguments and the result are those of `_pipelined`; `contiguous` is that of `hidden`.
        """
        by_rows = entries_by_row(self.init_shared, x)
        return apply_in_stages(
            self._layer_function(contiguous, in_loop=False),
            list(self.periods.blocks),
            shards_of("layers"),
            self.remat,
            (x, {name: shared[name] for name in by_rows}),
            rows,
            {name: value for name, value in shared.items() if name not in by_rows},
            microbatches=microbatches,
        )

    def unstack_periods(self) -> tuple[Any, ...]:
        """Return the modules of each period of layers with parameters of their own, copied out of the stacks, for `hidden`."""
        return self._each_period(self.periods)

    def unstack_state(self, state: DecoderState) -> DecoderState:
        """Return a state whose `layers` are `PeriodStates`, the states of each period of layers, copied out of the stacks."""
        return state._replace(layers=PeriodStates(self._each_period(state.layers)))

    def _check_periods(self, periods, state, shape: tuple[int, ...]) -> None:
        unstacked = state is not None and isinstance(state.layers, PeriodStates)
        if periods is None:
            if unstacked:
                raise ValueError("state is from unstack_state: accepted with periods only")
            return
        if len(periods) != self.num_periods:
            raise ValueError(
                f"periods has {len(periods)} entries; accepted is what unstack_periods returns, {self.num_periods}"
            )
        if not unstacked or shape[1] != 1:
            raise ValueError(
                f"periods: accepted is one token of each row, with a state from unstack_state; tokens has shape {shape}"
            )

    def _each_period(self, stacked: Any) -> tuple[Any, ...]:
        return tuple(jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(self.num_periods))

    def _decode(self, apply_period, x, shared, rows, states, periods=None):
        """Apply all layers to one token per row, and update the stacked memories of all layers in place.

        A scan that returns each layer's memories would stack them in new arrays, and copy these back. Here
        the stack is in the carry. This is not possible on a mesh, where the types of arrays may change from
        layer to layer: those of a carry may not.

        Args:
            apply_period: the function that applies one period of layers: `periods.run_period` with a layer
                function.
            x: [B, 1, D], the residual stream before the first layer.
            shared: the values that travel from layer to layer, by name.
            rows: segment ids, positions and update mask, each [B, 1] or None.
            states: `DecoderState.layers`, with `periods` that of a state from `unstack_state`.
            periods: what `unstack_periods` returned, or None.

        Returns:
            x after the layers, `states` after the token, and the statistics of each layer of the period,
            stacked over the periods.
        """

        def decode(carry, inputs):
            x, shared, states = carry
            period, index = inputs
            period_states = tuple(
                layer_of(s, index, in_place=block.mixer.memories_in_place)
                for s, block in zip(states, period.blocks, strict=True)
            )
            (x, shared), (period_states, statistics) = apply_period(
                rows, (x, shared), (period, period_states, index)
            )
            return (x, shared, put_layer(states, period_states, index)), statistics

        carry = x, shared, states
        if periods is None:
            inputs = self.periods, jnp.arange(self.num_periods)
            (x, _, states), aux = jax.lax.scan(decode, carry, inputs)
            return x, states, aux
        after, statistics = [], []
        for i, period in enumerate(periods):
            inputs = period, states.each[i], jnp.int32(i)
            (x, shared), (state, of_period) = apply_period(rows, (x, shared), inputs)
            after.append(state)
            statistics.append(of_period)
        return (
            x,
            PeriodStates(tuple(after)),
            jax.tree.map(lambda *each: jnp.stack(each), *statistics),
        )
