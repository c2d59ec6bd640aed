"""What a Liger step at 8 B takes of a card that is not here: `make test-aot`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

from configs import liger
from lsm_jax.models import abstract
from lsm_jax.parallel import MeshConfig, batch_sharding, make_mesh
from lsm_jax.training.partition import split, targets
from lsm_jax.training.step import make_program, params_of
from tests.kernels.test_aot import H200

pytestmark = pytest.mark.aot


def test_eight_billion_parameters_fit_one_card_of_80_gb():
    config = liger.get_config("llama3-8b")
    device = topologies.get_topology_desc("", "cuda", target_config=H200, topology="1x1x1").devices[0]  # fmt: skip
    mesh = make_mesh(MeshConfig(), [device])
    program = make_program(config, mesh)
    shape = (config.batch_size, config.data.sequence_length)
    rows = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=batch_sharding(mesh))
        for name, dtype in (
            ("tokens", jnp.int32), ("labels", jnp.int32), ("segment_ids", jnp.int32),
            ("positions", jnp.int32), ("loss_mask", jnp.float32),
        )
    }  # fmt: skip
    with jax.set_mesh(mesh):
        state = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            jax.eval_shape(program.init),
            program.shardings,
        )
        every = targets(
            params_of(abstract(config.model)), program.param_shardings, config.trainable
        )
        frozen = split(every, config.trainable)[1]
        lowered = program.train_step.trace(state, rows, frozen).lower(lowering_platforms=("cuda",))
        memory = lowered.compile({"xla_gpu_autotune_level": 0}).memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    total = (held + memory.temp_size_in_bytes) / 1e9
    print(f"{total:.1f} GB, of which {memory.temp_size_in_bytes / 1e9:.1f} temporary")
    assert 16 < total < 40  # 8.0 B parameters in bfloat16 alone are 16
