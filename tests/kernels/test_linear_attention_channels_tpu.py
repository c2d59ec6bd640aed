"""Tests of the TPU kernels of linear attention with a decay per key or value channel: compared with the
recurrence in the interpreter, on the CPU, and lowered for a TPU.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from lsm_jax import ops
from pallas_kernels.linear_attention import linear_attention, unsupported
from pallas_kernels.linear_attention.cases import TPU_CHANNEL_INTERPRETED, TPU_TOLERANCE
from pallas_kernels.linear_attention.tpu import channel_decay as tpu_channels
from pallas_kernels.linear_attention.tpu import value_decay as tpu_values
from pallas_kernels.tpu import halving as tpu_halving
from tests.kernels import on_tpu
from tests.kernels import test_linear_attention_gpu as on_gpu

SCALE = on_gpu.SCALE
STRONG = [0.0, -1e-3, -0.1, -1.0, -30.0]


def make(dims, kind="channel", *, dtype=jnp.float32, documents=False, decays=STRONG, bonus=False):
    """Return the inputs of linear attention that are differentiated, by name, with log decays of the kind
    `kind` drawn from `decays`, and the index of each token's document, or None without `documents`.
    """
    x = on_gpu.make(*dims, documents=False, decay=kind, bonus=bonus)
    del x["run"]
    rng = np.random.default_rng(3)
    name = "value_log_decay" if kind == "value channel" else "log_decay"
    x[name] = jnp.asarray(rng.choice(decays, size=x[name].shape), jnp.float32)
    run = on_tpu.runs(dims[0]) if documents else None
    return x | {n: x[n].astype(dtype) for n in "qkv"}, run


def fused(x, run, interpret=True):
    return linear_attention(
        **x, run=run, scale=SCALE, implementation="mosaic_tpu", interpret=interpret
    )


def compare(x, run, tolerance):
    on_tpu.compare(fused, on_gpu.by_token, x, run, tolerance)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if "short" in n else pytest.mark.slow)
        for n in TPU_CHANNEL_INTERPRETED
    ],
)
def test_equals_the_recurrence_in_value_and_every_gradient(name, monkeypatch):
    if "short" in name:
        for backend in (tpu_channels, tpu_values):
            monkeypatch.setattr(backend, "CHUNK", 16)
    case = TPU_CHANNEL_INTERPRETED[name]
    dims = case.length, *case.heads, case.key_dim, case.value_dim
    x, run = make(dims, case.decay, documents=case.documents, bonus=case.bonus)
    compare(x, run, TPU_TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [dict(), dict(bonus=True), dict(kind="value channel")],
    ids=["key", "bonus", "value"],
)
def test_bfloat16_is_as_exact_as_its_operands(options):
    compare(*make((256, 1, 1, 1, 64, 64), dtype=jnp.bfloat16, **options), 1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["channel", "value channel"])
def test_has_no_races_and_extreme_decays_leave_no_nan(kind):
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    x, run = make((130, 1, 1, 1, 8, 8), kind, documents=True, decays=[0, -0.1, -3e38])
    watched = pltpu.InterpretParams(detect_races=True)
    output, final = fused(x, run, watched)
    assert not interpret_pallas_call.races.races_found
    for a, b in zip((output, final), jax.jit(on_gpu.by_token)(**x, run=run), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def test_large_gradients_take_nothing_from_the_precision_of_small_ones():
    """The gradient of the log decay is precise at the tokens of the first half, where it is much smaller than
    at those of the second. Computed as a difference of sums over all later tokens, it would have an error of
    1e-3 there.
    """
    size = 16
    g = np.full((size, 8), -0.01, np.float32)
    x = np.ones((size, 8), np.float32)
    x[size // 2 :] *= 1e4
    masks = tpu_halving.read_masks(None, size)
    zero = jnp.zeros((size, 8))

    def gradient(x, g):
        decays = tpu_halving.chunk_decays(g, masks)
        tiles = tpu_halving.operands(x, x, decays, jnp.float32)
        products = tpu_halving.level_products(jnp.ones((size, size)), tiles, masks)
        terms = tpu_halving.decay_terms(tiles, products)
        return tpu_halving.decay_gradient(terms, zero, zero, zero[:1])

    sums = np.cumsum(np.float64(g), 0)
    i, j, n = np.indices((size, size, size))
    terms = np.exp(np.minimum(sums[:, None] - sums, 0)) * (np.float64(x)[:, None] * x)
    wanted = np.einsum("ijn,ijd->nd", (j < n) & (n <= i), terms)
    np.testing.assert_allclose(jax.jit(gradient)(x, g), wanted, rtol=2e-6)


@functools.cache
def _forward(names):
    return jax.jit(lambda x: fused(x, None)[0])


@pytest.mark.parametrize("kind", ["channel", "value channel"])
def test_causal_to_the_bit(kind):
    x, _ = make((256, 1, 1, 1, 8, 8), kind, dtype=jnp.bfloat16)
    decay = "log_decay" if kind == "channel" else "value_log_decay"
    before = _forward(kind)(x)
    for token in (1, 127, 128, 200):
        changed = {n: x[n].at[:, token:].multiply(-100) for n in "qkv"}
        changed[decay] = x[decay].at[:, token:].add(-20)
        after = _forward(kind)(x | changed)
        np.testing.assert_array_equal(before[:, :token], after[:, :token])
        assert np.any(before[:, token:] != after[:, token:])


@pytest.mark.parametrize("kind", ["channel", "value channel"])
@pytest.mark.parametrize("dims", [(128, 128), pytest.param((64, 64), marks=pytest.mark.slow)])
def test_lowers_for_a_tpu(dims, kind):
    x, run = jax.eval_shape(
        lambda: make((1000, 4, 4, 8, *dims), kind, documents=True, dtype=jnp.bfloat16)
    )
    on_tpu.check_lowering(fused, x, run, dims == (128, 128))


def test_what_is_not_asked_for_is_not_computed():
    x, run = jax.eval_shape(lambda: make((256, 1, 1, 1, 8, 16)))
    arrays = *(x[n] for n in ("q", "k", "v", "log_decay")), run, x["initial"]
    call = functools.partial(tpu_channels.forward, scale=SCALE, interpret=True)
    assert jax.eval_shape(functools.partial(call, save=False), *arrays)[2] is None
    states = jax.eval_shape(call, *arrays)[2]
    assert states.shape == (1, 1, 2, 16, 8)
    gradient = functools.partial(
        tpu_channels.backward, scale=SCALE, decay_gradient=False, interpret=True
    )
    assert jax.eval_shape(gradient, *arrays, states, x["v"], x["initial"])[3] is None


def test_names_the_unmet_requirement():
    def why(dims=(64, 64), kind="channel", change=lambda x: x, **options):
        x, _ = jax.eval_shape(lambda: make((100, 2, 2, 2, *dims), kind, **options))
        x = change(x)
        names = ("q", "k", "v", "log_decay", "bonus", "value_log_decay")
        return unsupported("mosaic_tpu", **{n: x[n] for n in names})

    assert why() is why(kind="value channel") is why(bonus=True) is None
    assert why(dtype=jnp.float16) == "q, k and v all in bfloat16 or all in float32, not float16"
    assert why(dims=(12, 64)) == "K a multiple of 8 up to 256, not 12"
    assert why(dims=(64, 512), kind="value channel") == "V a multiple of 8 up to 256, not 512"
    half = jax.ShapeDtypeStruct((1, 100, 2, 64), jnp.bfloat16)
    assert why(change=lambda x: x | dict(log_decay=half)) == "log_decay in float32, not bfloat16"
    both = "log_decay or value_log_decay, not both"
    assert why(kind="value channel", change=lambda x: x | dict(log_decay=half)) == both
    scalar = jax.ShapeDtypeStruct((1, 100, 2), jnp.float32)
    wanted = "no bonus unless the decay is log_decay [B, T, G, K] alone"
    assert why(bonus=True, change=lambda x: x | dict(log_decay=scalar)) == wanted


def test_linear_memory_runs_it_by_name():
    x, _ = jax.eval_shape(lambda: make((100, 1, 1, 2, 64, 64), bonus=True))
    del x["initial"]

    def lowered(implementation):
        op = functools.partial(ops.linear_memory, implementation=implementation)
        call = jax.jit(lambda x: op(**x)[0])
        return call.trace(x).lower(lowering_platforms=("tpu",)).as_text()

    assert "tpu_custom_call" in lowered("mosaic_tpu")
    assert "tpu_custom_call" not in lowered(None)
