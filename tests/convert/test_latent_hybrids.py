"""Kimi-Linear and Ling-3.0: both forms of their config.json, the names that transformers writes, fields that are refused, and the
export of own models. Their logits and unchanged exports are in `test_released`.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest

from lsm_jax import mixers
from lsm_jax.convert import Checkpoint, export, export_released, model_config
from lsm_jax.convert.families import FAMILIES
from lsm_jax.models import abstract
from lsm_jax.training.step import params_of
from tests.convert.test_released import GOLDENS, changed, imported

KIMI, LING = "transformers-kimi_linear", "transformers-bailing_hybrid"
LINEAR = dict(full_attn_layers=[3], kda_layers=[1, 2], num_heads=2, head_dim=8, short_conv_kernel_size=4)  # fmt: skip


def test_both_forms_of_kimi_are_one_model(tmp_path):
    """The golden has the fields and names of released files; transformers writes the types of layers, and others of the first
    layer's feedforward."""

    def as_transformers_writes(tensors):
        for name in [n for n in tensors if n.startswith("model.layers.0.mlp.")]:
            tensors[name.replace(".mlp.", ".block_sparse_moe.")] = tensors.pop(name)

    config, params = imported(changed(KIMI, tmp_path / "released"))
    assert config.letters() == "DLN"
    fields = dict(
        layer_types=["linear_attention"] * 2 + ["full_attention"], mlp_layer_types=["dense", "sparse", "sparse"],
        linear_num_heads=2, linear_head_dim=8, linear_conv_kernel_dim=4,
    )  # fmt: skip
    folder = changed(
        KIMI, tmp_path / "written", as_transformers_writes, linear_attn_config=None, **fields
    )
    again, same = imported(folder)
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, same, params)
    export(params, config, folder, tmp_path / "out")
    written, given = (f / "model.safetensors" for f in (tmp_path / "out", folder))
    assert written.read_bytes() == given.read_bytes()


@pytest.mark.slow
def test_tensors_of_lings_prediction_heads_are_ignored_and_exported(tmp_path):
    layers = model_config(GOLDENS / LING).num_layers

    def change(tensors, layer=layers):
        tensors[f"model.layers.{layer}.eh_proj.weight"] = np.ones((2, 3), np.float32)

    folder = changed(LING, tmp_path, change, num_nextn_predict_layers=1)
    config, params = imported(folder)
    export(params, config, folder, tmp_path / "out")
    written, given = (f / "model.safetensors" for f in (tmp_path / "out", folder))
    assert written.read_bytes() == given.read_bytes()
    for layer, count in ((layers + 1, 1), (layers, 0)):  # more layers than config.json states
        name = f"model.layers.{layer}.eh_proj.weight"
        part = functools.partial(change, layer=layer)
        other = changed(LING, tmp_path / str(count), part, num_nextn_predict_layers=count)
        with pytest.raises(ValueError, match=f"unexpected: {name}"):
            imported(other)


@pytest.mark.slow
@pytest.mark.parametrize("name", [KIMI, LING])
def test_own_models_are_exported(name, tmp_path):
    """A model of our own is exported: a pattern without a period, gates of another rank, three experts a token."""
    config = model_config(changed(name, tmp_path))
    config.pattern, config.num_layers = "DLLNN", 5
    for letter in "LN":
        config.layers[letter].feedforward.top_k = 1
    shapes, rng = params_of(abstract(config)), np.random.default_rng(0)
    params = jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32), shapes)
    folder = export_released(params, config, tmp_path / "out")
    kind = Checkpoint(folder).config["model_type"]
    assert kind == name.removeprefix("transformers-")
    again, same = imported(folder)
    assert FAMILIES[kind].describe_model(again) == FAMILIES[kind].describe_model(config)
    jax.tree.map(np.testing.assert_array_equal, same, params)
    other = dataclasses.replace(config.layers["N"].mixer, rope_interleaved=False, rope_base=1e4)
    config.layers["N"].mixer = other
    words = "no kimi_linear model with .*no bailing_hybrid model with .*rope_interleaved=False .accepted is True"
    with pytest.raises(ValueError, match=words):
        export_released(params, config, tmp_path / "no")


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        (KIMI, dict(new_gate=2), "unknown fields, which may change .* kimi_linear .*: new_gate=2"),
        (KIMI, dict(mla_use_nope=False), "mla_use_nope=False; accepted is True"),
        (KIMI, dict(moe_router_activation_func="softmax"), "moe_router_activation_func='softmax'; accepted is 'sigmoid'"),
        (KIMI, dict(num_key_value_heads=1), "num_key_value_heads=1; accepted is num_attention_heads=2"),
        (KIMI, dict(linear_attn_config=dict(LINEAR, kda_layers=[1])), "full_attn_layers=.3., kda_layers=.1.; accepted are two"),
        (KIMI, dict(linear_attn_config=dict(LINEAR, gate=1)), "linear_attn_config=.*; accepted is an object with the fields"),
        (KIMI, dict(linear_attn_config=dict(LINEAR, num_heads=0)), "linear_attn_config: num_heads=0; accepted is a whole"),
        (KIMI, dict(layer_types=["full_attention"] * 3), "layer_types=.* differs from linear_attn_config"),
        (KIMI, dict(linear_attn_config=None), "missing fields: layer_types"),
        (KIMI, dict(kv_lora_rank=2**20), "kv_lora_rank=1048576 is larger than every dimension"),
        (KIMI, dict(mlp_layer_types=["dense"]), "mlp_layer_types=.'dense'.; accepted is a list of 3"),
        (LING, dict(kda_lower_bound=1.0), "KDAConfig.lower_bound=1.0: accepted are None and negative"),
        (LING, dict(linear_num_heads=3), "linear_num_heads=3; accepted is num_attention_heads=2"),
        (LING, dict(rope_parameters=dict(rope_type="yarn", factor=2.0)), "the rotation: .* of type 'yarn'"),
        (LING, dict(new_gate=4), "unknown fields, .* bailing_hybrid .*: new_gate=4"),
    ],
)  # fmt: skip
def test_errors_name_the_field(name, fields, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        model_config(changed(name, tmp_path, **fields))


def test_kimis_published_proportions():
    """The layers of Kimi-Linear-48B-A3B that follow from its config.json."""
    config = mixers.MLAConfig(num_heads=32, rope_base=None)
    values = FAMILIES["kimi_linear"].values(
        dict(vocab_size=163840, hidden_size=2304, num_hidden_layers=3, num_attention_heads=32, linear_attn_config=dict(
            full_attn_layers=[3], kda_layers=[1, 2], num_heads=32, head_dim=128, short_conv_kernel_size=4,
        )), "config.json",
    )  # fmt: skip
    made = FAMILIES["kimi_linear"].config(values)
    assert made.layers["N"].mixer == config
    assert made.layers["L"].mixer == mixers.KDAConfig(num_heads=32, output_gate_bias=False)
    experts = made.layers["L"].feedforward
    assert (experts.num_experts, experts.top_k, experts.weight_scale) == (256, 8, 2.446)
