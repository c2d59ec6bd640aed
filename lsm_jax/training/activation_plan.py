"""Estimate the bytes of activations that each device of a training run needs, from the traced program of
one layer of each kind; nothing is compiled."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax import ops
from lsm_jax.feedforward.moe import MoE
from lsm_jax.mixers import MLAConfig, PaTHConfig
from lsm_jax.mixers.softmax import Softmax
from lsm_jax.models import Decoder
from lsm_jax.models.config import SAVES_PRODUCTS
from lsm_jax.models.decoder import rematerialized
from lsm_jax.models.narrow import is_large
from lsm_jax.models.stages import kinds_of
from lsm_jax.ops.core.checks import DEFAULT_CHUNK_SIZE
from lsm_jax.parallel import BATCH_AXES, Stages
from lsm_jax.training.config import TrainConfig
from lsm_jax.training.liveness import peak_bytes, result_bytes
from lsm_jax.training.partition import split
from lsm_jax.training.step import params_of, unrolls_on_one_gpu

_WITH_TRANSITIONS = (ops.delta_memory, ops.dplr_memory)
_STORE_TOKENS = (
    ops.attention, ops.path_attention, ops.block_attention, ops.native_sparse_attention,
)  # fmt: skip


def local_shape(config: TrainConfig, sizes: dict[str, int]) -> tuple[int, int]:
    """Return the shape of the tokens that one device computes at a time: (rows of a microbatch on the
    device, tokens of each of these rows)."""
    rows = config.batch_size // config.accumulation_steps // config.mesh.pieces()
    shards = math.prod(sizes[axis] for axis in BATCH_AXES if axis != "pipeline")
    return rows // shards, -(-config.data.sequence_length // sizes["sequence"])


def places_of_stages(model: Decoder, sizes: dict[str, int]) -> list[list[int]]:
    """Return the places in the period of the layers of each different pipeline stage on a mesh with these sizes of its axes;
    stages of whole periods are equal, and so one."""
    places = list(range(len(model.periods.blocks)))
    if model.num_periods % sizes["pipeline"] == 0:
        return [places * (model.num_periods // sizes["pipeline"])]
    stages = Stages(tuple(places * model.num_periods), sizes["pipeline"])
    return [list(program) for program in stages.programs()]


def entries_of_stage(model: Decoder, sizes: dict[str, int]) -> list[int]:
    """Return for how many layers of each place of the period a pipeline stage has entries on a mesh with these sizes of its
    axes. In stages that are not whole periods, those of all places with layers of one kind are counted at the first."""
    if model.num_periods % sizes["pipeline"] == 0:
        return [model.num_periods // sizes["pipeline"]] * len(model.periods.blocks)
    kinds = kinds_of(list(model.periods.blocks))
    first = {place: kind.places[0] for kind in kinds for place in kind.places}
    kind_of_layer = [first[place] for place in sorted(first)] * model.num_periods
    stages = Stages(tuple(kind_of_layer), sizes["pipeline"])
    return [stages.entries(place) if first[place] == place else 0 for place in sorted(first)]


def activation_bytes(
    config: TrainConfig, model: Decoder, sizes: dict[str, int], known: dict[Any, Any], platform: str
) -> tuple[int, int]:
    """Return the bytes of activations on one device as (saved, working): those saved for the backward pass
    over all layers, and the largest other arrays that exist at a time (one layer's backward pass, or the
    logits of a chunk of the loss).

    Args:
        config: the config of the training run.
        model: the model, whose parameters are shapes without values.
        sizes: number of devices along each mesh axis, by its name.
        known: a cache of the results of traced layers, to which this function adds; plans of the same run on
            other meshes then need not trace the layers again.
        platform: "cpu", "cuda" or "tpu", whose implementations of the ops are counted.
    """
    rows, length = local_shape(config, sizes)
    shape = rows, length, platform
    key = *shape, sizes["sequence"] > 1  # whether memories are masked or packed depends on it
    if key not in known:
        kinds = dict(zip(config.model.period(), model.periods.blocks, strict=True))
        of_kind = {n: _layer_bytes(config, model, b, *shape) for n, b in kinds.items()}
        known[key] = [of_kind[letter] for letter in config.model.period()]
    # The peak of a layer's backward pass contains what the layer saves. In a loop that is a copy out of the stack of all layers.
    in_place = unrolled(config, sizes, platform)
    layers = [
        (
            max(peak - residuals, 0) if in_place else peak,
            residuals - _casts_not_saved(config, block, sizes),
        )
        for (peak, residuals), block in zip(known[key], model.periods.blocks, strict=True)
    ]
    x = rows * length * config.model.hidden_size * jnp.dtype(config.model.dtype).itemsize
    working = max(peak for peak, _ in layers) // sizes["tensor"] + 2 * x
    entries = entries_of_stage(model, sizes)
    saved = x * (config.model.num_layers // sizes["pipeline"])
    # Branches of different stages return the residuals of all entries.
    saved += sum(n * (r // sizes["tensor"]) for n, (_, r) in zip(entries, layers, strict=True))
    pieces = config.mesh.pieces()
    rounds = config.mesh.rounds
    ticks = rounds * pieces + sizes["pipeline"] - 1 if sizes["pipeline"] > 1 else 1
    # With one round of the pipeline, the activations of every turn (one microbatch in one stage) are saved; with
    # several rounds, each turn is recomputed, so that only the activations of one turn exist.
    saved = saved * ticks if rounds == 1 else saved // rounds
    if sizes["pipeline"] > 1:
        # The gathered inputs; the outputs of each turn, of which those of the last round are the results.
        saved += (2 * pieces + ticks) * x
    if sizes["sequence"] > 1:
        blocks = model.periods.blocks
        transition = max(_transition_bytes(config, b, rows, length, platform) for b in blocks)
        working += transition // sizes["tensor"]
        updates = sum(
            n * update_bytes(config, b, rows, length)[0]
            for n, b in zip(entries, blocks, strict=True)
        )
        saved += updates * sizes["sequence"] // sizes["tensor"] * pieces
    if in_place:
        saved += _cast_stacks(config, model)
    tokens = min(config.model.loss_chunk_size, rows * length)
    logits = 3 * tokens * config.model.vocab_size * 4  # logits, probabilities, their errors
    item = jnp.dtype(config.model.dtype).itemsize
    head = config.model.vocab_size * config.model.hidden_size * (4 + item)  # gradient and copy
    return saved, max(working, logits + head)


def unrolled(config: TrainConfig, sizes: dict[str, int], platform: str) -> bool:
    """Return whether one device computes a step, by layers that are compiled one after the other."""
    if any(n > 1 for n in sizes.values()):
        return False
    if config.model.unroll_layers is None:
        return platform == "cuda" and unrolls_on_one_gpu(config.model)
    return config.model.unroll_layers


def _cast_stacks(config: TrainConfig, model: Decoder) -> int:
    """Return the bytes of the 16-bit copies of layers' matrices that unrolled layers on one device have before them (`cast_stacks`), but
    for experts' and those without rematerialisation, which layers save."""
    item = jnp.dtype(config.model.dtype).itemsize
    if config.model.remat not in SAVES_PRODUCTS or item >= 4:
        return 0
    trained, frozen = split(params_of(model), config.trainable)
    # Frozen matrices in 16 bits are not copied.
    parts = [trained, frozen] if config.frozen_dtype == "float32" else [trained]
    stacks = jax.tree.leaves([part.get("periods", {}) for part in parts])
    return sum(item * x.size for x in stacks if is_large(x) and x.ndim == 3)


