"""Estimates of a run on a mesh: bytes of memory and of communication per device. Nothing is computed or
compiled."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh

from lsm_jax import ops
from lsm_jax.mixers import MoMConfig
from lsm_jax.mixers.softmax import Softmax
from lsm_jax.models import Decoder, ModelConfig, abstract
from lsm_jax.models.decoder import rematerialized
from lsm_jax.parallel import AXES, BATCH_AXES
from lsm_jax.training.config import TrainConfig
from lsm_jax.training.liveness import peak_bytes, result_bytes
from lsm_jax.training.partition import split
from lsm_jax.training.step import param_shardings, params_of

_WITH_TRANSITIONS = (ops.delta_memory, ops.dplr_memory)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Bytes per device.

    Attributes:
        sizes: devices along each axis.
        parameters: the parameters; trained ones are float32, frozen ones bfloat16.
        optimizer: two moments of the trained parameters, float32.
        gradients: the gradients of the device's shard of the parameters, float32.
        saved: activations saved for the backward pass, of all layers and microbatches of the device.
        working: the largest other arrays that exist at a time: a recomputed layer and its gradients, or a
            chunk of the loss.
        update: arrays of the update, which exist after the activations are freed: the new parameters before
            it is known whether they are finite, and on some platforms the optimizer's update, too.
        communication: bytes that a device sends per step, by purpose.
    """

    sizes: dict[str, int]
    parameters: int
    optimizer: int
    gradients: int
    saved: int
    working: int
    update: int
    communication: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes of memory; activations and the update do not exist at the same time."""
        state = self.parameters + self.optimizer + self.gradients
        return state + max(self.saved + self.working, self.update)

    def report(self, hbm: float) -> str:
        """A table of the estimates, and whether they fit into `hbm` GiB."""
        mesh = " x ".join(f"{axis}={size}" for axis, size in self.sizes.items() if size > 1)
        names = ("parameters", "optimizer", "gradients", "saved", "working", "update", "total")
        lines = [f"mesh {mesh or 'of one device'}; GiB on each device:"]
        lines += [f"  {name:<12}{getattr(self, name) / 2**30:10.2f}" for name in names]
        fits = "fits" if self.total <= hbm * 2**30 else "does not fit"
        lines += [f"  {fits} into {hbm:g} GiB", "GiB that each device sends per step:"]
        sent = self.communication or {"nothing": 0}
        lines += [f"  {name:<24}{value / 2**30:10.3f}" for name, value in sent.items()]
        return "\n".join(lines)


def plan(
    config: TrainConfig,
    num_devices: int,
    known: dict[Any, Any] | None = None,
    *,
    kernels: bool = True,
) -> Plan:
    """Estimate the memory and communication of a run.

    Parameters, moments and gradients are counted by their shardings. Activations are counted in the trace of
    one layer of each kind, without arrays that the compiler fuses away (`peak_bytes`); they are assumed to
    be divided evenly over devices.

    Args:
        config: the config of the run.
        num_devices: number of devices of its mesh.
        known: a cache of traces, for plans of the same run on other meshes.
        kernels: whether to plan for NVIDIA Hopper with its fused kernels; otherwise for XLA alone, on CPUs
            and other GPUs.

    Raises:
        ValueError: the config or the mesh is not valid.
    """
    config.validate(num_devices, on_paper=True)
    platform = "cuda" if kernels else "cpu"
    sizes = config.mesh.shape(num_devices)
    mesh = AbstractMesh(tuple(sizes.values()), AXES)
    model = abstract(_executed_model(config.model, sizes))
    params, shardings = params_of(model), param_shardings(mesh, model)
    all_params = {_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(params)}
    leaf_shardings = jax.tree.leaves(shardings)
    local_counts = [
        math.prod(s.shard_shape(x.shape))
        for x, s in zip(all_params.values(), leaf_shardings, strict=True)
    ]
    local_params = dict(zip(all_params, local_counts, strict=True))
    trained_leaves = jax.tree_util.tree_leaves_with_path(split(params, config.trainable)[0])
    trained = 4 * sum(local_params[_name(path)] for path, _ in trained_leaves)
    saved, working = _activations(config, model, sizes, {} if known is None else known, platform)
    # With several rounds: the layers as distributed over stages, and their gradients.
    distributed = 2 * _period_bytes(local_params) if config.mesh.rounds > 1 else 0
    return Plan(
        sizes=sizes,
        parameters=trained + 2 * (sum(local_counts) - trained // 4),
        optimizer=2 * trained,
        gradients=trained
        * (2 if config.accumulation_steps > 1 else 1),  # their sum, and those of one piece
        saved=saved,
        working=working
        + distributed
        + _gathered(config, all_params, sizes)
        + gathered_keys_and_values_bytes(config, model, sizes),
        # XLA computes new parameters inside the optimizer's fusion on NVIDIA GPUs, but after it on CPUs.
        update=trained * (1 if kernels else 2),
        communication=_communication(config, model, all_params, local_params, trained, sizes),
    )


def _executed_model(model: ModelConfig, sizes: dict[str, int]) -> ModelConfig:
    """The model as it is executed on this mesh: if rows are divided over devices, memories are masked
    instead of packed."""
    if sizes["sequence"] == 1:
        return model
    layers = {
        letter: dataclasses.replace(
            layer, mixer=dataclasses.replace(layer.mixer, execution="masked")
        )
        if isinstance(layer.mixer, MoMConfig)
        else layer
        for letter, layer in model.layers.items()
    }
    return dataclasses.replace(model, layers=layers)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _period_bytes(local_params: dict[str, int]) -> int:
    """Bytes of the parameters of layers on a device, in float32."""
    return 4 * sum(size for name, size in local_params.items() if name.startswith("periods/"))


def _local_shape(config: TrainConfig, sizes: dict[str, int]) -> tuple[int, int]:
    """(rows of a microbatch, tokens of each row) on one device."""
    rows = config.batch_size // config.accumulation_steps // config.mesh.pieces()
    shards = math.prod(sizes[axis] for axis in BATCH_AXES if axis != "pipeline")
    return rows // shards, -(-config.data.sequence_length // sizes["sequence"])


def _activations(
    config: TrainConfig, model: Decoder, sizes: dict[str, int], known: dict[Any, Any], platform: str
) -> tuple[int, int]:
    """The bytes (saved, working) of activations; `known` is the cache of traces."""
    rows, length = _local_shape(config, sizes)
    shape = rows, length, platform
    key = *shape, sizes["sequence"] > 1  # whether memories are masked or packed depends on it
    if key not in known:
        known[key] = [_layer_bytes(config, model, b, *shape) for b in model.periods.blocks]
    layers = known[key]
    x = rows * length * config.model.hidden_size * jnp.dtype(config.model.dtype).itemsize
    working = max(peak for peak, _ in layers) // sizes["tensor"] + 2 * x
    saved = sum(x + residuals // sizes["tensor"] for _, residuals in layers)
    pieces = config.mesh.pieces()
    rounds = config.mesh.rounds
    ticks = rounds * pieces + sizes["pipeline"] - 1 if sizes["pipeline"] > 1 else 1
    # With one round the activations of every turn are saved; with several, each turn is recomputed, so those
    # of one turn exist.
    saved *= model.num_periods // (sizes["pipeline"] * rounds) * (ticks if rounds == 1 else 1)
    if sizes["pipeline"] > 1:
        # The gathered inputs; the outputs of each turn, of which those of the last round are the results.
        saved += (2 * pieces + ticks) * x
    if sizes["sequence"] > 1:
        blocks = model.periods.blocks
        transition = max(_transition_bytes(config, b, rows, length, platform) for b in blocks)
        working += transition // sizes["tensor"]
        updates = sum(_update_bytes(config, b, rows, length)[0] for b in blocks)
        residuals = updates * sizes["sequence"] // sizes["tensor"]
        saved += residuals * model.num_periods // sizes["pipeline"] * pieces
    tokens = min(config.model.loss_chunk_size, rows * length)
    logits = 3 * tokens * config.model.vocab_size * 4  # logits, probabilities, their errors
    item = jnp.dtype(config.model.dtype).itemsize
    head = config.model.vocab_size * config.model.hidden_size * (4 + item)  # gradient and copy
    return saved, max(working, logits + head)


def _layer_bytes(
    config: TrainConfig, model: Decoder, stacked: Any, rows: int, length: int, platform: str
) -> tuple[int, int]:
    """(peak bytes of the backward pass, bytes saved for it in addition to the input) of one layer with all
    heads and channels."""
    x = jax.ShapeDtypeStruct(
        (rows, length, config.model.hidden_size), jnp.dtype(config.model.dtype)
    )
    ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    model_graph, weights = nnx.split(model)
    shared = jax.eval_shape(lambda w, x: nnx.merge(model_graph, w).init_shared(x), weights, x)
    graph, params = nnx.split(stacked, nnx.Param)
    params = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape[1:], p.dtype), params)

    def layer(params, x, shared, ids):
        block = nnx.merge(graph, params)
        x, _, _, aux = block(
            x, shared, None, layer=0, segment_ids=ids, positions=ids, contiguous=True
        )
        return x, sum((v for k, v in aux.items() if k.endswith("_loss")), jnp.zeros(()))

    def backward(params, x, shared, ids, dx):
        _, vjp = jax.vjp(lambda p, x: layer(p, x, shared, ids), params, x)
        return vjp((dx, jnp.ones(())))

    peak = peak_bytes(jax.make_jaxpr(backward)(params, x, shared, ids, x).jaxpr, platform)
    if config.model.remat == "full":
        return peak, 0
    run = rematerialized(layer, config.model.remat)

    def residuals(params, x, shared, ids):
        _, vjp = jax.vjp(lambda p, x: run(p, x, shared, ids), params, x)
        return vjp

    return peak, result_bytes(jax.make_jaxpr(residuals)(params, x, shared, ids).jaxpr, platform)


def _update_bytes(config: TrainConfig, block: Any, rows: int, length: int) -> tuple[int, int]:
    """Bytes of (update, state) of a layer's memory for the tokens of one device, with all heads; (0, 0) for
    attention.

    The update of all of the device's tokens is gathered over devices and saved; of the state the gradient is
    gathered. Both include the tails of convolutions and token shifts. A delta rule's transition is a matrix
    [K, K] per head.
    """
    mixer: Any = block.mixer
    kind = type(mixer.innermost()).op
    if kind is ops.attention:
        return 0, 0
    start = _abstract_state(config, mixer, rows, length)
    memory = jax.tree.leaves(start.memory)
    state = sum(x.size * x.dtype.itemsize for x in memory)
    tails = [x for x in jax.tree.leaves(start.tails) if x.ndim > 1]
    state += 4 * sum(x.size for x in tails)  # in words of 32 bits
    if kind not in _WITH_TRANSITIONS:
        return state, state
    largest = max(memory, key=lambda x: x.size)
    keys, values = largest.shape[-2:]
    return state + largest.size // values * keys * largest.dtype.itemsize, state


def _transition_bytes(
    config: TrainConfig, block: Any, rows: int, length: int, platform: str
) -> int:
    """Bytes that a delta rule needs to compute its transition, for which the op has K more value channels."""
    if type(block.mixer.innermost()).op not in _WITH_TRANSITIONS:
        return 0
    memory = jax.tree.leaves(_abstract_state(config, block.mixer, rows, length).memory)
    *batch, heads, keys, values = max(memory, key=lambda x: x.size).shape
    rows = math.prod(batch)  # includes the axis of memories, if there are several
    dtype = jnp.dtype(config.model.dtype)

    def peak(channels: int) -> int:
        k = jax.ShapeDtypeStruct((rows, length, heads, keys), dtype)
        v = jax.ShapeDtypeStruct((rows, length, heads, channels), dtype)
        beta = jax.ShapeDtypeStruct(k.shape[:-1], jnp.float32)

        def run(k, v, beta):
            output, state = ops.delta_memory(k, k, v, beta, beta)
            return output, state.memory

        def backward(k, v, beta):
            results, vjp = jax.vjp(run, k, v, beta)
            return vjp(results)

        return peak_bytes(jax.make_jaxpr(backward)(k, v, beta).jaxpr, platform)

    return peak(values + keys) - peak(values)


def _abstract_state(config: TrainConfig, mixer: Any, rows: int, length: int) -> Any:
    dtype = jnp.dtype(config.model.dtype)
    return jax.eval_shape(lambda: mixer.init_state(rows, length, dtype))


def _gathered(config: TrainConfig, all_params: dict[str, Any], sizes: dict[str, int]) -> int:
    """Bytes of the parameters that fsdp gathers for one period, and of their gradients before they are
    scattered."""
    if sizes["fsdp"] == 1:
        return 0
    periods = config.model.num_layers // len(config.model.period())
    count = sum(x.size for name, x in all_params.items() if name.startswith("periods/"))
    parts = sizes["tensor"] * sizes["expert"]
    item = jnp.dtype(config.model.dtype).itemsize
    return count // periods // parts * (4 + item)


def _gathers_keys_and_values(mixer: Any) -> bool:
    """Whether a layer gathers keys and values: attention layers do, and linearized layers with a window."""
    if type(mixer.innermost()).op is ops.attention:
        return True
    return isinstance(mixer, Softmax) and bool(getattr(mixer.config, "window_weight", True))


def gathered_keys_and_values_bytes(
    config: TrainConfig, model: Decoder, sizes: dict[str, int]
) -> int:
    """Bytes of the keys and values of all tokens that an attention layer gathers over the sequence axis, and
    of their gradients."""
    if sizes["sequence"] == 1:
        return 0
    rows, _ = _local_shape(config, sizes)
    dtype = jnp.dtype(config.model.dtype)
    layer_bytes = [0]
    for block in model.periods.blocks:
        mixer: Any = block.mixer
        if not _gathers_keys_and_values(mixer):
            continue
        heads, dim = mixer.config.kv_heads(), mixer.head_dim
        count = 2 * rows * config.data.sequence_length * heads * dim // sizes["tensor"]
        layer_bytes.append(count * (dtype.itemsize + 4))
    return max(layer_bytes)


def _communication(
    config: TrainConfig,
    model: Decoder,
    all_params: dict[str, Any],
    local_params: dict[str, int],
    trained: int,
    sizes: dict[str, int],
) -> dict[str, int]:
    """Bytes that a device sends per step, by purpose; a ring of n devices sends (n - 1) / n of its data."""
    rows, length = _local_shape(config, sizes)
    width, item = config.model.hidden_size, jnp.dtype(config.model.dtype).itemsize
    pieces = config.mesh.pieces() * config.accumulation_steps
    x = rows * length * width * item  # one microbatch's activations
    layers = config.model.num_layers // sizes["pipeline"]
    passes = 3 if config.model.remat == "full" else 2  # forward, again, backward
    sent: dict[str, float] = {}

    def ring(size: int) -> float:
        return (size - 1) / size

    local_bytes = trained + 2 * (sum(local_params.values()) - trained // 4)
    copies = sizes["data"] * sizes["sequence"]
    experts = 4 * sum(
        local_params[n]
        for n in local_params
        if all_params[n].ndim == 4 and n.rpartition("/")[2].endswith("_proj")
    )
    if copies > 1:
        sent["gradients summed"] = 2 * ring(copies) * trained
    if sizes["expert"] > 1:
        sent["gradients summed over expert"] = 2 * ring(sizes["expert"]) * max(trained - experts, 0)
        buffers, moe = 0.0, 0
        for letter in config.model.letters()[: len(config.model.period())]:
            feedforward = config.model.layers[letter].feedforward
            if hasattr(feedforward, "num_experts"):
                buffers += min(feedforward.expert_buffer, sizes["expert"]) * feedforward.top_k * x
                moe += 1
        periods = layers // len(config.model.period())
        sent["experts, there and back"] = (
            2 * passes * ring(sizes["expert"]) * buffers * periods * pieces
        )
    if sizes["fsdp"] > 1:
        gathered = local_bytes * sizes["fsdp"] * ring(sizes["fsdp"])
        sent["parameters gathered"] = passes * gathered * config.accumulation_steps
        sent["gradients scattered"] = (
            trained * sizes["fsdp"] * ring(sizes["fsdp"]) * config.accumulation_steps
        )
    if sizes["tensor"] > 1:  # mixer and feedforward, forward and backward
        sent["tensor sums"] = 2 * 2 * 2 * ring(sizes["tensor"]) * x * layers * pieces
    if sizes["pipeline"] > 1:
        turns = config.mesh.rounds * pieces
        sent["stage to stage"] = 2 * x * turns + 2 * ring(sizes["pipeline"]) * 2 * x * pieces
        if config.mesh.rounds > 1:
            # Forward, and the gradients back; at most one of the groups that a device stores is used by its
            # own stage.
            moved = _period_bytes(local_params) * ring(sizes["pipeline"])
            sent["layers dealt out, and back"] = 2 * moved * config.accumulation_steps
    if sizes["sequence"] > 1:
        count = 0
        for block in model.periods.blocks:
            mixer: Any = block.mixer
            count += sum(_update_bytes(config, block, rows, length))
            if _gathers_keys_and_values(
                mixer
            ):  # keys and values, gathered again where they are computed again
                heads, dim = mixer.config.kv_heads(), mixer.head_dim
                count += 2 * rows * length * heads * dim * item * passes
        periods = layers // len(config.model.period())
        sent["states, or keys and values"] = (
            (sizes["sequence"] - 1) * count / sizes["tensor"] * periods * pieces
        )
    return {name: int(np.ceil(value)) for name, value in sent.items()}
