"""Estimate the bytes of memory that each device needs to read and generate text with a model, without compiling or computing
anything."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh

from lsm_jax.models import Decoder, ModelConfig, abstract
from lsm_jax.parallel import AXES, BATCH_AXES, MeshConfig
from lsm_jax.training.liveness import peak_bytes
from lsm_jax.training.partition import in_frozen_dtype
from lsm_jax.training.step import param_shardings, params_of

PIECE = 2048
"""The number of a prompt's tokens that are read in one call, as `eval.py` does."""


@dataclasses.dataclass(frozen=True)
class InferencePlan:
    """Estimated bytes of memory per device for the reading and generation of text on one mesh.

    Attributes:
        sizes: number of devices along each mesh axis, by its name.
        parameters: bytes of the parameters: matrices in bfloat16, others in float32.
        state: bytes of the states of all layers: memories, tails of convolutions, and the keys and values (or latents) of all
            tokens of a row.
        working: bytes of the largest other arrays that exist at a time: those of a layer that reads a piece of the prompt, and
            the parameters that a device gathers.
    """

    sizes: dict[str, int]
    parameters: int
    state: int
    working: int

    @property
    def total(self) -> int:
        """Estimated peak bytes of memory on one device."""
        return self.parameters + self.state + self.working


def inference_plan(
    config: ModelConfig,
    mesh: MeshConfig,
    num_devices: int,
    *,
    rows: int = 1,
    length: int,
    known: dict[Any, Any] | None = None,
) -> InferencePlan:
    """Return the memory plan of a model that reads and generates rows of text on NVIDIA cards with this library's kernels.

    Parameters are counted by their shardings, states by their shapes, and activations in the trace of one layer of each kind
    with a piece of `PIECE` tokens.

    Args:
        config: the model.
        mesh: the mesh, of the axes "data", "fsdp" and "expert".
        num_devices: number of devices of the mesh.
        rows: number of rows that are generated at a time; those of a device are its share, at least one.
        length: tokens of a row, the prompt's and the generated ones.
        known: a dict that caches results of traced layers, for plans of the same model on other meshes; None caches nothing.

    Raises:
        ValueError: the mesh is not valid, or has other axes.
    """
    known = {} if known is None else known
    sizes = mesh.shape(num_devices)
    if others := [axis for axis in ("sequence", "tensor", "pipeline") if sizes[axis] > 1]:
        raise ValueError(f"mesh.{others[0]}={sizes[others[0]]}; accepted is 1")
    if "model" not in known:
        known["model"] = abstract(config.for_inference())
    model, abstract_mesh = known["model"], AbstractMesh(tuple(sizes.values()), AXES)
    params = in_frozen_dtype(params_of(model), "bfloat16_matrices")
    shardings = param_shardings(abstract_mesh, model)
    local_rows = -(-rows // math.prod(sizes[axis] for axis in BATCH_AXES))
    key = local_rows, length
    if key not in known:
        known[key] = _state_and_working(config, model, local_rows, length)
    state, working = known[key]
    leaves = zip(jax.tree.leaves(params), jax.tree.leaves(shardings), strict=True)
    parameters = sum(_local_bytes(x, sharding) for x, sharding in leaves)
    gathered = [0]
    if sizes["fsdp"] > 1:
        blocks, placed = params["periods"]["blocks"], shardings["periods"]["blocks"]
        # While a layer of a period is computed, the next one is gathered. Every device then has both whole, but of the experts
        # only its share.
        each = [_complete_bytes(blocks[i], placed[i], sizes["fsdp"]) for i in range(len(blocks))]
        gathered = [sum(each[i : i + 2]) for i in range(max(1, len(each) - 1))]
    return InferencePlan(sizes, parameters, state, working + max(gathered) // model.num_periods)


def _complete_bytes(params: Any, shardings: Any, fsdp: int) -> int:
    """Return the bytes of parameters that a device gathers over the mesh axis "fsdp", which has so many devices."""
    return sum(
        _local_bytes(x, sharding) * (fsdp if "fsdp" in str(sharding.spec) else 1)
        for x, sharding in zip(jax.tree.leaves(params), jax.tree.leaves(shardings), strict=True)
    )


def _local_bytes(x: jax.ShapeDtypeStruct, sharding: Any) -> int:
    return math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize


def _state_and_working(
    config: ModelConfig, model: Decoder, rows: int, length: int
) -> tuple[int, int]:
    """Return the bytes of the state of all layers, and of the largest other arrays, for so many rows."""
    graph, weights = nnx.split(model)
    state = jax.eval_shape(lambda w: nnx.merge(graph, w).init_state(rows, length), weights)
    piece = min(PIECE, length)
    x = jax.ShapeDtypeStruct((rows, piece, config.hidden_size), jnp.dtype(config.dtype))
    shared = jax.eval_shape(lambda w, x: nnx.merge(graph, w).init_shared(x), weights, x)
    peaks: dict[str, int] = {}
    letters = zip(config.period(), model.periods.blocks, state.layers, strict=True)
    for letter, block, of_block in letters:
        if letter not in peaks:
            peaks[letter] = _layer_peak(block, x, shared, of_block)
    logits = (
        2 * rows * config.vocab_size * 4
    )  # of the last tokens, and their copy while one is drawn
    in_stream = 2 * x.size * x.dtype.itemsize
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    return total, max(*peaks.values(), logits) + in_stream


def _layer_peak(stacked: Any, x: Any, shared: Any, state: Any) -> int:
    """Return the peak bytes of the arrays of one layer that reads tokens x, given its parameters and state, which are stacked over
    the periods of the pattern."""
    graph, params = nnx.split(stacked, nnx.Param)
    params, state = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape[1:], p.dtype), (params, state)
    )
    positions = jax.ShapeDtypeStruct(x.shape[:2], jnp.int32)

    def layer(params, x, shared, state, positions):
        block = nnx.merge(graph, params)
        return block(x, shared, state, layer=0, positions=positions)[::2]

    traced = jax.make_jaxpr(layer)(params, x, shared, state, positions)
    return peak_bytes(traced.jaxpr, "cuda")
