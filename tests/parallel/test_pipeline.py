"""Pipeline parallelism: loss and gradients equal those of one device. The fast case also shards heads."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsm_jax.parallel import MeshConfig, make_mesh, pipelined
from lsm_jax.training.memory_plan import plan
from tests.parallel.meshes import run_of
from tests.parallel.test_parallel import run_with_devices
from tests.parallel.test_tensor import meshes

SCHEDULES = ((2, 4, 1), (2, 2, 4), (4, 8, 2), (4, 4, 3), (3, 6, 4))  # stages, microbatches, rounds


def test_four_microbatches_twice_through_two_stages():
    assert meshes("linear_attention:pipeline=2,microbatches=4,rounds=2,tensor=2") == 1


@pytest.mark.slow
def test_schedules():
    """With any number of pipeline stages, microbatches and rounds, the results are those of the layers in
    order.
    """
    assert run_with_devices(8, "-m", "tests.parallel.test_pipeline").count("ok") == len(SCHEDULES)


def test_rounds_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="mesh.rounds=2 with mesh.pipeline=1: accepted are"):
        MeshConfig(rounds=2).shape(8)
    with pytest.raises(ValueError, match="mesh.rounds=0"):
        MeshConfig(data=1, pipeline=2, rounds=0).shape(2)
    config = run_of("linear_attention", mesh=MeshConfig(data=1, pipeline=2, rounds=4))
    with pytest.raises(ValueError, match=r"mesh.pipeline=2 x mesh.rounds=4: the model's 4 periods"):
        config.validate(2)


def test_rounds_are_planned():
    """The memory plan of a pipeline shows that more rounds save more activations between stages, and
    require that layers are sent to the stages' devices.
    """
    one, two = (
        plan(run_of("linear_attention", mesh=MeshConfig(data=1, pipeline=2, rounds=r)), 2)
        for r in (1, 2)
    )
    assert two.working > one.working and two.parameters == one.parameters
    assert "layers dealt out, and back" in two.communication.keys() - one.communication.keys()
    assert two.communication["stage to stage"] > one.communication["stage to stage"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        "rwkv7:pipeline=4,microbatches=4",  # the first layer's values are part of the carry
        "hgrn2:pipeline=2,rounds=2",  # bounds over all layers
        "gla/softmax:pipeline=2",  # a stage is a period
    ],
)
def test_stages_equal_one_device(case):
    """A training step with layers in pipeline stages equals one on one device; `test_compose` checks the
    statistics of experts in stages.
    """
    assert meshes(case) == 1


def stage(layers, carry, rows, constants):
    """Apply one pipeline stage, made up for this test, to `carry`: return it after the layers, and
    statistics. Both depend on the rows of the microbatch and on each layer's number, so that a wrong order
    shows.
    """

    def layer(x, params):
        x = jnp.tanh(params["w"] * x + rows + constants * params["number"])
        count = jnp.sum(jnp.ones(x.shape[0])) * params["number"]
        return x, {"mean": jnp.mean(x), "rows_count": count}

    return jax.lax.scan(layer, carry, layers)


def main() -> None:
    """Compare values, statistics and gradients of each pipeline schedule with those of the layers in order."""
    rng = np.random.default_rng(0)
    for stages, pieces, rounds in SCHEDULES:
        count = 2 * stages * rounds
        layers = {"w": rng.normal(size=(count, 3)), "number": np.arange(count)}
        x, rows = rng.normal(size=(2, 2 * pieces, 3))

        def both(run, layers=layers, x=x, rows=rows):
            def loss(w, x, rows, constants):
                y, statistics = run(layers | {"w": w}, x, rows, constants)
                return jnp.sum(y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)), (y, statistics)

            gradient = jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)
            return jax.jit(gradient)(layers["w"], x, rows, jnp.asarray(0.1))

        expected = both(stage)
        mesh = make_mesh(MeshConfig(data=1, pipeline=stages), jax.devices()[:stages])
        with jax.set_mesh(mesh):
            got = both(
                lambda *a, n=pieces, r=rounds: pipelined(stage, *a, microbatches=n, rounds=r)
            )
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
        print(stages, pieces, rounds, "ok", flush=True)


if __name__ == "__main__":
    main()
