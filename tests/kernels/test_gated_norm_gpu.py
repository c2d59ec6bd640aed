"""Tests of the Hopper kernels of gated norms: run in Mosaic GPU's interpreter, and lowered for an H200."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from lsm_jax import ops
from lsm_jax.ops.backends.select import clear_choices
from pallas_kernels.compat import gpu_interpreter, races_found
from pallas_kernels.gated_norm import gated_rms_norm, gated_rms_norm_gradients, unsupported
from pallas_kernels.gated_norm.cases import INTERPRETED, TOLERANCES, Case
from tests.kernels.test_linear_attention_gpu import error


def make(case: Case) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Return random arrays of a gated norm, by name, its options, and a gradient of the output."""
    rng = np.random.default_rng(0)
    shape = case[:4]

    def normal(*shape, dtype=jnp.bfloat16):
        return jnp.asarray(rng.normal(size=shape), dtype)

    arrays = dict(
        x=normal(*shape),
        gate=normal(*shape, dtype=jnp.float32 if case.wide_gate else jnp.bfloat16),
        scale=normal(*(shape[2:] if case.group > 1 else shape[3:]), dtype=jnp.float32),
    )
    if case.skip:
        arrays |= dict(skip=normal(case.heads, dtype=jnp.float32), skip_input=normal(*shape))
    options = dict(
        eps=1e-5, group=case.group, activation=case.activation, gate_first=case.gate_first
    )
    return arrays, options, normal(*shape)


def both(function, arrays, dy, **options):
    """Return the output and the gradients of a gated norm computed by `function`."""
    output, pull = jax.vjp(lambda a: function(**a, **options), arrays)
    return output, pull(dy.astype(output.dtype))[0]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, marks=[pytest.mark.slow] * bool(i), id=c.id)
        for i, c in enumerate(INTERPRETED)
    ],
)
def test_equals_the_plain_form(case):
    """The value and every gradient of the kernel are those of XLA in float32, and there are no races."""
    arrays, options, dy = make(case)
    got = both(gated_rms_norm, arrays, dy, **options, interpret=gpu_interpreter())
    assert not races_found()
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), arrays)
    wanted = both(ops.gated_rms_norm, wide, dy, **options, implementation="xla")
    assert got[0].dtype == jnp.bfloat16
    assert error(got[0], wanted[0]) < TOLERANCES["interpreted"]
    for name, gradient in got[1].items():
        assert gradient.dtype == arrays[name].dtype
        assert error(gradient, wanted[1][name]) < TOLERANCES["interpreted"], name


@pytest.mark.parametrize(
    "case",
    [
        Case(1, 4, 4, 64, 4, gate_first=True),
        pytest.param(Case(1, 6, 64, 64, 64, gate_first=True), marks=pytest.mark.slow),
        pytest.param(Case(2, 6, 4, 256, 2, activation="sigmoid"), marks=pytest.mark.slow),
    ],
    ids=lambda case: case.id,
)
def test_the_gradient_stores_the_output(case):
    """The backward kernel that stores the output has the gradients of the one that stores none, and the forward kernel's output, to the
    bit.
    """
    arrays, options, dy = make(case)
    options = options | dict(interpret=gpu_interpreter())
    *got, y = gated_rms_norm_gradients(**arrays, dy=dy, **options)
    assert not races_found()
    output, wanted = both(gated_rms_norm, arrays, dy, **options)
    np.testing.assert_array_equal(y, output)
    for a, name in zip(got, ("x", "gate", "scale"), strict=True):
        np.testing.assert_array_equal(a, wanted[name])


