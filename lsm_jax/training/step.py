"""One training step as a pure function of the state and a batch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from lsm_jax.models import Decoder, abstract, logical_axes, next_token_loss
from lsm_jax.parallel import exchange_options, param_sharding
from lsm_jax.training.config import TrainConfig
from lsm_jax.training.optimizer import learning_rate, make_optimizer
from lsm_jax.training.partition import join, split

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]

OVERFLOW = "moe/overflow_count"
"""The metric of a step that is above 0 where tokens found no room on their way to their experts."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrainState:
    """Everything a step changes; a tree of arrays, or of their shapes or shardings.

    Attributes:
        step: steps taken, skipped ones included.
        params: pure dict of float32 arrays, those that train.
        opt_state: the optimizer's.
        skipped: steps whose loss or gradient was not finite.
        skipped_in_a_row: of those, the ones since the last good step.
    """

    step: Any
    params: dict[str, Any]
    opt_state: optax.OptState
    skipped: Any
    skipped_in_a_row: Any


@dataclasses.dataclass(frozen=True)
class Program:
    """The functions of a run, compiled on first use.

    Attributes:
        init: () -> the first `TrainState`, sharded over the mesh.
        shardings: a `TrainState` of shardings.
        param_shardings: of every parameter, those that stand still included.
        train_step: (state, batch, frozen) -> (state, metrics), among them the losses and statistics that layers report;
            donates the state. `frozen` are the parameters that stand still, where there are any. A batch's documents have no
            gaps, as `lsm_jax.data` packs them: no padding between two tokens of one.
        eval_step: (every parameter, batch) -> (summed loss in nats, number of predicted tokens, tokens' choices
            of experts that found no room).
    """

    init: Callable[[], TrainState]
    shardings: TrainState
    param_shardings: dict[str, Any]
    train_step: Callable[..., tuple[TrainState, Metrics]]
    eval_step: Callable[[dict[str, Any], Batch], tuple[jax.Array, jax.Array, jax.Array]]


def params_of(model: Decoder) -> dict[str, Any]:
    """A model's parameters as a pure dict."""
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def param_shardings(mesh: Mesh | AbstractMesh, model: Decoder) -> dict[str, Any]:
    """Where each parameter of a (possibly abstract) model lives.

    Raises:
        ValueError: a mixer's heads, or an axis of a parameter, that the mesh does not divide.
    """
    for place, block in enumerate(model.periods.blocks):
        mixer = block.mixer.innermost()
        for kind in ("num_heads", "num_value_heads", "num_kv_heads", "num_groups"):
            for count in (getattr(mixer.config, kind, None), getattr(mixer, kind, None)):
                if isinstance(count, int):  # a flat axis of heads may divide where they do not
                    name = f"{type(mixer).__name__}.{kind} of layer {place}"
                    param_sharding(mesh, ("heads",), (count,), name=name)

    def place(path, axes, leaf):
        return param_sharding(
            mesh, axes, leaf.shape, name=jax.tree_util.keystr(path, simple=True, separator=".")
        )

    return jax.tree_util.tree_map_with_path(
        place, logical_axes(model), params_of(model), is_leaf=lambda x: isinstance(x, tuple)
    )


