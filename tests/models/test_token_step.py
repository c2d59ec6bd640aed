"""Tests of one token by few kernels, in Mosaic GPU's interpreter."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lsm_jax import feedforward, mixers, models
from lsm_jax.models import sampling, token_step, token_tiles
from pallas_kernels.compat import gpu_interpreter, races_found
from pallas_kernels.decode_step import deferred
from pallas_kernels.row_product.cases import TILES_COMPILED

KEY = jax.random.key(0)


def new_model(method: str, heads: int = 1, **fields) -> models.Decoder:
    """Return a model of two layers of width 256, or of 256 a head, with parameters large enough that each changes the logits."""
    config = models.lm(method, "tiny", vocab_size=64)
    config.num_layers, config.hidden_size, config.dtype = 2, 256 * heads, "bfloat16"
    config.layers["L"].mixer = mixers.METHODS[method].config.for_width(256 * heads)
    if method == "gla":
        config.layers["L"].mixer.num_heads = heads
    config.layers["L"].feedforward = feedforward.SwiGLUConfig(intermediate_size=256)
    for name, value in fields.items():
        setattr(config, name, value)
    graph, params = nnx.split(models.Decoder(config, rngs=nnx.Rngs(0)))
    keys = iter(jax.random.split(KEY, len(jax.tree.leaves(params))))

    def stirred(x):
        x = 3 * x if x.ndim > 2 else x
        return x + 0.1 * jax.random.normal(next(keys), x.shape) if x.ndim == 2 else x

    return nnx.merge(graph, jax.tree.map(stirred, params))


def assert_as_exact(got, layers, exact) -> None:
    """Check that an array is about as close to that of float32 as the layers' in bfloat16 is."""
    got, layers, exact = (np.asarray(x, np.float64) for x in (got, layers, exact))
    error, known = (np.sqrt(np.mean((x - exact) ** 2)) for x in (got, layers))
    assert error <= 1.5 * known + 1e-6 * np.abs(exact).max()
    assert error < 0.03 * max(np.sqrt(np.mean(exact**2)), 1e-6) or not exact.any()


def prepared_model(batch: int, name: str, **fields):
    """Return a model, the modules of its periods, its matrices for rows of this number, a token of each row, and the state after a prompt."""
    model = new_model(name, **fields)
    prompt = jax.random.randint(KEY, (batch, 6), 0, 64)
    read = dict(capacity=64, prefill_chunk=None, unroll_layers=True)
    _, state = sampling.read_prompt(*nnx.split(model), prompt, None, **read)
    periods, token = model.unstack_periods(), jnp.arange(3, 3 + batch) % 64
    return model, periods, token_step.prepare(model, periods, batch), token, state


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(token_step, "_INTERPRET", gpu_interpreter())


