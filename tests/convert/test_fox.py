"""Import of FoX's published checkpoints, with random weights: the logits are the published model's, and errors are named."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import lsm_jax
from lsm_jax import models
from lsm_jax.convert import Checkpoint, export_fox, fox_config, fox_export, fox_params, import_fox
from lsm_jax.convert.fox import main
from lsm_jax.data import DataConfig
from lsm_jax.models import Decoder
from lsm_jax.training.runs import initial_params
from lsm_jax.training.step import params_of
from tests.mixers.published_fox import logits

VOCAB, WIDTH, HEADS, DEPTH, INNER = 300, 32, 2, 2, 256
BASE = dict(
    vocab_size=VOCAB, hidden_size=WIDTH, num_heads=HEADS, num_hidden_layers=DEPTH, num_kv_heads=None, window_size=None,
    hidden_act="swish", norm_eps=1e-6, rope_base=500000.0, tie_word_embeddings=False, intermediate_size=None,
)  # fmt: skip
PRO = dict(
    model_type="forgetting_transformer-project_fox", hidden_ratio=3.5, use_rope=False, use_output_gate=True, ogate_act="sigmoid",
    fgate_type="full", use_output_norm=True, qk_norm=True, qk_norm_share_param_across_head=True, use_k_shift=True,
    use_v_shift=True,
)  # fmt: skip
OFF = dict.fromkeys(("use_output_gate", "use_output_norm", "qk_norm", "use_k_shift", "use_v_shift"), False)  # fmt: skip
KINDS = {
    "pro": PRO,
    "pro-per-head-rotated": PRO | dict(qk_norm_share_param_across_head=False, use_rope=True),
    "pro-learned-gate": PRO | dict(fgate_type="bias_only", use_v_shift=False, use_output_norm=False),
    "fixed": PRO | OFF | dict(fgate_type="fixed", fgate_bias_init=True, decay_time_min=2.0, decay_time_max=64.0),
    "llama": PRO | OFF,
    "transformer-pro": PRO | dict(fgate_type="none", use_rope=True),
    "transformer-llama": dict(model_type="transformer-project_fox", hidden_ratio=4, use_rope=True, qk_norm=False),
}  # fmt: skip
COMMON = dict(
    vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=DEPTH, tie_word_embeddings=False
)
LAYER = COMMON | dict(hidden_act="swish", norm_eps=1e-6, hidden_ratio=4, intermediate_size=None)
BASELINES = {
    "mamba2": COMMON | dict(
        model_type="mamba2-project_fox", num_heads=4, head_dim=16, state_size=8, expand=2, conv_kernel=4, n_groups=1,
        hidden_act="silu", use_bias=False, use_conv_bias=True, rms_norm=True, layer_norm_epsilon=1e-5, chunk_size=256,
        time_step_limit=[0.0, float("inf")], time_step_rank=2, residual_in_fp32=True,
    ),
    "hgrn2": LAYER | dict(
        model_type="hgrn2-project_fox", num_heads=None, expand_ratio=16, use_lower_bound=True, use_short_conv=False,
        elementwise_affine=True, attn_mode="chunk",
    ),
    "hgrn2-without-bounds": LAYER | dict(model_type="hgrn2-project_fox", expand_ratio=8, use_lower_bound=False),
    "deltanet": LAYER | dict(
        model_type="delta_net-project_fox", num_heads=2, expand_k=1, expand_v=1, use_gate=False, use_short_conv=True,
        conv_size=4, use_beta=True, use_output_norm=True, qk_norm="l2", qk_activation="silu", norm_first=False,
    ),
    "deltanet-gated": LAYER | dict(model_type="delta_net-project_fox", num_heads=4, use_gate=True, expand_v=2),
}  # fmt: skip
ALL = KINDS | BASELINES
FAST = ("pro", "pro-per-head-rotated", "transformer-llama", "mamba2", "hgrn2", "deltanet")


def published(config: dict) -> dict[str, np.ndarray]:
    """Return random weights of a FoX model with this config, under the names of the published checkpoints."""
    rng = np.random.default_rng(0)

    def matrix(*shape):
        return rng.normal(size=shape) * 0.2

    def scale(size):
        return 1 + 0.3 * rng.normal(size=size)

    weights = {
        "model.embeddings.weight": matrix(VOCAB, WIDTH),
        "model.norm.weight": scale(WIDTH),
        "lm_head.weight": matrix(VOCAB, WIDTH),
    }
    for i in range(DEPTH):
        layer = {
            "attn_norm.weight": scale(WIDTH),
            "mlp_norm.weight": scale(WIDTH),
            "mlp.gate_proj.weight": matrix(2 * INNER, WIDTH),
            "mlp.down_proj.weight": matrix(WIDTH, INNER),
            "attn.q_proj.weight": matrix(WIDTH, WIDTH),
            "attn.o_proj.weight": matrix(WIDTH, WIDTH),
        }
        for letter in "kv":
            shifted = config.get(f"use_{letter}_shift")
            layer[f"attn.{letter}_proj{'.linear' * bool(shifted)}.weight"] = matrix(WIDTH, WIDTH)
            if shifted:
                layer[f"attn.{letter}_proj.shift_proj.weight"] = matrix(HEADS, WIDTH)
        if config["qk_norm"]:
            size = WIDTH // HEADS if config["qk_norm_share_param_across_head"] else WIDTH
            layer |= {f"attn.{n}_norm.weight": scale(size) for n in "qk"}
        if config.get("use_output_gate"):
            layer["attn.ogate_proj.weight"] = matrix(WIDTH, WIDTH)
        if config.get("use_output_norm"):
            layer["attn.output_norm.weight"] = scale(WIDTH)
        gate = config.get("fgate_type")
        if gate == "full":
            layer["attn.fgate_proj.weight"] = matrix(HEADS, WIDTH)
            layer["attn.fgate_proj.bias"] = rng.normal(size=HEADS)
        elif gate == "bias_only":
            layer["attn.fgate_bias"] = rng.normal(size=HEADS)
        elif gate == "fixed":
            layer["attn.fgate_bias"] = -np.log(np.expm1(1 / np.array([2.0, 64.0])))
        weights |= {f"model.layers.{i}.{name}": value for name, value in layer.items()}
    return {name: value.astype(np.float32) for name, value in weights.items()}


def published_baseline(config: dict) -> dict[str, np.ndarray]:
    """Return random weights of a baseline of FoX's paper (such as Mamba2) with this config, under the names
    of the published checkpoints.
    """
    rng = np.random.default_rng(0)

    def matrix(*shape, scale=0.2):
        return rng.normal(size=shape) * scale

    def scale(size):
        return 1 + 0.3 * rng.normal(size=size)

    kind = config["model_type"].removesuffix("-project_fox")
    folder, norm = ("backbone", "norm_f") if kind == "mamba2" else ("model", "norm")
    weights = {
        f"{folder}.embeddings.weight": matrix(VOCAB, WIDTH),
        f"{folder}.{norm}.weight": scale(WIDTH),
        "lm_head.weight": matrix(VOCAB, WIDTH),
    }
    if config.get("use_lower_bound"):
        weights["model.lower_bounds"] = np.zeros((DEPTH, WIDTH))
    for i in range(DEPTH):
        if kind == "mamba2":
            heads, inner = config["num_heads"], 2 * WIDTH
            channels = inner + 2 * config["state_size"]
            layer = {
                "norm.weight": scale(WIDTH),
                "mixer.in_proj.weight": matrix(inner + channels + heads, WIDTH),
                "mixer.conv1d.weight": matrix(channels, 1, 4, scale=0.5),
                "mixer.conv1d.bias": matrix(channels),
                "mixer.dt_bias": matrix(heads),
                "mixer.A_log": matrix(heads),
                "mixer.D": scale(heads),
                "mixer.norm.weight": scale(inner),
                "mixer.out_proj.weight": matrix(WIDTH, inner),
            }
        else:
            layer = {
                "attn_norm.weight": scale(WIDTH),
                "mlp_norm.weight": scale(WIDTH),
                "mlp.gate_proj.weight": matrix(2 * INNER, WIDTH),
                "mlp.down_proj.weight": matrix(WIDTH, INNER),
                "attn.q_proj.weight": matrix(WIDTH, WIDTH),
            }
        if kind == "hgrn2":
            layer |= {f"attn.{n}_proj.weight": matrix(WIDTH, WIDTH) for n in "fio"}
            layer["attn.g_norm.weight"] = scale(WIDTH)
        if kind == "delta_net":
            heads, values = config["num_heads"], WIDTH * config.get("expand_v", 1)
            sizes = dict(q=WIDTH, k=WIDTH, v=values)
            layer |= {f"attn.{n}_proj.weight": matrix(size, WIDTH) for n, size in sizes.items()}
            layer |= {f"attn.{n}_conv1d.weight": matrix(s, 1, 4, scale=0.5) for n, s in sizes.items()}  # fmt: skip
            layer["attn.b_proj.weight"] = matrix(heads, WIDTH)
            layer["attn.o_norm.weight"] = scale(values // heads)
            layer["attn.o_proj.weight"] = matrix(WIDTH, values)
            if config["use_gate"]:
                layer["attn.g_proj.weight"] = matrix(values, WIDTH)
        weights |= {f"{folder}.layers.{i}.{name}": value for name, value in layer.items()}
    return {name: value.astype(np.float32) for name, value in weights.items()}


def write(folder, kind="pro", change=None, parts=1, **fields):
    """Write a checkpoint in the layout that FoX's authors published, with random weights, into a folder.

    Args:
        folder: folder that is written.
        kind: name of the published model, one of `ALL`.
        change: function that edits the weights (arrays by name) before they are written.
        parts: number of safetensors files that the weights are divided into.
        fields: fields of config.json that replace the usual ones.

    Returns:
        (folder, config, weights).
    """
    config = BASELINES[kind] if kind in BASELINES else BASE | KINDS[kind]
    config = config | fields
    weights = (published_baseline if kind in BASELINES else published)(config)
    if change is not None:
        change(weights)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if parts == 1:
        save_file(weights, folder / "model.safetensors")
        return folder, config, weights
    files = {name: f"model-{i % parts + 1:05}.safetensors" for i, name in enumerate(weights)}
    for file in set(files.values()):
        save_file({n: w for n, w in weights.items() if files[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder, config, weights


MARKED = [pytest.param(k, marks=() if k in FAST else pytest.mark.slow, id=k) for k in ALL]


@pytest.mark.parametrize("kind", MARKED)
def test_logits_are_those_of_the_published_model(tmp_path, kind):
    folder, config, weights = write(tmp_path / "x", kind, parts=1 + len(kind) % 2)
    checkpoint = Checkpoint(folder)
    imported = fox_config(checkpoint)
    params = fox_params(checkpoint, imported)
    imported.dtype = "float32"
    abstract_model = nnx.eval_shape(lambda: Decoder(imported, rngs=nnx.Rngs(0)))
    model = nnx.merge(nnx.graphdef(abstract_model), params)
    tokens = np.random.default_rng(1).integers(0, VOCAB, 12)
    output = jax.jit(lambda m, t: m(t)[0])(model, tokens[None])[0]
    expected = logits(weights, config, tokens)
    assert expected.std() > 0.5
    np.testing.assert_allclose(output, expected, rtol=0, atol=2e-4 * np.abs(expected).max())


def test_an_imported_run_can_be_loaded_and_started_from(tmp_path):
    import ml_dtypes

    def to_bfloat16(weights):
        weights |= {n: w.astype(ml_dtypes.bfloat16) for n, w in weights.items()}
        weights["model.layers.0.attn.rotary.inv_freq"] = np.ones(8, np.float32)

    folder, _, weights = write(tmp_path / "fox-small", "transformer-pro", to_bfloat16)
    config = import_fox(folder, tmp_path / "run", DataConfig(tokenizer="bytes", sequence_length=8))
    assert config.name == "fox-small"
    run = lsm_jax.load_run(tmp_path / "run")
    assert run.step == 0 and run.config == config
    kernel = run.params["periods"]["blocks"][0]["mixer"]["q_proj"]["kernel"]
    published_kernel = weights["model.layers.1.attn.q_proj.weight"].astype(np.float32)
    np.testing.assert_array_equal(kernel[1], published_kernel.T)
    zeros = jax.tree.map(np.zeros_like, run.params)
    again = initial_params(str(tmp_path / "run"), zeros)
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), again, run.params))
    with pytest.raises(ValueError, match="contains a run; accepted is a new directory"):
        import_fox(folder, tmp_path / "run")


def test_the_command_makes_a_run_and_exports_it(tmp_path, capsys):
    folder, *_ = write(tmp_path / "x")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(use_cache=True)))
    assert main([f"--source={folder}", f"--workdir={tmp_path / 'run'}"]) == 0
    assert "eval.py --workdir=" in capsys.readouterr().out
    options = [f"--workdir={tmp_path / 'run'}", f"--out={tmp_path / 'out'}", f"--source={folder}"]
    assert fox_export.main(options) == 0
    assert_same_folder(folder, tmp_path / "out")
    assert fox_export.main(options) == 1
    assert "out' is not empty; accepted is a new folder" in capsys.readouterr().err
    data = lsm_jax.load_run(tmp_path / "run").config.data
    assert (data.tokenizer, data.json_escape, data.sequence_length) == ("gpt2", True, 16_384)
    assert main([f"--source={tmp_path}", f"--workdir={tmp_path / 'other'}"]) == 1
    assert "config.json cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def imported(folder):
    """Return the model config and the parameters that importing a FoX checkpoint's folder gives."""
    checkpoint = Checkpoint(folder)
    config = fox_config(checkpoint)
    return config, fox_params(checkpoint, config)


