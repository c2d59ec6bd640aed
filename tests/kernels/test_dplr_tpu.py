"""Tests of the TPU kernels of RWKV7's memory, interpreted on the CPU and compared with the recurrence, and
lowered for a TPU.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from lsm_jax import ops
from pallas_kernels.dplr import dplr, unsupported
from pallas_kernels.dplr.cases import TPU_INTERPRETED, TPU_TOLERANCES
from pallas_kernels.dplr.tpu import channel_decay as tpu
from pallas_kernels.tpu import solve
from tests.kernels import on_tpu
from tests.kernels.test_dplr_gpu import SCALE, by_token, make


def given(*dims, dtype=jnp.float32, documents=False, strong=False):
    """Return the arguments of the TPU kernel of RWKV7's memory: the arrays that are differentiated, by name,
    and the index of each token's document, or None without `documents`.
    """
    x = make(*dims, documents=False, strong=strong)
    del x["run"]
    run = on_tpu.runs(dims[0]) if documents else None
    return x | {n: x[n].astype(dtype) for n in ("q", "k", "v", "a", "b")}, run


def fused(x, run, interpret=True):
    return dplr(**x, run=run, scale=SCALE, implementation="mosaic_tpu", interpret=interpret)


def compare(x, run, tolerance):
    on_tpu.compare(fused, by_token, x, run, tolerance)


@pytest.mark.parametrize(
    "case",
    [pytest.param(x, marks=pytest.mark.slow if n else (), id=x.name) for n, x in enumerate(TPU_INTERPRETED)],
)  # fmt: skip
def test_equals_the_recurrence_in_value_and_every_gradient(case, monkeypatch):
    if case.name == "short":
        for backend in (solve, tpu):
            monkeypatch.setattr(backend, "CHUNK", 16)
    inputs = given(*case.dims, documents=case.documents, strong=case.strength)
    compare(*inputs, TPU_TOLERANCES["float32"])


@pytest.mark.slow
@pytest.mark.parametrize("strong", [False, True])
def test_bfloat16_is_as_exact_as_its_operands(strong):
    compare(
        *given(256, 1, 1, 1, 64, 64, dtype=jnp.bfloat16, strong=strong), TPU_TOLERANCES["bfloat16"]
    )


@pytest.mark.slow
def test_has_no_races():
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    x, run = given(130, 1, 1, 1, 8, 8, documents=True)
    fused(x, run, pltpu.InterpretParams(detect_races=True))
    assert not interpret_pallas_call.races.races_found


@pytest.mark.slow
def test_causal_to_the_bit():
    x, _ = given(256, 1, 1, 1, 8, 8, dtype=jnp.bfloat16)
    forward = jax.jit(lambda x: fused(x, None)[0])
    before = forward(x)
    for token in (1, 127, 128, 200):
        changed = {n: x[n].at[:, token:].multiply(-3) for n in ("q", "k", "v")}
        changed |= {n: x[n].at[:, token:].multiply(0.5) for n in ("a", "b", "log_decay")}
        after = forward(x | changed)
        np.testing.assert_array_equal(before[:, :token], after[:, :token])
        assert np.any(before[:, token:] != after[:, token:])


@pytest.mark.parametrize("dims", [(128, 128), pytest.param((64, 64), marks=pytest.mark.slow)])
def test_lowers_for_a_tpu(dims):
    x, run = jax.eval_shape(lambda: given(1000, 4, 4, 8, *dims, documents=True, dtype=jnp.bfloat16))
    on_tpu.check_lowering(fused, x, run, dims == (128, 128))


def test_returns_the_unmet_requirement_and_saves_residuals_on_request_only():
    def why(dims=(64, 64), change=lambda x: x, **options):
        x, _ = jax.eval_shape(lambda: given(128, 2, 2, 2, *dims, **options))
        arrays = {n: change(x)[n] for n in ("q", "k", "v", "a", "b", "log_decay")}
        return unsupported("mosaic_tpu", **arrays)

    assert why() is None
    assert why(dims=(12, 64)) == "K a multiple of 8 up to 256, not 12"
    half = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
    assert (
        why(change=lambda x: x | dict(a=half)) == "a and b in v's dtype, not bfloat16 and float32"
    )
    assert why(change=lambda x: x | dict(log_decay=half)) == "log_decay in float32, not bfloat16"
    x, run = jax.eval_shape(lambda: given(256, 1, 1, 1, 8, 16))
    arrays = *(x[n] for n in ("q", "k", "v", "a", "b", "log_decay")), run, x["initial"]
    call = functools.partial(tpu.forward, scale=SCALE, interpret=True)
    assert jax.eval_shape(functools.partial(call, save=False), *arrays)[2] is None
    saved = jax.eval_shape(call, *arrays)[2]
    assert saved.states.shape == (1, 1, 2, 16, 8) and saved.inverse.shape == (1, 1, 256, 128)


def test_dplr_memory_runs_it_by_name():
    x, _ = jax.eval_shape(lambda: given(100, 1, 1, 2, 64, 64))
    del x["initial"]

    def lowered(implementation):
        op = functools.partial(ops.dplr_memory, implementation=implementation)
        call = jax.jit(lambda x: op(**x)[0])
        return call.trace(x).lower(lowering_platforms=("tpu",)).as_text()

    assert "tpu_custom_call" in lowered("mosaic_tpu")
    assert "tpu_custom_call" not in lowered(None)
