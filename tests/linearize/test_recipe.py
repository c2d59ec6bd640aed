"""An exported Liger model has its recipe, and every way of import makes the same model of it."""

from __future__ import annotations

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsm_jax import convert
from lsm_jax.convert.recipe import FILE
from lsm_jax.linearize import Pretrained, liger_model, window_model
from lsm_jax.linearize.export import export_run
from lsm_jax.linearize.peft import import_adapters
from lsm_jax.linearize.released import Released, import_released
from lsm_jax.mixers import LigerConfig, LoRAConfig, OpConfig, SoftmaxConfig
from lsm_jax.training import load_run, train
from tests.linearize.conftest import config_of
from tests.linearize.test_released import tokenizer

TOKENS = np.arange(40)[None] * 5 % 257


def logits(run):
    return np.asarray(jax.jit(lambda m, t: m(t)[0])(run.model, jnp.asarray(TOKENS)))


@pytest.fixture(scope="module")
def trained(llama, tmp_path_factory):
    """Return the folder of the pretrained model and that of a run whose layers are Liger's and softmax attention in turn."""
    folder = tmp_path_factory.mktemp("recipe")
    base = tokenizer(shutil.copytree(llama, folder / "base"))
    rows = [dict(instruction=f"Say {i}", output=f"It is {i}.") for i in range(8)]
    (folder / "alpaca.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = config_of(base, folder / "alpaca.jsonl", total_tokens=2048)
    model = dataclasses.replace(config.base.config(), dtype="float32", remat="none")
    fields = dict(gate="mamba2", window=8, memory_weight=0.25, op=OpConfig(chunk_size=16))
    config.model = liger_model(model, hybrid=2, lora=LoRAConfig(rank=2), **fields)
    train(config, folder / "run")
    return base, folder / "run"


@pytest.mark.slow
def test_an_exported_liger_model_is_imported_as_itself(trained, tmp_path):
    base, run = trained
    expected = logits(load_run(run))
    out = export_run(run, tmp_path / "out")
    config = convert.import_huggingface(out, tmp_path / "again")
    assert [type(config.model.layers[x].mixer) for x in config.model.letters()] == [
        LigerConfig,
        SoftmaxConfig,
    ]
    mixer = config.model.layers[config.model.letters()[0]].mixer
    assert (mixer.gate, mixer.window, mixer.memory_weight, mixer.window_weight) == (
        "mamba2",
        8,
        0.25,
        0.5,
    )
    again = logits(load_run(tmp_path / "again"))
    np.testing.assert_allclose(again, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    # Without the recipe it would be the softmax model, with other logits.
    (out / FILE).unlink()
    sums = (out / "SHA256SUMS").read_text().splitlines(keepends=True)
    (out / "SHA256SUMS").write_text("".join(x for x in sums if FILE not in x))
    convert.import_huggingface(out, tmp_path / "softmax")
    assert (
        np.abs(logits(load_run(tmp_path / "softmax")) - expected).max()
        > 0.05 * np.abs(expected).max()
    )


def test_adapters_alone_are_imported_as_the_liger_model(trained, tmp_path):
    base, run = trained
    out = export_run(run, tmp_path / "adapters", format="peft")
    import_adapters(out, base, tmp_path / "again")
    np.testing.assert_array_equal(logits(load_run(tmp_path / "again")), logits(load_run(run)))
    for wrong in (dict(method="softmax"), dict(method="liger", gate="gla")):
        with pytest.raises(ValueError, match=f"{FILE} describes another model"):
            import_adapters(out, base, tmp_path / "other", **wrong)


def test_the_window_of_a_model_without_memory_is_kept(llama, tmp_path):
    model = convert.model_config(llama)
    params = convert.load_params(llama, model)
    out = convert.export(params, window_model(model, window=16), llama, tmp_path / "out")
    assert {x.mixer.window for x in convert.model_config(out).layers.values()} == {16}
    assert Pretrained(path=str(out)).config() == model  # as config.json describes it
    # An unchanged model has no recipe, and an export of it as the softmax model loses the old one.
    assert not (convert.export(params, model, llama, tmp_path / "plain") / FILE).exists()
    assert not (convert.export(params, model, out, tmp_path / "full") / FILE).exists()


@pytest.mark.slow
def test_the_window_of_the_authors_format_is_kept(llama, instructions, tmp_path):
    base = tokenizer(shutil.copytree(llama, tmp_path / "base"))
    config = config_of(base, instructions, total_tokens=1024)
    model = dataclasses.replace(config.base.config(), dtype="float32", remat="none")
    config.model = liger_model(model, lora=LoRAConfig(rank=2), gate="hgrn2", window=64, op=OpConfig(chunk_size=16))  # fmt: skip
    train(config, tmp_path / "run")
    out = export_run(tmp_path / "run", tmp_path / "out", format="liger")
    assert import_released(out, tmp_path / "again").model.layers["L"].mixer.window == 64
    assert Released(out).model(65).layers["L"].mixer.window == 65
    assert "gla" != Released(out).model().layers["L"].mixer.gate == "hgrn2"
    _edit(out, lambda recipe: recipe["mixers"]["L"].update(memory_weight=0.1))
    with pytest.raises(ValueError, match=f"{FILE} and .*config.json are of different models"):
        import_released(out, tmp_path / "other")


def _edit(folder, change):
    """Change the recipe in a folder, and remove its checksum."""
    recipe = json.loads((folder / FILE).read_text())
    change(recipe)
    (folder / FILE).write_text(json.dumps(recipe))
    (folder / "SHA256SUMS").unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r.update(format=2), "format=2; accepted is 1"),
        (lambda r: r.update(extra=1), "fields extra; accepted are exactly format, pattern and mixers"),
        (lambda r: r.update(pattern="LX"), "its letters must be the names of mixers"),
        (lambda r: r.update(pattern="LLL"), "the model has 2 layers, which its letters do not divide"),
        (lambda r: r["mixers"]["L"].update(rope_base=5.0), r"mixers.L.rope_base=5.0, but config.json says 10000.0"),
        (lambda r: r["mixers"]["L"].update(window=0), "window"),
        (lambda r: r["mixers"]["L"].update(window="x"), "window='x': accepted is"),
        (lambda r: r["mixers"]["L"].update(colour=1), "LigerConfig has no field colour"),
        (lambda r: r["mixers"].update(L=3), "mixers.L is a int, and config.json describes a SoftmaxConfig"),
        (lambda r: r["mixers"]["L"].update(type="lsm_jax.cli.main:main"), "accepted are the configs of lsm_jax.mixers"),
        (lambda r: r["mixers"]["L"]["op"].update(type="os:system"), "mixers.L.op.type='os:system'; accepted"),
        (lambda r: r["mixers"]["L"].update(type="lsm_jax.mixers.gla:GLAConfig"), "."),
    ],
)  # fmt: skip
def test_damaged_recipes_are_named(change, words, llama, tmp_path):
    model = convert.model_config(llama)
    params = convert.load_params(llama, model)
    out = convert.export(params, liger_model(model, window=8), llama, tmp_path / "out")
    _edit(out, change)
    with pytest.raises(ValueError, match=f"{FILE}: ") as error:
        convert.model_config(out)
    error.match(words)
