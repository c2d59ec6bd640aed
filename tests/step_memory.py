"""Compute the memory of a training step on GPUs that this machine does not have, with XLA's compiler only (`make test-aot`)."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from lsm_jax.models import abstract
from lsm_jax.parallel import AXES, batch_sharding, make_mesh
from lsm_jax.training import TrainConfig, make_program
from lsm_jax.training.partition import split, targets
from lsm_jax.training.step import params_of
from tests.kernels.test_aot import H200


def compiled_memory(config: TrainConfig, rows: int, length: int, *, packed: bool) -> Any:
    """Compile a training step for the H200s of the config's mesh and return XLA's memory analysis.

    Args:
        config: the training config of the run, whose mesh says how many cards there are.
        rows: number of rows (token sequences) of the batch.
        length: number of tokens in each row.
        packed: whether the batch has segment ids and positions.
    """
    cards = math.prod(max(1, getattr(config.mesh, axis)) for axis in AXES)
    topology = topologies.get_topology_desc("", "cuda", target_config=H200, topology=f"1x1x{cards}")
    mesh = make_mesh(config.mesh, list(topology.devices))
    program = make_program(config, mesh)
    kinds = dict(tokens=jnp.int32, labels=jnp.int32, loss_mask=jnp.float32)
    if packed:
        kinds |= dict(segment_ids=jnp.int32, positions=jnp.int32)
    batch = {
        name: jax.ShapeDtypeStruct((rows, length), kind, sharding=batch_sharding(mesh))
        for name, kind in kinds.items()
    }
    with jax.set_mesh(mesh):
        state = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            jax.eval_shape(program.init),
            program.shardings,
        )
        frozen = None
        if config.trainable:
            all_params = params_of(abstract(config.model))
            placed = targets(
                all_params, program.param_shardings, config.trainable, config.frozen_dtype
            )
            frozen = split(placed, config.trainable)[1]
        lowered = program.train_step.trace(state, batch, frozen).lower(lowering_platforms=("cuda",))
        return lowered.compile({"xla_gpu_autotune_level": 0}).memory_analysis()
