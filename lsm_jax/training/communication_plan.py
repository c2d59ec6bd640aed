"""Estimate the bytes that each device of a training run sends to other devices per step.

A gather or a scatter among n devices is counted as a ring: a device sends (n - 1) / n of the bytes of the
complete array. A sum over devices is counted as a scatter and a gather.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from lsm_jax.models import Decoder
from lsm_jax.training.activation_plan import (
    entries_of_stage,
    gathered_numbers,
    gathers_keys_and_values,
    local_shape,
    places_of_stages,
    tail_bytes,
    update_bytes,
)
from lsm_jax.training.config import TrainConfig


def communication_bytes(
    config: TrainConfig,
    model: Decoder,
    all_params: dict[str, Any],
    local_params: dict[str, int],
    trained: int,
    dealt: Dealt,
    sizes: dict[str, int],
) -> dict[str, int]:
    """Return the bytes that one device sends to others per training step, as a dict by purpose (such as the
    sum of gradients, or the exchange with experts).

    Args:
        config: the config of the run.
        model: the model, whose parameters are shapes without values.
        all_params: the shape of each parameter of the whole model, by its path.
        local_params: the number of entries of each parameter that one device stores, by its path.
        trained: bytes of the trained parameters on one device, in float32.
        dealt: what a pipeline deals out, from `dealt_bytes`.
        sizes: number of devices along each mesh axis, by its name.
    """
    local_bytes = trained + 2 * (sum(local_params.values()) - trained // 4)
    pieces = config.mesh.pieces() * config.accumulation_steps
    x = _activation_bytes(config, sizes)
    layers = config.model.num_layers // sizes["pipeline"]
    sent: dict[str, float] = {}
    copies = sizes["data"] * sizes["sequence"]
    if copies > 1:
        sent["gradients summed"] = 2 * _ring(copies) * trained
    if sizes["expert"] > 1:
        sent |= _of_experts(config, model, all_params, local_params, trained, sizes)
    if sizes["fsdp"] > 1:
        gathered = local_bytes * sizes["fsdp"] * _ring(sizes["fsdp"])
        sent["parameters gathered"] = _passes(config) * gathered * config.accumulation_steps
        sent["gradients scattered"] = (
            trained * sizes["fsdp"] * _ring(sizes["fsdp"]) * config.accumulation_steps
        )
    if sizes["tensor"] > 1:  # a sum for each mixer and feedforward, forward and backward
        sent["tensor sums"] = 2 * 2 * 2 * _ring(sizes["tensor"]) * x * layers * pieces
    if sizes["pipeline"] > 1:
        turns = config.mesh.rounds * pieces
        sent["stage to stage"] = 2 * x * turns + 2 * _ring(sizes["pipeline"]) * 2 * x * pieces
        # Forward, and the gradients back; at most one of the groups that a device stores is used by its own stage.
        moved = (dealt.sent + dealt.returned) * _ring(sizes["pipeline"])
        if moved:
            sent["layers dealt out, and back"] = moved * config.accumulation_steps
    if sizes["sequence"] > 1:
        sent["states, or keys and values"] = _of_sequence(config, model, sizes)
    return {name: int(np.ceil(value)) for name, value in sent.items()}


class LayerArray(NamedTuple):
    """A parameter of layers, stacked over the periods, as one device of a pipeline stores it.

    Attributes:
        place: the place of its layers in the period.
        count: the numbers that the device stores.
        itemsize: bytes of a number.
        trained: whether it is trained, and so has a gradient in float32.
        divided: whether devices of the pipeline store different parts of it; otherwise each stores all of it.
    """

    place: int
    count: int
    itemsize: int
    trained: bool
    divided: bool


class Dealt(NamedTuple):
    """Bytes of layers' parameters that a device of a pipeline receives in each step, because it does not store the layers of its
    stage.

    Attributes:
        held: the received parameters, and the gradients of the trained ones.
        sent: the parameters of which devices store different parts.
        returned: the gradients of these, if they are trained.
    """

    held: int = 0
    sent: int = 0
    returned: int = 0


def dealt_bytes(
    config: TrainConfig, model: Decoder, arrays: Sequence[LayerArray], sizes: dict[str, int]
) -> Dealt:
    """Return the bytes of layers' parameters that each step deals out to a device of the pipeline, none where the device stores
    the layers of its stage.

    With several rounds they are as many as the device stores. In stages that are not whole periods, the device stores a part of
    the width of all layers, or all of arrays without a width that can be divided, and receives those of `entries_of_stage`
    complete.

    Args:
        config: the config of the run.
        model: the model, whose parameters are shapes without values.
        arrays: the parameters of the layers.
        sizes: number of devices along each mesh axis, by its name.
    """
    whole = model.num_periods % sizes["pipeline"] == 0
    if whole and config.mesh.rounds == 1:
        return Dealt()
    entries = entries_of_stage(model, sizes)
    held = sent = returned = 0
    for array in arrays:
        count = array.count
        if not whole:
            count *= sizes["pipeline"] if array.divided else 1
            count = count * entries[array.place] // model.num_periods
        gradients = 4 * count if array.trained else 0
        held += count * array.itemsize + gradients
        if array.divided:
            sent += count * array.itemsize
            returned += gradients
    return Dealt(held, sent, returned)


def _ring(size: int) -> float:
    return (size - 1) / size


def _passes(config: TrainConfig) -> int:
    """Return how often a training step computes all layers and communicates for them: 2 (forward and
    backward), or 3 if the backward pass computes them again (remat="full")."""
    return 3 if config.model.remat == "full" else 2


def _activation_bytes(config: TrainConfig, sizes: dict[str, int]) -> int:
    """Return the bytes of one layer's input [rows, tokens, width] for one microbatch on one device."""
    rows, length = local_shape(config, sizes)
    return rows * length * config.model.hidden_size * jnp.dtype(config.model.dtype).itemsize