def make_program(config: TrainConfig, mesh: Mesh) -> Program:
    """The run's functions; call them inside `jax.set_mesh(mesh)`."""
    model = abstract(config.model)
    graph = nnx.graphdef(model)
    optimizer = make_optimizer(config)

    def init() -> TrainState:
        whole = params_of(Decoder(config.model, rngs=nnx.Rngs(config.seed)))
        params, _ = split(whole, config.trainable)
        # One buffer a counter: the step donates the state.
        step, skipped, row = (jnp.zeros((), jnp.int32) for _ in range(3))
        return TrainState(step, params, optimizer.init(params), skipped, row)

    every_place = param_shardings(mesh, model)
    place, _ = split(every_place, config.trainable)
    whole = NamedSharding(mesh, PartitionSpec())
    state = jax.eval_shape(init)
    opt_shardings = optax.tree_utils.tree_map_params(
        optimizer.init,
        lambda _, sharding: sharding,
        state.opt_state,
        place,
        transform_non_params=lambda _: whole,
    )
    shardings = TrainState(whole, place, opt_shardings, whole, whole)

    def summed_loss(params, batch):
        decoder = nnx.merge(graph, params)
        hidden, _, aux = decoder.hidden(
            batch["tokens"],
            segment_ids=batch.get("segment_ids"),
            positions=batch.get("positions"),
            contiguous=True,
            microbatches=config.mesh.pieces(),
            rounds=config.mesh.rounds,
        )
        nll = next_token_loss(
            hidden,
            decoder.head(),
            batch["labels"],
            batch["loss_mask"],
            chunk_size=config.model.loss_chunk_size,
        )
        return jnp.sum(nll), aux

    pieces = config.accumulation_steps

    def train_step(
        state: TrainState, batch: Batch, frozen: dict[str, Any] | None = None
    ) -> tuple[TrainState, Metrics]:
        total = jnp.maximum(jnp.sum(batch["loss_mask"]), 1)

        def objective(params, piece):
            nll, aux = summed_loss(join(frozen or {}, params), piece)
            losses = sum((v for k, v in aux.items() if k.endswith("_loss")), jnp.zeros(()))
            reported = {name: value for name, value in aux.items() if "/tokens/" not in name}
            return nll / total + losses / pieces, (nll / total, reported)

        gradient = jax.value_and_grad(objective, has_aux=True)
        if pieces == 1:
            (_, (loss, aux)), grads = gradient(state.params, batch)
        else:

            def accumulate(carry, piece):
                (_, (loss, aux)), grads = gradient(state.params, piece)
                return jax.tree.map(jnp.add, carry, (loss, grads)), aux

            zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params))
            (loss, grads), aux = jax.lax.scan(accumulate, zeros, _split(batch, pieces))
            aux = {
                n: (jnp.sum if n.endswith("_count") else jnp.mean)(x, axis=0)
                for n, x in aux.items()
            }

        norm = optax.global_norm(grads)
        rate = learning_rate(config, state.step)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
        good = jnp.isfinite(loss) & jnp.isfinite(norm) & jnp.isfinite(optax.global_norm(params))
        good &= aux.get(OVERFLOW, 0) == 0

        def keep(new, old):
            return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)

        bad = jnp.where(good, 0, 1)
        after = TrainState(
            state.step + 1,
            keep(params, state.params),
            keep(opt_state, state.opt_state),
            state.skipped + bad,
            jnp.where(good, 0, state.skipped_in_a_row + 1),
        )
        metrics = {
            "train/loss": loss,
            "train/grad_norm": norm,
            "train/learning_rate": rate,
            "train/skipped_steps": after.skipped,
            "skipped_in_a_row": after.skipped_in_a_row,
            **aux,
        }
        return after, metrics

    def eval_step(params, batch):
        nll, aux = summed_loss(params, batch)
        return nll, jnp.sum(batch["loss_mask"]), aux.get(OVERFLOW, jnp.zeros(()))

    exchanges = {getattr(x.feedforward, "exchange", "") for x in config.model.layers.values()}
    compiled: Any = functools.partial(jax.jit, compiler_options=exchange_options(mesh, exchanges))
    return Program(
        jax.jit(init, out_shardings=shardings),
        shardings,
        every_place,
        # Statistics of layers are cut over pipeline stages; every host reads them whole.
        compiled(train_step, donate_argnums=0, out_shardings=(shardings, whole)),
        compiled(eval_step, out_shardings=whole),
    )


def _split(batch: Batch, pieces: int) -> Batch:
    """[B, ...] -> [pieces, B / pieces, ...], each device keeping its rows."""
    return jax.tree.map(lambda x: jnp.swapaxes(x.reshape(-1, pieces, *x.shape[1:]), 0, 1), batch)
