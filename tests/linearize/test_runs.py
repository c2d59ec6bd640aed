"""Tests of fine-tuning a pretrained transformer that was converted to Liger: which parameters are trained and
saved, resuming a run, merging adapters into weights, and export.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from lsm_jax import models
from lsm_jax.convert import load
from lsm_jax.data import NeedleConfig
from lsm_jax.evaluation import TASKS, Request
from lsm_jax.linearize import (
    Pretrained,
    base_model,
    liger_model,
    lolcats_model,
    merge_adapters,
)
from lsm_jax.linearize.export import export_run, main
from lsm_jax.mixers import LoRAConfig, OpConfig
from lsm_jax.parallel import MeshConfig, make_mesh
from lsm_jax.training import from_dict, load_run, make_program, read_rows, to_dict, train
from lsm_jax.training.partition import leaves_of, split, targets
from lsm_jax.training.run_files import checkpoint_directory
from tests.linearize.conftest import assert_same_bits, config_of
from tests.linearize.on_mesh import MESHES
from tests.parallel.test_parallel import run_with_devices
from tests.training.tiny import stop_at


def losses(workdir):
    return [
        row["train/loss"] for row in read_rows(workdir / "metrics.jsonl") if "train/loss" in row
    ]


def loaded(llama, config):
    """Return the parameters, by name, of a Liger run before its first step, as they are read from the
    pretrained Llama.
    """
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = models.abstract(config.model)
    shapes = nnx.to_pure_dict(nnx.state(shapes, nnx.Param))
    target = targets(shapes, jax.tree.map(lambda _: device, shapes), config.trainable)
    return leaves_of(Pretrained(path=str(llama)).load(config.model, target))


@pytest.fixture(scope="module")
def trained(llama, tmp_path_factory):
    """Fixture: the config and the directory of a finished Liger run of six steps."""
    folder = tmp_path_factory.mktemp("runs")
    path = folder / "alpaca.jsonl"
    rows = [dict(instruction=f"Say {i}", input="", output=f"It is {i}. " * 3) for i in range(16)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = config_of(llama, path)
    train(config, folder / "run")
    return config, folder / "run"


def test_only_adapters_train_and_are_saved(llama, trained):
    config, workdir = trained
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config
    assert losses(workdir)[-1] < losses(workdir)[0]
    original = loaded(llama, config)
    for name, leaf in leaves_of(load_run(workdir).params).items():
        if ".lora." in name:
            assert leaf.dtype == jnp.float32
            assert name.endswith(".a") or (leaf != 0).any(), name
        else:
            assert leaf.dtype == jnp.bfloat16
            np.testing.assert_array_equal(leaf, original[name])
    newest = checkpoint_directory(workdir) / "6"
    assert "lora" in (newest / "params" / "_METADATA").read_text()
    for part in ("params", "training"):
        assert "embedding" not in (newest / part / "_METADATA").read_text()


def test_frozen_parameters_are_loaded_as_bfloat16(llama, instructions, monkeypatch):
    config = config_of(llama, instructions, trainable=("q_proj",))
    config.model.lora, calls, read = None, [], load._read

    def record(source, place, shape, dtype):
        calls.extend((rows.name, dtype) for _, rows in place)
        return read(source, place, shape, dtype)

    monkeypatch.setattr(load, "_read", record)
    params = loaded(llama, config)
    assert {str(kind) for name, kind in calls if "q_proj" in name} == {"float32"}
    assert {str(kind) for name, kind in calls if "q_proj" not in name} == {"bfloat16"}
    assert {name for name, leaf in params.items() if leaf.dtype == jnp.float32} == {
        "periods.blocks.0.mixer.q_proj.kernel"
    }


@pytest.mark.slow
def test_a_resumed_run_has_the_same_losses(trained, tmp_path):
    config, workdir = trained
    train(config, tmp_path / "halves", on_report=stop_at(3))
    train(config, tmp_path / "halves")
    assert losses(tmp_path / "halves") == losses(workdir)
    assert_same_bits(load_run(tmp_path / "halves").params, load_run(workdir).params)


def test_merged_adapters_give_the_same_logits_and_are_exported(llama, trained, tmp_path):
    config, workdir = trained
    run = load_run(workdir)
    tokens = jnp.arange(20)[None] * 7 % 257
    params = jax.tree.map(lambda x: x.astype(jnp.float32), run.params)
    merged = merge_adapters(params, config.model.lora)
    without_adapters = dataclasses.replace(config.model, lora=None)

    def logits(model, params):
        graph = nnx.graphdef(models.abstract(model))
        return jax.jit(lambda p: nnx.merge(graph, p)(tokens)[0])(params)

    expected = logits(config.model, params)
    untuned = merge_adapters(jax.tree.map(jnp.zeros_like, params), config.model.lora)
    assert jax.tree.structure(untuned) == jax.tree.structure(merged)
    np.testing.assert_allclose(logits(without_adapters, merged), expected, atol=2e-5)

    folder = export_run(workdir, tmp_path / "out")
    before, after = (load_file(f / "model.safetensors") for f in (llama, folder))
    assert {k: (v.shape, v.dtype) for k, v in before.items()} == {
        k: (v.shape, v.dtype) for k, v in after.items()
    }
    assert (folder / "config.json").read_bytes() == (llama / "config.json").read_bytes()
    assert before["model.layers.0.self_attn.q_proj.weight"].shape == (16, 16)
    again = loaded(folder, dataclasses.replace(config, model=without_adapters, trainable=()))
    np.testing.assert_allclose(
        again["periods.blocks.0.mixer.q_proj.kernel"],
        leaves_of(merged)["periods.blocks.0.mixer.q_proj.kernel"],
        atol=1e-7,
    )
    assert main([f"--workdir={workdir}", f"--out={folder}"]) == 1  # the folder exists


@pytest.mark.slow
def test_a_run_does_not_load_other_frozen_parameters(llama, instructions, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(llama, base)
    config = config_of(base, instructions, total_tokens=1024)
    train(config, tmp_path / "run")
    tensors = load_file(base / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name][::-1].copy()  # the same numbers, in another order
    save_file(tensors, base / "model.safetensors")
    for begin in (lambda: load_run(tmp_path / "run"), lambda: train(config, tmp_path / "run")):
        with pytest.raises(
            ValueError, match=r"not those that the run began with.*1 changed: .*up_proj"
        ):
            begin()


def test_a_pretrained_window_may_be_longer_than_the_rows(llama, instructions):
    config = config_of(llama, instructions)
    config.model = dataclasses.replace(config.model, layers=copy.deepcopy(config.model.layers))
    config.model.layers["L"].mixer.window = 4096
    config.validate()
    with pytest.raises(ValueError, match="window=4096 is longer than data.sequence_length=256"):
        dataclasses.replace(config, base=None, trainable=()).validate()


def test_every_nth_layer_of_a_hybrid_is_softmax_attention(llama):
    base = Pretrained(path=str(llama)).config()
    base.num_layers = 6
    model = liger_model(base, hybrid=3, window=8)
    assert (model.pattern, model.letters()) == ("LLN", "LLNLLN")
    assert liger_model(base, hybrid=4).letters() == "LLLNLL"
    assert base_model(model).pattern == "LLN"
    assert {type(x.mixer).__name__ for x in base_model(model).layers.values()} == {"SoftmaxConfig"}
    with pytest.raises(
        ValueError, match="hybrid=7: accepted are 0 and integers from 2 to the model's 6 layers"
    ):
        liger_model(base, hybrid=7)


def test_llama_3_8b_trains_4718592_parameters():
    from configs import liger

    config = liger.get_config("llama3-8b")
    config.batch_size = 8 * len(jax.devices())
    mesh = make_mesh(MeshConfig())
    with jax.set_mesh(mesh):
        state = jax.eval_shape(make_program(config, mesh).init)
    assert sum(leaf.size for leaf in jax.tree.leaves(state.params)) == 4_718_592
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert sum(leaf.size for leaf in moments) == 2 * 4_718_592
    params = nnx.to_pure_dict(nnx.state(models.abstract(config.model), nnx.Param))
    _, frozen = split(params, config.trainable)
    assert sum(leaf.size for leaf in jax.tree.leaves(frozen)) == 8_030_261_248


@pytest.mark.slow
def test_losses_on_a_mesh_are_the_same(llama, trained, tmp_path):
    config, workdir = trained
    run_with_devices(
        4, "-m", "tests.linearize.on_mesh", str(llama), config.data.path, str(tmp_path)
    )
    for name in MESHES:
        np.testing.assert_allclose(
            losses(tmp_path / name), losses(workdir), rtol=1e-4, err_msg=name
        )


def test_options_of_the_liger_config():
    from configs import liger

    variant = "llama3-8b,lr=2e-3,rank=16,memory_weight=.1,window_weight=1,temperature=64"
    config = liger.get_config(variant)
    mixer = config.model.layers["L"].mixer
    assert (mixer.memory_weight, mixer.window_weight, mixer.temperature()) == (0.1, 1.0, 64.0)
    assert config.model.lora == LoRAConfig(rank=16, alpha=16.0)
    assert config.optimizer.peak_lr == 2e-3
    for option, words in {
        "lr=fast": "lr='fast'; accepted is a number",
        "rank=-1": "rank='-1'; accepted is a whole number",
        "lr=nan": "lr='nan'; accepted is a number",
        "lr=0": "lr='0'; accepted is a number above 0",
        "lr=1e-3,lr=1e-2": "lr is given twice",
        "method=softmax,window=8": "window requires a method with a window",
        "method=window,gate=gla": "gate requires method=liger",
        "ablation=no_lora,rank=4": "rank requires adapters",
        "tokenizer=tokenizer.json": "tokenizer requires source=PATH",
        "method=window,temperature=2": "require method=liger",
        "temperature=0": "gate_temperature",
        "memory=1": "option 'memory'; accepted are source, tokenizer, gate",
    }.items():
        with pytest.raises(ValueError, match=words):
            liger.get_config(f"llama3-8b,{option}")


def test_the_tokenizer_written_for_a_gguf_file_must_have_its_tokens(tmp_path):
    from configs import liger

    file, variant = tmp_path / "m.gguf", f"auto,source={tmp_path / 'm.gguf'}"
    shutil.copy(Path(__file__).parents[1] / "convert" / "goldens" / "llama.gguf", file)
    tokenizer = Path(liger.get_config(variant).data.tokenizer)
    assert liger.get_config(variant).data.tokenizer == str(tokenizer)
    content = json.loads(tokenizer.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["other"] = vocabulary.pop(next(t for t, i in vocabulary.items() if i == 5))
    tokenizer.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="m.gguf.tokenizer.*is not that of.*its id 5 is 'other'"):
        liger.get_config(variant)


def test_errors_name_the_field(llama, instructions, tmp_path):
    config = config_of(llama, instructions)
    changes = {
        "trainable=.*no parameter has 'lorra'.*did you mean 'lora'": dict(trainable=("lorra",)),
        "set init_from or base, from which they are read": dict(base=None),
        "base.path is empty; accepted is a pretrained": dict(base=Pretrained()),
        "base.path=.*nowhere' does not exist.*has moved, change base.path": dict(
            base=Pretrained(path=str(tmp_path / "nowhere"))
        ),
        "is not the pretrained model of.*\n.*num_layers: 2 in base.path, 4 in the config": dict(
            model=dataclasses.replace(config.model, num_layers=4)
        ),
        "no projection p_proj; it has .*q_proj": dict(
            model=dataclasses.replace(config.model, lora=LoRAConfig(targets=("p_proj",)))
        ),
        "LoRAConfig.rank=0: it must be greater than 0": dict(
            model=dataclasses.replace(config.model, lora=LoRAConfig(rank=0))
        ),
    }
    for message, change in changes.items():
        with pytest.raises(ValueError, match=message):
            train(dataclasses.replace(config, **change), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("ablation", ["random_gate", "feature_map", "no_lora", "no_window"])
def test_ablations_train_the_listed_parameters(llama, instructions, tmp_path, ablation):
    from configs import liger

    fields, trainable = liger.ABLATIONS[ablation]
    config = config_of(llama, instructions)
    base = dataclasses.replace(config.base.config(), dtype="float32", remat="none")
    lora = None if ablation == "no_lora" else LoRAConfig(rank=2)
    config.model = liger_model(
        base, lora=lora, **dict(window=8, op=OpConfig(chunk_size=16)) | fields
    )
    config.trainable = trainable
    train(config, tmp_path / "run")
    run, original = load_run(tmp_path / "run"), loaded(llama, config)
    changed = {
        name
        for name, leaf in leaves_of(run.params).items()
        if name in original and (leaf != original[name]).any()
    }
    kernels = {f"periods.blocks.0.mixer.{n}_proj.kernel" for n in "qkv"}
    assert changed == (kernels if ablation == "no_lora" else set())
    if ablation in ("random_gate", "feature_map"):
        with pytest.raises(ValueError, match="cannot be exported, .* no such parameters: periods"):
            export_run(tmp_path / "run", tmp_path / "out")


@pytest.mark.slow
def test_lolcats_trains_its_maps_and_then_adapters(llama, instructions, tmp_path):
    from configs import liger

    config = config_of(llama, instructions)
    base = dataclasses.replace(config.base.config(), dtype="float32", remat="none")
    fields = dict(window=8, op=OpConfig(chunk_size=16), feature_dim=4)
    config.model = lolcats_model(base, transfer=True, **fields)
    config.trainable = liger.LOLCATS_MAPS
    longer = dataclasses.replace(config, total_tokens=24 * 1024)
    train(longer, tmp_path / "maps")
    rows = read_rows(tmp_path / "maps" / "metrics.jsonl")
    distance = [row["attention_transfer_loss"] for row in rows if "attention_transfer_loss" in row]
    assert distance[-1] < 0.9 * distance[0]
    config.model = lolcats_model(base, lora=LoRAConfig(rank=2), **fields)
    config.trainable = ("lora",)
    with pytest.raises(ValueError, match="(?s)base=.*q_map.kernel: absent ->"):
        train(config, tmp_path / "tuned")
    config.init_from = str(tmp_path / "maps")
    train(config, tmp_path / "tuned")
    first, second = (leaves_of(load_run(tmp_path / w).params) for w in ("maps", "tuned"))
    for name in (n for n in first if "map" in n or "factor" in n):
        np.testing.assert_array_equal(second[name], first[name].astype(jnp.bfloat16))
    assert losses(tmp_path / "tuned")[-1] < losses(tmp_path / "tuned")[0]


@pytest.mark.slow
def test_all_evaluation_tasks_run(trained, tmp_path):
    _, workdir = trained
    run = load_run(workdir)
    results = TASKS["perplexity"](run, Request(piece_length=64), tmp_path)
    assert np.isfinite(results["val/loss"])
    assert len(TASKS["generate"](run, Request(prompt="Say", num_tokens=4), tmp_path).tokens) <= 4
    text = tmp_path / "essay.txt"
    text.write_text("A line of an essay, which is no instruction.\n" * 60)
    results = TASKS["perplexity"](run, Request(data=str(text)), tmp_path)
    assert np.isfinite(results["val/loss"]) and results["val/tokens"] > 2000
    as_trained = Request(data=run.config.data.path, data_as_trained=True)
    assert TASKS["perplexity"](run, as_trained, tmp_path)["val/tokens"] < 1000  # only answers
    needle = NeedleConfig(lengths=(600,), depths=(50,), samples=1)
    assert TASKS["needle"](run, Request(needle=needle, data=str(text)), tmp_path)


@pytest.mark.slow
def test_a_run_can_start_from_the_adapters_of_another_run(trained, tmp_path):
    config, workdir = trained
    train(dataclasses.replace(config, init_from=str(workdir), base=None), tmp_path / "second")
    first, second = (load_run(w).params for w in (workdir, tmp_path / "second"))
    for (name, a), b in zip(leaves_of(first).items(), leaves_of(second).values(), strict=True):
        assert (".lora." in name) == bool((a != b).any()), name
    assert losses(tmp_path / "second")[0] < losses(workdir)[0]