@pytest.mark.parametrize(
    "case",
    [
        Case(1, 4, 4, 128, activation="sigmoid", wide_gate=True),
        pytest.param(Case(1, 6, 2, 512), marks=pytest.mark.slow),
        pytest.param(Case(1, 6, 64, 64, 64, gate_first=True), marks=pytest.mark.slow),
    ],
    ids=lambda case: case.id,
)
def test_a_bias_of_the_gate(case):
    """Values and gradients with a bias of the gate are those of XLA in float32 with the bias added to the gate before; the gradient of a
    float32 gate, with the output, is rounded.
    """
    arrays, options, dy = make(case)
    arrays["scale"] = jnp.broadcast_to(arrays["scale"], case[2:4])
    arrays["bias"] = jnp.asarray(np.random.default_rng(1).normal(size=case[2:4]), jnp.float32)
    kernel = functools.partial(gated_rms_norm, interpret=gpu_interpreter())
    output, gradients = both(kernel, arrays, dy, **options)
    *stored, y = gated_rms_norm_gradients(**arrays, dy=dy, **options, interpret=gpu_interpreter())
    assert not races_found()

    def plain(gate, bias, **others):
        return ops.gated_rms_norm(gate=gate + bias, **others, implementation="xla")

    wide = jax.tree.map(lambda a: a.astype(jnp.float32), arrays)
    wanted = both(plain, wide, dy, **options)
    assert error(output, wanted[0]) < TOLERANCES["interpreted"]
    np.testing.assert_array_equal(y, output)
    for name, again in zip(("x", "gate", "scale", "bias"), stored, strict=True):
        assert error(gradients[name], wanted[1][name]) < TOLERANCES["interpreted"], name
        np.testing.assert_array_equal(again, gradients[name].astype(again.dtype))
        assert again.dtype == (jnp.bfloat16 if name == "gate" else arrays[name].dtype)


def shapes_of(case: Case) -> tuple[Any, dict[str, Any], Any]:
    """Return the shapes of a case's arrays by name, its options, and the shape of a gradient of the output."""
    arrays, options, dy = make(case._replace(batch=1, length=2))

    def full(a):
        shape = (case.batch, case.length, *a.shape[2:]) if a.ndim == 4 else a.shape
        return jax.ShapeDtypeStruct(shape, a.dtype)

    return jax.tree.map(full, arrays), options, full(dy)


def lowered(case: Case, implementation: str | None) -> str:
    """Return the program for a Hopper GPU of the op's output and gradients."""
    arrays, options, dy = shapes_of(case)

    def run(arrays, dy):
        return both(ops.gated_rms_norm, arrays, dy, **options, implementation=implementation)

    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        return jax.jit(run).trace(arrays, dy).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("case", "automatic"),
    [
        (Case(2, 64, 4, 64, 4, gate_first=True, skip=True), True),
        (Case(2, 64, 4, 64, gate_first=True), False),
        (Case(2, 64, 4, 64, 4, skip=True), False),
        (Case(2, 64, 4, 64), False),
    ],
    ids=lambda value: getattr(value, "id", value),
)
def test_the_op_selects_it_where_it_is_faster(case, automatic):
    """On a Hopper GPU calls with a skip and a gate before the norm lower to one kernel forward and one backward; others do so by
    name only, and `ops.choices` says why.
    """
    clear_choices()
    assert lowered(case, None).count("custom_call @mosaic_gpu") == 2 * automatic
    chosen = ops.choices()["gated_rms_norm"]
    if automatic:
        assert chosen.startswith("mosaic_gpu on NVIDIA 9.0")
    else:
        reason = "it was timed to be faster with a skip and a gate before the norm only"
        assert chosen == f"xla (mosaic_gpu not used: {reason})"
        assert lowered(case, "mosaic_gpu").count("custom_call @mosaic_gpu") == 2


def test_names_the_requirement_that_is_not_met():
    arrays, options, _ = make(Case(1, 64, 4, 128))
    x, gate = arrays["x"], arrays["gate"]
    assert unsupported(x, gate, None, 1) is None
    assert "groups of 384 of 384 channels" in str(unsupported(x[:, :, :3], gate, None, 3))
    call: Any = options | dict(scale=arrays["scale"], implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match="requires x and skip_input in bfloat16"):
        ops.gated_rms_norm(x.astype(jnp.float32), gate, **call)
    with pytest.raises(NotImplementedError, match="requires 64 tokens or more, not 63"):
        ops.gated_rms_norm(x[:, :63], gate[:, :63], **call)
    with pytest.raises(NotImplementedError, match="requires a multiple of 2 tokens"):
        gated_rms_norm(x[:, :63], gate[:, :63], arrays["scale"], eps=1e-5)
