"""Tests of sampling from a model: greedy tokens are the argmax of a call on all tokens, however the prompt
is read; top_k, top_p and temperature; errors.
"""

from __future__ import annotations

import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lsm_jax import feedforward, models
from lsm_jax.models import sampling
from lsm_jax.models.sampling import program, read_prompt, restrict

KEY = jax.random.key(0)


def greedy(small, prompt, **call):
    return models.sample(small.model, prompt, num_tokens=5, key=KEY, temperature=0.0, **call)


@pytest.mark.classes
def test_greedy_is_the_argmax_of_the_full_forward(small):
    prompt = small.tokens[:, :5]
    tokens = greedy(small, prompt)
    assert tokens.shape == (2, 5) and tokens.dtype == jnp.int32
    logits, _ = small(jnp.concatenate([prompt, tokens], axis=1))
    assert (logits[:, 4:-1].argmax(axis=-1) == tokens).all()


def test_padding_and_prefill_in_pieces_change_nothing(gla):
    prompt = gla.tokens[:, :5]
    expected = greedy(gla, prompt)
    ids = jnp.array([[1, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 1]], jnp.int32)
    padded = jnp.stack([jnp.pad(prompt[0], (0, 2)), jnp.pad(prompt[1], (2, 0))])
    assert (greedy(gla, padded, segment_ids=ids, prefill_chunk=2) == expected).all()


def test_stop_token_fills_the_row(plain):
    prompt = plain.tokens[:, :5]
    expected = np.array(greedy(plain, prompt))
    stop = int(expected[0, 1])
    stopped = np.array(greedy(plain, prompt, stop_token=stop))
    for row, free in zip(stopped, expected, strict=True):
        hits = np.flatnonzero(free == stop)
        end = hits[0] if len(hits) else len(free)
        assert (row[:end] == free[:end]).all() and (row[end:] == stop).all()


def test_a_key_gives_the_same_draw_and_restrictions_hold(plain):
    prompt = plain.tokens[:, :5]

    def draw(key, **call):
        return models.sample(plain.model, prompt, num_tokens=5, key=key, **call)

    assert (draw(KEY) == draw(KEY)).all()
    assert (draw(KEY) != draw(jax.random.key(7))).any()
    expected = greedy(plain, prompt)
    for edge in (dict(top_p=1e-6), dict(top_p=1e-46), dict(temperature=1e-39)):
        assert (draw(KEY, **edge) == expected).all()


def test_restrict():
    logits = jnp.log(jnp.array([0.1, 0.4, 0.2, 0.3]))
    kept = lambda **call: jnp.isfinite(restrict(logits, **call)).tolist()  # noqa: E731
    assert kept(top_k=2) == [False, True, False, True]
    assert kept(top_p=0.5) == [False, True, False, True]
    assert kept(top_p=0.75) == [False, True, True, True]
    assert kept(top_p=1.0) == [True] * 4
    assert kept(top_k=3, top_p=0.3) == [False, True, False, False]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (dict(num_tokens=0), "num_tokens=0"),
        (dict(temperature=-1.0), "temperature=-1"),
        (dict(top_k=0), "top_k=0: accepted are None and 1 to 50"),
        (dict(top_k=51), "top_k=51"),
        (dict(top_p=0.0), r"top_p=0.0: accepted are None and numbers in \(0, 1\]"),
        (dict(stop_token=50), "stop_token=50"),
        (dict(prefill_chunk=0), "prefill_chunk=0"),
        (dict(prompt=np.zeros((1, 0), int)), "at least one token"),
        (dict(prompt=np.full((1, 3), 50)), "ids from 50 to 50; accepted are 0 to 49"),
        (dict(segment_ids=np.zeros((2, 5), int)), "all padding"),
        (dict(segment_ids=np.ones((2, 4), int)), "segment_ids has shape"),
    ],
)
def test_wrong_arguments_are_refused(plain, call, words):
    call = dict(prompt=plain.tokens[:, :5], num_tokens=2, key=KEY) | call
    with pytest.raises(ValueError, match=words):
        models.sample(plain.model, call.pop("prompt"), **call)


def test_unrolled_layers_give_the_same_tokens(gla):
    call = dict(num_tokens=5, key=KEY, temperature=0.0)
    loop = models.sample(gla.model, gla.tokens[:, :6], **call)
    assert (models.sample(gla.model, gla.tokens[:, :6], unroll_layers=True, **call) == loop).all()


def test_prompts_of_other_lengths_share_the_program_of_decoding(gla):
    call = dict(num_tokens=3, key=KEY, temperature=0.0)
    models.sample(gla.model, gla.tokens[:, :5], **call)
    compiled = program(2, False)._cache_size()
    models.sample(gla.model, gla.tokens[:, :7], **call)
    assert program(2, False)._cache_size() == compiled


def test_a_model_that_xla_refuses_with_the_options_is_decoded_without(gla, monkeypatch):
    """XLA fails for single numbers as results of products, once, and another error is raised."""
    call = dict(num_tokens=5, key=KEY, temperature=0.0, unroll_layers=True)
    expected = models.sample(gla.model, gla.tokens[:1, :6], **call)
    calls, message = [], "INTERNAL: RET_CHECK failure"

    def refused(batch, unroll_layers):
        calls.append(batch)
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(sampling, "compiler_options", lambda batch, unroll: {"some": "option"})
    monkeypatch.setattr(sampling, "program", refused)
    monkeypatch.setattr(sampling, "_REFUSED", set())
    for _ in range(2):
        assert (models.sample(gla.model, gla.tokens[:1, :6], **call) == expected).all()
    assert calls == [1]
    sampling._REFUSED.clear()
    message = "RESOURCE_EXHAUSTED: Out of memory"
    with pytest.raises(jax.errors.JaxRuntimeError, match="Out of memory"):
        models.sample(gla.model, gla.tokens[:1, :6], **call)


