"""Make the functions that train and evaluate a model: one training step is a pure function of the train
state and a batch."""

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

from lsm_jax.mixers import MoMConfig
from lsm_jax.mixers.method import Method, method_of
from lsm_jax.models import (
    Decoder,
    ModelConfig,
    abstract,
    logical_axes,
    next_token_loss,
    training_losses,
)
from lsm_jax.parallel import exchange_options, param_sharding
from lsm_jax.training.config import TrainConfig
from lsm_jax.training.optimizer import ema_decay_at, learning_rate, make_optimizer, stays_finite
from lsm_jax.training.partition import join, leaves_of, like, split

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]

OVERFLOW = "moe/overflow_count"
"""The metric that counts the choices of experts that did not fit into the buffers of the exchange between
devices. After an overflow the step must be taken again with larger buffers (`ExpertBuffers`)."""

UNROLLED = 48
"""The largest number of layers that a training step on one GPU compiles one after the other by default (`unrolls_on_one_gpu`)."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrainState:
    """The state of training, everything that a training step changes: a tree of arrays, or of their shapes
    or shardings.

    Attributes:
        step: number of training steps taken, including skipped ones, but not those with an overflow (choices of
            experts that did not fit into the buffers).
        params: the trained parameters, a pure dict of float32 arrays.
        opt_state: the state of the optimizer.
        skipped: number of steps whose loss, gradient or new parameters were not finite.
        skipped_in_a_row: number of consecutive steps skipped since the last good step.
        ema: the exponential moving average of the parameters, a tree like `params`; empty if the run keeps none.
    """

    step: Any
    params: dict[str, Any]
    opt_state: optax.OptState
    skipped: Any
    skipped_in_a_row: Any
    ema: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Program:
    """The functions of a training run: initialise, take a training step, compute the held-out loss. Each is
    compiled at its first use.

    Attributes:
        init: function without arguments that returns the `TrainState` before the first step, sharded over the
            mesh.
        shardings: a `TrainState` whose leaves are the shardings of a train state.
        param_shardings: the shardings of all parameters, including frozen ones.
        train_step: (state, batch, frozen=None, overflow=None) -> (state, metrics); the metrics include the
            losses and statistics that layers report; donates the state. `frozen` is the tree of frozen
            parameters, if there are any. A document of a batch must have no padding between its tokens;
            `lsm_jax.data` packs rows in this way. A step with an overflow (`OVERFLOW` of its metrics is not
            0) returns the state unchanged, including its counters. `overflow` is that metric of the previous
            step, a replicated int32; if it is not 0, this step returns the state unchanged and the same
            count, so that a step that was started before the host read the count changes nothing either.
        eval_step: (all parameters, batch) -> (loss in nats [T] and number of predicted tokens [T], summed over the tokens at
            each position in their document, number of choices of experts that did not fit into the buffers of the exchange),
            of the model in the form in which it is evaluated (`ModelConfig.for_inference`).
        teacher_eval_step: in a run of attention transfer, the function that `eval_step` is for the student, but
            for its teacher (`ModelConfig.teacher`); None in other runs.
    """

    init: Callable[[], TrainState]
    shardings: TrainState
    param_shardings: dict[str, Any]
    train_step: Callable[..., tuple[TrainState, Metrics]]
    eval_step: Callable[[dict[str, Any], Batch], tuple[jax.Array, jax.Array, jax.Array]]
    teacher_eval_step: Callable[..., tuple[jax.Array, jax.Array, jax.Array]] | None = None


def params_of(model: Decoder) -> dict[str, Any]:
    """Return the parameters of a model as a pure dict of arrays."""
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def param_shardings(mesh: Mesh | AbstractMesh, model: Decoder) -> dict[str, Any]:
    """Return the sharding of each parameter of a (possibly abstract) model on the mesh, as a tree of the
    parameters' structure.

    Raises:
        ValueError: the mesh does not divide a mixer's heads or an axis of a parameter.
    """
    mixers = (
        (place, mixer)
        for place, block in enumerate(model.periods.blocks)
        for mixer in getattr(block.mixer, "parts", (block.mixer.innermost(),))
    )
    for place, mixer in mixers:
        for kind in ("num_heads", "num_value_heads", "num_kv_heads", "num_groups"):
            for count in (getattr(mixer.config, kind, None), getattr(mixer, kind, None)):
                if isinstance(
                    count, int
                ):  # a flat axis of heads and channels may be divisible where the heads are not
                    name = f"{type(mixer).__name__}.{kind} of layer {place}"
                    param_sharding(mesh, ("heads",), (count,), name=name)

    def place(path, axes, leaf):
        return param_sharding(
            mesh, axes, leaf.shape, name=jax.tree_util.keystr(path, simple=True, separator=".")
        )

    return jax.tree_util.tree_map_with_path(
        place, logical_axes(model), params_of(model), is_leaf=lambda x: isinstance(x, tuple)
    )


def unrolls_layers(model: ModelConfig, mesh: Mesh) -> bool:
    """Return whether a training step compiles the layers one after the other: as the config says, and where it says nothing, on one GPU
    by `unrolls_on_one_gpu`."""
    if model.unroll_layers is not None:
        return model.unroll_layers
    one_gpu = mesh.size == 1 and mesh.devices.flat[0].platform == "gpu"
    return one_gpu and unrolls_on_one_gpu(model)


def unrolls_on_one_gpu(model: ModelConfig) -> bool:
    """Return whether a training step on one GPU compiles the layers one after the other by default: up to `UNROLLED` layers, of mixers
    that do not take minutes to compile (`Method.in_loop`), nor contain such a mixer, as Mixture-of-Memories may."""
    return model.num_layers <= UNROLLED and not any(used.in_loop for used in methods_of(model))


def methods_of(model: ModelConfig) -> list[Method]:
    """Return the methods of a model's layers, with those around which a Mixture-of-Memories is."""
    used = [model.layers[letter].mixer for letter in sorted(set(model.pattern))]
    used += [config.mixer for config in used if isinstance(config, MoMConfig)]
    return [method_of(config) for config in used]


