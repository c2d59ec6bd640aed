"""Tests of the TPU kernels of the delta rule, interpreted on the CPU and compared with the recurrence, and
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
from pallas_kernels.delta_rule import delta_rule, unsupported
from pallas_kernels.delta_rule.cases import TPU_INTERPRETED, TPU_TOLERANCES
from pallas_kernels.delta_rule.tpu import channel_decay as tpu_channels
from pallas_kernels.delta_rule.tpu import scalar_decay as tpu
from pallas_kernels.tpu import solve
from tests.kernels import on_tpu
from tests.kernels.test_delta_rule_gpu import SCALE, by_token, make

FIELDS = ("q", "k", "v", "beta", "log_decay", "initial")


def given(*dims, dtype=jnp.float32, documents=False, decay="mild", **options):
    """Return the arguments of the delta rule's TPU kernel: the arrays that are differentiated, by name, and
    the index of each token's document, or None without `documents`.
    """
    inputs = make(*dims, documents=False, decay=decay, **options)
    del inputs["run"]
    run = on_tpu.runs(dims[0]) if documents else None
    return inputs | {n: inputs[n].astype(dtype) for n in "qkv"}, run


def fused(x, run, interpret=True):
    return delta_rule(**x, run=run, scale=SCALE, implementation="mosaic_tpu", interpret=interpret)


def compare(x, run, tolerance):
    on_tpu.compare(fused, by_token, x, run, tolerance)


@pytest.mark.parametrize(
    "case",
    [pytest.param(x, marks=pytest.mark.slow if n > 2 else (), id=x.name) for n, x in enumerate(TPU_INTERPRETED)],
)  # fmt: skip
def test_equals_the_recurrence_in_value_and_every_gradient(case, monkeypatch):
    for backend in (tpu, solve):  # several programs with few heads each
        monkeypatch.setattr(backend, "HEADS", 2)
    if "short" in case.name:
        for backend in (tpu, tpu_channels, solve):
            monkeypatch.setattr(backend, "CHUNK", 16)
    tolerance = TPU_TOLERANCES["float32, keys alike" if case.alike else "float32"]
    compare(*given(*case.dims, documents=case.documents, **case.options), tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("decay", ["mild", "strong channel"])
@pytest.mark.parametrize("alike", [False, True])
def test_bfloat16_is_as_exact_as_its_operands(alike, decay):
    options = dict(dtype=jnp.bfloat16, alike=alike, decay=decay)
    compare(*given(256, 1, 1, 1, 64, 64, **options), TPU_TOLERANCES["bfloat16"])


@pytest.mark.slow
@pytest.mark.parametrize("decay", ["mild", "channel"])
def test_has_no_races(decay):
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    inputs, run = given(130, 1, 1, 1, 8, 8, documents=True, decay=decay)
    fused(inputs, run, pltpu.InterpretParams(detect_races=True))
    assert not interpret_pallas_call.races.races_found


@functools.cache
def _forward():
    return jax.jit(lambda x: fused(x, None)[0])


@pytest.mark.parametrize("decay", ["mild", pytest.param("channel", marks=pytest.mark.slow)])
def test_causal_to_the_bit(decay):
    inputs, _ = given(256, 1, 1, 1, 8, 8, dtype=jnp.bfloat16, decay=decay)
    before = _forward()(inputs)
    for token in (1, 127, 128, 200):
        changed = {n: inputs[n].at[:, token:].multiply(-3) for n in ("q", "v")}
        changed |= {n: inputs[n].at[:, token:].multiply(0.5) for n in ("k", "beta")}
        changed["log_decay"] = inputs["log_decay"].at[:, token:].multiply(3)
        after = _forward()(inputs | changed)
        np.testing.assert_array_equal(before[:, :token], after[:, :token])
        assert np.any(before[:, token:] != after[:, token:])


@pytest.mark.parametrize("decay", ["mild", "channel"])
@pytest.mark.parametrize("dims", [(128, 128), pytest.param((64, 64), marks=pytest.mark.slow)])
def test_lowers_for_a_tpu(dims, decay):
    inputs, run = jax.eval_shape(
        lambda: given(1000, 4, 4, 8, *dims, documents=True, dtype=jnp.bfloat16, decay=decay)
    )
    on_tpu.check_lowering(fused, inputs, run, dims == (128, 128))


def test_residuals_and_the_gradient_of_the_decay_are_computed_on_request_only():
    inputs, run = jax.eval_shape(lambda: given(256, 1, 1, 1, 8, 8))
    arrays = *(inputs[n] for n in FIELDS[:5]), run, inputs["initial"]
    call = functools.partial(tpu.forward, scale=SCALE, interpret=True)
    assert jax.eval_shape(functools.partial(call, save=False), *arrays)[2] is None
    saved = jax.eval_shape(call, *arrays)[2]
    assert saved.states.shape == (1, 1, 2, 8, 8) and saved.inverse.shape == (1, 1, 256, 128)
    gradient = functools.partial(tpu.backward, scale=SCALE, decay_gradient=False, interpret=True)
    of_values = inputs["v"], inputs["initial"]
    assert jax.eval_shape(gradient, *arrays, saved, *of_values)[4] is None


def test_returns_the_unmet_requirement():
    def why(dims=(64, 64), **options):
        x, _ = jax.eval_shape(lambda: given(128, 2, 2, 2, *dims, **options))
        return unsupported("mosaic_tpu", x["q"], x["k"], x["v"], x["log_decay"])

    assert why() is None
    assert why(dtype=jnp.float16) == "q, k and v all in bfloat16 or all in float32, not float16"
    assert why(dims=(12, 64)) == "K a multiple of 8 up to 256, not 12"
    assert (
        why(dims=(64, 264))
        == "V a multiple of 8 up to 256, or a multiple of 256 in parts if q has no more heads than v, not 264"
    )
    assert why(dims=(64, 512)) is None is why(dims=(64, 512), decay="channel")  # in parts of 256
    assert why(decay="channel") is None
    assert why(dims=(12, 64), decay="channel") == "K a multiple of 8 up to 256, not 12"
    x, run = given(8, 1, 1, 1, 8, 8, decay="channel")
    x["log_decay"] = x["log_decay"].astype(jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="requires log_decay in float32, not bfloat16"):
        fused(x, run)


def test_delta_memory_runs_it_by_name():
    inputs, _ = jax.eval_shape(lambda: given(100, 1, 1, 2, 64, 64))
    del inputs["initial"]

    def lowered(implementation):
        op = functools.partial(ops.delta_memory, implementation=implementation)
        call = jax.jit(lambda x: op(**x)[0])
        return call.trace(inputs).lower(lowering_platforms=("tpu",)).as_text()

    assert "tpu_custom_call" in lowered("mosaic_tpu")
    assert "tpu_custom_call" not in lowered(None)