def _casts_not_saved(config: TrainConfig, block: Any, sizes: dict[str, int]) -> int:
    """Return how many bytes of the 16-bit copies of experts' matrices (8-bit in FP8), which one device alone saves where products are saved, each device of
    a mesh with these sizes of its axes does not save: all if devices gather the matrices, else those of other devices' experts."""
    experts, item = block.feedforward, jnp.dtype(config.model.dtype).itemsize
    if isinstance(experts, MoE) and experts.config.matmul == "fp8":
        item = 1
    if config.model.remat not in SAVES_PRODUCTS or item >= 4 or not isinstance(experts, MoE):
        return 0
    if experts.config.execution != "grouped":
        return 0
    kernels = experts.gate_proj, experts.up_proj, experts.down_proj
    copies = sum(item * math.prod(p.shape[1:]) for p in kernels if p is not None)
    return copies if sizes["fsdp"] > 1 else copies - copies // sizes["expert"]


def _layer_bytes(
    config: TrainConfig, model: Decoder, stacked: Any, rows: int, length: int, platform: str
) -> tuple[int, int]:
    """Estimate the activation memory of one layer that is not sharded over heads or channels: return the
    bytes of (the peak of its forward and backward pass, what it saves for the backward pass besides its input).

    Args:
        config: the config of the training run, whose `remat` determines what a layer saves.
        model: the model, whose parameters are shapes without values.
        stacked: the layer, with its parameters stacked over the periods of the pattern.
        rows: number of rows of a microbatch on one device.
        length: number of tokens of each of these rows on the device.
        platform: "cpu", "cuda" or "tpu", whose implementations of the ops are counted.
    """
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


