"""Tests of a method registered from outside of the package: one file and one call of `register`."""

from __future__ import annotations

import dataclasses
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lsm_jax import mixers, models
from lsm_jax.training.config_json import from_dict, to_dict
from scripts.doc_blocks import ROOT
from scripts.newcomer import page_python
from tests.toys.toy_method import METHOD, ToyConfig


@pytest.fixture
def toy(monkeypatch):
    """Fixture that adds a toy method to the table of methods, and removes it when the test ends."""
    monkeypatch.setitem(mixers.METHODS, "toy", METHOD)
    del mixers.METHODS["toy"]
    mixers.register(METHOD)
    return METHOD


def test_a_model_of_a_registered_method_computes_and_decodes(toy):
    config = models.lm("toy", "tiny", vocab_size=50, pattern="LN")
    config.hidden_size, config.num_layers, config.dtype = 32, 2, "float32"
    config.layers["N"].mixer = mixers.SoftmaxConfig.for_width(32)
    config.validate()
    model = models.Decoder(config, rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 5), 0, 50)
    whole = model(tokens)[0]
    state = model.init_state(2, 5)
    for place in range(5):
        logits, state, *_ = model(tokens[:, place : place + 1], state=state)
        np.testing.assert_allclose(logits[:, 0], whole[:, place], atol=1e-5)


def test_a_registered_method_computes_its_definition(toy):
    mixer = mixers.build(ToyConfig(num_heads=1), 8, rngs=nnx.Rngs(0), init_std=1.0)
    x = jax.random.normal(jax.random.key(0), (1, 3, 8))
    q, k, v = (p(x)[0] for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    memory, expected = jnp.zeros((8, 8)), []
    for t in range(3):
        memory = jax.nn.sigmoid(1.0) * memory + jnp.outer(k[t], v[t])
        expected.append(q[t] @ memory / 8**0.5)
    expected = mixer.o_proj(jnp.stack(expected))
    np.testing.assert_allclose(mixer(x)[0][0], expected, rtol=1e-4, atol=1e-4)


def test_a_run_of_a_registered_method_is_stored_and_loaded(toy):
    assert from_dict(to_dict(ToyConfig(num_heads=4))) == ToyConfig(num_heads=4)


def test_a_run_of_a_method_in_a_config_file_is_loaded_by_the_file_under_another_name(monkeypatch):
    """`train.py --config=leaky.py:leaky-nano` runs the file as a module of another name than `eval.py --method_file` does."""
    source = page_python(ROOT, "docs/new_method.md")[0]
    monkeypatch.delitem(mixers.METHODS, "leaky", raising=False)
    stored = []
    try:
        for name in ("config_config", "<run_path>"):
            module = types.ModuleType(name)
            monkeypatch.setitem(sys.modules, name, module)
            exec(compile(source, "leaky.py", "exec"), module.__dict__)
            stored.append(to_dict(module.LeakyConfig(num_heads=4)))
        assert stored[0] == stored[1]
        loaded = from_dict(stored[0])
        assert type(loaded) is module.LeakyConfig and loaded.num_heads == 4
    finally:
        mixers.METHODS.pop("leaky", None)
    with pytest.raises(ValueError, match="the method 'leaky' is not registered; run the file"):
        from_dict(stored[0])


def test_names_and_configs_that_exist_are_refused(toy):
    with pytest.raises(ValueError, match="'toy' exists already; registered are linear_attention"):
        mixers.register(METHOD)
    with pytest.raises(ValueError, match="config=ToyConfig is the config of method 'toy'"):
        mixers.register(dataclasses.replace(METHOD, name="toy2"))
    with pytest.raises(ValueError, match="'mom' exists already"):
        mixers.register(dataclasses.replace(METHOD, name="mom"), wrapper=True)


def test_configs_of_methods_that_nobody_registered_are_refused():
    with pytest.raises(ValueError, match="is not one of lsm_jax"):
        from_dict(to_dict(ToyConfig()))


def run_guide(path):
    """Run the file of docs/new_method.md as if it lay at `path`, and return its names."""
    code = page_python(ROOT, "docs/new_method.md")[0]
    values: dict = {"__name__": __name__}
    exec(compile(code, str(path), "exec"), values)
    return values


def test_a_file_that_registers_a_method_may_run_again_but_not_another_file(monkeypatch, tmp_path):
    methods = dict(mixers.METHODS)
    for holder in (mixers, mixers.method):
        monkeypatch.setattr(holder, "METHODS", methods)
    first, second = run_guide(tmp_path / "leaky.py"), run_guide(tmp_path / "leaky.py")
    assert mixers.METHODS["leaky"] is second["METHOD"]
    assert mixers.method_of(second["LeakyConfig"]()) is second["METHOD"]
    with pytest.raises(ValueError, match="'leaky' exists already"):
        mixers.register(second["METHOD"])
    with pytest.raises(ValueError, match="'leaky' exists already"):
        run_guide(tmp_path / "copy.py")
    assert first["METHOD"] is not second["METHOD"]


def test_a_call_returns_its_results_by_name(toy):
    mixer = mixers.build(ToyConfig(num_heads=1), 8, rngs=nnx.Rngs(0))
    output = mixer(jnp.ones((1, 3, 8)))
    y, state, aux = output
    assert output.y is y and output.state is state and output.aux is aux
    assert jax.tree.structure(jax.jit(mixer)(jnp.ones((1, 3, 8)))) == jax.tree.structure(output)
