"""Checkpoints that the papers' own code saved have the logits that it computed (author_goldens/, see
make_author_goldens.py), and are exported unchanged.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from flax import nnx
from safetensors.numpy import load_file

from configs import mom
from lsm_jax import load_run
from lsm_jax.convert import Checkpoint, export_fox, fox_config, fox_params
from lsm_jax.convert.recipe import FILE as RECIPE
from lsm_jax.linearize.export import export_run
from lsm_jax.linearize.released import import_released
from lsm_jax.models import Decoder, LayerConfig, ModelConfig, abstract
from lsm_jax.training.step import params_of

GOLDENS = Path(__file__).parent / "author_goldens"
FOX = sorted(path.name for path in (GOLDENS / "fox").iterdir())
LIGER = sorted(path.name for path in (GOLDENS / "liger").iterdir())
TOLERANCE = 3e-5  # of the largest difference, divided by the root mean square of the logits


def assert_logits(folder: Path, model: Decoder) -> None:
    """Check that a model has the logits of a golden."""
    golden = np.load(folder / "expected.npz")
    expected = golden["logits"]
    rms = np.sqrt(np.mean(expected**2))
    assert rms > 1 and expected.shape[1] >= 60
    output = np.asarray(jax.jit(lambda m, t: m(t)[0])(model, golden["tokens"]))
    assert np.abs(output - expected).max() < TOLERANCE * rms


def assert_same_files(folder: Path, out: Path) -> None:
    """Check that an exported folder has the files of a golden, byte for byte, their checksums, and the recipe of a Liger model."""
    names = {path.name for path in folder.iterdir()} - {"expected.npz"}
    added = {path.name for path in out.iterdir()} - {"expected.npz"} - names
    assert added == {"SHA256SUMS"} | ({RECIPE} if folder.name.startswith("liger") else set())
    for name in names:
        assert (out / name).read_bytes() == (folder / name).read_bytes(), name


@pytest.mark.parametrize("kind", FOX)
def test_fox(kind, tmp_path):
    folder = GOLDENS / "fox" / kind
    checkpoint = Checkpoint(folder)
    config = dataclasses.replace(fox_config(checkpoint), dtype="float32", remat="none")
    params = fox_params(checkpoint, config)
    assert_logits(folder, nnx.merge(nnx.graphdef(abstract(config)), params))
    assert_same_files(folder, export_fox(params, config, tmp_path / "out", source=folder))


@pytest.mark.parametrize("kind", LIGER)
def test_liger(kind, tmp_path):
    golden, folder = GOLDENS / "liger" / kind, tmp_path / kind
    shutil.copytree(golden, folder)
    vocabulary = {chr(0x100 + i): i for i in range(48)}
    words = tokenizers.models.WordLevel(vocabulary, unk_token=chr(0x100))
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))
    import_released(folder, tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert run.config.model.layers["L"].mixer.window == 65
    assert_logits(golden, run.model)
    assert_same_files(folder, export_run(tmp_path / "run", tmp_path / "out", source=folder))


def published_parameter(
    tensors: dict[str, np.ndarray], keys: list[str], layer: int, memories: int
) -> np.ndarray:
    """Return the values of a parameter of a Mixture-of-Memories model from a checkpoint of the authors.

    Args:
        tensors: the checkpoint's tensors by name.
        keys: the parameter's keys: in the model, or in the block of a layer.
        layer: the index of the layer, -1 for parameters outside of layers.
        memories: the number of memories that the router selects from.
    """
    if layer < 0:
        name = {"embedding": "model.embeddings", "norm": "model.norm", "lm_head": "lm_head"}[keys[0]]  # fmt: skip
        value = tensors[f"{name}.weight"]
        return value.T if keys[0] == "lm_head" else value
    at = f"model.layers.{layer}."
    if keys[0] != "mixer":
        name = {"mixer_norm": "attn_norm", "feedforward_norm": "mlp_norm"}.get(keys[0])
        return tensors[f"{at}{name}.weight"] if name else tensors[f"{at}mlp.{keys[1]}.weight"].T
    at += "attn."
    if keys[1] == "router":
        return tensors[f"{at}gate.weight"].T
    part = keys[2]
    letter = {"k_proj": "k", "v_proj": "v", "beta_proj": "b", "decay_proj": "a"}.get(part)
    if letter is not None:  # the shared memory is the last
        names = [*(f"{letter}_proj.{i}" for i in range(memories)), f"shared_{letter}"]
        return np.stack([tensors[f"{at}{name}.weight"].T for name in names])
    if part in ("a_log", "dt_bias"):
        return tensors[at + part.replace("a_log", "A_log")]
    value = tensors[f"{at}{part.replace('_conv', '_conv1d').replace('norm', 'o_norm')}.weight"]
    return value[:, 0].T if part.endswith("_conv") else value.T


def test_mixture_of_memories():
    folder = GOLDENS / "mom" / "gated_deltanet"
    tensors = load_file(folder / "model.safetensors")
    published = mom.get_config("tiny,as_published=1").model.layers["L"]
    mixer = mom.mixer_config(32, dict(as_published=True))
    inner = dataclasses.replace(published.feedforward, intermediate_size=24)
    layer = LayerConfig(mixer=mixer, feedforward=inner)
    config = ModelConfig(
        vocab_size=48,
        hidden_size=32,
        num_layers=2,
        layers={"L": layer},
        tie_embeddings=False,
        norm_eps=1e-6,
        dtype="float32",
        remat="none",
    )
    used = []

    def value(path, leaf):
        keys = jax.tree_util.keystr(path, simple=True, separator=".").split(".")
        if keys[0] != "periods":
            values = published_parameter(tensors, keys, -1, mixer.num_memories)
        else:
            rows = [published_parameter(tensors, keys[3:], i, mixer.num_memories) for i in (0, 1)]
            values = np.stack(rows)
        assert values.shape == leaf.shape, keys
        used.append(values.size)
        return values

    params = jax.tree_util.tree_map_with_path(value, params_of(abstract(config)))
    assert sum(used) == sum(x.size for x in tensors.values())
    assert_logits(folder, nnx.merge(nnx.graphdef(abstract(config)), params))
