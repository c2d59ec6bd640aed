"""Runs of this library are exported in the formats of released models, and are read again unchanged."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from lsm_jax import mixers
from lsm_jax.convert import Checkpoint, export_released
from lsm_jax.convert.families import FAMILIES
from lsm_jax.feedforward import SwiGLUConfig
from lsm_jax.mixers import fp8
from lsm_jax.models import Decoder, abstract, lm
from lsm_jax.training.step import params_of
from tests.convert.test_released import imported, marked

OWN = (
    "gla", "retnet", "deltanet", "gated_deltanet", "kda", "hgrn2", "gsa", "mamba", "mamba2", "gated_deltaproduct", "comba",
    "precond_gated_deltanet", "precond_kda", "mesa_net", "path", "moba", "nsa", "hgrn", "lightnet", "abc",
    "mamba3", "mamba3_mimo", "log_linear_mamba2", "rwkv6", "rwkv7", "mom", "mla",
)  # fmt: skip


@pytest.mark.parametrize("method", marked(OWN, ("gated_deltanet", "gsa")))
def test_own_models_are_exported(method, tmp_path, monkeypatch):
    monkeypatch.setattr(fp8, "LEAST_SIZE", 16)
    config = dataclasses.replace(lm(method, "tiny", vocab_size=48), num_layers=2)
    if method == "log_linear_mamba2":
        config.layers["L"].feedforward = SwiGLUConfig()  # FLA's, whatever its config says
    if method == "path":
        config.layers["L"].mixer.rank = 32  # the only one that FLA has
    if method == "mla":
        mixer = config.layers["L"].mixer
        mixer.rope_interleaved, mixer.norm_eps = False, 1e-5  # FLA's, whatever its config says
    if method.startswith("mamba3"):
        config.layers["L"].mixer.rate = "softplus"  # FLA's
    if method.startswith("rwkv"):
        config.norm = "layer"  # FLA's
    if method == "lightnet":
        config.layers["L"].mixer.norm_eps = 1e-6  # FLA's, whatever its config says
    config.unroll_layers, config.matmul = True, "default" if method == "mom" else "fp8"
    params = params_of(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32), params)
    folder = export_released(params, config, tmp_path / "out", norm_eps=1e-5)
    again, again_params = imported(folder)
    if not method.startswith("rwkv"):  # whose ranks are None, and numbers in the file
        # The epsilon is 1e-5, but LightNet's.
        assert again.layers["L"].mixer == config.layers["L"].mixer
    family = FAMILIES[Checkpoint(folder).config["model_type"]]
    written = family.describe_model(family.with_epsilon(config, 1e-5))
    assert family.describe_model(again) == written
    assert again.norm_eps == 1e-5

    def same(path, ours, theirs):
        first = "first" in jax.tree_util.keystr(path)  # of which layer 0 of RWKV-7 has none
        np.testing.assert_array_equal(ours[first:], theirs[first:])

    jax.tree_util.tree_map_with_path(same, again_params, params)


def hybrid(family):
    """Return the config of a model of this library that the family computes."""
    if family == "xlstm":
        return dataclasses.replace(lm("mlstm", "tiny", vocab_size=48), logits_cap=30.0)
    inner = "relu2" if family == "nemotron_h" else "swiglu"
    if family == "recurrent_gemma":
        config = lm("rg_lru", "tiny", "LN", vocab_size=48, feedforward="geglu")
        config.norm, config.embedding_scale, config.logits_cap = "zero_centred_rms", 8.0, 30.0
        softmax = config.layers["N"].mixer
        softmax.window, softmax.output_bias, softmax.rotary_dim = 16, True, 8
        return config
    config = lm("mamba2", "tiny", "LN", vocab_size=48, feedforward=inner)
    mamba, softmax = config.layers["L"], config.layers["N"].mixer
    if family == "bamba":
        softmax.rotary_dim = softmax.dim(config.hidden_size) // 2
    if family == "nemotron_h":
        softmax.rope_base = None
    if family == "falcon_h1":
        mamba.mixer = mixers.ParallelConfig(first=mamba.mixer, second=softmax)
        config.layers, config.pattern = {"L": mamba}, "L"
    if family == "lfm2":
        mamba.mixer, softmax.qk_norm, softmax.norm_eps = mixers.ShortConvConfig(), True, 1e-5
    return config


HYBRIDS = ("granitemoehybrid", "bamba", "nemotron_h", "falcon_h1", "lfm2", "xlstm", "recurrent_gemma")  # fmt: skip


@pytest.mark.parametrize("family", marked(HYBRIDS, ("falcon_h1",)))
def test_own_hybrids_are_exported(family, tmp_path):
    config = hybrid(family)
    config.num_layers = 2
    params = params_of(abstract(config))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32), params)
    folder = export_released(params, config, tmp_path / "out", norm_eps=1e-5)
    assert Checkpoint(folder).config["model_type"] == family
    again, again_params = imported(folder)
    assert FAMILIES[family].describe_model(again) == FAMILIES[family].describe_model(
        FAMILIES[family].with_epsilon(config, 1e-5)
    )
    # The letters may be others, as Nemotron-H's are, but the layers are the same.
    ours, theirs = (jax.tree.leaves(p) for p in (params, again_params))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_models_that_the_library_lacks_are_refused(tmp_path):
    def refused(config, words):
        with pytest.raises(ValueError, match=words):
            export_released({}, config, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    config = lm("gla", "tiny")
    refused(config, "no gla model with .*layer 0.mixer.norm_eps=1e-05 .accepted is 1e-06.")
    config.norm_eps = 1e-5
    config.layers["L"].mixer.gate_rank = 8
    refused(config, "no gla model with layer 0.mixer.gate_rank=8 .accepted is 16.")
    config.layers["L"].mixer.gate_rank, config.layers["L"].mixer.conv_size = 16, 4
    refused(config, "no gla model with layer 0.mixer.conv_size=4 .accepted is 1.")
    refused(lm("titans", "tiny"), "mixers of TitansConfig; accepted is one of GLAConfig")
    refused(lm("softmax", "tiny"), "mixers of SoftmaxConfig; accepted is one of GLAConfig")
    for method, fields, words in (
        ("moba", dict(num_blocks=1), "MoBAConfig.num_blocks=1; accepted for an export are numbers from 2"),
        ("moba", dict(num_kv_heads=1), "MoBAConfig.num_kv_heads=1; accepted for an export are None and num_heads="),
        ("path", dict(rank=32, conv_size=4), "PaTHConfig.conv_size=4; accepted for an export is 3"),
        ("nsa", dict(num_kv_heads=4), "NSAConfig.num_heads=16; accepted for an export are num_kv_heads=4 times a power of 2"),
        ("mla", dict(norm_eps=1e-5), "no mla model with layer 0.mixer.rope_interleaved=True .accepted is False."),
        ("mla", dict(output_gate=True), "no mla model with .*layer 0.mixer.output_gate=True .accepted is False."),
        ("mla", dict(scale=0.5), "no mla model with .*layer 0.mixer.scale=0.5 .accepted is 0.2041"),
        ("mla", dict(rope_base=None), "MLAConfig.rope_base=None; accepted for an export is a number"),
        ("mla", dict(value_dim=48), "v_head_dim=48: accepted are numbers to qk_nope_head_dim . qk_rope_head_dim = 24"),
        ("mamba3", {}, "no mamba3 model with .*layer 0.mixer.rate='heavy_tail' .accepted is 'softplus'."),
    ):  # fmt: skip
        config = lm(method, "tiny")
        config.layers["L"].mixer = dataclasses.replace(config.layers["L"].mixer, **fields)
        refused(config, words)
    refused(lm("path", "tiny", "LN"), "mixers of SoftmaxConfig beside PaTHConfig; accepted for an export is PaTHConfig alone")  # fmt: skip
    linear = lm("linear_attention", "tiny")
    linear.layers["L"].mixer.feature_map, linear.norm_eps = "hedgehog", 1e-5
    refused(linear, "shared_feature_map=False .accepted is True.")
