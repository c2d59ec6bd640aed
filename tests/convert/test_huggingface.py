"""Import and export of pretrained transformers: logits are those of transformers (goldens/, see make_goldens.py), errors name the
field or tensor, and an exported model is unchanged.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from safetensors.numpy import load_file, save_file

import lsm_jax
from lsm_jax.convert import export, load_params, model_config
from lsm_jax.convert.checkpoint import Tensors
from lsm_jax.convert.huggingface import open_source, transformers_layout
from lsm_jax.mixers import RopeScaling, SoftmaxConfig
from lsm_jax.models import abstract
from lsm_jax.parallel import MeshConfig, make_mesh
from lsm_jax.training.step import param_shardings
from tests.parallel.test_parallel import run_with_devices

GOLDENS = Path(__file__).parent / "goldens"
KINDS = sorted(p.name for p in GOLDENS.iterdir() if p.suffix not in (".npz", ".json"))
FAST = ("llama3.2", "mistral", "qwen2-windows", "qwen3", "llama.gguf")
SPLIT = ("llama3.1", "qwen2", "qwen3.gguf")  # also computed in two calls with a state
MARKED = [pytest.param(k, marks=() if k in FAST else pytest.mark.slow, id=k) for k in KINDS]


def changed(tmp_path, kind: str, change=None, **fields) -> Path:
    """Copy the golden (a tiny saved transformer) of this kind and change fields of its config.json;
    `change` is a function that edits its tensors, a dict by name.
    """
    folder = tmp_path / "changed"
    shutil.copytree(GOLDENS / kind, folder)
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
    if change is not None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def build(source, params=None):
    """Return the config of the pretrained model in a folder or file `source`, and the decoder in float32 with
    the model's parameters, or with `params` if they are given.
    """
    config = dataclasses.replace(model_config(source), dtype="float32", remat="none")
    params = load_params(source, config) if params is None else params
    return config, nnx.merge(nnx.graphdef(abstract(config)), params)


@pytest.mark.parametrize("kind", MARKED)
def test_logits_are_those_of_transformers(kind):
    source = GOLDENS / kind
    assert 5 < len(KINDS)
    golden = np.load(source / "expected.npz" if source.is_dir() else source.with_suffix(".npz"))
    tokens, expected = jnp.asarray(golden["tokens"]), golden["logits"]
    assert expected.std() > 1
    _, model = build(source)
    positions = golden.get("positions")
    outputs = [jax.jit(lambda m, t: m(t, positions=positions)[0])(model, tokens)]
    if kind in SPLIT:
        half = tokens.shape[1] * 2 // 3

        @jax.jit
        def in_two_calls(model, tokens):
            first, state, _ = model(tokens[:, :half], state=model.init_state(1, tokens.shape[1]))
            second, _, _ = model(tokens[:, half:], state=state)
            return jnp.concatenate([first, second], axis=1)

        outputs.append(in_two_calls(model, tokens))
    for output in outputs:
        np.testing.assert_allclose(output, expected, rtol=0, atol=5e-5)


def test_the_scaling_of_a_gguf_file_is_recognised(tmp_path):
    mixer = model_config(GOLDENS / "llama3.2.gguf").layers["L"].mixer
    assert mixer.rope_scaling == RopeScaling(kind="llama3", factor=32.0, original_length=8192)
    content = (GOLDENS / "llama3.2.gguf").read_bytes()
    (tmp_path / "x.gguf").write_bytes(content.replace(np.float32(32).tobytes(), b"\0\0\0\x41"))
    with pytest.raises(ValueError, match="rope_freqs.weight is not that of Llama 3.1 or 3.2"):
        model_config(tmp_path / "x.gguf")


def test_configs_of_older_transformers_give_the_same_model(tmp_path):
    def older(kind, **fields):
        """Return the golden model of this kind with its config.json as transformers 4 wrote it."""
        folder = tmp_path / kind
        shutil.copytree(GOLDENS / kind, folder)
        config = json.loads((folder / "config.json").read_text())
        del config["rope_parameters"]
        config["torch_dtype"] = config.pop("dtype")
        config.pop("layer_types", None)
        (folder / "config.json").write_text(json.dumps(config | fields))
        return model_config(folder)

    scaling = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64, rope_type="llama3")  # fmt: skip
    cases = {
        "llama3": dict(rope_theta=500000.0, rope_scaling=None, is_llama_config=True),
        "llama3.1": dict(rope_theta=10000.0, rope_scaling=scaling),
        "llama-linear": dict(rope_scaling=dict(type="linear", factor=4.0)),
        "qwen2-windows": dict(rope_theta=10000.0, use_mrope=False),
        "mistral": {},
    }
    for kind, fields in cases.items():
        assert older(kind, **fields) == model_config(GOLDENS / kind)


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        ("llama3", dict(model_type="gemma"), "model_type='gemma'; accepted are llama, mistral, qwen2, qwen3, abc, bailing_hybrid, .*, xlstm"),
        ("llama3", dict(architectures=["LlamaForTokenClassification"]), "accepted is .'LlamaForCausalLM'"),
        ("llama3", dict(hidden_size=None), "config.json: missing fields: hidden_size"),
        ("llama3", dict(hidden_act="gelu"), "hidden_act='gelu'; accepted is 'silu'"),
        ("llama3", dict(attention_bias=True), "attention_bias=True; accepted is False"),
        ("llama3", dict(mlp_bias=True), "mlp_bias=True; accepted is False"),
        ("llama3", dict(quantization_config={"bits": 4}), "quantization_config=.*accepted is None"),
        ("llama3", dict(logit_scale=2.0), "unknown fields, which may change what a llama model computes: logit_scale=2.0"),
        ("llama3", dict(rope_parameters=dict(rope_type="yarn", factor=2.0)), "type 'yarn'; accepted are default, linear, llama3"),
        ("llama3", dict(rope_parameters=dict(rope_type="dynamic", factor=2.0)), "type 'dynamic'; accepted are"),
        ("llama3", dict(rope_parameters=dict(rope_type="linear")), r"type 'linear' has the fields \[\]; accepted are exactly \['factor'\]"),
        ("llama3", dict(rope_parameters=dict(rope_type="linear", factor=0.5)), "factor=0.5, .*accepted are a factor from 1"),
        ("llama3", dict(tie_word_embeddings="false"), "tie_word_embeddings='false'; accepted is true or false"),
        ("llama3", dict(hidden_size=24.0), "hidden_size=24.0; accepted is a whole number from 1"),
        ("llama3", dict(rope_theta="x"), "rope_theta='x'; accepted is a finite number above 0"),
        ("llama3", dict(num_key_value_heads=2), "num_kv_heads=2 does not divide num_heads=3"),
        ("qwen2-windows", dict(layer_types=["full_attention", "other"]), "accepted is a list of 2, each one of full_attention, sliding_attention"),
    ],
)  # fmt: skip
def test_unsupported_fields_are_named(tmp_path, kind, fields, words):
    with pytest.raises(ValueError, match=words):
        model_config(changed(tmp_path, kind, **fields))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(kind="yarn"), "RopeScaling.kind='yarn': accepted are 'linear', 'llama3'"),
        (dict(factor=True), "RopeScaling.factor=True: it must be a finite number"),
        (dict(high_freq_factor=1.0), "high_freq_factor=1.0; accepted are .* high over low"),
        (dict(original_length=0), "RopeScaling.original_length=0: it must be greater than 0"),
        (None, "without a rope_base no position is rotated; accepted is rope_scaling=None"),
    ],
)
def test_errors_of_rope_scaling_name_the_field(fields, words):
    config = SoftmaxConfig(num_heads=4, rope_scaling=RopeScaling(**fields or {}))
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(config, rope_base=config.rope_base if fields else None).validate(32)


def test_wrong_tensors_are_named(tmp_path):
    def change(tensors):
        del tensors["model.layers.1.self_attn.q_norm.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(48, np.float32)
        tensors["model.norm.weight"] = np.ones(5, np.float32)

    folder = changed(tmp_path, "qwen3", change)
    with pytest.raises(
        ValueError, match="the tensors are not those of the model in config.json"
    ) as error:
        load_params(folder, model_config(folder))
    for words in (
        "missing: model.layers.1.self_attn.q_norm.weight (16,)",
        "unexpected: model.layers.0.self_attn.q_proj.bias (48,)",
        "model.norm.weight has shape (5,); the model of the config requires (24,)",
    ):
        assert words in str(error.value)
    config = model_config(GOLDENS / "llama3")
    config.layers["L"].mixer = lsm_jax.mixers.FoXConfig(num_heads=3)
    with pytest.raises(ValueError, match="has no tensor for these parameters:\n  mixer.f_proj"):
        load_params(GOLDENS / "llama3", config)
    with pytest.raises(ValueError, match="nowhere' does not exist; accepted is a Hugging Face"):
        model_config(tmp_path / "nowhere")


def _to_bfloat16_with_extra_tensors(tensors):
    for name, value in tensors.items():
        tensors[name] = value.astype(ml_dtypes.bfloat16)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)


@pytest.mark.parametrize(
    ("kind", "change"),
    [("llama2", None), ("qwen2", None), ("llama3.2", _to_bfloat16_with_extra_tensors)],
)
def test_export_of_an_unchanged_model_writes_the_same_bytes(tmp_path, kind, change):
    folder = changed(tmp_path, kind, change)
    (folder / "expected.npz").unlink()
    config = model_config(folder)
    out = export(load_params(folder, config), config, folder, tmp_path / "out")
    names = sorted(path.name for path in folder.iterdir())
    assert sorted([*names, "SHA256SUMS"]) == sorted(path.name for path in out.iterdir())
    assert len(names) > 1
    for name in names:
        assert (folder / name).read_bytes() == (out / name).read_bytes(), name
    with pytest.raises(ValueError, match="out' is not empty; accepted is a new folder"):
        export({}, config, folder, out)


@pytest.mark.parametrize("name", ["token_embd.weight", "tokenizer.ggml.merges"])
def test_what_a_gguf_file_lacks_is_named(tmp_path, name):
    content = (GOLDENS / "llama.gguf").read_bytes()
    (tmp_path / "x.gguf").write_bytes(content.replace(name.encode(), name[:-1].encode() + b"_"))
    with pytest.raises(ValueError, match=f"missing fields: {name}|{name} is missing"):
        config = model_config(tmp_path / "x.gguf")
        export(
            load_params(tmp_path / "x.gguf", config), config, tmp_path / "x.gguf", tmp_path / "out"
        )


def test_a_gguf_file_is_exported_as_a_folder(tmp_path):
    source = GOLDENS / "llama.gguf"
    config, model = build(source)
    params = load_params(source, config)
    out = export(params, config, source, tmp_path / "out")
    again = dataclasses.replace(model_config(out), dtype=config.dtype, remat=config.remat)
    assert again == dataclasses.replace(config, init_std=again.init_std)
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), params, load_params(out, again)))
    assert (out / "tokenizer.json").is_file()
    written = json.loads((out / "config.json").read_text())
    assert (written["bos_token_id"], written["eos_token_id"]) == (1, 2)
    trained = jax.tree.map(lambda x: x * 1.5, params)
    export(trained, config, out, tmp_path / "trained")
    name = "model.layers.1.mlp.up_proj.weight"
    files = [load_file(f / "model.safetensors") for f in (out, tmp_path / "trained")]
    np.testing.assert_array_equal(files[1][name], files[0][name] * 1.5)


def test_a_tied_head_must_be_equal_to_the_embedding(tmp_path):
    def change(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    folder = changed(tmp_path, "qwen2", change)
    with pytest.raises(ValueError, match="lm_head.weight differs from model.embed_tokens.weight"):
        load_params(folder, model_config(folder))


def write_large(tmp_path, **sizes) -> Path:
    """Write a Hugging Face folder with a Llama of the given sizes and random weights."""
    fields = dict(num_attention_heads=8, num_hidden_layers=3, head_dim=64, hidden_size=512) | sizes

    def change(tensors):
        tensors.clear()
        for name, shape in transformers_layout(config).shapes.items():
            tensors[name] = rng.standard_normal(shape, np.float32)

    rng = np.random.default_rng(0)
    described = Tensors()
    described.folder = GOLDENS / "llama3"
    described.config = json.loads((described.folder / "config.json").read_text()) | fields
    layers = fields["num_hidden_layers"]
    described.shapes = {f"model.layers.{i}.mlp.up_proj.weight": (2**20, 1) for i in range(layers)}
    config = model_config(described)
    return changed(tmp_path, "llama3", change, **fields)


def test_parameters_are_loaded_one_at_a_time_to_their_devices(tmp_path):
    folder = write_large(tmp_path, vocab_size=512, intermediate_size=2048)
    source, largest = open_source(folder), 512 * 2048 * 4
    config = model_config(source)
    mesh = make_mesh(MeshConfig(data=1, fsdp=len(jax.devices())))
    shardings = param_shardings(mesh, abstract(config))
    load_params(source, config, shardings=shardings)  # compiles
    reports = []
    tracemalloc.start()
    params = load_params(
        source, config, shardings=shardings, progress=lambda *report: reports.append(report)
    )
    # This is numpy's memory only: the parameters, and the copy during a transfer, are in the device's memory.
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * largest + 2**23, peak / largest
    total = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)
    assert reports[-1] == (total, total) and len(reports) == len(source.shapes)
    kernel = params["periods"]["blocks"][0]["feedforward"]["up_proj"]["kernel"]
    stored = load_file(folder / "model.safetensors")["model.layers.2.mlp.up_proj.weight"]
    np.testing.assert_array_equal(kernel[2], stored.T)
    assert isinstance(kernel.sharding, NamedSharding)
    equal = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), params, shardings)
    assert jax.tree.all(equal)


MEMORY = """
import sys, threading, time
import jax
from lsm_jax.convert import load_params, model_config

def memory():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])

def watch():
    while not done:
        peaks.append(memory())
        time.sleep(0.002)

config, done, peaks = model_config(sys.argv[1]), [], []
jax.block_until_ready(jax.jit(lambda x: x + 1)(jax.numpy.ones(8)))
start, thread = memory(), threading.Thread(target=watch)
thread.start()
params = load_params(sys.argv[1], config)
done.append(True)
thread.join()
print((max(peaks) - start - sum(leaf.nbytes for leaf in jax.tree.leaves(params))) / int(sys.argv[2]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="requires Linux's /proc")
def test_loading_requires_less_host_memory_than_the_parameters_and_three_tensors(tmp_path):
    folder = write_large(tmp_path, vocab_size=16384, intermediate_size=4096, num_hidden_layers=6)
    extra = float(run_with_devices(1, "-c", MEMORY, str(folder), str(16384 * 512 * 4)))
    print(f"memory in addition to the parameters: {extra:.2f} of the largest tensor")
    assert extra < 3


@pytest.mark.slow
def test_parameters_are_sharded_over_four_devices():
    run_with_devices(4, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "to_their_devices")  # fmt: skip
