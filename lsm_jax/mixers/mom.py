"""Mixture-of-Memories (MoM, arXiv 2502.13685): a router sends each token to k of M memories of any inner
mixer.

A memory is updated only by the tokens that are routed to it, in time order, with keys, values and gates of
its own projections. Other tokens do not change it; they do not decay it either. All memories are read with
the same query. Short convolutions run along the tokens of each memory (but for `row_conv_size`). One more, shared memory may see all
tokens. The outputs of a token's memories are summed, weighted by the router, before the inner mixer's norm
and output gate, which are applied once (Section 3.2 and the authors' code).

There are two forms of the same function. *masked*: one row for each memory, in which all other tokens are
masked. *packed*: the tokens sorted by memory (`lsm_jax.mixers.mom_layout.Packed`), so that only routed tokens
cost anything.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax.mixers import checks
from lsm_jax.mixers.base import Context, Mixer, MixerState, TokenShift, short_convolution
from lsm_jax.mixers.clock import fresh_clock
from lsm_jax.mixers.gated_deltanet import GatedDeltaNetConfig
from lsm_jax.mixers.heads import head_size
from lsm_jax.mixers.layers import Dense
from lsm_jax.mixers.method import METHODS, Method, build
from lsm_jax.mixers.mom_inner import Part, run_inner
from lsm_jax.mixers.mom_layout import (
    Rows,
    chunks_needed,
    pack,
    pack_by_device,
    stack_memory_parts,
)
from lsm_jax.mixers.mom_router import Route, route_tokens
from lsm_jax.mixers.mom_state import (
    MoMState,
    check_memories,
    mark_document,
    positions_in_memory,
    split_memories,
    token_documents,
)
from lsm_jax.ops import shift_state
from lsm_jax.ops.core.checks import DEFAULT_CHUNK_SIZE
from lsm_jax.parallel import sequence_shards

EXECUTIONS = ("packed", "masked")
BALANCES = ("layer", "model")
_ROW = "row_"  # prefix of the names of tails that belong to the row, not to a memory


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class MoMConfig:
    """The config of a Mixture-of-Memories: a router sends each token to some of several memories of an inner mixer.

    Attributes:
        mixer: the config of the inner mixer; any mixer with `Mixer.memory_parts`.
        num_memories: M, the number of memories that the router selects from.
        top_k: k, the number of memories that a token is routed to.
        shared_memory: whether there is one more memory that sees every token, with weight 1.
        single_projections: whether all memories have the same projections of keys, values and gates, instead
            of one set for each.
        row_conv_size: width of a short convolution c along the row's tokens, whatever their memories: the memories, not the
            router, receive x + c(x) instead of x. 1, as published, is none: a token then reaches only its own memories.
        balance_scale: multiplies the balance loss `M Σ_m f_m P_m`; f_m is the fraction of the tokens routed
            to memory m, and P_m the mean probability of m. It is k at perfect balance.
        balance: "layer" computes the loss of each layer and averages over the model's layers with memories.
            "model" computes one loss, with f and P averaged over these layers, as in the authors' code: the
            imbalance of one layer may then compensate that of another.
        execution: "packed" or "masked". The masked form is used in any case for calls with an `update_mask`;
            for packed documents with a state, with the inner op's associative form, or sharded over devices
            along the sequence; and for sharded rows whose length the devices do not divide, or that GPUs or TPUs share (but
            for `op.implementation="xla"`), whether kernels serve the call or not, since fused kernels have one state per row.
    """

    mixer: Any = dataclasses.field(default_factory=lambda: GatedDeltaNetConfig(num_heads=4, expand_v=1.0))  # fmt: skip
    num_memories: int = 4
    top_k: int = 2
    shared_memory: bool = True
    single_projections: bool = False
    row_conv_size: int = 1
    balance_scale: float = 1e-3
    balance: str = "layer"
    execution: str = "packed"

    @classmethod
    def for_width(cls, hidden_size: int) -> MoMConfig:
        """Return the config of Mixture-of-Memories for a model of width `hidden_size`, with the published proportions:
        four memories, two for each token, and a shared one, of Gated DeltaNet with four heads of 256 channels (three at
        width 768, smaller ones below).
        """
        size = head_size(hidden_size, 256)
        heads = min(4, hidden_size // size)
        return cls(mixer=GatedDeltaNetConfig(num_heads=heads, head_dim=size, expand_v=1.0))

    def num_groups(self) -> int:
        """Return G, the number of memories of a layer, including the one that all tokens share if there is one."""
        return self.num_memories + self.shared_memory

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of Mixture-of-Memories is not accepted, or does not fit a model of
        width `hidden_size`.
        """
        checks.fields(self)
        able = [m for m in METHODS.values() if m.module.memory_parts]
        if type(self.mixer) not in [m.config for m in able]:
            known = [m for m in METHODS.values() if m.config is type(self.mixer)]
            why = f": {known[0].module.single_because}" if known else ""
            raise ValueError(
                f"MoMConfig.mixer={self.mixer!r} cannot be one of several memories{why}; accepted are the configs of "
                f"{', '.join(m.name for m in able)}"
            )
        self.mixer.validate(hidden_size)
        checks.positive(self, num_memories=self.num_memories, row_conv_size=self.row_conv_size)
        if not 1 <= self.top_k <= self.num_memories:
            raise ValueError(
                f"MoMConfig.top_k={self.top_k}: accepted are 1 to num_memories={self.num_memories}"
            )
        if self.balance_scale < 0:
            raise ValueError(f"MoMConfig.balance_scale={self.balance_scale}: it must be at least 0")
        checks.one_of(self, "balance", self.balance, BALANCES)
        checks.one_of(self, "execution", self.execution, EXECUTIONS)

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: the router, the convolution along
        the row, the inner mixer's query and output once, and its other parts for each memory that the token is routed to.
        """
        inner = nnx.eval_shape(lambda: build(self.mixer, hidden_size, rngs=nnx.Rngs(0)))
        kernels = [
            p.get_value().size * (path[0] not in inner.memory_parts)
            for path, p in nnx.to_flat_state(nnx.state(inner, nnx.Param))
            if path[-1] == "kernel"
        ]
        read = self.top_k + self.shared_memory
        inner_flops = self.mixer.flops_per_token(hidden_size, seq_len)
        taps = self.row_conv_size if self.row_conv_size > 1 else 0
        router_flops = 2.0 * hidden_size * (self.num_memories + taps)
        return router_flops + read * inner_flops - 2.0 * (read - 1) * sum(kernels)


class MoM(Mixer):
    """The layer of Mixture-of-Memories: a mixer that maps [B, T, D] to [B, T, D]; `MoMConfig` says what its options
    mean.
    """

    uses_depth = True
    has_losses = True
    memories_in_place = False

    def __init__(
        self,
        config: MoMConfig,
        hidden_size: int,
        *,
        rngs: nnx.Rngs,
        init_std: float = 0.02,
        layer: jax.Array | int = 0,
        num_layers: int = 1,
        loss_layers: int | None = None,
    ):
        super().__init__(config, hidden_size)
        self.loss_layers = num_layers if loss_layers is None else loss_layers
        options: dict[str, Any] = dict(
            rngs=rngs, init_std=init_std, layer=layer, num_layers=num_layers
        )
        groups = 1 if config.single_projections else config.num_groups()
        built = [build(config.mixer, hidden_size, **options) for _ in range(groups)]
        self.inner = built[0]
        if not config.single_projections:
            active = (config.top_k + config.shared_memory) / groups
            self.inner = stack_memory_parts(built, active)
        self.uses_positions = self.inner.uses_positions
        self.router = Dense(
            hidden_size, config.num_memories, axes=("embed", None), rngs=rngs, init_std=init_std
        )
        along_row = dict(rngs=rngs, axis="embed", silu=False)
        self.row_conv = (
            short_convolution(_ROW + "input", hidden_size, config.row_conv_size, **along_row)
            if config.row_conv_size > 1
            else None
        )

    def innermost(self) -> Mixer:
        """Return the mixer whose `init_shared` the model calls: the inner mixer, or the innermost one if the
        inner mixer wraps another.
        """
        return self.inner.innermost()

    def model_losses(self, statistics: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Return the router's balance loss, computed from the statistics of all layers together, by name; empty if the
        config balances each layer.
        """
        config = self.config
        if config.balance == "layer":
            return {}
        part = config.top_k * jnp.mean(statistics["mom/load"], axis=0)
        mean = jnp.mean(statistics["mom/probability"], axis=0)
        loss = config.num_memories * jnp.sum(part * mean)
        return {"mom/balance_loss": config.balance_scale * loss}

    def finish(self, o: jax.Array, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return (y, context), with the layer's output y [B, T, D] from o, the weighted sum of the outputs of
        each token's memories, by the inner mixer's `finish`; its token shifts run along the row instead of
        along a memory's tokens.
        """
        tails = {n.removeprefix(_ROW): s for n, s in context.tails.items() if n.startswith(_ROW)}
        inner = dataclasses.replace(context, tails=tails, saved={})
        y, inner = self.inner.finish(o, x, inner)
        return y, context.add(tails={_ROW + name: state for name, state in inner.tails.items()})

    def remembering(self) -> tuple[Any, ...]:
        """Return the layers that remember a tail of tokens from call to call: the inner mixer's short
        convolutions and token shifts, with a state for each memory, and those that run along the row: copies of the
        token shifts that `finish` uses, and the convolution along the row.
        """
        parts = self.inner.remembering()
        shifts = (p for p in parts if isinstance(p, TokenShift) and p.in_finish)
        along_row = (TokenShift(_ROW + p.name, p.channels) for p in shifts)
        return *parts, *along_row, *(() if self.row_conv is None else (self.row_conv,))

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> MoMState:
        """Return the state of a Mixture-of-Memories before any token: G empty states of the inner mixer for each of the
        `batch_size` rows, and the count of documents.
        """
        groups = self.config.num_groups()
        memories = self.inner.init_memory(batch_size * groups, max_length, dtype)
        zeros = jnp.zeros(batch_size, jnp.int32)
        return MoMState(split_memories(memories, groups), zeros, zeros + 1)

    def init_state(self, batch_size: int, max_length: int, dtype: Any) -> MixerState:
        """Return the state of a Mixture-of-Memories layer before any token: for each memory, the inner
        mixer's empty memory and the empty tails of its convolutions, [B, G, ...]; and the tails of token
        shifts along the row.
        """
        groups, tails = self.config.num_groups(), {}
        for part in self.remembering():
            rows = 1 if part.name.startswith(_ROW) else groups
            tail = shift_state(batch_size * rows, part.remembered, part.channels, dtype=dtype)
            tails[part.name] = tail if part.name.startswith(_ROW) else split_memories(tail, groups)
        clock = fresh_clock(batch_size) if self.uses_positions else None
        return MixerState(self.init_memory(batch_size, max_length, dtype), tails, clock)

    def through_memory(
        self, x: jax.Array, context: Context, memory: MoMState | None
    ) -> tuple[jax.Array, MoMState, Context]:
        """Return the outputs of the memories for tokens x [B, T, D], summed for each token with its router's weights,
        and the state and context after the call.

        The router sends each token to some memories, and each memory runs along its own tokens.
        """
        if memory is not None:
            check_memories(memory, self.config.num_groups())
        route, statistics = self._route(x, context)
        if self.row_conv is not None:
            before, context = self.row_conv(x, context)
            x = x + before
        documents, last_id, document = token_documents(x, context.segment_ids, memory)
        if self.inner.positions_in_memory:
            counted = route.routed
            if context.update_mask is not None:
                counted = counted & (context.update_mask != 0)[..., None]
            positions = positions_in_memory(counted, documents, memory)
            context = dataclasses.replace(context, positions=positions)
        if x.shape[1] == 1 and memory is not None:
            part, after = self._one_token(x, context, route, documents, memory)
        elif not self._packs(x, context, memory):
            part, after = self._masked(x, context, route, documents, memory)
        elif memory is None and self._packs_documents() and sequence_shards(x.shape[1]) == 1:
            part = self._packed_from_empty(x, context, route, documents)
            after = self._final_states(x, context, route, documents, document)
        else:
            part, after = self._packed_with_state(x, context, route, document, memory)
        memories, tails = after
        context = context.add(bypass=part.bypass, shared=part.shared, tails=tails, aux=statistics)
        return part.output, MoMState(memories, last_id, document), context

    def _route(self, x: jax.Array, context: Context) -> tuple[Route, dict[str, jax.Array]]:
        """Return the memories to which the router sends each token of x [B, T, D], and their weights; and, by
        name, the router's balance loss and statistics.
        """
        logits = self.router(x, dtype=jnp.promote_types(x.dtype, jnp.float32))
        return route_tokens(logits, self.config, context, self.loss_layers)

    def _packs(self, x: jax.Array, context: Context, memory: MoMState | None) -> bool:
        """Return whether a call lays out each memory's tokens one after another (packed), instead of running every
        memory over all tokens; see `MoMConfig.execution`.
        """
        devices = sequence_shards(x.shape[1])
        if self.config.execution == "masked" or x.shape[1] % devices:
            return False
        fused = jax.default_backend() != "cpu" and self.inner.config.op.names() != ("xla",)
        if devices > 1 and (context.segment_ids is not None or fused):
            return False
        documents = memory is None and self._packs_documents()
        return context.update_mask is None and (documents or context.segment_ids is None)

    def _packs_documents(self) -> bool:
        """Return whether the packed form may lay out all memories of a row as one packed row of documents for
        the op: True unless the op has the associative form.

        The index of a memory's chunks in that row depends on later tokens. Outputs must not depend on the
        index, not even by their rounding, as they do in the associative form.
        """
        return self.inner.config.op.form != "associative"

    # ---------------------------------------------------------------------------------------------------- the forms

    def _masked(self, x, context, route, documents, memory):
        """Run the inner mixer over one row of all tokens for each memory, in which the tokens that are not
        routed to the memory are masked.
        """
        layout = Rows(self.config.num_groups())
        mask = route.routed
        if context.update_mask is not None:
            mask = mask & (context.update_mask != 0)[..., None]
        if documents is not None:
            documents = layout.tokens(documents)
        state, tails = (None, {}) if memory is None else (memory.memories, self._tails(context))
        state, tails = jax.tree.map(lambda s: s.reshape(-1, *s.shape[2:]), (state, tails))
        part = self._run(
            x, context, layout, route, documents, layout.from_memories(mask), state, tails
        )
        memory, tails = split_memories((part.memory, part.tails), layout.num_groups)
        if documents is None:
            memory, tails = mark_document(memory, tails, jnp.ones(x.shape[0], jnp.int32))
        return part, (memory, tails)

    def _one_token(self, x, context, route, documents, memory):
        """Run the inner mixer over one token of each row, only for the memories that the token is routed to;
        return the results, and the states of all memories, of which the others are neither read nor written.
        """
        layout = Rows(self.config.num_groups(), route.indices[:, 0])
        mask = None if context.update_mask is None else layout.tokens(context.update_mask)
        before = memory.memories, self._tails(context)
        active = jax.tree.map(lambda s: layout.select(s).reshape(-1, *s.shape[2:]), before)
        part = self._run(x, context, layout, route, layout.tokens(documents), mask, *active)
        after = split_memories((part.memory, part.tails), layout.rows)
        return part, jax.tree.map(layout.replace, before, after)

    def _packed_from_empty(self, x, context, route, documents):
        """Run the inner mixer in the packed form, from empty memories: the tokens of all memories are one
        packed row, in which every document of every memory is a document with its own id.
        """
        group = jnp.arange(self.config.num_groups())
        document = 1 if documents is None else documents[..., None]
        ids = jnp.broadcast_to(group * (x.shape[1] + 2) + document, route.routed.shape)
        return self._run_packed(x, context, route, ids, None, {}, contiguous=True)

    def _final_states(self, x, context, route, documents, document):
        """Return the states after the tokens that `_packed_from_empty` read, those of each row's last
        document, by a second run of the packed form over that document alone; XLA removes it if the states
        are unused.
        """
        ids = jnp.arange(self.config.num_groups()) + 1
        current = 1 if documents is None else documents[..., None] == document[:, None, None]
        ids = jnp.broadcast_to(ids * current, route.routed.shape)
        empty = self.init_state(x.shape[0], 1, x.dtype)
        memory = empty.memory._replace(document=document)
        return self._states(x, context, route, ids, memory, empty.tails)[1]

    def _packed_with_state(self, x, context, route, document, memory):
        """Run the packed form, in which the tokens of each memory lie one after another, for rows that are one
        document, from a given state or from an empty one: each memory is a segment with a state of its own.
        """
        tails = self._tails(context)
        if memory is None:
            _, tails, _ = self.init_state(x.shape[0], 1, x.dtype)
            memory = self.init_memory(x.shape[0], 1, x.dtype)
        ids = jnp.arange(self.config.num_groups(), dtype=jnp.int32) + 1
        ids = jnp.broadcast_to(ids, route.routed.shape)
        return self._states(x, context, route, ids, memory, tails)

    def _states(self, x, context, route, ids, memory, tails):
        """Run the packed form with one state per memory, and return the results and the states after the
        call. The state of a memory whose last token was of an earlier document counts as empty.
        """
        document = memory.document

        def current(state):
            valid = (state.segment_id == 0) | (state.segment_id == document[:, None])
            state = jax.tree.map(
                lambda s: jnp.where(valid.reshape(valid.shape + (1,) * (s.ndim - 2)), s, 0), state
            )
            return state._replace(segment_id=document)

        tails = {n: current(s) for n, s in tails.items() if not n.startswith(_ROW)}
        part = self._run_packed(x, context, route, ids, current(memory.memories), tails)
        return part, mark_document(part.memory, part.tails, document)

    def _run_packed(self, x, context, route, ids, memory, tails, contiguous=False):
        """Pack the tokens x [B, T, D] by memory, and run the inner mixer over them; return the results in the
        order of the row's tokens. `ids` [B, T, G] are the segment ids of each token's copies for the
        memories.
        """
        config = self.config
        size = self.inner.config.op.chunk_size or DEFAULT_CHUNK_SIZE
        devices = sequence_shards(x.shape[1])
        count = chunks_needed(
            x.shape[1] // devices, config.num_memories, config.top_k, config.shared_memory, size
        )
        if devices == 1:
            layout = pack(route.routed, size, count)
        else:
            layout = pack_by_device(route.routed, size, count, devices)
        ids = layout.from_memories(ids)
        return self._run(x, context, layout, route, ids, None, memory, tails, contiguous)

    def _run(self, *arguments: Any) -> Part:
        """Run the inner mixer; the arguments are those of `run_inner` after the first two."""
        return run_inner(self.inner, self.config.single_projections, *arguments)

    def _tails(self, context: Context) -> dict[str, Any]:
        """Return, by name, the tails that the call received for the inner mixer's short convolutions and
        token shifts along each memory's tokens, without the tails of those along the row.
        """
        return {n: tail for n, tail in context.tails.items() if not n.startswith(_ROW)}


METHOD = Method(
    name="mom",
    paper="arXiv 2502.13685",
    op="the inner mixer's",
    gate="of the inner mixer, for tokens routed to the memory; else 1",
    write="of the inner mixer, for tokens routed to the memory",
    read="Σ g_m (output of memory m), and the output of the shared memory",
    state="the inner mixer's state for each memory",
    config=MoMConfig,
    module=MoM,
)
