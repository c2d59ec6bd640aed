"""Mixture-of-Memories (MoM, arXiv 2502.13685): a router sends each token to k of M memories of any inner mixer.

A memory is updated by the tokens routed to it alone, in time order, with its keys, values and gates; other tokens do not
change it, decay included. The query is shared, short convolutions run along each memory's tokens, one more memory may see all, and
outputs, not memories, are summed by router weight ahead of the one norm and output gate (Section 3.2 and the authors' code).

Two forms of one definition. *masked*: a row for each memory, whose other tokens are masked. *packed*: tokens sorted by memory
(`lsm_jax.mixers.mom_layout.Packed`), so that the work is that of the tokens routed.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax.mixers import checks
from lsm_jax.mixers.base import Context, Mixer, MixerState, TokenShift
from lsm_jax.mixers.clock import fresh_clock
from lsm_jax.mixers.gated_deltanet import GatedDeltaNetConfig
from lsm_jax.mixers.layers import Dense, project
from lsm_jax.mixers.method import METHODS, Method, build
from lsm_jax.mixers.mom_layout import (
    Packed,
    PackedByDevice,
    Rows,
    chunks_needed,
    pack,
    pack_by_device,
)
from lsm_jax.ops import DocumentCount, number_documents, shift_state
from lsm_jax.ops.core.checks import DEFAULT_CHUNK_SIZE
from lsm_jax.parallel import sequence_shards

EXECUTIONS = ("packed", "masked")
BALANCES = ("layer", "model")
_ROW = "row_"  # ahead of the names of tails that belong to the row, not to a memory


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class MoMConfig:
    """Mixture-of-Memories.

    Attributes:
        mixer: config of the inner mixer, whose memory there are several of; any with `Mixer.memory_parts`.
        num_memories: memories the router chooses from (M).
        top_k: memories a token is routed to.
        shared_memory: one more memory that sees every token, with weight 1.
        single_projections: one set of keys, values and gates for all memories, in place of one each.
        balance_scale: multiplies the balance loss, `M Σ f_m P_m` with f_m the part of the tokens routed to m and P_m its mean
            probability: k at perfect balance.
        balance: "layer" computes the loss of each layer and averages over the model's layers with memories; "model" computes
            one loss, with f and P averaged over these layers, as in the authors' code: one layer's imbalance may then make up
            for another's.
        execution: "packed" or "masked". Masked in any case are calls with an `update_mask`; packed documents that go on from a
            state, run in the inner op's associative form, or are sharded over devices along the sequence; and sharded rows of a
            length that the devices do not divide.
    """

    mixer: Any = dataclasses.field(default_factory=lambda: GatedDeltaNetConfig(num_heads=4, expand_v=1.0))  # fmt: skip
    num_memories: int = 4
    top_k: int = 2
    shared_memory: bool = True
    single_projections: bool = False
    balance_scale: float = 1e-3
    balance: str = "layer"
    execution: str = "packed"

    @classmethod
    def for_width(cls, hidden_size: int) -> MoMConfig:
        """The published proportions: four memories, two a token and a shared one, of Gated DeltaNet with four heads of 256."""
        head_dim = min(256, hidden_size // 4)
        return cls(mixer=GatedDeltaNetConfig(num_heads=4, head_dim=head_dim, expand_v=1.0))

    def num_groups(self) -> int:
        """Memories, the shared one included."""
        return self.num_memories + self.shared_memory

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError where a field does not fit."""
        checks.fields(self)
        able = [m for m in METHODS.values() if m.module.memory_parts]
        if type(self.mixer) not in [m.config for m in able]:
            raise ValueError(
                f"MoMConfig.mixer={self.mixer!r} cannot be one of several memories; accepted are the configs of "
                f"{', '.join(m.name for m in able)}"
            )
        self.mixer.validate(hidden_size)
        checks.positive(self, num_memories=self.num_memories)
        if not 1 <= self.top_k <= self.num_memories:
            raise ValueError(
                f"MoMConfig.top_k={self.top_k}: accepted are 1 to num_memories={self.num_memories}"
            )
        if self.balance_scale < 0:
            raise ValueError(f"MoMConfig.balance_scale={self.balance_scale}: it must be at least 0")
        checks.one_of(self, "balance", self.balance, BALANCES)
        checks.one_of(self, "execution", self.execution, EXECUTIONS)

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Forward floating-point operations of a token: router, the inner mixer's query and output once, the rest a memory."""
        inner = nnx.eval_shape(lambda: build(self.mixer, hidden_size, rngs=nnx.Rngs(0)))
        kernels = [
            p.get_value().size * (path[0] not in inner.memory_parts)
            for path, p in nnx.to_flat_state(nnx.state(inner, nnx.Param))
            if path[-1] == "kernel"
        ]
        read = self.top_k + self.shared_memory
        whole = self.mixer.flops_per_token(hidden_size, seq_len)
        return (
            2.0 * hidden_size * self.num_memories + read * whole - 2.0 * (read - 1) * sum(kernels)
        )