def compiler_options(model: ModelConfig, mesh: Mesh) -> dict[str, Any]:
    """Return XLA's compiler options for the training and evaluation steps of a model on the mesh's devices: those of the exchange of
    tokens between experts; on GPUs whether XLA tries several compilations of each fusion (`Method.fusions_tuned`), and for products in
    FP8 that none is Triton's: these would multiply the widened numbers."""
    exchanges = {getattr(x.feedforward, "exchange", "") for x in model.layers.values()}
    options = exchange_options(mesh, exchanges)
    tuned = all(used.fusions_tuned for used in methods_of(model))
    if mesh.devices.flat[0].platform == "gpu":
        if not tuned:
            options["xla_gpu_experimental_enable_fusion_autotuner"] = False
        if "fp8" in (model.matmul, model.head_matmul):
            options["xla_gpu_enable_triton_gemm"] = False
    return options


def make_program(config: TrainConfig, mesh: Mesh) -> Program:
    """Make the functions of a training run (initialise, train, evaluate) for the config's model and the devices of
    `mesh`. Their callers must set the mesh by `jax.set_mesh(mesh)`."""
    unroll = unrolls_layers(config.model, mesh)
    model = abstract(dataclasses.replace(config.model, unroll_layers=unroll))
    graph = nnx.graphdef(model)
    optimizer = make_optimizer(config)

    def init() -> TrainState:
        all_params = params_of(Decoder(config.model, rngs=nnx.Rngs(config.seed)))
        params, _ = split(all_params, config.trainable)
        # Each counter has a buffer of its own, since the step donates the state.
        step, skipped, in_a_row = (jnp.zeros((), jnp.int32) for _ in range(3))
        ema = jax.tree.map(jnp.copy, params) if config.ema_decay else {}
        return TrainState(step, params, optimizer.init(params), skipped, in_a_row, ema)

    all_shardings = param_shardings(mesh, model)
    trained_shardings, _ = split(all_shardings, config.trainable)
    replicated = NamedSharding(mesh, PartitionSpec())
    shapes = jax.eval_shape(init)
    opt_shardings = optax.tree_utils.tree_map_params(
        optimizer.init,
        moment_sharding,
        shapes.opt_state,
        trained_shardings,
        shapes.params,
        transform_non_params=lambda _: replicated,
        is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode),
    )
    ema = trained_shardings if config.ema_decay else {}
    counters = replicated, replicated
    shardings = TrainState(replicated, trained_shardings, opt_shardings, *counters, ema)
    train_step = _make_train_step(config, optimizer, _make_loss(config, graph))

    student, teacher = config.model.for_inference(), config.model.teacher()

    def eval_step_of(model: ModelConfig) -> Callable[..., tuple[jax.Array, jax.Array, jax.Array]]:
        decoder = abstract(model)
        shapes, hidden_states = params_of(decoder), _hidden_states(config, nnx.graphdef(decoder))

        def eval_step(params, batch):
            decoder, hidden, aux = hidden_states(like(params, shapes), batch)
            chunk_size = model.loss_chunk_size
            given = decoder.head(), batch["labels"], batch["loss_mask"]
            nll = next_token_loss(hidden, *given, chunk_size=chunk_size, cap=model.logits_cap)
            counted = batch["loss_mask"].astype(jnp.float32)
            if "positions" in batch:  # of documents that are packed into rows
                zeros = jnp.zeros(nll.shape[1], jnp.float32)
                sums = [zeros.at[batch["positions"]].add(x) for x in (nll, counted)]
            else:
                sums = [jnp.sum(x, axis=0) for x in (nll, counted)]
            return sums[0], sums[1], aux.get(OVERFLOW, jnp.zeros(()))

        return eval_step

    options = compiler_options(config.model, mesh)
    compiled: Any = functools.partial(jax.jit, compiler_options=options)
    return Program(
        jax.jit(init, out_shardings=shardings),
        shardings,
        all_shardings,
        # Statistics of layers are sharded over pipeline stages; every host reads all of them.
        compiled(train_step, donate_argnums=0, out_shardings=(shardings, replicated)),
        compiled(eval_step_of(student), out_shardings=replicated),
        None if teacher is None else compiled(eval_step_of(teacher), out_shardings=replicated),
    )


