"""Tests of the TPU kernels of attention with forget gates: compared in the interpreter with attention from
all scores at once, and lowered for a TPU.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from lsm_jax import ops
from pallas_kernels.forgetting_attention import api, bounds, tpu, unsupported
from pallas_kernels.forgetting_attention.tpu import requirements
from tests.kernels.test_forgetting_attention_gpu import SCALE, make, plain

PLACES = ("run", "written")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(requirements, "TILES", (32,))


def given(*dims, dtype=jnp.float32, **options):
    """Return the inputs of attention that are differentiated (queries, keys, values and the sums of gates),
    and the arrays that are not (such as documents), both by name.
    """
    inputs = make(*dims, **options)
    places = {n: inputs.pop(n) for n in PLACES}
    return inputs | {n: inputs[n].astype(dtype) for n in "qkv"}, places


def fused(x, interpret=True, **places):
    call = functools.partial(api.forgetting_attention, scale=SCALE, interpret=interpret)
    return call(**x, **places, implementation="mosaic_tpu")


def compare(inputs, places, tolerance, **options):
    """Check that the output and every gradient of attention's TPU kernel equal those of attention from all
    scores at once, up to `tolerance` relative to the largest entry; return those of the kernel.
    """

    @functools.partial(jax.jit, static_argnums=0)
    def both(function, x, d_output):
        output, pull = jax.vjp(function, x)
        return output, pull(d_output.astype(output.dtype))[0]

    rng = np.random.default_rng(1)
    q, v = inputs["q"], inputs["v"]
    d_output = jnp.asarray(rng.normal(size=(*q.shape[:3], v.shape[3])), v.dtype)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
    wanted = both(lambda x: plain(**x, **dict(window=None) | places), wide, d_output)
    actual = both(lambda x: fused(x, **places, **options), inputs, d_output)
    grads, wanted_grads = actual[1], wanted[1]
    if inputs["sums"] is not None:
        np.testing.assert_array_equal(grads["sums"][1], 0)  # the whole gradient is on the high part
        # The gradient of a gate is the sum over all later tokens, in which nearly everything cancels.
        for x in (grads, wanted_grads):
            high = np.float64(x["sums"][0])
            x["sums"] = high, high[:, ::-1].cumsum(1)
    for (path, a), b in zip(
        jax.tree.leaves_with_path(actual), jax.tree.leaves(wanted), strict=True
    ):
        a, b = np.float64(a), np.float64(b)
        scale = max(1, np.abs(b).max())
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale, err_msg=str(path))
    return actual


CASES = {
    "grouped heads, gates": dict(dims=(100, 4, 2, 8)),
    "documents, strong gates": dict(dims=(224, 2, 1, 8), gates="strong", documents=True),
    "window": dict(dims=(160, 2, 2, 8), window=50),
    "window without gates": dict(dims=(160, 1, 1, 8), gates=None, window=33),
    "masked documents": dict(dims=(100, 2, 1, 8), documents=True, masked=True),
    "wide heads": dict(dims=(70, 2, 2, 128)),
    "masked without gates": dict(dims=(70, 2, 1, 8), gates=None, masked=True),
    "one token": dict(dims=(1, 1, 1, 8)),
}
FAST = ("masked documents",)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in CASES]
)
def test_equals_attention_in_value_and_every_gradient(name):
    options = dict(CASES[name])
    window = options.pop("window", None)
    inputs, places = given(*options.pop("dims"), **options)
    compare(inputs, places | dict(window=window), 2e-5 if "strong" in name else 2e-6)


@pytest.mark.slow
def test_bfloat16_is_as_exact_as_its_operands():
    inputs, places = given(100, 2, 1, 16, dtype=jnp.bfloat16)
    compare(inputs, places, 1e-2)


@pytest.mark.slow
def test_has_no_races():
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    inputs, places = given(70, 1, 1, 8, documents=True)
    compare(inputs, places, 2e-6, interpret=pltpu.InterpretParams(detect_races=True))
    assert not interpret_pallas_call.races.races_found


@pytest.mark.slow
@pytest.mark.parametrize("documents", [False, True])
def test_pruning_changes_nothing_that_matters(documents):
    inputs, places = given(256, 2, 1, 8, documents=documents)
    rows = bounds.Rows(tuple(jnp.swapaxes(x, 1, 2) for x in inputs["sums"]), places["run"])
    options = dict(scale=SCALE, window=None, prune=True, tile_size=32)
    found = bounds.find_bounds(inputs["q"], inputs["k"], rows, **options)
    assert found.first_of_query.max() >= 2 and jnp.any(found.first < found.first_common)

    @functools.partial(jax.jit, static_argnums=1)
    def both(x, prune):
        output, pull = jax.vjp(lambda x: fused(x, prune=prune, **places), x)
        return output, pull(jnp.sin(jnp.arange(output.size)).reshape(output.shape))

    for a, b in zip(
        *(jax.tree.leaves(both(inputs, prune)) for prune in (True, False)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)


@functools.cache
def _output(prune):
    return jax.jit(lambda x: fused(x, prune=prune))


@pytest.mark.parametrize("prune", [pytest.param(True, marks=pytest.mark.slow), False])
def test_causal_to_the_bit(prune):
    inputs, _ = given(160, 2, 1, 8, gates="strong", dtype=jnp.bfloat16)
    before = _output(prune)(inputs)
    for token in (1, 32, 77, 159):
        changed = {n: inputs[n].at[:, token:].multiply(-20) for n in "qkv"}
        changed["sums"] = tuple(x.at[:, token:].multiply(2) for x in inputs["sums"])
        after = _output(prune)(changed)
        np.testing.assert_array_equal(before[:, :token], after[:, :token])
        assert np.any(before[:, token:] != after[:, token:])


def for_a_tpu():
    return use_abstract_mesh(
        AbstractMesh((), (), abstract_device=AbstractDevice("TPU v5 lite", 1, platform="tpu"))
    )


@pytest.mark.parametrize("dim", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_lowers_for_a_tpu(dim, monkeypatch):
    monkeypatch.undo()
    struct = jax.ShapeDtypeStruct
    q, k = (struct((2, 1000, heads, dim), jnp.bfloat16) for heads in (4, 2))
    sums, run = struct((2, 1000, 4), jnp.float32), struct((2, 1000), jnp.int32)

    def both(q, k, v, high, low, run):
        def call(*x):
            x = dict(q=x[0], k=x[1], v=x[2], sums=x[3:])
            return fused(x, interpret=False, run=run, window=700)

        output, pull = jax.vjp(call, q, k, v, high, low)
        return pull(output)

    with for_a_tpu():
        text = jax.jit(both).trace(q, k, k, sums, sums, run).lower(lowering_platforms=("tpu",))
    text = text.as_text()
    assert text.count("custom_call @tpu_custom_call") == 3
    transposed = [x for x in text.splitlines() if "stablehlo.transpose" in x and "bf16" in x]
    assert (not transposed) == (dim == 128)  # heads of 128 channels are not transposed


def test_names_the_requirement_that_is_not_met():
    def unmet(heads=(2, 2, 2), dims=(64, 64), dtype=jnp.bfloat16):
        shapes = zip(heads, (dims[0], *dims), strict=True)
        structs = (jax.ShapeDtypeStruct((1, 9, *x), dtype) for x in shapes)
        return unsupported("mosaic_tpu", *structs)

    assert unmet() is None and unmet((4, 2, 2), (256, 128), jnp.float32) is None
    assert unmet(dtype=jnp.float16) == "q, k and v all in bfloat16 or all in float32, not float16"
    assert unmet(dims=(12, 64)) == "K a multiple of 8 up to 256, not 12"
    assert unmet(dims=(64, 512)) == "V a multiple of 8 up to 256, not 512"
    assert unmet((3, 2, 2)) == (
        "as many key heads as value heads, a divisor of the query heads, "
        "not 2 and 2 for 3 query heads"
    )


def test_attention_takes_it_by_name(monkeypatch):
    monkeypatch.undo()
    struct = jax.ShapeDtypeStruct
    q, gates = struct((1, 64, 2, 64), jnp.float32), struct((1, 64, 2), jnp.float32)

    def text(**more):
        call = lambda q, g: ops.attention(q, q, q, log_forget=g, **more)[0]  # noqa: E731
        return jax.jit(call).trace(q, gates).lower(lowering_platforms=("tpu",)).as_text()

    assert "tpu_custom_call" not in text()
    assert "tpu_custom_call" in text(implementation="mosaic_tpu")
    with pytest.raises(NotImplementedError, match="'mosaic_tpu' .* no initial_state"):
        text(
            initial_state=ops.attention_state(1, 64, 2, 64, 64, forget_heads=2),
            implementation="mosaic_tpu",
        )


@pytest.mark.parametrize("length, size", [(1, 128), (128, 128), (129, 256), (513, 512)])
def test_tiles_grow_with_the_sequence(length, size, monkeypatch):
    monkeypatch.undo()
    assert tpu.tile(length) == size
