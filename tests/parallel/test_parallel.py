"""Tests of meshes, of the rules that map logical axes to mesh axes, and of ops under meshes. Tests that need
several devices run in another process.
"""

from __future__ import annotations

import math
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from lsm_jax.parallel import (
    AXES,
    MeshConfig,
    batch_shards,
    constrain,
    make_mesh,
    param_sharding,
    partition_spec,
)
from tests.ops.cases import FAMILIES

SCRIPT = """
import jax, jax.numpy as jnp, numpy as np
from lsm_jax import ops
from lsm_jax.parallel import MeshConfig, batch_sharding, make_mesh, param_sharding

keys = jax.random.split(jax.random.key(0), 3)
q, k, v = (jax.random.normal(key, (8, 24, 2, 8)) for key in keys)
decay, ids = -jnp.array([0.1, 0.2]), jnp.ones((8, 24), jnp.int32).at[:, 9:].set(2)

def loss(q, decay):
    o, state = ops.linear_memory(q, k, v, decay, segment_ids=ids)
    o2, _ = ops.attention(q, k, v)
    return jnp.sum(jnp.sin(o) + o2) + jnp.sum(state.memory)

gradient = jax.value_and_grad(loss, (0, 1))
expected = jax.jit(gradient)(q, decay)
mesh = make_mesh(MeshConfig(fsdp=4))
with jax.set_mesh(mesh):
    rows = jax.device_put(q, batch_sharding(mesh))
    compiled = jax.jit(gradient).lower(rows, decay).compile()
    got = compiled(rows, decay)
    assert "all-gather" not in compiled.as_text()
    odd = jax.jit(lambda q: ops.attention(q, q, q)[0])(q[:3])  # a batch that is not divisible is not sharded
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, expected)
try:
    param_sharding(mesh, ("embed", "mlp"), (6, 8), "up.kernel")
except ValueError as error:
    assert "up.kernel: axis 'embed' of size 6 does not divide over 4 devices" in str(error), error
else:
    raise AssertionError
"""


def run_with_devices(count, *arguments, as_users=False):
    """Run Python with the given arguments in a process of `count` CPU devices, and return its output.

    With `as_users`, programs are compiled with XLA's default options in place of the tests', for tests that
    read sizes from the compiled program.
    """
    flags = {
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={count}",
        "JAX_PLATFORMS": "cpu",
    }
    if as_users:
        flags["XLA_FLAGS"] = flags["XLA_FLAGS"].split()[-1]
        flags["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "0"
    command = [sys.executable, *arguments]
    root = pathlib.Path(__file__).parents[2]
    run = subprocess.run(
        command, env=os.environ | flags, cwd=root, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_ops_are_sharded_over_eight_devices():
    run_with_devices(8, "-c", SCRIPT)


@pytest.mark.parametrize(
    "op",
    [
        "token_shift",
        # Its gradient once crashed XLA's partitioner.
        pytest.param("linear_memory:associative:documents", marks=pytest.mark.slow),
        *(
            pytest.param(op + ":chunk:segments" * ("chunk" in forms), marks=pytest.mark.slow)
            for op, forms in (
                {name: family.forms for name, family in FAMILIES.items()}
                | {"cumulative_phase": (), "time_invariant_memory": ()}
            ).items()
            if op != "token_shift"
        ),
    ],
)
def test_ops_under_any_mesh(op):
    """Every op has the same values and gradients under several kinds of mesh as without one; see
    `tests.parallel.settings`.
    """
    assert run_with_devices(4, "-m", "tests.parallel.settings", op).endswith("ok\n")


@pytest.mark.parametrize(
    ("config", "shape"),
    [(MeshConfig(), (8, 1)), (MeshConfig(fsdp=4), (2, 4)), (MeshConfig(data=1, fsdp=8), (1, 8))],
)
def test_the_data_axis_is_inferred(config, shape):
    sizes = config.shape(8)
    assert (sizes["data"], sizes["fsdp"]) == shape
    assert tuple(sizes) == AXES and math.prod(sizes.values()) == 8


def test_every_axis_is_named():
    sizes = MeshConfig(tensor=2, expert=2, pipeline=2, microbatches=4).shape(16)
    assert sizes == dict(pipeline=2, data=2, fsdp=1, expert=2, sequence=1, tensor=2)
    assert batch_shards(sizes) == 8
    with pytest.raises(
        ValueError, match=r"mesh.microbatches=3: accepted are multiples of mesh.pipeline=2"
    ):
        MeshConfig(pipeline=2, microbatches=3).shape(2)
    with pytest.raises(ValueError, match="mesh.data=-1 x mesh.tensor=3 does not fit 8 devices"):
        MeshConfig(tensor=3).shape(8)


@pytest.mark.parametrize(
    "config",
    [
        MeshConfig(fsdp=3),
        MeshConfig(data=2),
        MeshConfig(data=0),
        MeshConfig(fsdp=0),
        MeshConfig(tensor=-1),
    ],
)
def test_mesh_that_does_not_fit_is_refused(config):
    with pytest.raises(ValueError, match="mesh"):
        config.shape(8)


def test_rules():
    assert partition_spec(("batch", None)) == jax.P(("pipeline", "data", "fsdp", "expert"), None)
    with pytest.raises(ValueError, match="'width' has no rule"):
        partition_spec(("width",))
    x = jnp.ones((2, 2))
    assert constrain(x, ("batch", None)) is x
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    assert param_sharding(mesh, ("vocab", "embed"), (5, 3)).is_fully_replicated
