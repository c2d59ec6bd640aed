"""Tests of the published checkpoints of Liger's authors and of adapters in PEFT's format: logits, export and
import again, and errors for checkpoints that do not match the model.
"""

from __future__ import annotations

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file

from configs import liger
from lsm_jax import convert
from lsm_jax.linearize import Pretrained, base_model, liger_model
from lsm_jax.linearize.export import export_run
from lsm_jax.linearize.export import main as export_main
from lsm_jax.linearize.peft import CONFIG, TENSORS, Adapters, import_adapters, lora_config
from lsm_jax.linearize.peft import main as peft_main
from lsm_jax.linearize.released import Released, describe, import_released
from lsm_jax.linearize.released import main as released_main
from lsm_jax.mixers import LigerConfig, LoRAConfig, OpConfig
from lsm_jax.training import load_run, train
from tests.convert.make_liger import ARCHITECTURES, LAYERS, VOCAB, logits, write_liger
from tests.linearize.conftest import config_of

TOKENS = np.random.default_rng(0).integers(0, VOCAB, 80)


def tokenizer(folder):
    """Write a byte tokenizer of 260 tokens into the folder of a checkpoint, and return the folder."""
    vocabulary = {chr(0x100 + i): i for i in range(VOCAB)}
    model = tokenizers.models.WordLevel(vocabulary, unk_token=chr(0x100))
    tokenizers.Tokenizer(model).save(str(folder / "tokenizer.json"))
    return folder


def run_logits(run):
    return np.asarray(jax.jit(lambda m, t: m(t)[0])(run.model, jnp.asarray(TOKENS)[None])[0])


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_released_checkpoints_have_the_logits_of_their_code_and_are_exported_unchanged(kind, tmp_path):  # fmt: skip
    folder = tokenizer(write_liger(tmp_path / kind, kind))
    assert released_main([f"--source={folder}", f"--workdir={tmp_path / 'run'}"]) == 0
    run = load_run(tmp_path / "run")
    mixer = run.config.model.layers["L"].mixer
    assert type(mixer) is LigerConfig and mixer.window == 65
    expected = logits(folder, TOKENS)
    np.testing.assert_allclose(run_logits(run), expected, atol=5e-5 * np.abs(expected).max())
    if kind != "liger_gla":
        return
    other = np.abs(logits(folder, TOKENS, window=64) - expected).max()
    assert other > 1e-3 * np.abs(expected).max()  # the 65th token counts
    for out, arguments in (("a", []), ("b", ["--format=liger"])):
        command = [f"--workdir={tmp_path / 'run'}", f"--out={tmp_path / out}", f"--source={folder}"]
        assert export_main([*command, *arguments]) == 0
        for file in sorted(folder.iterdir()):
            if (out, file.name) == ("b", "config.json"):
                assert json.loads((tmp_path / out / file.name).read_text()) == json.loads(
                    file.read_text()
                )
                continue
            assert (tmp_path / out / file.name).read_bytes() == file.read_bytes(), file.name