def _of_experts(
    config: TrainConfig,
    model: Decoder,
    all_params: dict[str, Any],
    local_params: dict[str, int],
    trained: int,
    sizes: dict[str, int],
) -> dict[str, float]:
    """Return the bytes that one device sends over the mesh axis "expert" per training step, by purpose: the
    gradients of all parameters except the experts', and the activations of the tokens that are sent to
    experts and back."""
    experts = 4 * sum(
        local_params[n]
        for n in local_params
        if all_params[n].ndim == 4 and n.rpartition("/")[2].endswith("_proj")
    )
    x = _activation_bytes(config, sizes)
    buffers = []
    for letter in config.model.period():
        feedforward = config.model.layers[letter].feedforward
        routed = hasattr(feedforward, "num_experts")
        choices = (
            min(feedforward.expert_buffer, sizes["expert"]) * feedforward.top_k if routed else 0
        )
        buffers.append(choices * x)
    most = max(sum(buffers[p] for p in stage) for stage in places_of_stages(model, sizes))
    pieces = config.mesh.pieces() * config.accumulation_steps
    ring = _ring(sizes["expert"])
    return {
        "gradients summed over expert": 2 * ring * max(trained - experts, 0),
        "experts, there and back": 2 * _passes(config) * ring * most * pieces,
    }


def _of_sequence(config: TrainConfig, model: Decoder, sizes: dict[str, int]) -> float:
    """Return the bytes that one device sends per training step because the tokens of a row are sharded over
    devices: the memories' composed updates and the gradients of their states, the keys and values of attention, and
    the tails of convolutions and token shifts. `sizes` is the number of devices along each mesh axis, by its name."""
    rows, length = local_shape(config, sizes)
    item = jnp.dtype(config.model.dtype).itemsize
    others = sizes["sequence"] - 1
    # Tails go to the next device, also where the backward pass computes a layer again, and their gradients come back.
    times = 2 if config.model.remat == "none" else 3
    sent = []
    for block in model.periods.blocks:
        mixer: Any = block.mixer
        count = sum(update_bytes(config, block, rows, length))
        if gathers_keys_and_values(mixer):  # in each pass
            count += rows * length * math.prod(gathered_numbers(mixer, item)) * _passes(config)
        sent.append(others * count + times * tail_bytes(config, block, rows, length))
    most = max(sum(sent[p] for p in stage) for stage in places_of_stages(model, sizes))
    pieces = config.mesh.pieces() * config.accumulation_steps
    return most / sizes["tensor"] * pieces
