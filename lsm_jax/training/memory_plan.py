"""What a run takes on a mesh, on paper: bytes of memory and of communication on each device. Nothing is computed or compiled."""

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
    """Bytes on each device.

    Attributes:
        sizes: devices along each axis.
        parameters: float32, and bfloat16 those that stand still.
        optimizer: two moments, float32.
        gradients: float32, of its part of the parameters.
        saved: activations kept for the backward pass, of all its layers and microbatches.
        working: the most that exists at a time besides: a layer computed again and its gradients, or a chunk of the loss.
        update: once the activations are gone, the parameters that the optimizer would make, before it is known whether they are
            finite, and on some platforms its update beside them.
        communication: bytes that a device sends a step, by what for.
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
        """Bytes of memory: activations and update do not exist at the same time."""
        state = self.parameters + self.optimizer + self.gradients
        return state + max(self.saved + self.working, self.update)

    def report(self, hbm: float) -> str:
        """A table, and whether it fits into `hbm` GiB."""
        mesh = " x ".join(f"{axis}={size}" for axis, size in self.sizes.items() if size > 1)
        names = ("parameters", "optimizer", "gradients", "saved", "working", "update", "total")
        lines = [f"mesh {mesh or 'of one device'}; GiB on each device:"]
        lines += [f"  {name:<12}{getattr(self, name) / 2**30:10.2f}" for name in names]
        fits = "fits" if self.total <= hbm * 2**30 else "does not fit"
        lines += [f"  {fits} into {hbm:g} GiB", "GiB that each device sends a step:"]
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
    """The plan of a run on so many devices.

    Parameters, moments and gradients are counted by their shardings. Activations are those of the program's trace, of one
    layer of each kind, with arrays that the compiler fuses away left out (`peak_bytes`); a device's part of them is taken as even.

    Args:
        config: the run.
        num_devices: over which its mesh must go.
        known: keeps what was traced, for the next plan of the same run on another mesh.
        kernels: for NVIDIA Hopper, whose fused kernels serve what they can; else as XLA alone has it on CPUs and other GPUs.

    Raises:
        ValueError: a config, or a mesh, that does not fit.
    """
    config.validate(num_devices, on_paper=True)
    platform = "cuda" if kernels else "cpu"
    sizes = config.mesh.shape(num_devices)
    mesh = AbstractMesh(tuple(sizes.values()), AXES)
    model = abstract(_as_run(config.model, sizes))
    params, shardings = params_of(model), param_shardings(mesh, model)
    whole = {_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(params)}
    places = jax.tree.leaves(shardings)
    parts = [math.prod(s.shard_shape(x.shape)) for x, s in zip(whole.values(), places, strict=True)]
    held = dict(zip(whole, parts, strict=True))
    learns = jax.tree_util.tree_leaves_with_path(split(params, config.trainable)[0])
    trained = 4 * sum(held[_name(path)] for path, _ in learns)
    saved, working = _activations(config, model, sizes, {} if known is None else known, platform)
    # Of several rounds: the layers as they are dealt out, and their gradients.
    dealt = 2 * _of_periods(held) if config.mesh.rounds > 1 else 0
    return Plan(
        sizes=sizes,
        parameters=trained + 2 * (sum(parts) - trained // 4),
        optimizer=2 * trained,
        gradients=trained * (2 if config.accumulation_steps > 1 else 1),  # their sum, and a piece's
        saved=saved,
        working=working
        + dealt
        + _gathered(config, whole, sizes)
        + _keys_and_values(config, model, sizes),
        # XLA makes parameters in the optimizer's fusion on NVIDIA, on CPUs behind it.
        update=trained * (1 if kernels else 2),
        communication=_communication(config, model, whole, held, trained, sizes),
    )


def _as_run(model: ModelConfig, sizes: dict[str, int]) -> ModelConfig:
    """The model in the form that this mesh runs: of parts of a row, memories are masked, not packed."""
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


def _of_periods(held: dict[str, int]) -> int:
    """Bytes of the layers' parameters that a device holds, in float32."""
    return 4 * sum(size for name, size in held.items() if name.startswith("periods/"))


def _local_shape(config: TrainConfig, sizes: dict[str, int]) -> tuple[int, int]:
    """Rows of a microbatch, and tokens of each, on one device."""
    rows = config.batch_size // config.accumulation_steps // config.mesh.pieces()
    shards = math.prod(sizes[axis] for axis in BATCH_AXES if axis != "pipeline")
    return rows // shards, -(-config.data.sequence_length // sizes["sequence"])