def assert_same_folder(source, out):
    """Assert that an exported folder has the files of its source, and their checksums in addition."""
    names = sorted(path.name for path in source.iterdir() if path.name != "SHA256SUMS")
    assert sorted([*names, "SHA256SUMS"]) == sorted(path.name for path in out.iterdir())
    for name in names:
        assert (source / name).read_bytes() == (out / name).read_bytes(), name


@pytest.mark.parametrize("kind", MARKED)
def test_an_unchanged_model_is_exported_byte_for_byte(tmp_path, kind):
    import ml_dtypes

    def change(weights):
        if kind in ("deltanet", "llama"):  # rounded, as the released ones may be
            weights |= {n: w.astype(ml_dtypes.bfloat16) for n, w in weights.items()}
        if kind == "transformer-llama":
            weights["model.layers.0.attn.rotary.inv_freq"] = np.ones(8, np.float32)
        if kind == "hgrn2":  # not applied, but stored
            weights["model.lower_bounds"] += 0.5

    folder, config, _ = write(tmp_path / "x", kind, change, parts=1 + len(kind) % 3)
    (folder / "tokenizer.json").write_text("{}")
    model, params = imported(folder)
    export_fox(params, model, tmp_path / "out", source=folder)
    assert_same_folder(folder, tmp_path / "out")
    # Without the source: the same model, from the same names, in float32.
    alone = export_fox(params, model, tmp_path / "alone")
    again, again_params = imported(alone)
    assert again == model
    jax.tree.map(np.testing.assert_array_equal, again_params, params)
    shapes = {n: s for n, s in Checkpoint(folder).shapes.items() if "inv_freq" not in n}
    if kind == "hgrn2-without-bounds":
        shapes["model.lower_bounds"] = (DEPTH, WIDTH)
    assert Checkpoint(alone).shapes == shapes
    described = json.loads((alone / "config.json").read_text())
    assert described["model_type"] == config["model_type"]
    for name in set(described) & set(config) - {"use_lower_bound"}:
        assert described[name] == config[name], name


