"""Tests of the Hopper kernels of selective memories (Mamba's, and complex ones): run in Mosaic GPU's
interpreter, and lowered for an H200.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from benchmarks.calls.tokens import scan_both as both
from benchmarks.calls.tokens import scan_call as call
from benchmarks.calls.tokens import scan_inputs as make
from lsm_jax import ops
from pallas_kernels.compat import gpu_interpreter, races_found
from pallas_kernels.selective_scan import (
    complex_scan,
    complex_unsupported,
    selective_scan,
    unsupported,
)
from pallas_kernels.selective_scan.cases import (
    GRADIENT_TOLERANCES,
    HOPPER_INTERPRETED,
    OUTPUT_TOLERANCE,
    Case,
)
from tests.kernels.test_linear_attention_gpu import error
from tests.marks import slow_after


def compare(case: Case, run) -> tuple[Any, Any]:
    """Check that the values and gradients of a selective scan that `run(arrays, marks, cotangents)` returns
    equal those of the recurrence in float32; return them.
    """
    arrays, marks = make(case)
    rng = np.random.default_rng(1)
    dy = jnp.asarray(rng.normal(size=arrays["u"].shape), jnp.bfloat16)
    d_memory = jnp.asarray(rng.normal(size=(2, *arrays["memory"].shape)), jnp.float32)
    found = run(arrays, marks, (dy, d_memory))
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), (arrays, (dy, d_memory)))
    expected = both(wide[0], marks, "xla", wide[1])
    for got, want in zip(found[0], expected[0], strict=True):
        assert error(got, want) < OUTPUT_TOLERANCE
    for name, got in found[1].items():
        want = expected[1][name]
        assert jnp.isfinite(got).all(), name
        assert error(got, want) < GRADIENT_TOLERANCES[got.dtype.name], name
    return found


@pytest.fixture
def interpreted(monkeypatch):
    """A fixture that makes the op of selective memories run its Hopper kernels in the interpreter, on a CPU."""

    def scan(function):
        return lambda *a, **k: function(*a, **k, interpret=gpu_interpreter())

    monkeypatch.setattr("pallas_kernels.selective_scan.selective_scan", scan(selective_scan))
    monkeypatch.setattr("pallas_kernels.selective_scan.complex_scan", scan(complex_scan))
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, marks=[pytest.mark.slow] * (i > 0), id=c.id)
        for i, c in enumerate(HOPPER_INTERPRETED)
    ],
)
@pytest.mark.usefixtures("interpreted")
def test_equals_the_recurrence(case):
    """The outputs, the final memory and every gradient of the selective scan's Hopper kernels equal those of
    the token-by-token recurrence, and the interpreter finds no race between threads.
    """
    compare(case, lambda a, m, c: both(a, m, "mosaic_gpu", c))
    assert not races_found()


@pytest.mark.slow
@pytest.mark.parametrize("states", [16, 0])
@pytest.mark.usefixtures("interpreted")
def test_no_later_token_changes_a_bit(states):
    case = Case(96, 128, states, True, batch=1)
    arrays, marks = make(case)
    later = jnp.arange(96) >= 70
    ids = marks["segment_ids"]
    changed = arrays | dict(u=jnp.where(later[:, None], -arrays["u"], arrays["u"]))
    other = marks | dict(segment_ids=jnp.where(later, jnp.where(ids == 0, 9, 0), ids))
    y, z = (call(a, m, "mosaic_gpu")[0] for a, m in ((arrays, marks), (changed, other)))
    np.testing.assert_array_equal(y[:, :70], z[:, :70])
    assert jnp.isfinite(y).all() and (y[:, 70:] != z[:, 70:]).any()


@pytest.mark.slow
@pytest.mark.parametrize("states", [16, 0])
@pytest.mark.usefixtures("interpreted")
def test_maps_over_an_axis(states):
    """`jax.vmap` of a selective scan on its Hopper kernels has the gradients of separate calls, one for each
    entry of the mapped axis.
    """
    case = Case(64, 128, states, False, batch=1)
    arrays = [make(case, seed)[0] for seed in range(2)]

    def total(arrays):
        y, memory = call(arrays, {}, "mosaic_gpu")
        return jnp.sum(y.astype(jnp.float32) ** 2) + jnp.sum(memory**2)

    mapped = jax.vmap(jax.grad(total))(jax.tree.map(lambda *x: jnp.stack(x), *arrays))
    for index, one in enumerate(arrays):
        for name, gradient in jax.grad(total)(one).items():
            np.testing.assert_allclose(mapped[name][index], gradient, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("states", slow_after(1, [16, 0]))
def test_the_op_lowers_to_them_on_the_card(states):
    """The op of selective memories lowers to three kernels forward and three backward on a Hopper GPU, also
    if the implementation is not named.
    """
    arrays, marks = make(Case(4090, 256, states, True))

    def lowered(marks):
        def step(arrays):
            y, pull = jax.vjp(lambda a: call(a, marks, None), arrays)
            return pull(y)

        device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
        with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
            return jax.jit(step).trace(arrays).lower(lowering_platforms=("cuda",)).as_text()

    assert lowered(marks).count("custom_call @mosaic_gpu") == 6
    assert lowered({}).count("custom_call @mosaic_gpu") == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(u=jnp.ones((2, 64, 64))), "u in bfloat16, not float32"),
        (dict(B=jnp.ones((64, 16))), "for a real memory: discretization='euler'"),
        (dict(discretization="zoh"), "for a real memory: discretization='euler'"),
        (dict(delta=jnp.ones(64)), r"delta \[B, T, D\]"),
        (dict(form="associative"), "form='chunk' of more than one token, not 'associative'"),
        (
            dict(A=-jnp.ones((64, 4)), B=jnp.ones((2, 64, 4)), C=jnp.ones((2, 64, 4))),
            "memories of 8 or 16 numbers for each channel, not 4",
        ),
        (dict(A=-jnp.ones((64, 16)) + 1j), "for a complex memory: one entry per channel"),
        (
            dict(initial_state=ops.selective_state(2, 64, 16, num_segments=3)),
            "one state per row, not one per segment",
        ),
    ],
)
def test_names_the_requirement_that_is_not_met(changes, message):
    arrays: dict[str, Any] = dict(make(Case(64, 64, 16, False))[0])
    del arrays["memory"]
    arrays |= changes
    if "initial_state" in changes:
        arrays["segment_ids"] = jnp.ones((2, 64), jnp.int32)
    with pytest.raises(NotImplementedError, match=f"implementation='mosaic_gpu' .*{message}"):
        ops.selective_memory(**arrays, implementation="mosaic_gpu")
    y, _ = ops.selective_memory(**arrays)  # without a named implementation, XLA computes it
    assert y.shape == arrays["u"].shape


def test_names_what_exists():
    x, memory = jnp.ones((1, 64, 64), jnp.bfloat16), jnp.zeros((1, 64, 16))
    with pytest.raises(ValueError, match="implementation='cutile'; accepted are"):
        selective_scan(
            x, x, memory[0], x[..., :16], x[..., :16], initial=memory, implementation="cutile"
        )
    with pytest.raises(
        NotImplementedError, match="requires a multiple of 128 channels of one complex"
    ):
        complex_scan(x, x, x, x, initial=jnp.zeros((1, 2, 64)))
    for asked, tokens in (
        (unsupported, 2**22 - 63),
        (lambda *x: complex_unsupported(*x[:2]), 2**21 - 31),
    ):
        rows = [jax.ShapeDtypeStruct((1, t, 128), jnp.bfloat16) for t in (tokens - 1, tokens)]
        assert asked("mosaic_gpu", rows[0], 16) is None
        assert "at most 65,535 chunks" in asked("mosaic_gpu", rows[1], 16)


@pytest.mark.slow
def test_what_writes_nothing_may_be_anything(interpreted):
    """A masked token does not change the selective memory, even if its input u is infinite; the term D u is
    added only to its own output.
    """
    arrays, _ = make(Case(100, 64, 16, False, batch=1))
    at = 10
    arrays["u"] = arrays["u"].at[:, at].set(jnp.inf)
    marks = dict(update_mask=jnp.arange(100)[None] != at)
    for given in (arrays, arrays | dict(D=None)):
        (y, memory), (expected, kept) = (call(given, marks, x) for x in ("mosaic_gpu", "xla"))
        assert jnp.isfinite(y[:, at]).all() == (given["D"] is None)
        y, expected = (jnp.delete(x, at, axis=1) for x in (y, expected))
        assert error(y, expected) < 5e-3
        assert error(memory[0], kept[0]) < 1e-5