def _activations(
    config: TrainConfig, model: Decoder, sizes: dict[str, int], known: dict[Any, Any], platform: str
) -> tuple[int, int]:
    """(saved, working) bytes; `known` keeps what was traced."""
    rows, length = _local_shape(config, sizes)
    shape = rows, length, platform
    key = *shape, sizes["sequence"] > 1  # on which the form of several memories depends
    if key not in known:
        known[key] = [_layer_bytes(config, model, b, *shape) for b in model.periods.blocks]
    layers = known[key]
    x = rows * length * config.model.hidden_size * jnp.dtype(config.model.dtype).itemsize
    working = max(peak for peak, _ in layers) // sizes["tensor"] + 2 * x
    saved = sum(x + kept // sizes["tensor"] for _, kept in layers)
    pieces = config.mesh.pieces()
    rounds = config.mesh.rounds
    ticks = rounds * pieces + sizes["pipeline"] - 1 if sizes["pipeline"] > 1 else 1
    # Of one round every turn's are kept; of several a turn is run again, and one turn's are there at a time.
    saved *= model.num_periods // (sizes["pipeline"] * rounds) * (ticks if rounds == 1 else 1)
    if sizes["pipeline"] > 1:
        # What comes in, gathered; what goes on after each turn, of which the last round's goes out.
        saved += (2 * pieces + ticks) * x
    if sizes["sequence"] > 1:
        blocks = model.periods.blocks
        beside = max(_beside_update(config, b, rows, length, platform) for b in blocks)
        working += beside // sizes["tensor"]
        updates = sum(_as_one_update(config, b, rows, length)[0] for b in blocks)
        kept = updates * sizes["sequence"] // sizes["tensor"]
        saved += kept * model.num_periods // sizes["pipeline"] * pieces
    tokens = min(config.model.loss_chunk_size, rows * length)
    logits = 3 * tokens * config.model.vocab_size * 4  # logits, probabilities, their errors
    item = jnp.dtype(config.model.dtype).itemsize
    head = config.model.vocab_size * config.model.hidden_size * (4 + item)  # gradient and copy
    return saved, max(working, logits + head)


def _layer_bytes(
    config: TrainConfig, model: Decoder, stacked: Any, rows: int, length: int, platform: str
) -> tuple[int, int]:
    """Of one layer on whole heads and widths: the most that its backward pass needs at a time, and what is kept for it beside its
    input."""
    x = jax.ShapeDtypeStruct((rows, length, config.model.hidden_size), jnp.dtype(config.model.dtype))  # fmt: skip
    ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    whole, weights = nnx.split(model)
    shared = jax.eval_shape(lambda w, x: nnx.merge(whole, w).init_shared(x), weights, x)
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

    def kept(params, x, shared, ids):
        _, vjp = jax.vjp(lambda p, x: run(p, x, shared, ids), params, x)
        return vjp

    return peak, result_bytes(jax.make_jaxpr(kept)(params, x, shared, ids).jaxpr, platform)


def _as_one_update(config: TrainConfig, block: Any, rows: int, length: int) -> tuple[int, int]:
    """Bytes that one device's tokens make as one update of a layer's memory, on whole heads: the update, which is gathered and
    kept, and the state, whose gradient is gathered, both with the tails of convolutions and token shifts. None for attention.

    A delta rule's transition is a matrix [K, K] a head.
    """
    mixer: Any = block.mixer
    kind = type(mixer.innermost()).op
    if kind is ops.attention:
        return 0, 0
    start = _fresh_state(config, mixer, rows, length)
    memory = jax.tree.leaves(start.memory)
    state = sum(x.size * x.dtype.itemsize for x in memory)
    tails = [x for x in jax.tree.leaves(start.tails) if x.ndim > 1]
    state += 4 * sum(x.size for x in tails)  # in words of 32 bits
    if kind not in _WITH_TRANSITIONS:
        return state, state
    largest = max(memory, key=lambda x: x.size)
    keys, values = largest.shape[-2:]
    return state + largest.size // values * keys * largest.dtype.itemsize, state


def _beside_update(config: TrainConfig, block: Any, rows: int, length: int, platform: str) -> int:
    """Bytes that exist besides while a delta rule finds its transition: by K more value channels, which the whole op carries."""
    if type(block.mixer.innermost()).op not in _WITH_TRANSITIONS:
        return 0
    memory = jax.tree.leaves(_fresh_state(config, block.mixer, rows, length).memory)
    *batch, heads, keys, values = max(memory, key=lambda x: x.size).shape
    rows = math.prod(batch)  # of each memory, where there are several
    dtype = jnp.dtype(config.model.dtype)

    def peak(channels: int) -> int:
        k = jax.ShapeDtypeStruct((rows, length, heads, keys), dtype)
        v = jax.ShapeDtypeStruct((rows, length, heads, channels), dtype)
        beta = jax.ShapeDtypeStruct(k.shape[:-1], jnp.float32)

        def run(k, v, beta):
            output, state = ops.delta_memory(k, k, v, beta, beta)
            return output, state.memory

        def backward(k, v, beta):
            found, vjp = jax.vjp(run, k, v, beta)
            return vjp(found)

        return peak_bytes(jax.make_jaxpr(backward)(k, v, beta).jaxpr, platform)

    return peak(values + keys) - peak(values)


def _fresh_state(config: TrainConfig, mixer: Any, rows: int, length: int) -> Any:
    dtype = jnp.dtype(config.model.dtype)
    return jax.eval_shape(lambda: mixer.init_state(rows, length, dtype))


def _gathered(config: TrainConfig, whole: dict[str, Any], sizes: dict[str, int]) -> int:
    """Bytes of the parameters that fsdp gathers while one period is computed, and of their gradients before they are cut."""
    if sizes["fsdp"] == 1:
        return 0
    periods = config.model.num_layers // len(config.model.period())
    count = sum(x.size for name, x in whole.items() if name.startswith("periods/"))
    parts = sizes["tensor"] * sizes["expert"]
    item = jnp.dtype(config.model.dtype).itemsize
    return count // periods // parts * (4 + item)


def _attends(mixer: Any) -> bool:
    """Whether a layer gathers keys and values: attention, and linearized layers with a window."""
    if type(mixer.innermost()).op is ops.attention:
        return True
    return isinstance(mixer, Softmax) and bool(getattr(mixer.config, "window_weight", True))


def _keys_and_values(config: TrainConfig, model: Decoder, sizes: dict[str, int]) -> int:
    """Bytes of the keys and values of whole rows that an attention layer gathers over the sequence, and of their gradients."""
    if sizes["sequence"] == 1:
        return 0
    rows, _ = _local_shape(config, sizes)
    dtype = jnp.dtype(config.model.dtype)
    found = [0]
    for block in model.periods.blocks:
        mixer: Any = block.mixer
        if not _attends(mixer):
            continue
        heads, dim = mixer.config.kv_heads(), mixer.head_dim
        count = 2 * rows * config.data.sequence_length * heads * dim // sizes["tensor"]
        found.append(count * (dtype.itemsize + 4))
    return max(found)


def _communication(
    config: TrainConfig, model: Decoder, whole: dict[str, Any], held: dict[str, int], trained: int, sizes: dict[str, int]
) -> dict[str, int]:  # fmt: skip
    """Bytes that a device sends a step, rings taken at (n - 1) / n of what they carry."""
    rows, length = _local_shape(config, sizes)
    width, item = config.model.hidden_size, jnp.dtype(config.model.dtype).itemsize
    pieces = config.mesh.pieces() * config.accumulation_steps
    x = rows * length * width * item  # one microbatch's activations
    layers = config.model.num_layers // sizes["pipeline"]
    passes = 3 if config.model.remat == "full" else 2  # forward, again, backward
    sent: dict[str, float] = {}

    def ring(size: int) -> float:
        return (size - 1) / size

    own = trained + 2 * (sum(held.values()) - trained // 4)
    copies = sizes["data"] * sizes["sequence"]
    experts = 4 * sum(held[n] for n in held if whole[n].ndim == 4 and n.rpartition("/")[2].endswith("_proj"))  # fmt: skip
    if copies > 1:
        sent["gradients summed"] = 2 * ring(copies) * trained
    if sizes["expert"] > 1:
        sent["gradients summed over expert"] = 2 * ring(sizes["expert"]) * max(trained - experts, 0)
        buffers, moe = 0.0, 0
        for letter in config.model.letters()[: len(config.model.period())]:
            inner = config.model.layers[letter].feedforward
            if hasattr(inner, "num_experts"):
                buffers += min(inner.expert_buffer, sizes["expert"]) * inner.top_k * x
                moe += 1
        periods = layers // len(config.model.period())
        sent["experts, there and back"] = 2 * passes * ring(sizes["expert"]) * buffers * periods * pieces  # fmt: skip
    if sizes["fsdp"] > 1:
        gathered = own * sizes["fsdp"] * ring(sizes["fsdp"])
        sent["parameters gathered"] = passes * gathered * config.accumulation_steps
        sent["gradients scattered"] = (
            trained * sizes["fsdp"] * ring(sizes["fsdp"]) * config.accumulation_steps
        )
    if sizes["tensor"] > 1:  # mixer and feedforward, forward and backward
        sent["tensor sums"] = 2 * 2 * 2 * ring(sizes["tensor"]) * x * layers * pieces
    if sizes["pipeline"] > 1:
        turns = config.mesh.rounds * pieces
        sent["stage to stage"] = 2 * x * turns + 2 * ring(sizes["pipeline"]) * 2 * x * pieces
        if (
            config.mesh.rounds > 1
        ):  # there, and their gradients back; of groups that one device stores at most one is its own
            moved = _of_periods(held) * ring(sizes["pipeline"])
            sent["layers dealt out, and back"] = 2 * moved * config.accumulation_steps
    if sizes["sequence"] > 1:
        count = 0
        for block in model.periods.blocks:
            mixer: Any = block.mixer
            count += sum(_as_one_update(config, block, rows, length))
            if _attends(mixer):  # keys and values, gathered again where they are computed again
                heads, dim = mixer.config.kv_heads(), mixer.head_dim
                count += 2 * rows * length * heads * dim * item * passes
        periods = layers // len(config.model.period())
        sent["states, or keys and values"] = (sizes["sequence"] - 1) * count / sizes["tensor"] * periods * pieces  # fmt: skip
    return {name: int(np.ceil(value)) for name, value in sent.items()}