def test_one_gpu_with_memory_for_two_copies_unrolls_layers(gla, monkeypatch):
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(nnx.state(gla.model)))

    def unrolls(limit, platform="gpu", used=held):
        stats = {"bytes_limit": limit, "bytes_in_use": used}
        device = SimpleNamespace(platform=platform, memory_stats=lambda: stats)
        return sampling._unrolls(gla.model, device, 1, 64)

    assert unrolls(4 * held) and not unrolls(2 * held) and not unrolls(4 * held, "cpu")
    assert not unrolls(4 * held, used=4 * held)
    monkeypatch.setattr(sampling, "UNROLLED", 1)
    assert not unrolls(4 * held)


def test_unrolled_layers_require_their_own_parameters_and_states(plain):
    model, token = plain.model, plain.tokens[:, :1]
    periods, state = model.unstack_periods(), model.init_state(2, 8)
    unstacked = model.unstack_state(state)
    for call, words in (
        (dict(state=unstacked, periods=periods[:1]), "periods has 1 entries; accepted is what"),
        (dict(state=state, periods=periods), "with a state from unstack_state"),
        (dict(state=unstacked), "state is from unstack_state: accepted with periods only"),
    ):
        with pytest.raises(ValueError, match=words):
            model.hidden(token, **call)
    with pytest.raises(ValueError, match="accepted is one token of each row"):
        model.hidden(plain.tokens[:, :2], state=unstacked, periods=periods)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rwkv7", "mom", "mamba2"])
def test_unrolled_layers_of_other_methods_give_the_same_tokens(name):
    """Layers that share values, several memories, and experts in each layer."""
    config = models.lm(name, "nano", vocab_size=64)
    config.hidden_size, config.pattern, config.num_layers = 64, "LN", 4
    config.layers["L"].feedforward = feedforward.MoEConfig(num_experts=4, top_k=2, expert_size=32)
    model = models.Decoder(config, rngs=nnx.Rngs(0))
    prompt = jax.random.randint(KEY, (2, 6), 0, 64)
    call = dict(num_tokens=8, key=KEY, temperature=0.0)
    loop = models.sample(model, prompt, **call)
    assert (models.sample(model, prompt, unroll_layers=True, **call) == loop).all()


def test_unrolled_layers_read_their_own_parameters():
    """No product in the loop over tokens has a part of a stack as its operand."""
    config = models.lm("linear_attention", "nano")
    config.num_layers = 2
    graph, params = nnx.split(nnx.eval_shape(lambda: models.Decoder(config, rngs=nnx.Rngs(0))))
    static = dict(num_tokens=4, greedy=True, top_k=None, stop_token=None)
    stack = jax.tree.leaves(params["periods"]["blocks"][0]["feedforward"]["gate_proj"])[0].shape
    word = f"f32[{','.join(map(str, stack))}]"
    for unroll in (False, True):
        read = functools.partial(read_prompt, capacity=64, prefill_chunk=None, unroll_layers=unroll)
        prompt = jax.ShapeDtypeStruct((1, 4), jnp.int32)
        after = jax.eval_shape(functools.partial(read, graph), params, prompt, None)
        rest = (KEY, jax.ShapeDtypeStruct((), jnp.float32), None)
        lowered = program(1, unroll).lower(graph, params, *after, *rest, **static)
        text = lowered.compile().as_text()
        body = re.findall(r"while\(.*body=%?([\w.]+)", text[text.index("ENTRY") :])[0]
        inside = re.search(rf"^%?{re.escape(body)} .*?^}}", text, re.M | re.S)[0]
        assert (word in inside) is not unroll


@pytest.mark.parametrize("tie", [False, True])
def test_unrolled_layers_cast_their_parameters_before_the_loop(tie):
    """The loop over tokens casts no matrix; the tokens are those of the loop over layers."""
    config = models.lm("gla", "nano")
    config.num_layers, config.tie_embeddings = 2, tie
    assert config.dtype == "bfloat16"
    model = models.Decoder(config, rngs=nnx.Rngs(0))
    graph, params = nnx.split(model)
    prompt = jax.random.randint(KEY, (2, 6), 0, config.vocab_size)
    read = dict(capacity=64, prefill_chunk=None, unroll_layers=True)
    after = sampling.read_prompt(graph, params, prompt, None, **read)
    static = dict(num_tokens=4, greedy=True, top_k=None, stop_token=None)
    decode = functools.partial(sampling._decode, graph, **static)
    traced = jax.make_jaxpr(decode)(params, *after, KEY, jnp.float32(0), None)
    (loop,) = (e for e in traced.jaxpr.eqns if e.primitive.name == "while")
    matrices = {x.shape[1:] for x in jax.tree.leaves(params["periods"]) if x.ndim == 3}
    matrices |= {x.shape for x in jax.tree.leaves(params) if x.ndim == 2}

    def casts(jaxpr):
        for eqn in jaxpr.eqns:
            inner = [p for p in eqn.params.values() if hasattr(p, "eqns") or hasattr(p, "jaxpr")]
            for closed in inner:
                yield from casts(getattr(closed, "jaxpr", closed))
            if (
                eqn.primitive.name == "convert_element_type"
                and eqn.params["new_dtype"] == jnp.bfloat16
            ):
                yield eqn.invars[0].aval.shape

    matrices |= {shape[::-1] for shape in matrices}
    assert not matrices & set(casts(loop.params["body_jaxpr"].jaxpr))
    call = dict(num_tokens=8, key=KEY, temperature=0.0)
    expected = models.sample(model, prompt, **call)
    assert (models.sample(model, prompt, unroll_layers=True, **call) == expected).all()