def moment_sharding(moment: Any, sharding: NamedSharding, param: Any) -> Any:
    """Return the sharding of an array of the optimizer's state that belongs to a parameter, whose sharding and shape are
    given: that of the parameter if it has its shape, that of its other axes if it is a mean over one axis (Adafactor's rows
    and columns), and replicated if it is a placeholder of one number. A masked node is returned unchanged."""
    if isinstance(moment, optax.MaskedNode):
        return moment
    if moment.shape == param.shape:
        return sharding
    names = [*sharding.spec, *[None] * (len(param.shape) - len(sharding.spec))]
    for axis in reversed(range(len(param.shape))):
        rest = [i for i in range(len(param.shape)) if i != axis]
        if moment.shape == tuple(param.shape[i] for i in rest):
            return NamedSharding(sharding.mesh, PartitionSpec(*(names[i] for i in rest)))
    return NamedSharding(sharding.mesh, PartitionSpec())


def _hidden_states(config: TrainConfig, graph: Any) -> Callable[..., tuple[Decoder, Any, Metrics]]:
    """Return the function (all parameters, batch) -> (the decoder, its hidden states [B, T, D], losses and statistics that
    layers report)."""

    def hidden_states(params, batch):
        decoder = nnx.merge(graph, params)
        hidden, _, aux = decoder.hidden(
            batch["tokens"],
            segment_ids=batch.get("segment_ids"),
            positions=batch.get("positions"),
            contiguous=True,
            microbatches=config.mesh.pieces(),
            rounds=config.mesh.rounds,
        )
        return decoder, hidden, aux

    return hidden_states


def _make_loss(
    config: TrainConfig, graph: Any
) -> Callable[..., tuple[jax.Array, jax.Array, Metrics]]:
    """Return the function (all parameters, batch, count) -> (the loss to minimise and the negative log-likelihood in nats,
    summed over the batch's predicted tokens and divided by `count`; losses and statistics that layers report)."""
    hidden_states = _hidden_states(config, graph)

    def mean_loss(params, batch, count):
        decoder, hidden, aux = hidden_states(params, batch)
        with jax.named_scope("loss"):
            loss, nll = training_losses(
                hidden,
                decoder.head(),
                batch["labels"],
                batch["loss_mask"],
                count,
                chunk_size=config.model.loss_chunk_size,
                cap=config.model.logits_cap,
                label_smoothing=config.label_smoothing,
                z_loss=config.z_loss,
                matmul=config.model.head_matmul,
            )
        return loss, nll, aux

    return mean_loss


