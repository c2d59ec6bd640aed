"""Tests of the small pretrained models that `tests.linearize.make_pretrained` makes for the papers' pages."""

from __future__ import annotations

import json

import jax
import pytest

from configs import liger
from lsm_jax.data import JSONTokenizer
from lsm_jax.linearize import Pretrained
from lsm_jax.models import abstract
from lsm_jax.training.step import params_of
from tests.linearize.make_pretrained import HEAD_DIM, write_instructions, write_pretrained
from tests.marks import slow_after


@pytest.mark.parametrize("name", slow_after(2, list(liger.MODELS)))
def test_a_small_model_has_the_proportions_of_the_named_one(name, tmp_path):
    written = write_pretrained(name, tmp_path / name)
    config = liger.get_config(f"auto,source={tmp_path / name}")
    assert config.data.add_bos and (config.model.vocab_size, config.model.num_layers) == (258, 2)
    base, original = Pretrained(path=str(tmp_path / name)).config(), liger.MODELS[name]
    mixer, full = base.layers["L"].mixer, original.layers["L"].mixer
    for field in ("num_heads", "num_kv_heads", "rope_base", "rope_scaling", "qkv_bias", "qk_norm", "norm_eps"):  # fmt: skip
        assert getattr(mixer, field) == getattr(full, field), field
    scale = full.dim(original.hidden_size) // HEAD_DIM
    assert (mixer.dim(base.hidden_size), base.hidden_size * scale) == (HEAD_DIM, original.hidden_size)  # fmt: skip
    inner = base.layers["L"].feedforward.intermediate_size
    assert inner * scale == original.layers["L"].feedforward.intermediate_size
    assert (base.tie_embeddings, base.norm_eps) == (original.tie_embeddings, original.norm_eps)
    shapes = params_of(abstract(written))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), shapes)
    loaded = Pretrained(path=str(tmp_path / name)).load(base, target)
    assert jax.tree.map(lambda x: x.shape, loaded) == jax.tree.map(lambda x: x.shape, shapes)


def test_its_tokenizer_returns_every_text_and_its_instructions_are_an_array(tmp_path):
    write_pretrained("llama3.2-1b", tmp_path / "x")
    tokenizer = JSONTokenizer(tmp_path / "x" / "tokenizer.json")
    text = "Größe 3 μ\n"
    tokens = tokenizer.encode(text)
    assert len(tokens) == len(text.encode()) and tokenizer.decode(tokens) == text
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.adds_bos) == (256, 257, True)
    write_instructions(tmp_path / "alpaca.json", 4)
    rows = json.loads((tmp_path / "alpaca.json").read_text())
    assert len(rows) == 4 and all(row.keys() == {"instruction", "input", "output"} for row in rows)