@pytest.mark.parametrize(
    ("name", "fields", "batch"),
    [
        ("gla", dict(tie_embeddings=True), 1),
        ("gla", dict(tie_embeddings=True), 6),
        ("gla", dict(tie_embeddings=True), 64),
        pytest.param("gla", dict(tie_embeddings=True), 3, marks=pytest.mark.slow),
        pytest.param(
            "gla", dict(tie_embeddings=False, logits_cap=5.0, logits_scale=0.5), 1, marks=pytest.mark.slow
        ),
        pytest.param("gated_deltanet", {}, 1, marks=pytest.mark.slow),
        pytest.param("softmax", {}, 1, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_logits_and_states_are_those_of_the_layers(name, fields, batch, interpreted, monkeypatch):  # fmt: skip
    """With kernels of their own for a mixer's token, and without; of one row, and of more."""
    monkeypatch.setattr(token_step, "OTHER_MIXERS", name != "gla")
    model, periods, prepared, token, state = prepared_model(batch, name, **fields)
    assert token_step.serves(model, batch)
    assert all(m.into is not None for of in prepared.layers for m in of) is (name == "gla")
    logits, after, _ = jax.jit(token_step.pass_token)(model, periods, prepared, token, state)
    assert not races_found()
    assert logits.dtype == jnp.float32
    known = {}
    for dtype in ("bfloat16", "float32"):
        model.dtype = dtype
        hidden, states, _ = model.hidden(token[:, None], state=state, periods=periods)
        known[dtype] = model.logits(hidden[:, 0]), states
    jax.tree.map(assert_as_exact, (logits, after), known["bfloat16"], known["float32"])


def test_the_tilings_are_among_those_that_are_compared_on_a_card():
    assert {*token_tiles.TILINGS.values()} <= {case.tiling for case in TILES_COMPILED}


@pytest.mark.parametrize(
    ("heads", "tokens", "group", "programs"),
    [
        (1, 1, 8, None),
        pytest.param(2, 5, 4, None, id="a group and a token", marks=pytest.mark.slow),
        pytest.param(1, 2, 8, 44, id="rows in turn", marks=pytest.mark.slow),
    ],
)
def test_logits_by_tiles_are_those_of_the_layers(
    heads, tokens, group, programs, interpreted, monkeypatch
):
    """Whole tokens of rows whose products are by tiles and whose writes are deferred, of scales of the norms that differ from 1: the logits of the
    last, and the state, as exact as the layers'; every norm but the first has its squares from the kernel before it.
    """
    batch = 64
    monkeypatch.setattr(token_step, "GROUP", group)
    monkeypatch.setattr(deferred, "PROGRAMS", {group: programs} if programs else {})
    in_turn, step = [], deferred.deferred_rows.step
    monkeypatch.setattr(deferred.deferred_rows, "step", lambda *a, **o: in_turn.append(o) or step(*a, **o))  # fmt: skip
    monkeypatch.setattr(token_step, "DEFERRED_ROWS", batch)
    fields = dict(tie_embeddings=True, heads=heads)
    model, periods, prepared, token, state = prepared_model(batch, "gla", **fields)
    assert all(m.gate_up is not None for of in prepared.layers for m in of)
    pending, after, given = token_step.empty_writes(model, state, batch), state, []
    product = token_tiles.product

    def watched(name, *arguments, **options):
        if "eps" in options:
            given.append((name, options["squares"] is not None))
        return product(name, *arguments, **options)

    monkeypatch.setattr(token_tiles, "product", watched)
    run = jax.jit(token_step.pass_token)
    for i in range(tokens):
        logits, after, pending = run(model, periods, prepared, (token + i) % 64, after, pending)
        assert not races_found()
    with pytest.raises(ValueError, match="`pending` is None, but these rows' writes are deferred"):
        token_step.pass_token(model, periods, prepared, token, state)
    layer = [("into", True), ("out", True), ("gate_up", True)]
    traced = [("into", False), *layer[1:], *layer]  # once, or again where a state's kind differs
    assert given and given == traced * (len(given) // len(traced))
    assert bool(in_turn) is (programs is not None)
    assert int(pending.count) == tokens % group
    after = token_step.with_writes(after, pending)
    known = {}
    for dtype in ("bfloat16", "float32"):
        model.dtype, states = dtype, state
        for i in range(tokens):
            x = ((token + i) % 64)[:, None]
            hidden, states, _ = model.hidden(x, state=states, periods=periods)
        known[dtype] = model.logits(hidden[:, 0]), states
    jax.tree.map(assert_as_exact, (logits, after), known["bfloat16"], known["float32"])


@pytest.mark.parametrize("batch", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_tokens_are_those_of_the_layers(batch, interpreted, monkeypatch):
    model = new_model("gla", num_layers=1)
    prompt = jax.random.randint(KEY, (batch, 6), 0, 64)
    call = dict(num_tokens=4, key=KEY, temperature=0.0, unroll_layers=True)
    passed = []
    pass_token = token_step.pass_token
    monkeypatch.setattr(token_step, "pass_token", lambda *a: passed.append(a) or pass_token(*a))
    got = models.sample(model, prompt, **call)
    assert passed
    monkeypatch.setattr(token_step, "serves", lambda *_: False)
    passed.clear()
    assert (models.sample(model, prompt, **call) == got).all()
    assert not passed


@pytest.mark.parametrize(
    ("group", "tokens", "stop"),
    [
        pytest.param(4, 11, False, id="two groups and two tokens"),
        pytest.param(4, 11, True, id="stopped within a group"),
        pytest.param(8, 18, False, id="8", marks=pytest.mark.slow),
    ],
)
def test_tokens_and_states_with_deferred_writes_are_those_of_the_layers(
    group, tokens, stop, interpreted, monkeypatch
):
    """Greedy tokens, and the state after them, of two layers by the kernels, whose memories one of `group` tokens writes, against each
    token's write and against the layers, also where all rows stop before the last token.
    """
    monkeypatch.setattr(token_step, "DEFERRED_ROWS", 1)
    monkeypatch.setattr(token_step, "MOST_ROWS", 1)
    model = new_model("gla")
    graph, params = nnx.split(model)
    prompt = jax.random.randint(KEY, (1 if stop else 2, 6), 0, 64)
    prompt = jnp.concatenate([prompt, prompt]) if stop else prompt
    read = dict(capacity=64, prefill_chunk=None, unroll_layers=True)
    hidden, state = sampling.read_prompt(graph, params, prompt, None, **read)
    assert token_step.serves(model, 2)

    def decode(size, by_kernels, stop_token=None):
        monkeypatch.setattr(token_step, "GROUP", size)
        static = dict(num_tokens=tokens, greedy=True, top_k=None, stop_token=stop_token)
        run = jax.jit(lambda *a: sampling._decode(graph, *a, None, **static, by_kernels=by_kernels))
        drawn, after, pending = run(params, hidden, state, KEY, jnp.float32(0))
        return drawn, token_step.with_writes(after, pending)

    drawn, after = decode(1, False)
    if stop:
        row = np.asarray(drawn[0]).tolist()
        place = max(i for i in range(tokens - 1) if i % group and row[i] not in row[:i])
        drawn, after = decode(1, False, row[place])
        assert int(after.clock.position[0]) == 6 + place
    got, states = decode(group, True, row[place] if stop else None)
    assert not races_found()
    np.testing.assert_array_equal(got, drawn)
    for got, known in zip(jax.tree.leaves(states), jax.tree.leaves(after), strict=True):
        got, known = np.asarray(got, np.float64), np.asarray(known)
        assert np.abs(got - known).max() <= 0.03 * np.abs(known).max()


def test_other_models_pass_through_their_layers(interpreted, monkeypatch):
    """Each model that differs from a served one in one field is not served, nor are mixers without a step of their own."""
    assert token_step.serves(models.abstract(models.lm("gla", "340m")), 1)
    assert not token_step.serves(models.abstract(models.lm("gated_deltanet", "340m")), 1)
    monkeypatch.setattr(
        token_step, "OTHER_MIXERS", True
    )  # the small GLA's sizes are not its step's
    assert token_step.serves(models.abstract(_config({})), 6)
    large = models.abstract(models.lm("gla", "340m"))
    for rows, group in ((8, 1), (64, 1), (128, 8), (256, 8)):
        assert token_step.serves(large, rows) and token_step.group_of(large, rows) == group
    assert not token_step.serves(large, 257)
    small = models.abstract(
        _config({})
    )  # its heads are narrower than the step that defers writes accepts
    assert token_step.group_of(small, 64) == 1 and token_step.serves(small, 64)
    assert not token_step.serves(small, 65)
    monkeypatch.setattr(token_step, "WRITING_ROWS", 0)
    assert not token_step.serves(small, 6)
    for fields in (
        dict(dtype="float32"),
        dict(norm="layer"),
        dict(residual_scale=0.5),
        dict(head_bias=True),
        dict(hidden_size=128),
    ):
        assert not token_step.serves(models.abstract(_config(fields)), 1), fields
    assert token_step.serves(models.abstract(_config({})), 1)
    config = _config({})
    config.layers["L"].feedforward = feedforward.MoEConfig(num_experts=4, top_k=2, expert_size=32)
    assert not token_step.serves(models.abstract(config), 1)


def _config(fields) -> models.ModelConfig:
    config = models.lm("gla", "tiny", vocab_size=64)
    config.num_layers, config.hidden_size, config.dtype = 2, 256, "bfloat16"
    config.layers["L"].mixer = mixers.METHODS["gla"].config.for_width(256)
    config.layers["L"].feedforward = feedforward.SwiGLUConfig(intermediate_size=256)
    for name, value in fields.items():
        setattr(config, name, value)
    return config


def test_not_off_hopper():
    assert not token_step.serves(models.abstract(_config({})), 1)
