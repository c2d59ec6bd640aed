"""Pipeline parallelism: loss and gradients equal those of one device. The fast case also shards heads."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsm_jax import models
from lsm_jax.parallel import MeshConfig, Stages, make_mesh, pipelined
from lsm_jax.training.communication_plan import LayerArray, dealt_bytes
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
    config = run_of("linear_attention/softmax", mesh=MeshConfig(data=1, pipeline=4, sequence=2))
    with pytest.raises(
        ValueError, match="mesh.sequence=2 with mesh.pipeline=4: .* whole periods, or"
    ):
        config.validate(8)
    config = dataclasses.replace(config, mesh=MeshConfig(data=1, pipeline=2, rounds=2))
    with pytest.raises(ValueError, match="mesh.pipeline=2 x mesh.rounds=2: the model's 2 periods"):
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
        "mom+none:pipeline=2,microbatches=4",  # one balance loss of all layers
    ],
)
def test_stages_equal_one_device(case):
    """A training step with layers in pipeline stages equals one on one device; `test_compose` checks the
    statistics of experts in stages.
    """
    assert meshes(case) == 1


LLLN = "linear_attention/linear_attention/linear_attention/softmax"
LLLN_EXPERTS = LLLN.replace("/", "+moe/") + "+moe"


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        (f"{LLLN}@num_layers=8:pipeline=4",),
        (f"{LLLN}@num_layers=8@remat=full:pipeline=4,microbatches=8",),
        (f"{LLLN}@num_layers=8@remat=dots:pipeline=4",),
        (f"{LLLN_EXPERTS}@num_layers=8:pipeline=4", f"{LLLN_EXPERTS}@num_layers=8:pipeline=4,expert=2"),
        tuple(f"{LLLN}@remat=full:pipeline=2,{axis}=2" for axis in ("data", "fsdp", "tensor")),
        (f"{LLLN_EXPERTS}:pipeline=2,fsdp=2,tensor=2",),
        ("linear_attention+moe/mom+none:pipeline=4",),  # one balance loss of the layers with memories
        ("rwkv7+none/softmax+none:pipeline=4",),  # the first layer's values travel
        ("hgrn2+none/softmax+none:pipeline=4",),  # bounds over all layers
        (f"bfloat16:{LLLN}:pipeline=2,fsdp=2",),
    ],
    ids=lambda cases: cases[0].partition("@")[2] or cases[0],
)  # fmt: skip
def test_stages_that_are_not_whole_periods(cases):
    """A training step equals one on one device where stages cut a period; `tests.parallel.traffic` has the fast case."""
    assert meshes(*cases) == len(cases)


@pytest.mark.slow
def test_checkpoints_of_stages_that_are_not_whole_periods(tmp_path):
    out = run_with_devices(4, "-m", "tests.parallel.stage_checkpoints", str(tmp_path))
    assert out.count("restored") == 2 and "dealt out as planned" in out


def test_layers_of_stages():
    stages = Stages(tuple("LLLN" * 2), 4)
    assert stages.programs() == [("L", "L"), ("L", "N")]
    assert stages.program_of_stage().tolist() == [0, 1, 0, 1]
    assert (stages.entries("L"), stages.entries("N")) == (2, 1)
    assert stages.table("L").tolist() == [[0, 1], [2, 6 + 3], [3, 4], [5, 6 + 7]]
    assert stages.layers_of("N").tolist() == [3, 7]
    with pytest.raises(ValueError, match="count=3: accepted .* divide the 8 layers"):
        Stages(tuple("LLLN" * 2), 3)


@pytest.mark.slow
def test_layers_that_are_dealt_out_are_planned():
    """A device of four stages stores a quarter of eight layers of LLLN, and receives two linear layers and one softmax layer
    in each step.
    """
    config = run_of(f"{LLLN}@num_layers=8")
    alone = plan(config, 1)
    many = plan(dataclasses.replace(config, mesh=MeshConfig(data=1, pipeline=4)), 4)
    rest = 4 * (32 * 16 + 16)  # embedding and norm
    assert many.parameters - rest == (alone.parameters - rest) // 4
    linear, softmax = layer_bytes(config)
    assert 6 * linear + 2 * softmax == alone.parameters - rest
    assert many.communication["layers dealt out, and back"] == 2 * 3 * (2 * linear + softmax) // 4


def test_arrays_that_are_dealt_out_are_counted_by_what_moves():
    """A device of four stages stores a quarter of divided arrays and all of others, and returns gradients of trained ones alone."""
    model = models.abstract(run_of(f"{LLLN}@num_layers=8").model)
    config = run_of(f"{LLLN}@num_layers=8", mesh=MeshConfig(data=1, pipeline=4))
    sizes = config.mesh.shape(4)

    def dealt(**fields):
        array = LayerArray(
            **dict(place=0, count=8, itemsize=4, trained=True, divided=True) | fields
        )
        return dealt_bytes(config, model, [array], sizes)

    # Two periods, and two linear layers in a stage: of 8 numbers on each of four devices it receives all 32.
    assert dealt() == (256, 128, 128)
    assert dealt(trained=False, itemsize=2) == (64, 64, 0)
    assert dealt(divided=False) == (64, 0, 0)
    assert dealt(place=3) == (128, 64, 64)  # one softmax layer
    whole = dataclasses.replace(config, mesh=MeshConfig(data=1, pipeline=2))
    assert dealt_bytes(whole, model, [LayerArray(0, 8, 4, True, True)], whole.mesh.shape(2)) == (
        0,
        0,
        0,
    )


def layer_bytes(config) -> tuple[int, int]:
    """Return the bytes of the parameters of (a linear layer, a softmax layer) of LLLN."""
    blocks = models.abstract(config.model).periods.blocks
    sizes = [sum(4 * x.size for x in jax.tree.leaves(block)) // 2 for block in blocks]
    assert sizes[0] == sizes[1] == sizes[2]
    return sizes[0], sizes[3]


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

        def in_stages(*arguments, n=pieces, r=rounds):
            y, statistics = pipelined(stage, *arguments, microbatches=n, rounds=r)
            counts = jnp.sum(statistics["rows_count"], axis=1)
            return y, {"mean": jnp.mean(statistics["mean"], axis=1), "rows_count": counts}

        with jax.set_mesh(mesh):
            got = both(in_stages)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
        print(stages, pieces, rounds, "ok", flush=True)


if __name__ == "__main__":
    main()