def gradient_norms(grads: dict[str, Any]) -> Metrics:
    """Return the norms of the gradients of the model's parts, by the metric's name: one number for the embedding and the
    like, and for each part of a place in the pattern, such as `grad_norm/0.mixer`, a list over the periods of the pattern."""
    sums: dict[str, jax.Array] = {}
    for name, leaf in leaves_of(grads).items():
        parts = name.split(".")
        stacked = parts[:2] == ["periods", "blocks"]
        part = f"grad_norm/{'.'.join(parts[2:4]) if stacked else parts[0]}"
        sums[part] = sums.get(part, 0.0) + jnp.sum(leaf**2, axis=tuple(range(stacked, leaf.ndim)))
    return {name: jnp.sqrt(value) for name, value in sums.items()}


def _make_train_step(
    config: TrainConfig,
    optimizer: optax.GradientTransformation,
    mean_loss: Callable[..., tuple[jax.Array, jax.Array, Metrics]],
) -> Callable[..., tuple[TrainState, Metrics]]:
    """Return the function of one training step, not yet compiled. It computes the gradients and applies the optimizer; if
    the loss, the gradients or the new parameters are not finite, it changes no parameters. `Program.train_step`
    describes its arguments."""
    pieces = config.accumulation_steps

    def train_step(
        state: TrainState,
        batch: Batch,
        frozen: dict[str, Any] | None = None,
        overflow: jax.Array | None = None,
    ) -> tuple[TrainState, Metrics]:
        total = jnp.maximum(jnp.sum(batch["loss_mask"]), 1)

        def objective(params, piece):
            loss, nll, aux = mean_loss(join(frozen or {}, params), piece, total)
            losses = sum((v for k, v in aux.items() if k.endswith("_loss")), jnp.zeros(()))
            reported = {name: value for name, value in aux.items() if "/tokens/" not in name}
            return loss + losses / pieces, (nll, reported)

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

        with jax.named_scope("optimizer"):
            norm = optax.global_norm(grads)
            rate = learning_rate(config, state.step)
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
            weight = 1 - ema_decay_at(config, state.step)
            ema = state.ema and jax.tree.map(lambda a, p: a + weight * (p - a), state.ema, params)
        good = jnp.isfinite(loss) & jnp.isfinite(norm)
        # Where only finite parameters follow, nothing of the new ones is needed to decide, and one pass over parameters and
        # moments reads and writes them all.
        if not stays_finite(config):
            good &= jnp.isfinite(optax.global_norm(params))
        fits = jnp.ones((), bool)
        if OVERFLOW in aux:
            count = aux[OVERFLOW].astype(jnp.int32)
            aux[OVERFLOW] = count if overflow is None else jnp.where(overflow == 0, count, overflow)
            fits = aux[OVERFLOW] == 0
        good &= fits

        def select(new, old):
            return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)

        skipped = fits & ~good
        after = TrainState(
            state.step + fits.astype(jnp.int32),
            select(params, state.params),
            select(opt_state, state.opt_state),
            state.skipped + skipped.astype(jnp.int32),
            jnp.where(good, 0, state.skipped_in_a_row + skipped.astype(jnp.int32)),
            select(ema, state.ema),
        )
        metrics = {
            "train/loss": loss,
            "train/grad_norm": norm,
            "train/learning_rate": rate,
            "train/skipped_steps": after.skipped,
            "skipped_in_a_row": after.skipped_in_a_row,
            **aux,
        }
        if config.grad_norms:
            metrics |= gradient_norms(grads)
        return after, metrics

    return train_step


def _split(batch: Batch, pieces: int) -> Batch:
    """Reshape each array [B, ...] of a batch to [pieces, B / pieces, ...] for the accumulation of gradients over
    `pieces` equal subsets of its rows, such that each row remains on its device."""
    return jax.tree.map(lambda x: jnp.swapaxes(x.reshape(-1, pieces, *x.shape[1:]), 0, 1), batch)