class MoMState(NamedTuple):
    """The memories of a Mixture-of-Memories.

    Attributes:
        memories: the inner op's state with leaves [B, G, ...], G memories, the shared one last. Their segment ids are documents
            as counted here, so that a memory without any token of a document is recognised.
        last_id: int32 [B], the last nonzero segment id seen, 0 before any.
        document: int32 [B], documents begun so far, from 1.
    """

    memories: Any
    last_id: jax.Array
    document: jax.Array


class _Route(NamedTuple):
    """The router's output.

    Attributes:
        weight: float32 [B, T, G].
        routed: bool [B, T, G].
        indices: int32 [B, T, J], memories of each token, the shared one last.
    """

    weight: jax.Array
    routed: jax.Array
    indices: jax.Array


class _Part(NamedTuple):
    """The result of one call of the inner mixer: outputs by token, [B, T, ...], and states, arranged."""

    output: jax.Array
    bypass: dict[str, jax.Array]
    shared: dict[str, jax.Array]
    memory: Any
    tails: dict[str, Any]


class MoM(Mixer):
    """Mixture-of-Memories; see `MoMConfig`."""

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
            self.inner = _stack_memory_parts(built, active)
        self.uses_positions = self.inner.uses_positions
        self.router = Dense(
            hidden_size, config.num_memories, axes=("embed", None), rngs=rngs, init_std=init_std
        )

    def innermost(self) -> Mixer:
        """The inner mixer's."""
        return self.inner.innermost()

    def model_losses(self, statistics: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The balance loss of all layers together, if the config has it."""
        config = self.config
        if config.balance == "layer":
            return {}
        part = config.top_k * jnp.mean(statistics["mom/load"], axis=0)
        mean = jnp.mean(statistics["mom/probability"], axis=0)
        loss = config.num_memories * jnp.sum(part * mean)
        return {"mom/balance_loss": config.balance_scale * loss}

    def finish(self, o: jax.Array, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """The inner mixer's, once a token; a token shift there is along the row."""
        tails = {n.removeprefix(_ROW): s for n, s in context.tails.items() if n.startswith(_ROW)}
        inner = dataclasses.replace(context, tails=tails, saved={})
        y, inner = self.inner.finish(o, x, inner)
        return y, context.add(tails={_ROW + name: state for name, state in inner.tails.items()})

    def remembering(self) -> tuple[Any, ...]:
        """The inner mixer's, each with a state for each memory, and token shifts along the row."""
        parts = self.inner.remembering()
        row = (TokenShift(_ROW + p.name, p.channels) for p in parts if isinstance(p, TokenShift))
        return *parts, *row

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> MoMState:
        """Empty memories."""
        groups = self.config.num_groups()
        memories = self.inner.init_memory(batch_size * groups, max_length, dtype)
        zeros = jnp.zeros(batch_size, jnp.int32)
        return MoMState(_unflatten(memories, groups), zeros, zeros + 1)

    def init_state(self, batch_size: int, max_length: int, dtype: Any) -> MixerState:
        """The state before any token: `Mixer.init_state`'s with memories and tails of convolutions [B, G, ...]."""
        groups, tails = self.config.num_groups(), {}
        for part in self.remembering():
            rows = 1 if part.name.startswith(_ROW) else groups
            tail = shift_state(batch_size * rows, part.remembered, part.channels, dtype=dtype)
            tails[part.name] = tail if part.name.startswith(_ROW) else _unflatten(tail, groups)
        clock = fresh_clock(batch_size) if self.uses_positions else None
        return MixerState(self.init_memory(batch_size, max_length, dtype), tails, clock)

    def through_memory(
        self, x: jax.Array, context: Context, memory: MoMState | None
    ) -> tuple[jax.Array, MoMState, Context]:
        """Route, run every memory along its tokens, and sum their outputs by router weight."""
        if memory is not None:
            self._check_memory(memory)
        route, statistics = self._route(x, context)
        documents, last_id, document = _documents(x, context.segment_ids, memory)
        if self.inner.positions_in_memory:
            counted = route.routed
            if context.update_mask is not None:
                counted = counted & (context.update_mask != 0)[..., None]
            positions = _positions_in_memory(counted, documents, memory)
            context = dataclasses.replace(context, positions=positions)
        if x.shape[1] == 1 and memory is not None:
            part, after = self._decoded(x, context, route, documents, memory)
        elif not self._packs(x, context, memory):
            part, after = self._masked(x, context, route, documents, memory)
        elif memory is None and self._rows_of_documents() and sequence_shards(x.shape[1]) == 1:
            part = self._packed_from_empty(x, context, route, documents)
            after = self._packed_states(x, context, route, documents, document)
        else:
            part, after = self._packed_on(x, context, route, document, memory)
        memories, tails = after
        context = context.add(bypass=part.bypass, shared=part.shared, tails=tails, aux=statistics)
        return part.output, MoMState(memories, last_id, document), context

    def _check_memory(self, memory: Any) -> None:
        """Raise ValueError unless there is one state for each memory; their shapes are the op's to check."""
        groups = self.config.num_groups()
        if not isinstance(memory, MoMState):
            raise ValueError(
                f"MoM: state.memory is a {type(memory).__name__}; accepted is a MoMState of init_state"
            )
        for path, leaf in jax.tree_util.tree_leaves_with_path(memory.memories):
            if jnp.shape(leaf)[1:2] != (groups,):
                raise ValueError(
                    f"MoM: state.memory.memories{jax.tree_util.keystr(path)} has shape {jnp.shape(leaf)}; accepted are "
                    f"[B, {groups}, ...], one for each memory"
                )

    def _packs(self, x: jax.Array, context: Context, memory: MoMState | None) -> bool:
        """Whether the packed form supports a call; see `MoMConfig.execution`."""
        devices = sequence_shards(x.shape[1])
        if self.config.execution == "masked" or x.shape[1] % devices:
            return False
        if devices > 1 and context.segment_ids is not None:
            return False
        alone = memory is None and self._rows_of_documents()
        return context.update_mask is None and (alone or context.segment_ids is None)

    def _rows_of_documents(self) -> bool:
        """Whether the op's outputs depend only on a chunk's content, not on its index in the row, which later tokens change."""
        return self.inner.config.op.form != "associative"

    def _route(self, x: jax.Array, context: Context) -> tuple[_Route, dict[str, jax.Array]]:
        """Softmax in float32, the k likeliest, renormalised; and the balance loss and the router's statistics by name."""
        config, wide = self.config, jnp.promote_types(x.dtype, jnp.float32)
        logits = self.router(x, dtype=wide)
        probability = jax.nn.softmax(logits, axis=-1)
        rank = _ranks(logits)
        routed = rank < config.top_k
        indices = jnp.argmax(rank[..., None, :] == jnp.arange(config.top_k)[:, None], axis=-1)
        selected = jnp.where(routed, probability, 0)
        weight = selected / jnp.sum(selected, axis=-1, keepdims=True)

        real = jnp.ones(x.shape[:2], bool)
        if context.segment_ids is not None:
            real = context.segment_ids != 0
        live = real if context.update_mask is None else real & (context.update_mask != 0)
        live = live[..., None].astype(wide)
        count = jnp.maximum(jnp.sum(live), 1)
        part = jnp.sum(routed * live, axis=(0, 1)) / count
        mean = jnp.sum(probability * live, axis=(0, 1)) / count
        entropy = -jnp.sum(probability * jax.nn.log_softmax(logits, axis=-1), axis=-1)
        if config.balance == "model":
            balance = {"mom/probability": mean}
        else:
            loss = config.num_memories * jnp.sum(part * mean)
            balance = {"mom/balance_loss": config.balance_scale / self.loss_layers * loss}
        statistics = {
            **balance,
            "mom/load": part / config.top_k,
            "mom/entropy": jnp.sum(entropy * live[..., 0]) / count,
            "mom/tokens/routed": routed & real[..., None],
        }
        if config.shared_memory:
            ones = jnp.ones_like(weight[..., :1])
            weight = jnp.concatenate([weight, ones], axis=-1)
            routed = jnp.concatenate([routed, ones.astype(bool)], axis=-1)
            last = jnp.full_like(indices[..., :1], config.num_memories)
            indices = jnp.concatenate([indices, last], axis=-1)
        routed = routed & real[..., None]
        return _Route(jnp.where(routed, weight, 0), routed, indices), statistics

    # ---------------------------------------------------------------------------------------------------- the forms

    def _masked(self, x, context, route, documents, memory):
        """Every memory over all tokens, as rows; tokens that are not routed to it masked."""
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
        memory, tails = _unflatten((part.memory, part.tails), layout.num_groups)
        if documents is None:
            memory, tails = _of_document(memory, tails, jnp.ones(x.shape[0], jnp.int32))
        return part, (memory, tails)

    def _decoded(self, x, context, route, documents, memory):
        """One token: only the memories it is routed to are read and written."""
        layout = Rows(self.config.num_groups(), route.indices[:, 0])
        mask = None if context.update_mask is None else layout.tokens(context.update_mask)
        before = memory.memories, self._tails(context)
        active = jax.tree.map(lambda s: layout.select(s).reshape(-1, *s.shape[2:]), before)
        part = self._run(x, context, layout, route, layout.tokens(documents), mask, *active)
        after = _unflatten((part.memory, part.tails), layout.rows)
        return part, jax.tree.map(layout.replace, before, after)

    def _packed_from_empty(self, x, context, route, documents):
        """From empty memories, each with its documents one after another, all of them a row of documents to the op."""
        group = jnp.arange(self.config.num_groups())
        document = 1 if documents is None else documents[..., None]
        ids = jnp.broadcast_to(group * (x.shape[1] + 2) + document, route.routed.shape)
        return self._run_packed(x, context, route, ids, None, {}, contiguous=True)

    def _packed_states(self, x, context, route, documents, document):
        """The states that `_packed_from_empty` leaves: of the last document of each row alone. Not computed where not used."""
        ids = jnp.arange(self.config.num_groups()) + 1
        current = 1 if documents is None else documents[..., None] == document[:, None, None]
        ids = jnp.broadcast_to(ids * current, route.routed.shape)
        empty = self.init_state(x.shape[0], 1, x.dtype)
        memory = empty.memory._replace(document=document)
        return self._states(x, context, route, ids, memory, empty.tails)[1]

    def _packed_on(self, x, context, route, document, memory):
        """One document that goes on from a state, or from empty memories: a segment of the op for each memory."""
        tails = self._tails(context)
        if memory is None:
            _, tails, _ = self.init_state(x.shape[0], 1, x.dtype)
            memory = self.init_memory(x.shape[0], 1, x.dtype)
        ids = jnp.arange(self.config.num_groups(), dtype=jnp.int32) + 1
        ids = jnp.broadcast_to(ids, route.routed.shape)
        return self._states(x, context, route, ids, memory, tails)

    def _states(self, x, context, route, ids, memory, tails):
        """A packed call with one state a memory in and out; a memory of an earlier document counts as empty."""
        document = memory.document

        def current(state):
            keep = (state.segment_id == 0) | (state.segment_id == document[:, None])
            state = jax.tree.map(
                lambda s: jnp.where(keep.reshape(keep.shape + (1,) * (s.ndim - 2)), s, 0), state
            )
            return state._replace(segment_id=document)

        tails = {n: current(s) for n, s in tails.items() if not n.startswith(_ROW)}
        part = self._run_packed(x, context, route, ids, current(memory.memories), tails)
        return part, _of_document(part.memory, part.tails, document)

    def _run_packed(self, x, context, route, ids, memory, tails, contiguous=False):
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

    # ------------------------------------------------------------------------------------------- the inner mixer's call

    def _run(
        self,
        x: jax.Array,
        context: Context,
        layout: Rows | Packed | PackedByDevice,
        route: _Route,
        segment_ids: jax.Array | None,
        update_mask: jax.Array | None,
        memory: Any,
        tails: dict[str, Any],
        contiguous: bool = False,
    ) -> _Part:
        """The inner mixer over arranged tokens; the other arguments are arranged too, and so are the states that come out."""
        rows = layout.tokens(x)
        by_token = self.inner.shared_by_token
        shared = {n: layout.tokens(s) if n in by_token else s for n, s in context.shared.items()}
        positions = context.positions
        if positions is not None:
            by_memory = self.inner.positions_in_memory
            positions = (layout.from_memories if by_memory else layout.tokens)(positions)
        arranged = Context(
            context.layer, shared, segment_ids, positions, update_mask, tails, contiguous=contiguous
        )
        o, memory, arranged = self._arranged(layout, x).through_memory(rows, arranged, memory)
        routed, share = layout.from_memories(route.routed), layout.from_memories(route.weight)
        even = layout.from_memories(
            route.weight / jnp.maximum(jnp.sum(route.weight, axis=-1, keepdims=True), 1)
        )

        def mix(y, weight):
            extra = (1,) * (y.ndim - 2)
            wide = y.astype(jnp.promote_types(y.dtype, weight.dtype))
            y_weighted = jnp.where(routed.reshape(*routed.shape, *extra), wide, 0)
            y_weighted = y_weighted * weight.reshape(*weight.shape, *extra)
            return layout.total(y_weighted, y.dtype)

        return _Part(
            mix(o, share),
            {name: mix(y, share) for name, y in arranged.bypass.items()},
            {
                name: mix(arranged.shared[name], even)
                for name in by_token
                if name in arranged.shared
            },
            memory,
            dict(arranged.tails),
        )

    def _arranged(self, layout: Rows | Packed | PackedByDevice, x: jax.Array) -> Mixer:
        """A copy of the inner mixer whose `Dense` layers act on tokens as `layout` arranges them, x being the tokens before."""
        inner = nnx.merge(*nnx.split(self.inner))
        by_memory = () if self.config.single_projections else inner.memory_parts
        for path, layer in list(nnx.iter_graph(inner)):
            if isinstance(layer, Dense):
                tokens = x if path[-1] in inner.token_parts and len(path) == 1 else None
                layer.product = _product(layout, path[0] in by_memory, tokens)
        return inner

    def _tails(self, context: Context) -> dict[str, Any]:
        return {n: tail for n, tail in context.tails.items() if not n.startswith(_ROW)}


def _ranks(logits: jax.Array) -> jax.Array:
    """[..., M] -> each memory's place, 0 the likeliest; of equal ones the first. The partitioner would sort on all devices."""
    index = jnp.arange(logits.shape[-1])
    logit, other = logits[..., :, None], logits[..., None, :]
    ahead = (other > logit) | ((other == logit) & (index < index[:, None]))
    return jnp.sum(ahead, axis=-1, dtype=jnp.int32)


def _product(
    layout: Rows | Packed | PackedByDevice, by_memory: bool, tokens: jax.Array | None
) -> Any:
    """`project` for tokens that `layout` arranges.

    Args:
        layout: how they are arranged.
        by_memory: whether kernel and bias are [G, ...], one for each memory.
        tokens: [B, T, D], where the layer acts on arranged tokens as they came: the product is then computed once a token (and
            memory) and arranged after. None for other inputs.
    """

    def product(y: jax.Array, kernel: jax.Array, bias: jax.Array | None, dtype: Any) -> jax.Array:
        if tokens is None:
            return (layout.project if by_memory else project)(y, kernel, bias, dtype)
        if not by_memory:
            return layout.tokens(project(tokens, kernel, bias, dtype))
        if isinstance(layout, Packed) and bias is None and dtype in (None, y.dtype):
            projected = layout.project_tokens(y, kernel)
            if projected is not None:
                return projected
        groups, size, width = kernel.shape
        flat = jnp.moveaxis(kernel, 0, 1).reshape(size, groups * width)
        flat_bias = None if bias is None else bias.reshape(-1)
        every = project(tokens, flat, flat_bias, dtype)
        return layout.from_memories(every.reshape(*tokens.shape[:2], groups, width))

    return product


def _stack_memory_parts(mixers: list[Mixer], active: float) -> Mixer:
    """Return the first mixer with the `memory_parts` of all G mixers, whose parameters are stacked as [G, ...].

    Args:
        mixers: equal but for their parameters.
        active: the share of the stacked parameters that one token uses.
    """
    graphdef, _ = nnx.split(mixers[0])
    states = [dict(nnx.to_flat_state(nnx.state(mixer))) for mixer in mixers]
    stacked = {
        path: nnx.Param(
            jnp.stack([state[path].get_value() for state in states]),
            logical_axes=(None, *param.logical_axes),
            weight_decay=param.weight_decay,
            active=active,
        )
        for path, param in states[0].items()
        if path[0] in mixers[0].memory_parts
    }
    return nnx.merge(graphdef, nnx.from_flat_state(states[0] | stacked))


def _of_document(memory: Any, tails: dict[str, Any], document: jax.Array) -> tuple[Any, Any]:
    """The states of all memories, [B, G, ...], marked as of one document [B]."""
    ids = jnp.broadcast_to(document[:, None], jax.tree.leaves(memory)[0].shape[:2])
    tails = {name: tail._replace(segment_id=ids) for name, tail in tails.items()}
    return memory._replace(segment_id=ids), tails


def _unflatten(tree: Any, groups: int) -> Any:
    """Leaves [B * G, ...] -> [B, G, ...]."""
    return jax.tree.map(lambda s: s.reshape(-1, groups, *s.shape[1:]), tree)


def _documents(
    x: jax.Array, segment_ids: jax.Array | None, memory: MoMState | None
) -> tuple[jax.Array | None, jax.Array, jax.Array]:
    """The number of each token's document, [B, T], 0 on padding (None for one document from empty memories); and the state's
    last id and document after the call."""
    batch, length = x.shape[:2]
    last_id = jnp.zeros(batch, jnp.int32) if memory is None else memory.last_id
    document = jnp.ones(batch, jnp.int32) if memory is None else memory.document
    if segment_ids is None:
        one = jnp.broadcast_to(document[:, None], (batch, length))
        return None if memory is None else one, last_id, document
    run, after = number_documents(segment_ids, DocumentCount(document, last_id))
    ids = jnp.where(segment_ids != 0, run, 0)
    return ids, after.segment_id.astype(jnp.int32), after.count


def _positions_in_memory(
    counted: jax.Array, documents: jax.Array | None, memory: MoMState | None
) -> jax.Array:
    """The number of tokens of its document that each memory has seen before each token, int32 [B, T, G].

    After a state the count goes on from that in the mini-batch, which is the same for whatever uses its remainder.

    Args:
        counted: bool [B, T, G], the tokens that each memory is updated by.
        documents: [B, T], from `_documents`.
        memory: the state before the call, or None.
    """
    before = jnp.cumsum(counted, axis=1, dtype=jnp.int32) - counted
    if documents is None:
        return before
    length = documents.shape[1]
    current = jnp.ones_like(documents[:, :1]) if memory is None else memory.document[:, None]
    latest = jax.lax.cummax(jnp.concatenate([current, documents], axis=1), axis=1)
    starts = latest[:, 1:] > latest[:, :-1]
    start = jax.lax.cummax(jnp.where(starts, jnp.arange(length), -1), axis=1)[..., None]
    seen = jnp.zeros_like(before[:, 0])
    if memory is not None:
        state = memory.memories
        seen = jnp.where(state.segment_id == memory.document[:, None], state.position, 0)
    of_document = before - jnp.take_along_axis(before, jnp.maximum(start, 0), axis=1)
    return jnp.where(start < 0, before + seen[:, None], of_document)


METHOD = Method(
    name="mom",
    paper="arXiv 2502.13685",
    op="the inner mixer's",
    gate="of the inner mixer, for tokens routed to the memory; else 1",
    write="of the inner mixer, for tokens routed to the memory",
    read="Σ g_m (what memory m gives), and what the shared one gives",
    state="the inner mixer's for each memory",
    config=MoMConfig,
    module=MoM,
)
