"""The decoder: embedding, pre-norm residual layers scanned by pattern period, final norm, head."""

from __future__ import annotations

import copy
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax import feedforward, mixers
from lsm_jax.mixers import Clock
from lsm_jax.mixers.layers import Dense, RMSNorm, matmul_to_float32, parameter
from lsm_jax.models.config import LayerConfig, ModelConfig
from lsm_jax.ops import KEPT
from lsm_jax.ops.core.states import layer_of, put_layer
from lsm_jax.parallel import GATHERED, constrain, pipelined, shards_of

_ACTIVATIONS = ("batch", "sequence", None)


class DecoderState(NamedTuple):
    """All that a decoder carries from call to call, of static shape.

    Attributes:
        layers: a tuple of (mixer state, feedforward state), one a letter of the period, stacked over its repetitions.
        clock: each row's place in its document.
    """

    layers: Any
    clock: Clock


class Block(nnx.Module):
    """One layer: `x += mixer(norm(x))`, then `x += feedforward(norm(x))` where there is one."""

    def __init__(
        self, config: LayerConfig, model: ModelConfig, *, rngs: nnx.Rngs, layer: jax.Array | int
    ):
        size = model.hidden_size
        options: dict[str, Any] = dict(
            rngs=rngs, init_std=model.init_std, layer=layer, num_layers=model.num_layers
        )
        self.mixer_norm = RMSNorm(size, eps=model.norm_eps)
        self.mixer = mixers.build(config.mixer, size, **options)
        inner = config.feedforward
        self.feedforward_norm = None if inner is None else RMSNorm(size, eps=model.norm_eps)
        self.feedforward = None if inner is None else feedforward.build(inner, size, **options)
        if model.lora is not None:
            _adapt(self.mixer, self.feedforward, model.lora, rngs)

    def init_state(self, batch_size: int, max_length: int, dtype: Any) -> tuple[Any, Any]:
        """Fresh states of mixer and feedforward."""
        arguments = (batch_size, max_length, dtype)
        inner = None if self.feedforward is None else self.feedforward.init_state(*arguments)
        return self.mixer.init_state(*arguments), inner

    def __call__(
        self, x: jax.Array, shared: dict[str, jax.Array], state: tuple[Any, Any] | None, **call: Any
    ) -> tuple[jax.Array, dict[str, jax.Array], tuple[Any, Any], dict[str, jax.Array]]:
        """x [B, T, D] -> (x, shared, state, statistics)."""
        mixer_state, inner_state = (None, None) if state is None else state
        y, mixer_state, context = self.mixer.run(
            self.mixer_norm(x), shared=shared, state=mixer_state, **call
        )
        shared, aux = dict(context.shared), dict(context.aux)
        x = constrain(x + y, _ACTIVATIONS)
        if self.feedforward is not None and self.feedforward_norm is not None:
            y, inner_state, more = self.feedforward(
                self.feedforward_norm(x), shared=shared, state=inner_state, **call
            )
            x = constrain(x + y, _ACTIVATIONS)
            aux = {**aux, **more}
        return x, shared, (mixer_state, inner_state), aux


def _adapt(mixer: Any, inner: Any, lora: mixers.LoRAConfig, rngs: nnx.Rngs) -> None:
    """Give a layer's projections their adapters."""
    parts = [part for part in (mixer, inner) if part is not None]
    adapted = [name for part in parts for name in mixers.add_adapters(part, lora, rngs=rngs)]
    if missing := set(lora.targets) - set(adapted):
        kinds = " and ".join(type(part).__name__ for part in parts)
        has = sorted({n for part in parts for n, v in vars(part).items() if isinstance(v, Dense)})
        raise ValueError(
            f"model.lora.targets={lora.targets}: a layer of {kinds} has no projection {', '.join(sorted(missing))}; it has "
            f"{', '.join(has)}; several are written \"('q_proj', 'k_proj')\""
        )