def test_a_released_base_is_a_source_of_the_config(tmp_path):
    folder = tokenizer(write_liger(tmp_path / "liger_gla_base"))
    config = liger.get_config(f"auto,source={folder}")
    assert base_model(config.model) == dataclasses.replace(
        Pretrained(path=str(folder)).config(), dtype="bfloat16"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    {
        "model_type": (dict(model_type="liger_qwen3_gla"), "model_type='liger_qwen3_gla'; accepted are liger_gla, liger_gsa"),
        "architectures": (dict(architectures=["LigerGSAForCausalLM"]), r"accepted is \['LigerGLAForCausalLM'\]"),
        "expand_k": (dict(expand_k=2), "expand_k=2; accepted is 1"),
        "unknown": (dict(gate_norm=True), "unknown fields, which may change .*: gate_norm=True"),
        "bias": (dict(attention_bias=True), "attention_bias=True; accepted is False"),
    }.values(),
)  # fmt: skip
def test_refused_checkpoints(changes, message, tmp_path):
    folder = tokenizer(write_liger(tmp_path / "base", **changes))
    with pytest.raises(ValueError, match=message):
        import_released(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_slots_are_pool_size(tmp_path):
    absent = write_liger(tmp_path / "absent", "liger_gsa", pool_size="absent")
    with pytest.raises(ValueError, match="pool_size=64; accepted are divisors of the 8 channels"):
        Released(absent)
    (mixer,) = (x.mixer for x in Released(write_liger(tmp_path / "four", "liger_gsa")).model().layers.values())  # fmt: skip
    assert mixer.num_slots == 4


def test_a_run_is_described_for_the_released_code_or_refused(llama, instructions, tmp_path):
    config = config_of(llama, instructions, total_tokens=1024)
    base = dataclasses.replace(config.base.config(), dtype="float32", remat="none")
    config.model = liger_model(base, lora=LoRAConfig(rank=2), window=65, gate="hgrn2", op=OpConfig(chunk_size=16))  # fmt: skip
    train(config, tmp_path / "run")
    folder = export_run(tmp_path / "run", tmp_path / "out", format="liger")
    written = json.loads((folder / "config.json").read_text())
    assert written == json.loads((llama / "config.json").read_text()) | dict(
        model_type="liger_hgrn2", architectures=["LigerHGRN2ForCausalLM"]
    )
    assert Released(folder).model().layers["L"].mixer.gate == "hgrn2"
    for message, fields in {
        "gate='mamba2' of model_type='llama'; accepted are gla of llama, gsa": dict(gate="mamba2"),
        "window=8; the released code has 64, or 65": dict(window=8),
        "memory_weight=1.0; the released code computes 0.5": dict(memory_weight=1.0),
        "gate_temperature=4.0; the released code computes 16.0": dict(gate_temperature=4.0),
        "gate_lower_bound=0.5; the released code computes 0.0": dict(gate="hgrn2", gate_lower_bound=0.5),
        "learned_weights=True; the released code computes False": dict(learned_weights=True),
        "layers N: SoftmaxConfig; the released code has the same": dict(hybrid=2),
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=message):
            describe(liger_model(base, **dict(window=64) | fields), "llama")


def write_adapters_of(folder, changes=None, targets=("self_attn.q_proj", "mlp.down_proj")):
    """Write adapters in PEFT's format, of rank 3 and alpha 6, for a checkpoint that `write_liger` wrote."""
    folder.mkdir()
    rng = np.random.default_rng(1)
    sizes = {"self_attn.q_proj": (32, 32), "mlp.down_proj": (40, 32)}
    tensors = {}
    for i in range(LAYERS):
        for name in targets:
            into, out = sizes[name]
            at = f"base_model.model.model.layers.{i}.{name}"
            tensors[f"{at}.lora_A.weight"] = rng.normal(size=(3, into)).astype(np.float32)
            tensors[f"{at}.lora_B.weight"] = (0.1 * rng.normal(size=(out, 3))).astype(np.float32)
    save_file(tensors, folder / TENSORS, metadata={"format": "pt"})
    config = dict(
        alpha_pattern={}, auto_mapping=None, base_model_name_or_path="base", bias="none", corda_config=None, eva_config=None,
        exclude_modules=None, fan_in_fan_out=False, inference_mode=True, init_lora_weights=True, layer_replication=None,
        layers_pattern=None, layers_to_transform=None, loftq_config={}, lora_alpha=6, lora_bias=False, lora_dropout=0.0,
        megatron_config=None, megatron_core="megatron.core", modules_to_save=None, peft_type="LORA", r=3, rank_pattern={},
        revision=None, target_modules=list(targets), task_type="CAUSAL_LM", trainable_token_indices=None, use_dora=False,
        use_rslora=False,
    )  # fmt: skip
    (folder / CONFIG).write_text(json.dumps(config | (changes or {})))
    return folder, tensors


def test_adapters_give_pefts_logits_and_are_written_unchanged(tmp_path):
    base = tokenizer(write_liger(tmp_path / "liger_gla_base", seed=2))
    # Frozen parameters are bfloat16, so those of the checkpoint are too.
    for file in base.glob("*.safetensors"):
        rounded = {k: np.asarray(jnp.asarray(v, jnp.bfloat16), np.float32) for k, v in load_file(file).items()}  # fmt: skip
        save_file(rounded, file, metadata={"format": "pt"})
    source, tensors = write_adapters_of(tmp_path / "iter_10")
    command = [f"--source={source}", f"--base={base}", f"--workdir={tmp_path / 'run'}"]
    assert peft_main(command) == 0
    run = load_run(tmp_path / "run")
    assert run.config.model.lora == LoRAConfig(targets=("q_proj", "down_proj"), rank=3, alpha=6.0)
    expected = logits(base, TOKENS, adapters=(2.0, tensors))
    assert np.abs(expected - logits(base, TOKENS)).max() > 0.1
    np.testing.assert_allclose(run_logits(run), expected, atol=5e-5 * np.abs(expected).max())

    out = export_run(tmp_path / "run", tmp_path / "out", format="peft")
    again = load_file(out / TENSORS)
    assert set(again) == set(tensors)
    for name, value in tensors.items():
        np.testing.assert_array_equal(again[name], value)
    assert lora_config(Adapters(out)) == run.config.model.lora
    read, written = (json.loads((f / CONFIG).read_text()) for f in (source, out))
    for name in set(read) & set(written) - {"target_modules", "base_model_name_or_path"}:
        assert read[name] == written[name], name
    merged = export_run(tmp_path / "run", tmp_path / "merged", format="liger")
    np.testing.assert_allclose(logits(merged, TOKENS), expected, rtol=1e-5, atol=1e-4)


def test_adapters_of_a_plain_transformer(llama, tmp_path):
    base = tokenizer(shutil.copytree(llama, tmp_path / "base"))
    folder, _ = write_adapters_of(tmp_path / "adapters")
    with pytest.raises(ValueError, match="(?s)does not fit base=.*lora_A.weight has shape"):
        import_adapters(folder, base, tmp_path / "run")
    for message, options in {
        "method='mamba'; accepted are softmax, liger": dict(method="mamba"),
        "gate: requires method='liger'": dict(gate="gla"),
    }.items():
        with pytest.raises(ValueError, match=message):
            import_adapters(folder, base, tmp_path / "run", **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(use_dora=True), "use_dora=True; accepted is False"),
        (dict(use_rslora=True), "use_rslora=True; accepted is False"),
        (dict(peft_type="IA3"), "peft_type='IA3'; accepted is 'LORA'"),
        (dict(bias="all"), "bias='all'; accepted is 'none'"),
        (dict(rank_pattern={"q_proj": 4}), "not supported: rank_pattern={'q_proj': 4}"),
        (dict(layers_to_transform=[0]), r"not supported: layers_to_transform=\[0\]"),
        (dict(modules_to_save=["lm_head"]), "not supported: modules_to_save"),
        (dict(new_thing=3), "not supported: new_thing=3"),
        (dict(init_lora_weights="pissa"), "init_lora_weights='pissa', which changes the weights"),
        (dict(target_modules="all-linear"), "target_modules='all-linear'; accepted is a list"),
        (dict(r=0), "r=0; accepted is a whole number from 1"),
        (dict(lora_alpha="8"), "lora_alpha='8'; accepted is a finite number above 0"),
    ],
)
def test_refused_adapters(changes, message, tmp_path):
    folder, _ = write_adapters_of(tmp_path / "adapters", changes)
    with pytest.raises(ValueError, match=message):
        lora_config(Adapters(folder))


def test_formats_of_the_export_are_checked(llama, instructions, tmp_path):
    config = config_of(llama, instructions, total_tokens=1024, trainable=("q_proj",))
    config.model = dataclasses.replace(config.model, lora=None)
    train(config, tmp_path / "run")
    for message, options in {
        "format='gguf'; accepted are huggingface, liger, peft": dict(format="gguf"),
        "the run trains q_proj; accepted are runs that train adapters": dict(format="peft"),
    }.items():
        with pytest.raises(ValueError, match=message):
            export_run(tmp_path / "run", tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
    assert convert.Checkpoint(llama).config["model_type"] == "llama"
