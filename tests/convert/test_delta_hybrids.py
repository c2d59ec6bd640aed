"""Qwen3.5, Qwen3-Next and OLMo-Hybrid: tensors that are not read, experts in one tensor, and fields that are refused. Their logits,
gradients and unchanged exports are in `test_released`.
"""

from __future__ import annotations

import dataclasses

import jax
import ml_dtypes
import numpy as np
import pytest

from lsm_jax import mixers
from lsm_jax.convert import Checkpoint, export, export_released, load_params, model_config
from lsm_jax.convert.huggingface import checkpoint_layout
from lsm_jax.models import lm
from tests.convert.test_released import changed, imported


def together(tensors):
    """Store the experts of each layer as two tensors, as some released files have them."""
    names = [n for n in tensors if ".experts.0.gate_proj.weight" in n]
    for first in names:
        prefix = first.partition(".experts.")[0] + ".experts."
        parts = {
            x: np.stack([tensors.pop(f"{prefix}{i}.{x}_proj.weight") for i in range(4)])
            for x in ("gate", "up", "down")
        }
        tensors[f"{prefix}gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], axis=1)
        tensors[f"{prefix}down_proj"] = parts["down"]


@pytest.mark.parametrize("name", ["transformers-qwen3_5_moe", "transformers-qwen3_next"])
def test_experts_in_one_tensor_are_the_same_experts(name, tmp_path):
    folder = changed(name, tmp_path, together)
    config, params = imported(folder)
    own, expected = imported(changed(name, tmp_path / "apart"))
    assert own == config
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    export(params, config, folder, tmp_path / "out")
    written, given = (f / "model.safetensors" for f in (tmp_path / "out", folder))
    assert written.read_bytes() == given.read_bytes()


def test_experts_keep_bfloat16(tmp_path):
    def change(tensors):
        for name, value in tensors.items():
            if not name.endswith("A_log"):
                tensors[name] = value.astype(ml_dtypes.bfloat16)

    source = Checkpoint(changed("transformers-qwen3_next", tmp_path, change))
    config = model_config(source)
    dtypes = checkpoint_layout(source, config).stored_dtypes(source)
    layer = load_params(source, config, dtype=dtypes)["periods"]["blocks"][0]
    assert layer["feedforward"]["up_proj"].dtype == ml_dtypes.bfloat16
    assert layer["mixer"]["g_proj"]["kernel"].dtype == ml_dtypes.bfloat16
    assert layer["mixer_norm"]["scale"].dtype == layer["mixer"]["a_log"].dtype == np.float32


def test_tensors_of_prediction_heads_are_ignored_and_exported(tmp_path):
    def change(tensors):
        tensors["mtp.fc.weight"] = np.arange(12, dtype=np.int8).reshape(3, 4)

    folder = changed("transformers-qwen3_5", tmp_path, change)
    config, params = imported(folder)
    assert config.letters() == "LLN" and config.tie_embeddings
    export(params, config, folder, tmp_path / "out")
    written, given = (f / "model.safetensors" for f in (tmp_path / "out", folder))
    assert written.read_bytes() == given.read_bytes()


def test_missing_and_surplus_tensors_are_named(tmp_path):
    def change(tensors):
        del tensors["model.language_model.layers.1.mlp.experts.2.up_proj.weight"]
        tensors["model.language_model.layers.1.extra"] = np.ones(3, np.float32)

    with pytest.raises(ValueError, match="not those of the model") as error:
        imported(changed("transformers-qwen3_5_moe", tmp_path, change))
    assert "missing: model.language_model.layers.1.mlp.experts.2.up_proj.weight (8, 32)" in str(error.value)  # fmt: skip
    assert "unexpected: model.language_model.layers.1.extra (3,)" in str(error.value)


NEXT, TEXT, OLMO = "transformers-qwen3_next", "transformers-qwen3_5_text", "transformers-olmo_hybrid"  # fmt: skip


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        (NEXT, dict(new_gate=2), "unknown fields, which may change .* qwen3_next .*: new_gate=2"),
        (NEXT, dict(attention_bias=True), "attention_bias=True; accepted is False"),
        (NEXT, dict(layer_types=["mamba"] * 4), "layer_types=.*; accepted is a list of 4, each one of"),
        (NEXT, dict(num_experts=2**20), "num_experts=1048576 is larger than every dimension"),
        (NEXT, dict(mlp_only_layers=["1"]), "mlp_only_layers=.'1'.; accepted is a list of the numbers"),
        (NEXT, dict(linear_num_value_heads=3), ".*num_heads=2 does not divide num_value_heads=3"),
        (NEXT, dict(partial_rotary_factor=0.5), "partial_rotary_factor=.*; accepted is one number"),
        (TEXT, dict(attn_output_gate=False), "attn_output_gate=False; accepted is True"),
        (TEXT, dict(rope_parameters=dict(rope_type="yarn", factor=4.0)), "the rotation: .* of type 'yarn'; accepted are"),
        (TEXT, dict(intermediate_size=None), "missing fields: intermediate_size"),
        ("transformers-qwen3_5", dict(text_config=None), "missing fields: text_config"),
        ("transformers-qwen3_5", dict(text_config=dict(model_type="llama")), "text_config.model_type='llama'; accepted"),
        ("transformers-qwen3_5", dict(audio_config={}), "unknown fields, which .*: audio_config"),
        ("transformers-qwen3_5", dict(hidden_size=8), "hidden_size=8, but text_config.hidden_size=32; accepted are equal"),
        (OLMO, dict(layer_types=["full_attention"] * 4), "layer_types=.*; accepted is a list of 4, of which some"),
        (OLMO, dict(rope_parameters=dict(rope_theta=None, factor=2)), "rope_parameters=.*; accepted without rope_theta"),
    ],
)  # fmt: skip
def test_errors_name_the_field(name, fields, words, tmp_path):
    with pytest.raises(ValueError, match=f"config.json: {words}"):
        model_config(changed(name, tmp_path, **fields))


def test_the_rotation_of_olmo_follows_rope_theta(tmp_path):
    def base(folder, **fields):
        return model_config(changed(OLMO, tmp_path / folder, **fields)).layers["N"].mixer.rope_base

    assert base("null") is None
    assert base("given", rope_parameters=dict(rope_theta=5e5, rope_type="default")) == 5e5
    assert base("outside", rope_parameters=None, rope_theta=None) is None
    assert base("absent", rope_parameters=None) == 1e4


def test_models_that_transformers_lacks_are_refused(tmp_path):
    config = lm("gated_deltanet", "tiny", pattern="LN")
    config.layers["N"].mixer = mixers.get_method("gated_attention").config.for_width(config.hidden_size)  # fmt: skip
    with pytest.raises(ValueError, match="no qwen3_5_text model with .*norm='rms'") as error:
        export_released({}, config, tmp_path / "out")
    assert "no mixtures of experts" in str(error.value)
    config.norm = "zero_centred_rms"
    gated = config.layers["N"].mixer
    config.layers["N"].mixer = dataclasses.replace(gated, output_gate="head")
    with pytest.raises(ValueError, match="mixer.output_gate='head' .accepted is 'channel'."):
        export_released({}, config, tmp_path / "out")
