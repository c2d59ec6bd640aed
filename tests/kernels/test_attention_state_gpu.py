"""Tests of Hopper's kernel of attention with the keys of a state: compared with XLA in Mosaic GPU's
interpreter, and lowered for an H200.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import pallas_kernels.forgetting_attention
from benchmarks.calls.attention import (
    DIM,
    HEADS,
    KEY_HEADS,
    cut,
    empty_state,
    pieces,
    state_gradients,
    tokens_of,
)  # fmt: skip
from lsm_jax import mixers, models, ops
from lsm_jax.ops.backends.select import clear_choices
from pallas_kernels.compat import gpu_interpreter, races_found
from pallas_kernels.forgetting_attention import forgetting_attention
from pallas_kernels.forgetting_attention.cases import SPLITS
from tests.kernels.test_forgetting_attention_gpu import make, plain
from tests.kernels.test_linear_attention_gpu import error


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    """A fixture that makes `ops.attention` run its Hopper kernel in the interpreter, on a CPU."""
    kernel = functools.partial(forgetting_attention, interpret=gpu_interpreter())
    monkeypatch.setattr(pallas_kernels.forgetting_attention, "forgetting_attention", kernel)


def assert_equal(actual, expected, tolerance=1e-2):
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True
    ):
        if a.dtype != jax.dtypes.float0:
            np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
            assert error(jnp.nan_to_num(a), jnp.nan_to_num(b)) < tolerance, path


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "documents" else pytest.mark.slow) for n in SPLITS],
)
def test_pieces_equal_xla(name):
    check_pieces(name)
    assert not races_found()


def check_pieces(name):
    """Compare the outputs and states of the calls of SPLITS[name], made one after another from the state before,
    between the fused kernel and XLA.
    """
    for actual, expected in pieces(name, "mosaic_gpu"):
        assert_equal(actual[0], expected[0], 5e-3)
        for a, b in zip(jax.tree.leaves(actual[1]), jax.tree.leaves(expected[1]), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_a_ring_of_several_rows_at_different_counts():
    """The kernel attends to the keys of a state in which row 0 has 5 tokens of its document and row 1 has 90.
    A NaN among the stored values of an earlier document does not change the output.
    """
    arrays = tokens_of(160)
    ids = np.ones((2, 160), np.int32)
    ids[0, 85:] = 2
    arrays["segment_ids"] = jnp.asarray(ids)
    first = cut(arrays, 0, 90)
    _, state = ops.attention(**first, initial_state=empty_state(160), implementation="xla")
    np.testing.assert_array_equal(state.count, [5, 90])
    piece = cut(arrays, 90, 160)
    expected, _ = ops.attention(**piece, initial_state=state, implementation="xla")
    stale = state._replace(values=state.values.at[0, 50:60].set(jnp.nan))
    actual, _ = ops.attention(**piece, initial_state=stale, implementation="mosaic_gpu")
    assert error(actual, expected) < 5e-3


@pytest.mark.slow
def test_every_gradient_equals_xla():
    check_gradients()


def check_gradients():
    """The kernel's gradients of the tokens, and of the state's keys, values and sums of gates, equal those of
    XLA's attention.
    """
    assert_equal(state_gradients("mosaic_gpu"), state_gradients("xla"))


@pytest.mark.slow
def test_heads_of_256_are_differentiated_by_xla():
    """Attention with heads of 256 channels, by the Hopper kernel, has XLA's derivatives to the bit, of the tokens and of a
    state, under `jax.vmap` and `jax.checkpoint` too.
    """
    arrays = tokens_of(90, dim=256)
    arrays["segment_ids"] = jnp.asarray(np.arange(90) // 40 + 1 + np.zeros((2, 1), int), jnp.int32)
    first = cut(arrays, 0, 20) | dict(implementation="xla")
    _, state = ops.attention(**first, initial_state=empty_state(96, dim=256))
    piece = cut(arrays, 20, 90)

    def gradients(implementation):
        @jax.checkpoint
        def attend(piece, state):
            return ops.attention(**piece, initial_state=state, implementation=implementation)[0]

        def of_row(piece, state):
            one = jax.tree.map(lambda x: x[None], (piece, state))
            return jnp.sum(attend(*one).astype(jnp.float32) ** 2)

        gradient = jax.value_and_grad(of_row, argnums=(0, 1), allow_int=True)
        return jax.jit(jax.vmap(gradient))(piece, state)

    actual, expected = (jax.tree.leaves(gradients(name)) for name in ("mosaic_gpu", "xla"))
    for a, b in zip(actual, expected, strict=True):
        if a.dtype != jax.dtypes.float0:
            np.testing.assert_array_equal(np.float32(a), np.float32(b))
    assert ops.choices()["attention"].count("mosaic_gpu (xla where differentiated)")


@pytest.mark.slow
def test_causal_to_the_bit():
    arrays, state = tokens_of(100, batch=1), empty_state(130, batch=1)
    first = tokens_of(30, seed=1, batch=1) | dict(implementation="xla")
    _, state = ops.attention(**first, initial_state=state)
    changed = {name: x.at[:, 77:].multiply(2) for name, x in arrays.items()}
    run = functools.partial(ops.attention, initial_state=state, implementation="mosaic_gpu")
    outputs = [run(**x)[0][:, :77] for x in (arrays, changed)]
    np.testing.assert_array_equal(*outputs)


@pytest.mark.slow
@pytest.mark.parametrize("places", [None, (0, 256)])
def test_kernel_with_earlier_keys(places):
    """Attention's Hopper kernel, called with more keys than queries, since keys precede the queries' row, has
    the output and gradients of attention computed from all scores at once. The queries are those of all
    tokens, or of the two parts of the row that begin at `places`.
    """
    earlier, length = (200, 300) if places is None else (100, 512)
    inputs = make(earlier + length, 2, 1, 64, gates="strong", documents=True, masked=True)
    where = {n: inputs.pop(n) for n in ("run", "written")}
    parts = [(0, length)] if places is None else [(p, p + 128) for p in places]

    def queries(x):
        return jnp.concatenate([x[:, earlier + a : earlier + b] for a, b in parts], axis=1)

    starts = None if places is None else jnp.asarray(places, jnp.int32)
    call = functools.partial(forgetting_attention, scale=0.2, interpret=gpu_interpreter())
    run = lambda x: call(**x | dict(q=queries(x["q"])), **where, places=starts, earlier=earlier)  # noqa: E731
    widened = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
    expected, wanted = jax.vjp(lambda x: queries(plain(**x, **where, window=None)), widened)
    actual, pull = jax.vjp(run, inputs)
    assert error(actual, expected) < 5e-3
    d_output = jnp.asarray(np.random.default_rng(1).normal(size=actual.shape), actual.dtype)
    (grads,), (wanted,) = pull(d_output), wanted(d_output.astype(jnp.float32))
    for name in "qkv":
        assert error(grads[name], wanted[name]) < 1e-2, name
    assert error(grads["sums"][0], wanted["sums"][0]) < 1e-2


def test_earlier_keys_are_checked():
    x = jnp.ones((1, 128, 2, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="earlier=129; accepted are 0 to the number of keys, 128"):
        forgetting_attention(x, x, x, scale=1.0, earlier=129)
    with pytest.raises(ValueError, match="places is not given with 128 queries and 64 keys"):
        forgetting_attention(x, x, x, scale=1.0, earlier=64)
    with pytest.raises(NotImplementedError, match="requires as many queries as keys"):
        forgetting_attention(x[:, :64], x, x, scale=1.0, earlier=64, implementation="mosaic_tpu")


def lowered(function, *arguments):
    """Return the program of `function` of these arguments, lowered for an H200, and the backend that
    `ops.attention` selected in it.
    """
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    clear_choices()
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        traced = jax.jit(function).trace(*arguments)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return text, ops.choices()["attention"]


@pytest.mark.parametrize("config", [mixers.FoXConfig, mixers.SoftmaxConfig])
def test_prefill_runs_fused_and_decoding_does_not(config, monkeypatch):
    monkeypatch.undo()  # lowered for the card, not interpreted
    heads = HEADS if config is mixers.FoXConfig else None
    state = jax.eval_shape(
        lambda: ops.attention_state(2, 300, 2, DIM, DIM, forget_heads=heads, dtype=jnp.bfloat16)
    )

    def call(length, **options):
        struct = jax.ShapeDtypeStruct
        q = struct((2, length, 2, DIM), jnp.bfloat16)
        gates = None if heads is None else struct((2, length, 2), jnp.float32)
        run = lambda q, g, s: ops.attention(q, q, q, log_forget=g, initial_state=s, **options)  # noqa: E731
        return lowered(run, q, gates, state)

    for length in (64, 100, 128):
        text, chosen = call(length)
        assert "mosaic_gpu" in text and chosen.startswith("mosaic_gpu on NVIDIA 9.0"), chosen
    assert "mosaic_gpu" in call(128, window=200)[0]
    text, chosen = call(1)
    assert "mosaic_gpu" not in text
    assert "mosaic_gpu not used: XLA continues from a state with fewer than 64 tokens" in chosen


# Query heads, key heads and their channels of released models.
RELEASED = {
    "Qwen3.5-4B": (16, 4, 256),
    "Qwen3-Next-80B-A3B": (16, 2, 256),
    "Granite-4.0-H-Small and Nemotron-H-8B": (32, 8, 128),
    "SmolLM2-360M": (15, 5, 64),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "Qwen3.5-4B" else pytest.mark.slow) for n in RELEASED],
)
def test_released_models_read_pieces_fused(name, monkeypatch):
    """At the heads of released models, attention to held keys runs by the Hopper kernel for a piece of 4,096 tokens, and
    by XLA for one token.
    """
    monkeypatch.undo()
    heads, key_heads, dim = RELEASED[name]
    sizes = (1, 8192, key_heads, dim, dim)
    state = jax.eval_shape(lambda: ops.attention_state(*sizes, dtype=jnp.bfloat16))

    def attend(q, k, state):
        return ops.attention(q, k, k, initial_state=state)

    def arguments(length):
        return (jax.ShapeDtypeStruct((1, length, n, dim), jnp.bfloat16) for n in (heads, key_heads))

    text, chosen = lowered(attend, *arguments(4096), state)
    assert "mosaic_gpu" in text and chosen.startswith("mosaic_gpu"), chosen
    text, chosen = lowered(attend, *arguments(1), state)
    assert "mosaic_gpu" not in text and chosen.startswith("xla"), chosen


def test_a_model_reads_pieces_fused(monkeypatch):
    """A model that reads tokens and a state, as in evaluation by pieces and in chunked prefill, computes
    attention with the Hopper kernel for 128 tokens, and without it for one token.
    """
    monkeypatch.undo()
    config = models.fox("pro", "125m", vocab_size=64)
    config.hidden_size, config.num_layers = 128, 1
    config.layers["L"].mixer.num_heads = 2
    model = nnx.eval_shape(lambda: models.Decoder(config, rngs=nnx.Rngs(0)))
    state = jax.eval_shape(lambda: model.init_state(1, 512))
    graph, params = nnx.split(model)

    def read(params, tokens, state):
        return nnx.merge(graph, params).hidden(tokens, state=state)[:2]

    for length, fused in ((128, True), (1, False)):
        tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
        assert ("mosaic_gpu" in lowered(read, params, tokens, state)[0]) == fused


def test_one_state_per_segment_is_refused():
    arrays = tokens_of(70) | dict(segment_ids=jnp.ones((2, 70), jnp.int32))
    state = ops.attention_state(
        2, 70, KEY_HEADS, DIM, DIM, num_segments=2, forget_heads=HEADS, dtype=jnp.bfloat16
    )
    with pytest.raises(NotImplementedError, match="requires one state per row"):
        ops.attention(**arrays, initial_state=state, implementation="mosaic_gpu")
