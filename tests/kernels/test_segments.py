"""Tests of kernels with one state per segment, in their interpreters: compared with the recurrence, and with
calls on each segment alone.
"""

import functools
import importlib
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels.delta_rule
import pallas_kernels.dplr
import pallas_kernels.linear_attention
from benchmarks.calls.memories import segment_call, segment_inputs, two_rows
from pallas_kernels.compat import gpu_interpreter, races_found
from pallas_kernels.memory_cases import SEGMENTS
from tests.kernels.test_linear_attention_gpu import error

# Segment ids for four states. State 3 has no token, segment 1 continues after segment 2 and has two chunks, and there is padding.
IDS = {
    chunk: np.repeat([1, 2, 1, 0, 4], np.array([40, 5, 30, 3, 37]) * chunk // 64)
    for chunk in (64, 128)
}
CHUNK = dict(mosaic_gpu=64, mosaic_tpu=128)


@jax.custom_vjp
def wait(x):
    return jax.block_until_ready(x)


wait.defvjp(lambda x: (wait(x), None), lambda _, g: (jax.block_until_ready(g),))


def run_alone(kernel, *, run, **x):
    """Call the function `kernel`, which runs a kernel in Mosaic GPU's interpreter, while nothing else runs:
    with too few free threads of XLA, those of the interpreter would wait for each other for ever.
    """
    x = {name: wait(a) if isinstance(a, jax.Array) else a for name, a in x.items()}
    return wait(kernel(run=run, **x))


@pytest.fixture(params=list(CHUNK))
def implementation(request, monkeypatch):
    interpret = gpu_interpreter() if request.param == "mosaic_gpu" else True
    for module, name in (
        (pallas_kernels.linear_attention, "linear_attention"),
        (pallas_kernels.delta_rule, "delta_rule"),
        (pallas_kernels.dplr, "dplr"),
    ):
        run = functools.partial(getattr(module, name), interpret=interpret)
        monkeypatch.setattr(module, name, functools.partial(run_alone, run))
    for op in ("linear.linear_memory", "delta.delta_memory", "delta.dplr_memory"):
        module = importlib.import_module(f"lsm_jax.ops.{op}")
        # Without jit: a program that waits for its kernels would occupy a thread, which they need if there are few cores.
        monkeypatch.setattr(module, "run", module.run.__wrapped__)
    return request.param


def check_threads(case, implementation):
    """Skip a case for which XLA has too few threads: the interpreter requires one for each warpgroup, since they wait for each other."""
    threads = int(os.environ.get("NPROC", os.cpu_count() or 1))
    if implementation == "mosaic_gpu" and 128 in SEGMENTS[case][2:4] and threads < 4:
        pytest.skip(f"XLA has {threads} threads here; NPROC=8 gives it more")


@pytest.mark.slow
@pytest.mark.parametrize("case", SEGMENTS)
def test_equals_the_recurrence_in_value_and_every_gradient(case, implementation):
    check_threads(case, implementation)
    check(case, implementation, IDS[CHUNK[implementation]])
    assert implementation == "mosaic_tpu" or not races_found()


@pytest.mark.slow
def test_equals_the_recurrence_in_value(implementation):
    check("scalar", implementation, IDS[CHUNK[implementation]], gradients=False)
    assert implementation == "mosaic_tpu" or not races_found()


def check(case, implementation, ids, gradients=True):
    """Check that a kernel with one state per segment has the values and gradients of the recurrence for the
    segment ids `ids` of two rows; return its results and gradients (None without `gradients`).
    """
    op, x, length = SEGMENTS[case].op, segment_inputs(SEGMENTS[case], len(ids)), len(ids)
    rng = np.random.default_rng(1)
    ids, mask = two_rows(ids), jnp.asarray(rng.random((2, length)) < 0.9)

    def run(x, **options):
        return segment_call(op, ids, mask=mask, **options, **x)

    fused = functools.partial(run, implementation=implementation)
    recurrent = functools.partial(run, form="recurrent", implementation="xla")
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), x)
    if not gradients:
        for got, want in zip(fused(x), recurrent(wide), strict=True):
            assert error(got, want) < 5e-3
        return None
    actual, pull = jax.vjp(fused, x)
    wanted, wanted_pull = jax.vjp(recurrent, wide)
    cotangents = [jnp.asarray(rng.normal(size=x.shape), x.dtype) for x in actual]
    (found,) = pull(tuple(cotangents))
    (expected,) = wanted_pull(tuple(x.astype(jnp.float32) for x in cotangents))
    for got, want in zip(actual, wanted, strict=True):
        assert error(got, want) < 5e-3
    np.testing.assert_array_equal(
        actual[1][0, 2], x["memory"][0, 2]
    )  # the state that no token updates
    for name, gradient in found.items():
        assert gradient.dtype == x[name].dtype
        assert error(gradient, expected[name]) < 1e-2, name
    np.testing.assert_array_equal(found["memory"][0, 2], cotangents[1][0, 2])
    return actual, found


@pytest.mark.slow
@pytest.mark.parametrize("case", SEGMENTS)
def test_segments_do_not_see_each_other(case, implementation):
    """With one state per segment, no bit of a kernel's output depends on other segments or on later tokens. A
    call on a segment alone has the same results up to rounding.
    """
    check_threads(case, implementation)
    op, ids = SEGMENTS[case].op, IDS[CHUNK[implementation]]
    x = segment_inputs(SEGMENTS[case], len(ids))
    memory, bonus = x.pop("memory"), x.pop("bonus", None)
    run = functools.partial(segment_call, op, implementation=implementation)
    run = run if bonus is None else functools.partial(run, bonus=bonus)
    output, final = run(two_rows(ids), memory, **x)

    later = np.flatnonzero(ids == 1)[50:]
    changed = {name: a.at[0, later].multiply(0.5) for name, a in x.items()}
    changed = {name: a.at[0, ids == 2].multiply(0.5) for name, a in changed.items()}
    other, ends = run(two_rows(ids), memory.at[0, 1].multiply(2), **changed)
    same = (ids == 4) | (ids == 1)
    same[later] = False
    np.testing.assert_array_equal(output[0, same], other[0, same])
    np.testing.assert_array_equal(final[0, 3], ends[0, 3])
    assert not np.array_equal(output[0, later], other[0, later])

    for segment in (1, 4):
        at = np.flatnonzero(ids == segment)
        alone = {name: a[:1, at] for name, a in x.items()}
        of_one, state = run(None, memory[:1, segment - 1], **alone)
        assert error(output[:1, at], of_one) < 1e-4
        assert error(final[:1, segment - 1], state) < 1e-4
