"""Estimate the bytes of memory that each device of a training run on a mesh needs, and the bytes that it sends
per step, without compiling or computing anything."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from lsm_jax.mixers import MoMConfig
from lsm_jax.models import ModelConfig, abstract
from lsm_jax.parallel import AXES
from lsm_jax.training.activation_plan import (
    activation_bytes,
    gathered_keys_and_values_bytes,
    unrolled,
)
from lsm_jax.training.communication_plan import (
    LayerArray,
    communication_bytes,
    dealt_bytes,
)
from lsm_jax.training.config import TrainConfig
from lsm_jax.training.optimizer import moments_of
from lsm_jax.training.partition import in_frozen_dtype, split
from lsm_jax.training.step import param_shardings, params_of


@dataclasses.dataclass(frozen=True)
class Plan:
    """Estimated bytes of memory and of communication per device for a training run on one mesh.

    Attributes:
        sizes: number of devices along each mesh axis, by its name.
        parameters: bytes of the parameters; trained ones are float32, frozen ones as `TrainConfig.frozen_dtype` says.
        optimizer: bytes of the moments of the trained parameters, float32: two of AdamW, one of Lion, with Muon one of
            matrices and two of other parameters, and with Adafactor one, and a row and a column of each matrix; and of their
            moving average, if the run keeps one.
        gradients: bytes of the gradients of the device's shard of the parameters, float32.
        saved: bytes of the activations saved for the backward pass, of all layers and microbatches of the device.
        working: bytes of the largest other arrays that exist at a time: a recomputed layer and its gradients, or a
            chunk of the loss.
        update: bytes of the arrays of the optimizer's update, which exist after the activations are freed: the
            new parameters before it is known whether they are finite, and on some platforms also the optimizer's
            update.
        freed: bytes of activations that are freed before gradients of as many bytes exist, those of layers that are compiled one after
            the other on one device; a loop over layers has the gradients of all of them from its beginning.
        communication: bytes that a device sends per step, by purpose.
    """

    sizes: dict[str, int]
    parameters: int
    optimizer: int
    gradients: int
    saved: int
    working: int
    update: int
    freed: int
    communication: dict[str, int]

    @property
    def total(self) -> int:
        """Estimated peak bytes of memory on one device: parameters, optimizer and gradients, and the larger
        of the activations, less those that are `freed`, and the arrays of the update, which do not exist at the same time."""
        state = self.parameters + self.optimizer + self.gradients
        return state + max(self.saved + self.working - self.freed, self.update)

    def report(self, hbm: float) -> str:
        """Return the memory plan as lines of text: the GiB of each kind of array on one device, whether their
        total fits into `hbm` GiB, and the GiB that the device sends per step."""
        mesh = " x ".join(f"{axis}={size}" for axis, size in self.sizes.items() if size > 1)
        names = "parameters optimizer gradients saved working update freed total".split()
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
    """Return the memory plan of a training run on a mesh: the estimated bytes of memory that each device needs,
    and those that it sends per step.

    Parameters, moments and gradients are counted by their shardings. Activations are counted in the trace of
    one layer of each kind, without arrays that the compiler fuses away (`peak_bytes`); they are assumed to
    be divided evenly over devices.

    Args:
        config: the config of the run.
        num_devices: number of devices of the mesh that `config.mesh` describes.
        known: a dict that caches the abstract model, its optimizer's moments and traced layers, for plans of the same run on
            other meshes; None caches nothing.
        kernels: whether to plan for NVIDIA Hopper with its fused kernels; otherwise for XLA alone, on CPUs
            and other GPUs.

    Raises:
        ValueError: the config or the mesh is not valid.
    """
    config.validate(num_devices, on_paper=True)
    platform = "cuda" if kernels else "cpu"
    sizes = config.mesh.shape(num_devices)
    mesh = AbstractMesh(tuple(sizes.values()), AXES)
    known = {} if known is None else known
    key = "model", sizes["sequence"] > 1
    if key not in known:
        known[key] = abstract(_executed_model(config.model, sizes))
    model = known[key]
    params, shardings = params_of(model), param_shardings(mesh, model)
    all_params = {_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(params)}
    leaf_shardings = jax.tree.leaves(shardings)
    local_counts = [
        math.prod(s.shard_shape(x.shape))
        for x, s in zip(all_params.values(), leaf_shardings, strict=True)
    ]
    local_params = dict(zip(all_params, local_counts, strict=True))
    trainable, frozen = split(params, config.trainable)
    trained_leaves = jax.tree_util.tree_leaves_with_path(trainable)
    frozen_leaves = jax.tree_util.tree_leaves_with_path(
        in_frozen_dtype(frozen, config.frozen_dtype)
    )
    trained = 4 * sum(local_params[_name(path)] for path, _ in trained_leaves)
    if "moments" not in known:
        known["moments"] = moments_of(config)
    moments = {name.replace(".", "/"): count for name, count in known["moments"].items()}
    averages = 1 if config.ema_decay else 0
    optimizer = sum(
        round(4 * (moments[_name(path)] + averages) * local_params[_name(path)])
        for path, _ in trained_leaves
    )
    # On a mesh that knows its device, layers choose as they will on it.
    device = AbstractDevice("NVIDIA H200", num_cores=None, platform="gpu")
    hopper = use_abstract_mesh(AbstractMesh((), (), abstract_device=device))
    with hopper if kernels else contextlib.nullcontext():
        saved, working = activation_bytes(config, model, sizes, known, platform)
    itemsizes = {_name(path): x.dtype.itemsize for path, x in frozen_leaves}
    arrays = [
        LayerArray(
            place=int(name.split("/")[2]),
            count=local_params[name],
            itemsize=itemsizes.get(name, 4),
            trained=name not in itemsizes,
            divided="pipeline" in str(sharding.spec),
        )
        for name, sharding in zip(all_params, leaf_shardings, strict=True)
        if name.startswith("periods/blocks/")
    ]
    dealt = dealt_bytes(config, model, arrays, sizes)
    return Plan(
        sizes=sizes,
        parameters=trained
        + sum(x.dtype.itemsize * local_params[_name(p)] for p, x in frozen_leaves),
        optimizer=optimizer,
        # With accumulation: the sum of the gradients, and those of one subset of the batch.
        gradients=trained * (2 if config.accumulation_steps > 1 else 1),
        saved=saved,
        working=working
        + dealt.held
        + _gathered_parameter_bytes(config, all_params, sizes, kernels)
        + gathered_keys_and_values_bytes(config, model, sizes),
        # XLA computes new parameters inside the optimizer's fusion on NVIDIA GPUs, but after it on CPUs.
        update=trained * (1 if kernels else 2),
        freed=min(saved, sum(x.trained * x.count * x.itemsize for x in arrays))
        if unrolled(config, sizes, platform)
        else 0,
        communication=communication_bytes(
            config, model, all_params, local_params, trained, dealt, sizes
        ),
    )


def _executed_model(model: ModelConfig, sizes: dict[str, int]) -> ModelConfig:
    """Return the config of the model as a mesh executes it, with `sizes` devices along each axis: if the
    tokens of a row are sharded (axis "sequence"), a Mixture-of-Memories masks the tokens of each memory
    instead of packing them."""
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


def _gathered_parameter_bytes(
    config: TrainConfig, all_params: dict[str, Any], sizes: dict[str, int], kernels: bool
) -> int:
    """Return the bytes of the parameters that a device gathers from the others along the mesh axis "fsdp" at a time, and of their
    gradients before they are scattered; 0 without that axis.

    With kernels they are those of two layers of a period: one that is computed, and the next one, whose gather runs meanwhile; a
    period of one layer has no next one in the body of the scan. Without kernels they are those of all layers of a period, of
    which XLA for CPUs needs about so much memory.
    """
    if sizes["fsdp"] == 1:
        return 0
    period = len(config.model.period())
    counts = [0] * period
    for name, x in all_params.items():
        if name.startswith("periods/blocks/"):
            counts[int(name.split("/")[2])] += x.size
    at_a_time = min(2, period) if kernels else period
    most = max(sum(counts[i : i + at_a_time]) for i in range(period - at_a_time + 1))
    periods = config.model.num_layers // period
    parts = sizes["tensor"] * sizes["expert"]
    item = jnp.dtype(config.model.dtype).itemsize
    return most // periods // parts * (4 + item)
