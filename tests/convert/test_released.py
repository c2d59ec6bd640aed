"""Released models with linear layers have the logits that flash-linear-attention and transformers computed
(released_goldens/, see make_released_goldens.py), and are exported unchanged.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import lsm_jax
from lsm_jax import mixers
from lsm_jax.convert import (
    Checkpoint,
    export,
    export_released,
    load_params,
    model_config,
    released_export,
)
from lsm_jax.convert.families import FAMILIES
from lsm_jax.convert.huggingface import checkpoint_layout, import_huggingface
from lsm_jax.models import LayerConfig, ModelConfig, abstract
from tests.convert.edits import edit

GOLDENS = Path(__file__).parent / "released_goldens"
NAMES = sorted(path.name for path in GOLDENS.iterdir() if path.is_dir())
# Models that `make test` compares, in chunked prefill, single tokens, packed and padded rows, and in the logits of a row; the
# others are slow.
FAST = ("transformers-mamba2",)
LOGITS = ("fla-gla", "fla-kda", "transformers-mamba", "transformers-qwen3_5_text")
GRADIENTS = (
    "fla-gla", "fla-delta_net", "fla-hgrn2", "fla-mla", "transformers-mamba", "transformers-mamba2",
    "transformers-granitemoehybrid-moe", "transformers-nemotron_h-moe", "transformers-qwen3_5_text", "transformers-recurrent_gemma",
)  # fmt: skip
# Models that `make test` exports again; the others are slow.
STORED = ("fla-linear_attn", "fla-rwkv7", "transformers-mamba")
TOLERANCE = 1e-4  # of logits, of which the largest are 4 to 9 (27 with tied embeddings)


def marked(names, fast):
    return [pytest.param(n, marks=() if n in fast else pytest.mark.slow) for n in names]


def imported(folder):
    """Return the config and the parameters of a checkpoint."""
    config = dataclasses.replace(model_config(folder), remat="none")
    return config, load_params(folder, config)


def model_of(folder):
    config, params = imported(folder)
    return nnx.merge(nnx.graphdef(abstract(config)), params)


def expected_of(name):
    """Return the tokens and the logits of both rows of a golden."""
    golden = np.load(GOLDENS / name / "expected.npz")
    return [(golden[f"tokens_{row}"], golden[f"logits_{row}"]) for row in (0, 1)]


def assert_close(logits, expected):
    assert np.abs(expected).max() > 4
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", marked(NAMES, LOGITS))
def test_logits_are_those_of_the_library(name):
    tokens, logits = expected_of(name)[0]
    output = jax.jit(lambda m, t: m(t)[0])(model_of(GOLDENS / name), tokens[None])
    assert_close(output[0], logits)


@pytest.mark.parametrize("name", marked(NAMES, FAST))
def test_logits_of_pieces_of_packed_rows_and_of_padded_rows(name):
    model = model_of(GOLDENS / name)
    (tokens, logits), (others, other_logits) = expected_of(name)
    first = len(tokens)
    # Two documents in one row; and a document after padding.
    packed = np.concatenate([tokens, others])
    padded = np.concatenate([np.zeros_like(tokens), others])
    segments = np.array([[1] * first + [2] * len(others), [0] * first + [1] * len(others)])
    together = jax.jit(lambda m, t, s: m(t, segment_ids=s)[0])
    output = together(model, np.stack([packed, padded]), segments)
    assert_close(output[0, :first], logits)
    assert_close(output[0, first:], other_logits)
    assert_close(output[1, first:], other_logits)
    # A row in two pieces of eight tokens, then token by token.
    step = jax.jit(lambda m, t, s: m(t, state=s)[:2])
    state, pieces = model.init_state(1, first), []
    for start, stop in ((0, 8), (8, 16), *((i, i + 1) for i in range(16, first))):
        piece, state = step(model, tokens[None, start:stop], state)
        pieces.append(piece[0])
    assert_close(np.concatenate(pieces), logits)


@pytest.mark.parametrize("name", marked(GRADIENTS, ()))
def test_gradients_are_those_of_the_library(name):
    folder = GOLDENS / name
    config, params = imported(folder)
    golden = np.load(folder / "expected.npz")
    tokens, graph = golden["tokens_0"], nnx.graphdef(abstract(config))

    def loss(params):
        logits = nnx.merge(graph, params)(tokens[None])[0]
        return jnp.sum(logits**2) / (2 * len(tokens))

    layout = checkpoint_layout(Checkpoint(folder), config)
    write = layout.writer(jax.jit(jax.grad(loss))(params))
    for tensor in layout.shapes:
        # A router's bias takes part in the choice of experts alone.
        expected = golden.get(f"grad.{tensor}", np.zeros(layout.shapes[tensor], np.float32))
        scale = np.abs(expected).max()
        unused = tensor.endswith("e_score_correction_bias") or ".experts." in tensor
        assert scale > 0 or unused  # no token may choose an expert
        np.testing.assert_allclose(write(tensor, np.float32), expected, rtol=0, atol=1e-4 * scale)


@pytest.mark.parametrize("name", marked(NAMES, STORED))
def test_an_unchanged_model_is_exported_byte_for_byte(name, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(GOLDENS / name, source, ignore=shutil.ignore_patterns("*.npz"))
    config, params = imported(source)
    export(params, config, source, tmp_path / "out")
    files = sorted(path.name for path in source.iterdir())
    assert sorted([*files, "SHA256SUMS"]) == sorted(p.name for p in (tmp_path / "out").iterdir())
    for file in files:
        assert (tmp_path / "out" / file).read_bytes() == (source / file).read_bytes(), file
    # Without the source: the same model from the same names, and fields that read as it.
    if config.layers[config.letters()[0]].mixer != mixers.SoftmaxConfig():
        alone = export_released(params, config, tmp_path / "alone")
        again, again_params = imported(alone)
        assert again.letters() == config.letters()
        jax.tree.map(np.testing.assert_array_equal, again_params, params)
        shapes, theirs = Checkpoint(alone).shapes, Checkpoint(source).shapes
        alike = {
            n.replace("_swish_gate", "").replace(".language_model.", ".")
            for n in theirs
            if not n.startswith("model.visual.")
        }
        assert {n.replace("_swish_gate", "") for n in shapes} == alike


def changed(name, tmp_path, change=None, **fields):
    """Copy a golden with changed tensors and fields; return its folder."""
    folder = tmp_path / name
    shutil.copytree(GOLDENS / name, folder)
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
    if change is not None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_matrices_keep_bfloat16_beside_float32_and_are_exported_so(tmp_path):
    def change(tensors):
        for name, value in tensors.items():
            if not name.endswith("A_log"):
                tensors[name] = value.astype(ml_dtypes.bfloat16)

    folder = changed("fla-gated_deltanet", tmp_path, change)
    source = Checkpoint(folder)
    config = model_config(source)
    dtypes = checkpoint_layout(source, config).stored_dtypes(source)
    params = load_params(source, config, dtype=dtypes)
    mixer = params["periods"]["blocks"][0]["mixer"]
    assert params["embedding"].dtype == mixer["q_proj"]["kernel"].dtype == jnp.bfloat16
    assert mixer["a_log"].dtype == mixer["norm"]["scale"].dtype == jnp.float32
    export(params, config, folder, tmp_path / "out")
    out = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert out == (folder / "model.safetensors").read_bytes()


def test_missing_and_surplus_tensors_are_named(tmp_path):
    def change(tensors):
        del tensors["model.layers.1.attn.v_lora.lora.2.bias"]
        tensors["model.layers.0.attn.v_lora.lora.2.bias"] = np.ones(32, np.float32)

    folder = changed("fla-rwkv7", tmp_path, change)
    with pytest.raises(ValueError, match="not those of the model") as error:
        imported(folder)
    assert "missing: model.layers.1.attn.v_lora.lora.2.bias (32,)" in str(error.value)
    assert "unexpected: model.layers.0.attn.v_lora.lora.2.bias (32,)" in str(error.value)


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("fla-gla", dict(new_gate=2), "unknown fields, which may change .* gla .*: new_gate=2"),
        ("fla-gla", dict(clamp_min=-1.0), "clamp_min=-1.0; accepted is None"),
        ("fla-gla", dict(attnres_block_size=2), "attnres_block_size=2; accepted is None"),
        ("fla-gla", dict(vocab_size=None), "missing fields: vocab_size"),
        ("fla-gla", dict(num_heads="2"), "num_heads='2'; accepted is a whole number"),
        ("fla-gla", dict(hidden_size=2**20), "hidden_size=1048576 is larger than every dimension"),
        ("fla-gla", dict(architectures=["GPT"]), "architectures=.'GPT'.; accepted is .'GLAForCausal"),
        ("fla-gla", dict(attn=dict(layers=[2], num_heads=2)), "attn.layers=.2.; accepted is a list of"),
        ("fla-gla", dict(attn=dict(layers=[1], num_heads=2, sink=1)), "attn has unknown fields: sink"),
        ("fla-gla", dict(attn=dict(layers=True, num_heads=2)), "attn.layers=True; accepted is a list of layers"),
        ("fla-delta_net", dict(qk_norm="sum"), "qk_norm='sum'; accepted is 'l2'"),
        ("fla-hgrn2", dict(num_heads=4), "num_heads=4: accepted is hidden_size / expand_ratio = 2"),
        ("fla-kda", dict(safe_gate=True), "lower_bound=None; accepted is a lower_bound below 0"),
        ("fla-rwkv7", dict(value_dim=[32, 64]), "value_dim=.32, 64.; accepted is hidden_size=32"),
        ("fla-mamba", dict(layer_norm_epsilon=1.0), "norm_eps=1e-05, but layer_norm_epsilon=1.0"),
        ("fla-mamba2", dict(norm_before_gate=True), "norm_before_gate=True; accepted is False"),
        ("transformers-mamba2", dict(time_step_limit=[0, 1]), r"time_step_limit=\[0, 1\]; accepted"),
        ("transformers-mamba2", dict(num_heads=8), "num_heads=8: accepted is expand . hidden_size"),
        ("transformers-granitemoehybrid", dict(mup_width=2), "unknown fields, .* granitemoehybrid .*: mup_width=2"),
        ("transformers-granitemoehybrid", dict(attention_bias=True), "attention_bias=True; accepted is False"),
        ("transformers-granitemoehybrid", dict(layer_types=["mamba", "rnn", "mamba"]), "layer_types=.*rnn.*; accepted is a list of 3"),
        ("fla-abc", dict(clamp_max=3), "clamp_min=-2, clamp_max=3; accepted is a clamp_min of -clamp_max"),
        ("fla-hgrn", dict(expand_ratio=2), "expand_ratio=2; accepted is 1"),
        ("fla-lightnet", dict(attn=dict(layers=[1], num_heads=2, rope_theta=5.0)), "attn.rope_theta=5.0, which FLA's lightnet does not"),
        ("fla-mamba3", dict(num_heads=3), "num_heads=3: accepted is expand . hidden_size / head_dim = 4"),
        ("fla-mamba3", dict(A_floor=0.1), "A_floor=0.1; accepted is 0.0001"),
        ("fla-log_linear_mamba2", dict(use_bias=False), "use_bias=False, use_conv_bias=False; accepted are true and false"),
        ("fla-log_linear_mamba2", dict(num_heads=3), "num_heads=3: accepted is expand . hidden_size / head_dim = 4"),
        ("fla-nsa", dict(block_counts=2), "NSAConfig.num_blocks=2: accepted are numbers from 3"),
        ("fla-precond_kda", dict(num_v_heads=4), "num_v_heads=4; accepted are null and num_heads=2"),
        ("fla-moba", dict(moba_topk=1), "moba_topk=1: accepted are numbers from 2"),
        ("fla-moba", dict(num_kv_heads=1), "num_kv_heads=1: accepted are null and num_heads=2"),
        ("fla-mla", dict(window_size=6), "window_size=6; accepted is None"),
        ("fla-mla", dict(attnres_block_size=2), "attnres_block_size=2; accepted is None"),
        ("fla-mla", dict(qk_head_dim=8), "qk_head_dim=8: accepted are null and qk_nope_head_dim . qk_rope_head_dim = 12"),
        ("fla-mla", dict(v_head_dim=13), "v_head_dim=13: accepted are numbers to qk_nope_head_dim . qk_rope_head_dim = 12"),
        ("fla-mla", dict(rope_theta=None), "rope_theta=None; accepted is a value"),
        ("fla-mla", dict(rope_theta=5.0), "rope_parameters=.*300.0.*; accepted are null and .*'rope_theta': 5.0"),
        ("fla-mla", dict(rope_scaling=dict(rope_type="yarn", factor=4.0)), "rope_scaling=.*yarn.*; accepted are null and .*'default'"),
        ("fla-mla", dict(qk_rope_head_dim=3, qk_head_dim=11), "MLAConfig.rope_dim=3: rotation needs an even number"),
        ("fla-path_attn", dict(num_heads=3), "num_heads=3: accepted is a divisor of hidden_size=32"),
        ("transformers-granitemoehybrid", dict(logits_scaling=0), "logits_scaling=0; accepted is a finite number above 0"),
        ("transformers-granitemoehybrid", dict(position_embedding_type="alibi"), "position_embedding_type='alibi'; accepted is None"),
        ("transformers-granitemoehybrid", dict(mamba_d_head=8), "mamba_d_head=8: accepted are 'auto' and the 64 inner"),
        ("transformers-bamba", dict(partial_rotary_factor=0.25), "partial_rotary_factor=0.25; accepted is 0.5"),
        ("transformers-bamba", dict(attn_layer_indices=[3]), "attn_layer_indices=.3.; accepted is a list of layers from 0 to 2"),
        ("transformers-bamba", dict(rope_parameters=dict(rope_type="yarn", factor=2.0)), "rotation: rope_scaling of type 'yarn'"),
        ("transformers-nemotron_h", dict(hybrid_override_pattern="M-MX-"), "hybrid_override_pattern='M-MX-'; accepted are letters"),
        ("transformers-nemotron_h", dict(hybrid_override_pattern="M-M--"), "hybrid_override_pattern='M-M--' differs from layers_block"),
        ("transformers-nemotron_h", dict(hybrid_override_pattern="M-M*-", layers_block_type=5), "differs from layers_block_type=5"),
        ("transformers-nemotron_h", dict(layers_block_type=["mlp"] * 5), "layer 0 is a feedforward, and no mixer is before it"),
        ("transformers-nemotron_h-moe", dict(moe_latent_size=8), "moe_latent_size=8; accepted is None"),
        ("transformers-nemotron_h-moe", dict(n_routed_experts=2**30), "n_routed_experts=1073741824 is larger than every dimension"),
        ("transformers-nemotron_h-moe", dict(topk_group=5), "MoEConfig.top_groups=5: accepted are 1 to num_groups=4"),
        ("transformers-falcon_h1", dict(ssm_multipliers=[1.0]), "ssm_multipliers=.1.0.; accepted is a list of 5 numbers"),
        ("transformers-falcon_h1", dict(projectors_bias=True), "projectors_bias=True; accepted is False"),
        ("transformers-lfm2", dict(layer_types=["conv"] * 2), "layer_types=.*; accepted is a list of 3"),
        ("transformers-lfm2", dict(layer_types=[{}] * 3), "layer_types=.*; accepted is a list of 3"),
        ("transformers-lfm2", dict(layer_types=None, full_attn_idxs=1), "full_attn_idxs=1; accepted is a list of layers"),
        ("transformers-lfm2", dict(conv_bias=True), "conv_bias=True; accepted is False"),
        ("transformers-recurrent_gemma", dict(block_types=["rnn"]), "block_types=.*rnn.*; accepted is a list of 'recurrent' and"),
        ("transformers-recurrent_gemma", dict(block_types=[]), "block_types=..; accepted is a list of"),
        ("transformers-recurrent_gemma", dict(head_dim=16), "num_attention_heads=4, head_dim=16: accepted are a divisor of"),
        ("transformers-recurrent_gemma", dict(intermediate_size=71), "intermediate_size=71: accepted are even numbers"),
        ("transformers-recurrent_gemma", dict(partial_rotary_factor=1), "partial_rotary_factor=1; accepted is 0.5"),
        ("transformers-recurrent_gemma", dict(attention_bias=True), "attention_bias=True; accepted is False"),
        ("transformers-recurrent_gemma", dict(lru_width=46), "RGLRUConfig.num_heads=4 does not divide expand . hidden_size=46"),
        ("transformers-xlstm", dict(weight_mode="fused"), "weight_mode='fused'; accepted is 'single'"),
        ("transformers-xlstm", dict(num_blocks=3), "num_blocks=3; accepted is num_hidden_layers=2"),
    ],
)  # fmt: skip
def test_errors_name_the_field(name, fields, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        model_config(changed(name, tmp_path, **fields))


def test_the_command_exports_a_run(tmp_path, capsys):
    import tokenizers

    folder = changed("fla-gla", tmp_path)
    vocabulary = {chr(0x100 + i): i for i in range(48)}
    words = tokenizers.models.WordLevel(vocabulary, unk_token=chr(0x100))
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))
    (folder / "expected.npz").unlink()
    import_huggingface(folder, tmp_path / "run")
    run = lsm_jax.load_run(tmp_path / "run")
    assert run.config.model.layers["L"].mixer == model_config(folder).layers["L"].mixer
    options = [f"--workdir={tmp_path / 'run'}", f"--out={tmp_path / 'out'}"]
    assert released_export.main([*options, f"--source={folder}"]) == 0
    for path in folder.iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    assert released_export.main([*options, f"--source={folder}", "--dtype=bfloat16"]) == 1
    assert "--dtype with --source: accepted is one of them" in capsys.readouterr().err
    options[1] += "-bfloat16"
    assert released_export.main([*options, "--dtype=bfloat16"]) == 0
    out = Checkpoint(tmp_path / "out-bfloat16")
    assert set(out.dtypes.values()) == {"BF16"} and (out.folder / "tokenizer.json").is_file()
    assert released_export.main(options) == 1
    assert "is not empty; accepted is a new folder" in capsys.readouterr().err
    path = (
        tmp_path / "run" / "config.json"
    )  # a run of configs/finetune.py names its tokenizer by folder or id
    data = json.loads(path.read_text())["data"] | dict(tokenizer=str(folder))
    edit(path, data=data)
    assert released_export.main([options[0], f"--out={tmp_path / 'again'}"]) == 0
    assert (tmp_path / "again" / "tokenizer.json").is_file()


def test_layouts_name_parameters_without_a_tensor():
    config = ModelConfig(
        vocab_size=48,
        hidden_size=32,
        num_layers=1,
        layers={"L": LayerConfig(mixer=mixers.TTTLinearConfig(num_heads=2))},
    )
    with pytest.raises(ValueError, match="gla format has no tensor for .*:\n  mixer"):
        FAMILIES["gla"].layout(json.loads((GOLDENS / "fla-gla" / "config.json").read_text()), config, "x")  # fmt: skip