def update_bytes(config: TrainConfig, block: Any, rows: int, length: int) -> tuple[int, int]:
    """Return the bytes, with all heads, of (the composed update of one device's tokens, the state) of a
    layer's mixer; (0, 0) for attention, whose memory is the tokens themselves.

    If the tokens of a row are sharded, devices gather each other's composed updates, which are saved for the
    backward pass, and in the backward pass the gradients of the states. Both sizes include the tails of
    convolutions and token shifts of several memories, which are gathered too; see `tail_bytes` for the others. The
    update of a delta or diagonal-plus-low-rank rule also has a transition [K, K] per head; the smaller transitions
    of other methods are not counted.

    Args:
        config: the config of the training run.
        block: the layer, which has the mixer.
        rows: number of rows of a microbatch on one device.
        length: number of tokens of each of these rows on the device.
    """
    mixer: Any = block.mixer
    kind = type(mixer.innermost()).op
    if kind in _STORE_TOKENS:
        return 0, 0
    start = _abstract_state(config, mixer, rows, length)
    memory = jax.tree.leaves(start.memory)
    state = sum(x.size * x.dtype.itemsize for x in memory)
    gathered = [x for x in jax.tree.leaves(start.tails) if x.ndim == 4]
    state += 4 * sum(x.size for x in gathered)  # in words of 32 bits
    if kind not in _WITH_TRANSITIONS:
        return state, state
    largest = max(memory, key=lambda x: x.size)
    keys, values = largest.shape[-2:]
    return state + largest.size // values * keys * largest.dtype.itemsize, state


def tail_bytes(config: TrainConfig, block: Any, rows: int, length: int) -> int:
    """Return the bytes of the tails of a mixer's convolutions and token shifts that a device sends to the next one, if the
    tokens of a row are sharded. The tails of several memories (MoM) are gathered, and belong to `update_bytes`, whose
    arguments these are. The shift of a feedforward (RWKV) is not counted: a token of each row."""
    tails = jax.tree.leaves(_abstract_state(config, block.mixer, rows, length).tails)
    return sum(x.size * x.dtype.itemsize for x in tails if x.ndim == 3)


def _transition_bytes(
    config: TrainConfig, block: Any, rows: int, length: int, platform: str
) -> int:
    """Return the additional bytes, at the peak of its forward and backward pass, with which a layer computes
    the composed transition [K, K] of one device's tokens, as is required if the tokens of a row are sharded.
    Only delta and diagonal-plus-low-rank rules have one; 0 for other layers.

    The op computes the transition as if the memory had K more value channels, so that the result is the
    difference between the delta rule's peaks with V + K and with V value channels.
    """
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


def gathers_keys_and_values(mixer: Any) -> bool:
    """Return whether a mixer gathers the keys and values of all tokens if a row is sharded over devices:
    attention does, and so do linearized layers with a window."""
    if type(mixer.innermost()).op in _STORE_TOKENS:
        return True
    return isinstance(mixer, Softmax) and bool(getattr(mixer.config, "window_weight", True))


def gathered_numbers(mixer: Any, itemsize: int) -> tuple[float, int]:
    """Return how many numbers a token has in the keys and values that devices gather, of all heads, and the bytes of each:
    `itemsize`. PaTH gathers float32 numbers, and for each chunk the product of its tokens' matrices.
    """
    config = mixer.config
    if isinstance(config, MLAConfig):
        return config.num_heads * (config.key_dim + config.rope_dim + config.value_dim), itemsize
    if isinstance(config, PaTHConfig):
        chunk = config.op.chunk_size or DEFAULT_CHUNK_SIZE
        return config.kv_heads() * config.head_dim * (2 + config.head_dim / chunk), 4
    return 2 * config.kv_heads() * mixer.head_dim, itemsize


def gathered_keys_and_values_bytes(
    config: TrainConfig, model: Decoder, sizes: dict[str, int]
) -> int:
    """Return the bytes that one device needs for the gathered keys and values of all tokens of its rows, for copies of them, and
    for their float32 gradients, in the layer in which these are largest.

    It is 0 if no layer gathers keys and values, or if the tokens of a row are not sharded over the mesh axis
    "sequence". `sizes` is the number of devices along each mesh axis, by its name.
    """
    if sizes["sequence"] == 1:
        return 0
    rows, _ = local_shape(config, sizes)
    dtype = jnp.dtype(config.model.dtype)
    layer_bytes = [0]
    for block in model.periods.blocks:
        mixer: Any = block.mixer
        if not gathers_keys_and_values(mixer):
            continue
        numbers, itemsize = gathered_numbers(mixer, dtype.itemsize)
        count = int(rows * config.data.sequence_length * numbers) // sizes["tensor"]
        # PaTH's queries go back over two copies of the row in a line, whose gradients are summed to those of the row.
        copies = 5 * 4 if isinstance(mixer.config, PaTHConfig) else itemsize + 4
        layer_bytes.append(count * copies)
    return max(layer_bytes)