class Period(nnx.Module):
    """The layers of one pattern period, the first of which is layer `first` of the model."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, first: jax.Array | int):
        self.blocks = nnx.List(
            [
                Block(config.layers[letter], config, rngs=rngs, layer=first + place)
                for place, letter in enumerate(config.period())
            ]
        )


def _stack_periods(config: ModelConfig, keys: jax.Array) -> Period:
    """One period a key, every parameter with a leading "layers" axis; one compilation, however many parameters."""

    def make(key, first):
        return nnx.state(Period(config, rngs=nnx.Rngs(key), first=first), nnx.Param)

    graphdef, _ = nnx.split(nnx.eval_shape(lambda: Period(config, rngs=nnx.Rngs(0), first=0)))
    first = jnp.arange(len(keys)) * len(config.period())
    periods = nnx.merge(graphdef, jax.jit(jax.vmap(make))(keys, first))
    for _, leaf in nnx.iter_graph(periods):
        if isinstance(leaf, nnx.Param):
            leaf.set_metadata(logical_axes=("layers", *leaf.logical_axes))
    return periods


@jax.custom_vjp
def _together(tree: Any) -> Any:
    """The tree; its gradients are handed on when all of them are there.

    Of several layers in a scan's body XLA would else make the gradients of the parameters last, and hold what all of them are made of:
    less time, more memory.
    """
    return tree


_together.defvjp(lambda tree: (tree, None), lambda _, grads: (jax.lax.optimization_barrier(grads),))


def rematerialized(function: Any, policy: str) -> Any:
    """Recompute a layer in the backward pass as the policy says. Inside a scan no common-subexpression barrier is needed."""
    if policy == "none":
        return function
    policies = jax.checkpoint_policies
    saveable = policies.save_only_these_names(GATHERED)
    if policy == "dots":
        names = policies.save_only_these_names(GATHERED, KEPT)
        saveable = policies.save_from_both_policies(names, policies.dots_with_no_batch_dims_saveable)  # fmt: skip
    return jax.checkpoint(function, policy=saveable, prevent_cse=False)


class Decoder(nnx.Module):
    """A causal language model.

    It holds parameters and nothing mutable, so `nnx.split` once and plain `jax.jit`, `jax.grad` over the parameters work.

    Args:
        config: the model; validated, and copied.
        rngs: source of the initial parameters.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        config.validate()
        config = copy.deepcopy(config)
        self.dtype, self.remat, self.vocab_size = config.dtype, config.remat, config.vocab_size
        self.loss_chunk_size = config.loss_chunk_size
        self.num_periods = config.num_layers // len(config.period())
        draw = jax.random.normal(rngs.params(), (config.vocab_size, config.hidden_size))
        self.embedding = parameter(config.init_std * draw, ("vocab", "embed"), weight_decay=True)
        self.periods = _stack_periods(config, jax.random.split(rngs.params(), self.num_periods))
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        shape = (config.hidden_size, config.vocab_size)
        untied = dict(axes=("embed", "vocab"), rngs=rngs, init_std=config.init_std)
        self.lm_head = None if config.tie_embeddings else Dense(*shape, **untied)

    def head(self) -> jax.Array:
        """The matrix [D, vocab] from hidden states to logits, float32."""
        return self.embedding[...].T if self.lm_head is None else self.lm_head.kernel[...]

    def init_state(self, batch_size: int, max_length: int) -> DecoderState:
        """The state before any token, for `batch_size` rows.

        Args:
            batch_size: rows.
            max_length: tokens softmax layers must be able to hold; other layers' states do not depend on it.
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
        """Logits [B, T, vocab] in float32, the state after, and statistics; arguments as in `hidden`."""
        x, state, aux = self.hidden(
            tokens,
            segment_ids=segment_ids,
            positions=positions,
            update_mask=update_mask,
            contiguous=contiguous,
            state=state,
        )
        return self.logits(x), state, aux

    def init_shared(self, x: jax.Array) -> dict[str, jax.Array]:
        """The values that travel from layer to layer, before the first; x is the embedding [B, T, D]."""
        firsts = len(self.periods.blocks) * jnp.arange(self.num_periods)
        kinds: dict[type[mixers.Mixer], list] = {}
        for place, block in enumerate(self.periods.blocks):
            mixer = block.mixer.innermost()
            kinds.setdefault(type(mixer), []).append((firsts + place, mixer))
        shared = {}
        for kind, stacks in kinds.items():
            shared.update(kind.init_shared(x, stacks))
        return shared

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Hidden states [..., D] -> logits [..., vocab] in float32."""
        return matmul_to_float32(hidden, self.head().astype(hidden.dtype))

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
    ) -> tuple[jax.Array, DecoderState | None, dict[str, jax.Array]]:
        """Hidden states after the final norm.

        Args:
            tokens: int [B, T]; an id outside the vocabulary gives NaN, since an array cannot raise.
            segment_ids: int [B, T], 0 for padding; None for one document that goes on.
            positions: int [B, T] within the document; counted where not given.
            update_mask: [B, T], 0 where a token must leave every memory as it is.
            contiguous: whether every token between two of one document is written, as the caller knows and `lsm_jax.data` packs:
                what looks back a few tokens then looks at its neighbours alone, on a sequence axis at one device's. Where it
                is not so, outputs are wrong.
            state: from `init_state` or an earlier call. None starts afresh and keeps nothing.
            microbatches: pieces in which the rows pass through a mesh's pipeline stages, each with a balance loss of its own,
                as in accumulation; 0 is one for each stage. With a state, or where there is one stage, they pass whole.
            rounds: times that each piece goes round the stages.

        Returns:
            [B, T, D] in the config's dtype; the state after, None if none was given; statistics by name. Those ending in
            `_loss` or `_count` are summed over the layers, the others stacked; those with `/tokens/` in their name are of
            each token, and absent where rows passed in microbatches.
        """
        x = self.embedding[...].at[tokens].get(mode="fill", fill_value=jnp.nan)
        x = constrain(x.astype(self.dtype), _ACTIVATIONS)
        clock = mixers.fresh_clock(tokens.shape[0]) if state is None else state.clock
        positions, clock = mixers.advance(clock, tokens.shape, segment_ids, update_mask, positions)
        size = len(self.periods.blocks)
        shared = self.init_shared(x)

        def layer(x, shared, block, state, index, segment_ids, positions, update_mask):
            if size > 1 and self.remat == "full":
                x, block = _together((x, block))
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

        layer = rematerialized(layer, self.remat)

        def body(rows, carry, inputs):
            x, shared = carry
            period, states, index = inputs
            after, statistics = [], []
            for place, block in enumerate(period.blocks):
                own = None if states is None else states[place]
                x, shared, own, aux = layer(x, shared, block, own, index * size + place, *rows)
                after.append(own)
                statistics.append(aux)
            return (x, shared), (None if states is None else tuple(after), statistics)

        rows = (segment_ids, positions, update_mask)
        index = jnp.arange(self.num_periods)
        if state is None and (stages := shards_of("layers")) > 1:
            by_rows = _by_rows(self.init_shared, x)

            def stage(layers, carry, rows, whole):
                periods, index = layers
                x, shared = carry
                scanned = functools.partial(body, rows)
                (x, shared), (_, aux) = jax.lax.scan(
                    scanned, (x, shared | whole), (periods, None, index)
                )
                kept = {name: shared[name] for name in by_rows}
                aux = [{n: a[n] for n in a if "/tokens/" not in n} for a in aux]
                return (x, kept), aux

            whole = {name: value for name, value in shared.items() if name not in by_rows}
            shared = {name: shared[name] for name in by_rows}
            (x, _), aux = pipelined(
                stage, (self.periods, index), (x, shared), rows, whole, microbatches=microbatches or stages,
                rounds=rounds,
            )  # fmt: skip
            return self.norm(x), None, _gather(aux)
        unsharded = jax.sharding.get_abstract_mesh().empty and jax.typeof(x).sharding.mesh.empty
        if state is not None and tokens.shape[1] == 1 and unsharded:
            # Each layer's memories are written where they were read; what a scan stacks would be new arrays, copied back.
            # (A mesh's types may change from layer to layer, which a carry's may not.)
            def decode(carry, inputs):
                x, shared, states = carry
                period, at = inputs
                own = tuple(
                    layer_of(s, at, in_place=block.mixer.memories_in_place)
                    for s, block in zip(states, period.blocks, strict=True)
                )
                (x, shared), (own, statistics) = body(rows, (x, shared), (period, own, at))
                return (x, shared, put_layer(states, own, at)), statistics

            carry = x, shared, state.layers
            (x, _, states), statistics = jax.lax.scan(decode, carry, (self.periods, index))
            return self.norm(x), DecoderState(states, clock), _gather(statistics)
        inputs = (self.periods, None if state is None else state.layers, index)
        scanned = functools.partial(body, rows)
        (x, _), (states, statistics) = jax.lax.scan(scanned, (x, shared), inputs)
        after = None if state is None else DecoderState(states, clock)
        return self.norm(x), after, _gather(statistics)


def _by_rows(init_shared: Any, x: jax.Array) -> set[str]:
    """The entries of `shared` that have x's rows."""
    shapes = (jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) for rows in (1, 2))
    one, two = (jax.eval_shape(init_shared, shape) for shape in shapes)
    return {name for name in one if one[name].shape != two[name].shape}


def _gather(statistics: list[dict[str, jax.Array]]) -> dict[str, jax.Array]:
    """Per-place statistics stacked over periods -> one entry a name, losses and counts summed, others in the order of layers.

    Where places differ in shape, as with other numbers of experts, each has an entry of its own, `name/place`.
    """
    gathered = {}
    for name in sorted({name for aux in statistics for name in aux}):
        found = {place: aux[name] for place, aux in enumerate(statistics) if name in aux}
        if len({value.shape for value in found.values()}) > 1:
            gathered |= {f"{name}/{place}": value for place, value in found.items()}
            continue
        stacked = jnp.stack(list(found.values()), axis=1)
        flat = stacked.reshape(-1, *stacked.shape[2:])
        summed = name.endswith(("_loss", "_count"))
        gathered[name] = jnp.sum(flat, axis=0) if summed else flat
    return gathered
