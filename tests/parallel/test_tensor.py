"""Heads and feedforward widths sharded over devices: loss and gradients equal those of one device; errors."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from lsm_jax import mixers, models
from lsm_jax.parallel import AXES, MeshConfig
from lsm_jax.training.step import param_shardings
from tests.parallel.meshes import mixer, run_of
from tests.parallel.test_parallel import run_with_devices


def meshes(*cases: str) -> int:
    """Run cases of `tests.parallel.meshes` (PATTERN:axis=size,...) in a process of eight devices; return
    the number of those that equal one device.
    """
    return run_with_devices(8, "-m", "tests.parallel.meshes", *cases).count(" ok, ")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        "linear_attention:data=2,tensor=4",  # one head per device
        # One method of each class of memory, one layer each; `test_sequence.test_every_method` has each
        # alone.
        "mamba2/gla/gated_deltanet/rwkv7:tensor=2,fsdp=2",
        "mamba/gsa/softmax/fox:tensor=2,fsdp=2",
    ],
)
def test_heads_over_devices(case):
    assert meshes(case) == 1


def abstract_mesh(**sizes: int) -> jax.sharding.AbstractMesh:
    """Return a mesh without devices that has axes of these sizes."""
    return jax.sharding.AbstractMesh(tuple(sizes.get(axis, 1) for axis in AXES), AXES)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(num_heads=1), "num_heads of layer 0: axis 'heads' of size 1 does not divide over 2 devices"),
        (dict(num_kv_heads=1), "num_kv_heads of layer 0: axis 'heads' of size 1"),
    ],
)  # fmt: skip
def test_heads_that_are_not_divisible_are_refused(fields, words):
    config = run_of("softmax").model
    layer = dataclasses.replace(config.layers["A"], mixer=mixer("softmax", **fields))
    config = dataclasses.replace(config, layers={"A": layer})
    with pytest.raises(ValueError, match=words):
        param_shardings(abstract_mesh(tensor=2), models.abstract(config))


@pytest.mark.parametrize(
    "method",
    [
        m if m in ("mamba2", "gated_deltanet", "fox") else pytest.param(m, marks=pytest.mark.slow)
        for m in mixers.METHODS
        if m not in ("s4d", "liger")  # no heads; contains another method
    ],
)
def test_parameters_of_every_method_are_sharded_over_every_axis(method):
    """The parameters of every method are sharded over every mesh axis; no parameter has a mesh axis twice."""
    config = dataclasses.replace(run_of("linear_attention+moe").model, num_layers=2)
    layer = dataclasses.replace(config.layers["A"], mixer=mixer(method))
    config = dataclasses.replace(config, layers={"A": layer})
    mesh = abstract_mesh(tensor=2, expert=2, pipeline=2, fsdp=2)
    found = jax.tree.leaves(param_shardings(mesh, models.abstract(config)))
    parts = [part for s in found for part in s.spec if part]
    used = {axis for part in parts for axis in ([part] if isinstance(part, str) else part)}
    assert used == {"tensor", "expert", "pipeline", "fsdp"}


def test_sizes_that_a_mesh_does_not_divide_are_refused():
    for axes, words in (
        (dict(pipeline=3), "mesh.pipeline=3: the model's 4 layers are not divisible by it; accepted are 1, 2, 4"),
        (dict(sequence=17), "data.sequence_length=16: it must be at least mesh.sequence=17"),
        (dict(expert=8), "model.layers.A.feedforward.num_experts=4: it must be divisible by mesh.expert=8"),
        (dict(pipeline=2, microbatches=16), "batch_size=8: it must be divisible by 2 devices x 8 microbatches"),
    ):  # fmt: skip
        mesh = MeshConfig(data=1, **axes)
        devices = mesh.expert * mesh.pipeline * mesh.sequence
        with pytest.raises(ValueError, match=words):
            run_of("linear_attention+moe", mesh=mesh).validate(devices)