PRESETS = ("pro", "llama", "transformer-pro", "transformer-llama", "pro-fixed-256", "llama-independent-2048", "pro-rope")  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_models_of_the_configs_are_exported(tmp_path, name):
    config = models.fox(name, "125m", vocab_size=VOCAB)
    config.hidden_size, config.num_layers = WIDTH, 1
    config.layers["L"].mixer.num_heads = 2
    params = params_of(Decoder(config, rngs=nnx.Rngs(0)))
    again, again_params = imported(export_fox(params, config, tmp_path / "out"))
    assert again.layers["L"].mixer == config.layers["L"].mixer
    jax.tree.map(np.testing.assert_array_equal, again_params, params)


def test_models_that_the_published_code_lacks_are_refused(tmp_path):
    def refused(config, words, source=None, params=None):
        with pytest.raises(ValueError, match=words):
            export_fox(params or {}, config, tmp_path / "out", source=source)
        assert not (tmp_path / "out").exists()

    swa = models.fox("pro", "125m")
    swa.layers["L"].mixer.window = 64
    refused(swa, "no model with layers.L.mixer.window=64 .accepted is None.")
    alibi = models.fox("pro", "125m")
    alibi.layers["L"].mixer.forget_gate = "alibi"
    refused(alibi, "layers.L.mixer.forget_gate='alibi' .accepted is 'data_dependent'.")
    refused(models.fox("samba"), "pattern='ML' .accepted is 'L'.")
    refused(models.lm("gla", "tiny"), "layers.L.mixer is a GLAConfig; accepted are FoXConfig")
    refused(models.fox("mamba2", "125m"), "no model with norm_eps=1e-06 .accepted is 1e-05.")
    folder, *_ = write(tmp_path / "hgrn2", "hgrn2")
    config, params = imported(folder)
    params["periods"]["blocks"][0]["mixer"]["lower_bound"] *= 0
    refused(config, "lower_bound: the forget gates have lower bounds", params=params)
    config, params = imported(write(tmp_path / "pro")[0])
    config.norm_eps = config.layers["L"].mixer.output_norm_eps = 1e-5
    refused(config, "another: .*norm_eps=1e-05 .accepted is 1e-06.", tmp_path / "pro", params)


