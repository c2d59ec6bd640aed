"""Tests of the TPU kernels of selective memories (Mamba's, and complex ones): run in the TPU's interpreter,
and lowered for a TPU.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from lsm_jax import ops
from pallas_kernels.selective_scan import complex_scan, selective_scan
from pallas_kernels.selective_scan.cases import TPU_INTERPRETED, Case
from tests.kernels.test_selective_scan_gpu import both, call, compare, make
from tests.marks import slow_after


@pytest.fixture
def interpreted(monkeypatch, request):
    """A fixture that makes the op of selective memories run its TPU kernels in the interpreter, on a CPU."""
    params = getattr(request, "param", pltpu.InterpretParams(detect_races=True))

    def scan(function):
        return lambda *a, **k: function(*a, **k, interpret=params)

    monkeypatch.setattr("pallas_kernels.selective_scan.selective_scan", scan(selective_scan))
    monkeypatch.setattr("pallas_kernels.selective_scan.complex_scan", scan(complex_scan))
    jax.clear_caches()
    yield
    jax.clear_caches()


def no_races() -> bool:
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    return not interpret_pallas_call.races.races_found


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, marks=[pytest.mark.slow] * (i > 0), id=c.id)
        for i, c in enumerate(TPU_INTERPRETED)
    ],
)
@pytest.mark.usefixtures("interpreted")
def test_equals_the_recurrence(case):
    """The outputs, the final memory and every gradient of the selective scan's TPU kernels equal those of the
    token-by-token recurrence, and the interpreter finds no race.
    """
    compare(case, lambda a, m, c: both(a, m, "mosaic_tpu", c))
    assert no_races()


@pytest.mark.slow
@pytest.mark.parametrize("states", [pytest.param(16, marks=pytest.mark.slow), 0])
@pytest.mark.usefixtures("interpreted")
def test_takes_float32(states):
    """The TPU kernels of a selective scan return output and gradients in float32 for inputs in float32, equal
    to those of the recurrence.
    """

    def run(arrays, marks, cotangents):
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), (arrays, cotangents))
        found = both(wide[0], marks, "mosaic_tpu", wide[1])
        assert found[0][0].dtype == found[1]["u"].dtype == jnp.float32
        return found

    compare(Case(130, 128, states, True, batch=1), run)


@pytest.mark.parametrize("states", slow_after(1, [0, 16]))
@pytest.mark.usefixtures("interpreted")
def test_no_later_token_changes_a_bit(states):
    case = Case(200, 128, states, True, batch=1)
    (arrays, marks), *others = make(case), *make(case, seed=1)
    constant = "A", "D", "memory"
    changed, other = (
        {n: x if n in constant else jnp.concatenate([x[:, :70], new[n][:, 70:]], axis=1)
         for n, x in old.items()}
        for old, new in zip((arrays, marks), others, strict=True)
    )  # fmt: skip
    y, z = (call(a, m, "mosaic_tpu")[0] for a, m in ((arrays, marks), (changed, other)))
    np.testing.assert_array_equal(y[:, :70], z[:, :70])
    assert jnp.isfinite(y).all() and (y[:, 70:] != z[:, 70:]).any()


# The TPU interpreter does not support the axis that `jax.vmap` adds.
@pytest.mark.slow
@pytest.mark.parametrize("interpreted", [True], indirect=True)
@pytest.mark.parametrize("states", [pytest.param(16, marks=pytest.mark.slow), 0])
@pytest.mark.usefixtures("interpreted")
def test_maps_over_an_axis(states):
    """`jax.vmap` of a selective scan on its TPU kernels has the gradients of separate calls, one for each
    entry of the mapped axis.
    """
    case = Case(64, 128, states, True, batch=1)
    given = [make(case, seed) for seed in range(2)]

    def total(arrays, marks):
        y, memory = call(arrays, marks, "mosaic_tpu")
        return jnp.sum(y.astype(jnp.float32) ** 2) + jnp.sum(memory**2)

    mapped = jax.vmap(jax.grad(total))(*jax.tree.map(lambda *x: jnp.stack(x), *given))
    for index, one in enumerate(given):
        for name, gradient in jax.grad(total)(*one).items():
            np.testing.assert_allclose(mapped[name][index], gradient, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("states", [16, 0])
def test_lowers_to_a_kernel_each_way(states, dtype):
    """The op of selective memories lowers to one kernel forward and one backward on a TPU, only if the
    implementation is named.
    """
    arrays, marks = make(Case(500, 256, states, True))
    arrays["u"] = arrays["u"].astype(dtype)

    def lowered(marks, implementation):
        def step(arrays):
            y, pull = jax.vjp(lambda a: call(a, marks, implementation), arrays)
            return pull(y)

        device = AbstractDevice("TPU v5 lite", 1, platform="tpu")
        with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
            return jax.jit(step).trace(arrays).lower(lowering_platforms=("tpu",)).as_text()

    kernel = "custom_call @tpu_custom_call"
    assert lowered(marks, "mosaic_tpu").count(kernel) == 2
    assert lowered({}, "mosaic_tpu").count(kernel) == 2
    assert lowered(marks, None).count(kernel) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(u=jnp.ones((2, 64, 128), jnp.float16)), "u in bfloat16 or float32, not float16"),
        (
            dict(
                u=jnp.ones((2, 64, 64)), delta=jnp.ones((2, 64, 64)),
                A=-jnp.ones((64, 16)), D=jnp.ones(64),
            ),
            "a multiple of 128 channels, not 64",
        ),
        (
            dict(A=-jnp.ones((128, 4)), B=jnp.ones((2, 64, 4)), C=jnp.ones((2, 64, 4))),
            "memories of 8, 16, 24 or 32 numbers for each channel, not 4",
        ),
        (dict(A=-jnp.ones((128, 16)) + 1j), "for a complex memory: one entry per channel"),
    ],
)  # fmt: skip
def test_names_the_requirement_that_is_not_met(changes, message):
    arrays: dict[str, Any] = dict(make(Case(64, 128, 16, False))[0])
    del arrays["memory"]
    with pytest.raises(NotImplementedError, match=f"implementation='mosaic_tpu' .*{message}"):
        ops.selective_memory(**(arrays | changes), implementation="mosaic_tpu")
