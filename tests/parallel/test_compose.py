"""Tests of training with several kinds of parallelism in one mesh (such as experts and pipeline stages),
compared with one device, and of checkpoints that are restored on another mesh.
"""

from __future__ import annotations

import pathlib
import sys

import grain
import jax
import numpy as np
import pytest

from lsm_jax.parallel import MeshConfig, hosts, make_mesh, token_sharding
from lsm_jax.training.checkpoints import Checkpoints, abstract_like
from lsm_jax.training.step import make_program
from tests.parallel.meshes import batch, run_of
from tests.parallel.test_parallel import run_with_devices
from tests.parallel.test_tensor import abstract_mesh, meshes

HYBRID = "linear_attention/softmax+moe"


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [  # of one model, so that the step on one device is compiled once
        ("data=2,sequence=2,tensor=2", "data=2,expert=4"),
        ("fsdp=2,pipeline=2,microbatches=4", "expert=2,tensor=2,pipeline=2,microbatches=4"),
    ],
    ids=["rows", "stages"],
)
def test_axes_compose(cases):
    assert meshes(*(f"{HYBRID}:{case}" for case in cases)) == len(cases)


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(("gla:fsdp=2,sequence=2",), id="tokens"),
        pytest.param(
            (
                f"{HYBRID}:tensor=2,expert=2",
                f"{HYBRID}:data=2,sequence=4",
                f"{HYBRID}:fsdp=2,pipeline=2,microbatches=2",
            ),
            marks=pytest.mark.slow,
            id="all",
        ),
        pytest.param(
            ("bfloat16:mamba2+none:data=2,sequence=2,tensor=2",),
            marks=pytest.mark.slow,
            id="bfloat16",
        ),
    ],
)
def test_gradients_of_norms_and_stream_together(cases):
    """Layers whose gradient is computed together with that of the residual stream, as on Hopper; here by XLA."""
    assert meshes("norms", *cases) == len(cases)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        "linear_attention+moe:data=2,expert=4",
        pytest.param(f"{HYBRID}:sequence=2,expert=2,pipeline=2", marks=pytest.mark.slow),
        pytest.param("mamba2+none:data=2,sequence=2,tensor=2", marks=pytest.mark.slow),
        pytest.param("gated_deltanet/gla:data=2,sequence=4", marks=pytest.mark.slow),
    ],
)
def test_bfloat16(case):
    """A training step in bfloat16 compiles on meshes with several kinds of parallelism; XLA's CPU compiler
    would abort at a bfloat16 sum over some of the mesh's axes.
    """
    assert meshes(f"bfloat16:{case}") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["gla+none", pytest.param("mamba2+moe/softmax", marks=pytest.mark.slow)]
)
def test_rows_that_are_not_divisible(case):
    """A training step on rows of 16 tokens, divided over three devices (which requires padding), equals one
    on a single device.
    """
    assert meshes(f"{case}:sequence=3") == 1


def test_rows_are_padded():
    rows = dict(tokens=np.ones((2, 16), np.int32), loss_mask=np.ones((2, 16), np.float32))
    cut = token_sharding(abstract_mesh(data=2, sequence=3))
    padded = hosts._padded(rows, cut)
    assert {x.shape for x in padded.values()} == {(2, 18)}
    for name in ("segment_ids", "loss_mask"):
        np.testing.assert_array_equal(padded[name][0], [1] * 16 + [0] * 2)
    assert hosts._padded(rows, token_sharding(abstract_mesh(sequence=4))) is rows


@pytest.mark.slow
def test_rows_experts_and_stages_are_sharded():
    assert meshes("gated_deltanet+moe:sequence=2,expert=2,pipeline=2") == 1


@pytest.mark.slow
def test_checkpoints_move_between_meshes(tmp_path):
    out = run_with_devices(4, "-m", "tests.parallel.test_compose", str(tmp_path / "checkpoints"))
    assert out.count("restored") == 3


def main(folder: str) -> None:
    """Save a checkpoint after a training step on one mesh; check that other meshes restore the same state
    and take the same second step.
    """

    def start(**axes):
        config = run_of("linear_attention+moe", mesh=MeshConfig(**dict(data=1) | axes))
        mesh = make_mesh(config.mesh, jax.devices()[: int(np.prod(list(axes.values())))])
        jax.set_mesh(mesh)
        return make_program(config, mesh), jax.device_put(batch(), token_sharding(mesh))

    program, rows = start(fsdp=2, tensor=2)
    state, _ = program.train_step(program.init(), rows)
    checkpoints = Checkpoints(pathlib.Path(folder))
    data = iter(grain.MapDataset.range(4).to_iter_dataset())
    checkpoints.save(1, state, data)
    checkpoints.wait()
    saved = jax.tree.map(np.asarray, state)
    _, metrics = program.train_step(state, rows)
    expected = float(metrics["train/loss"])
    for axes in (dict(data=4), dict(expert=2), dict(pipeline=2, fsdp=2)):
        program, rows = start(**axes)
        target = abstract_like(jax.eval_shape(program.init), program.shardings)
        found = checkpoints.restore(target, data)
        assert found is not None
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, found), saved)
        _, metrics = program.train_step(found, rows)
        np.testing.assert_allclose(float(metrics["train/loss"]), expected, rtol=1e-5)
        print("restored", axes, flush=True)
    checkpoints.close()


if __name__ == "__main__":
    main(sys.argv[1])