def test_whether_heads_share_the_norm_follows_from_the_weights_if_the_config_does_not_say(tmp_path):
    for kind, per_head in (("pro", False), ("pro-per-head-rotated", True)):
        folder, config, _ = write(tmp_path / kind, kind)
        del config["qk_norm_share_param_across_head"]
        (folder / "config.json").write_text(json.dumps(config))
        assert fox_config(Checkpoint(folder)).layers["L"].mixer.qk_norm_per_head == per_head


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(model_type="llama"), "model_type='llama'; accepted are forgetting_transformer-proj"),
        (dict(logit_scale=2, new=1), "unknown fields, which may change .*: logit_scale=2, new=1"),
        (dict(hidden_act="gelu"), "hidden_act='gelu'; accepted is 'swish'"),
        (dict(ogate_act="silu"), "ogate_act='silu'; accepted is 'sigmoid'"),
        (dict(num_kv_heads=1), "num_kv_heads=1; accepted is None"),
        (dict(fgate_type="half"), "fgate_type='half'; accepted are full, bias_only, fixed, none"),
        (dict(norm_eps=None), "norm_eps=None; accepted is a value, or no such field"),
        (dict(vocab_size="50257"), "vocab_size='50257'; accepted is a whole number from 1"),
        (
            dict(use_rope=True, rope_base=None),
            "rope_base=None; accepted is a value, or no such field",
        ),
        (dict(num_heads=5), "config.json: .*num_heads=5 does not divide hidden_size=32"),
    ],
)
def test_errors_name_the_field(tmp_path, fields, words):
    folder, *_ = write(tmp_path / "x")
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=words):
        fox_config(Checkpoint(folder))


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        (
            "mamba2",
            dict(num_heads=8),
            "num_heads=8: accepted is expand . hidden_size / head_dim = 4",
        ),
        ("mamba2", dict(n_groups=2), "n_groups=2; accepted is 1"),
        ("mamba2", dict(time_step_limit=[0, 1]), "time_step_limit=.0, 1.; accepted is .0.0, inf."),
        ("hgrn2", dict(num_heads=4), "num_heads=4: accepted is hidden_size / expand_ratio = 2"),
        ("hgrn2", dict(use_short_conv=True), "use_short_conv=True; accepted is False"),
        ("hgrn2", dict(fgate_type="full"), "unknown fields, .*: fgate_type='full'"),
        ("deltanet", dict(qk_norm="sum"), "qk_norm='sum'; accepted is 'l2'"),
        ("deltanet", dict(use_beta=False), "use_beta=False; accepted is True"),
        ("deltanet", dict(num_heads=None), "missing fields: num_heads"),
    ],
)
def test_errors_of_baselines_name_the_field(tmp_path, kind, fields, words):
    folder, config, _ = write(tmp_path / "x", kind)
    (folder / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(ValueError, match=words):
        fox_config(Checkpoint(folder))


def test_wrong_tensors_are_named(tmp_path):
    def change(weights):
        del weights["model.layers.1.attn.fgate_proj.bias"]
        weights["model.layers.0.attn.q_proj.bias"] = np.zeros(WIDTH, np.float32)
        name = "model.layers.0.mlp.down_proj.weight"
        weights[name] = np.ascontiguousarray(weights[name].T)

    folder, *_ = write(tmp_path / "x", change=change)
    checkpoint = Checkpoint(folder)
    with pytest.raises(
        ValueError, match="the tensors are not those of the model in config.json"
    ) as error:
        fox_params(checkpoint, fox_config(checkpoint))
    for words in (
        "missing: model.layers.1.attn.fgate_proj.bias (2,)",
        "unexpected: model.layers.0.attn.q_proj.bias (32,)",
        "model.layers.0.mlp.down_proj.weight has shape (256, 32); the model of the config requires (32, 256)",
    ):
        assert words in str(error.value)


def test_broken_files_are_named(tmp_path):
    def to_integers(weights):
        weights["model.norm.weight"] = np.ones(WIDTH, np.int32)

    folder, *_ = write(tmp_path / "x", change=to_integers)
    checkpoint = Checkpoint(folder)
    with pytest.raises(ValueError, match="model.norm.weight has dtype I32; accepted are F64"):
        fox_params(checkpoint, fox_config(checkpoint))
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="model.safetensors cannot be read"):
        Checkpoint(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="model.safetensors cannot be read: no such file"):
        Checkpoint(folder)
    with pytest.raises(ValueError, match="nowhere' is no folder; accepted is one with config.json"):
        Checkpoint(tmp_path / "nowhere")

    def other_gates(weights):
        weights["model.layers.1.attn.fgate_bias"] += 0.5

    checkpoint = Checkpoint(write(tmp_path / "fixed", "fixed", other_gates)[0])
    with pytest.raises(ValueError, match="layers.1.attn.fgate_bias does not have the decay times"):
        fox_params(checkpoint, fox_config(checkpoint))
