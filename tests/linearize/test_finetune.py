"""Tune imported models with linear layers by configs/finetune.py: adapters or all parameters, from a folder or a run, and write
them back into the released layout.
"""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import finetune
from lsm_jax import convert
from lsm_jax.evaluation import TASKS, Request
from lsm_jax.linearize.export import export_run
from lsm_jax.training import load_run, train
from lsm_jax.training.partition import leaves_of, split
from tests.linearize.released_models import write_model
from tests.parallel.test_parallel import run_with_devices

TOKENS = np.arange(40)[None] * 7 % 260


def write_instructions(folder):
    """Write 16 instructions of different lengths, and return the file."""
    rows = [
        dict(instruction=f"Say {i}", output=f"It is the thing {i}. " * (1 + i % 3))
        for i in range(16)
    ]
    (folder / "alpaca.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "alpaca.jsonl"


def tiny(variant, text, **changes):
    """Return the config of the variant in four steps of two rows of 256 tokens."""
    config = finetune.get_config(f"{variant},length=256,lr=1e-2")
    config.model = dataclasses.replace(config.model, remat="none")
    data = dict(path=str(text), heldout_fraction=0.2, num_threads=0, prefetch=0)
    config.data = dataclasses.replace(config.data, **data)
    optimizer = dataclasses.replace(config.optimizer, warmup_tokens=0)
    fields = dict(
        optimizer=optimizer, batch_size=2, total_tokens=4 * 512, log_every=1, eval_every=0
    )
    return dataclasses.replace(config, **fields | changes)


def logits(model):
    return np.asarray(jax.jit(lambda m, t: m(t)[0])(model, jnp.asarray(TOKENS)))


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """Return the folder of a released RWKV-7 in bfloat16, instructions, and the run that tuned adapters on all its projections."""
    folder = tmp_path_factory.mktemp("finetune")
    source, text = write_model(folder / "rwkv7", "rwkv7", "bfloat16"), write_instructions(folder)
    config = tiny(f"lora,source={source},rank=2", text)
    train(config, folder / "run")
    return source, text, folder / "run"


@pytest.mark.slow
def test_adapters_alone_train_and_frozen_parameters_are_as_stored(tuned):
    source, _, workdir = tuned
    run = load_run(workdir)
    assert (
        run.config.model.lora.targets == ("all",) and run.config.frozen_dtype == "bfloat16_matrices"
    )
    adapters, frozen = (leaves_of(x) for x in split(run.params, ("lora",)))
    parts = {name.partition("mixer.")[2] for name in adapters if "mixer" in name}
    assert {
        "r_proj.lora.a",
        "k_proj.lora.b",
        "decay.down.lora.a",
        "gate.up.lora.b",
        "o_proj.lora.a",
    } <= parts
    assert (
        sum(np.abs(value).max() > 0 for name, value in adapters.items() if name.endswith(".b"))
        >= 10
    )
    stored = leaves_of(convert.load_params(source, convert.model_config(source)))
    assert frozen.keys() == stored.keys()
    for name, value in stored.items():
        np.testing.assert_array_equal(np.asarray(frozen[name], np.float32), value, err_msg=name)
    assert {str(frozen[n].dtype) for n in frozen if n.endswith(("kernel", "embedding"))} == {
        "bfloat16"
    }
    assert {str(frozen[n].dtype) for n in frozen if n.endswith(("mix", "bonus", "scale"))} == {
        "float32"
    }


@pytest.mark.slow
def test_the_export_has_the_released_layout_and_the_tuned_models_logits(tuned, tmp_path):
    source, _, workdir = tuned
    run = load_run(workdir)
    out = export_run(workdir, tmp_path / "out")
    before, after = convert.Checkpoint(source), convert.Checkpoint(out)
    assert (before.shapes, before.dtypes, before.files, before.config) == (
        after.shapes,
        after.dtypes,
        after.files,
        after.config,
    )
    changed = {
        name
        for name in before.shapes
        if not np.array_equal(before.stored(name), after.stored(name))
    }
    assert "model.layers.1.attn.k_proj.weight" in changed and "lm_head.weight" not in changed
    assert not [name for name in changed if name.endswith((".bias", "x_k", "norm.weight"))]
    # Through float32, in which the merged matrices are nearly exact: the same logits.
    exact = convert.export_released(
        convert.load_params(source, convert.model_config(source)),
        convert.model_config(source),
        tmp_path / "wide",
    )
    again = export_run(workdir, tmp_path / "float32", source=exact)
    config = dataclasses.replace(convert.model_config(again), dtype="float32", remat="none")
    model = _model(config, convert.load_params(again, config))
    wide = dataclasses.replace(run.config.model, dtype="float32")
    expected = logits(_model(wide, run.params))
    np.testing.assert_allclose(logits(model), expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    with pytest.raises(ValueError, match="adapters of .*, for which a transformer has no module"):
        export_run(workdir, tmp_path / "peft", format="peft")


def _model(config, params):
    from flax import nnx

    from lsm_jax.models import abstract

    return nnx.merge(nnx.graphdef(abstract(config)), params)


def test_tasks_run_on_a_tuned_model(tuned, tmp_path):
    run = load_run(tuned[2])
    request = Request(prompt="the thing", num_tokens=4, batch_size=2, max_tokens=512)
    for name in ("perplexity", "generate"):
        (tmp_path / name).mkdir()
        assert TASKS[name](run, request, tmp_path / name)


@pytest.mark.slow
def test_a_run_is_tuned_completely_and_exported(tmp_path):
    source, text = write_model(tmp_path / "mamba2", "mamba2"), write_instructions(tmp_path)
    convert.import_huggingface(source, tmp_path / "imported")
    config = tiny(f"full,source={tmp_path / 'imported'}", text, total_tokens=512)
    assert config.init_from == str(tmp_path / "imported") and config.trainable == ()
    train(config, tmp_path / "run")
    out = export_run(tmp_path / "run", tmp_path / "out", source=source)
    before, after = convert.Checkpoint(source), convert.Checkpoint(out)
    assert before.shapes == after.shapes
    assert not np.array_equal(
        before.stored("backbone.layers.0.mixer.A_log"),
        after.stored("backbone.layers.0.mixer.A_log"),
    )


def test_errors_of_the_config(tuned):
    source, _, run = tuned
    for variant, words in {
        "dora,source=x": "what 'dora'; accepted are lora, full",
        f"full,source={source},rank=4": "rank requires lora",
        "lora,source=/nowhere": "does not exist",
        f"lora,source={run}": "the run has adapters; export it",
        f"lora,source={run},tokenizer=x": "tokenizer is not accepted with the directory of a run",
    }.items():
        with pytest.raises(ValueError, match=words):
            finetune.get_config(variant)
    from lsm_jax.models import abstract

    config = finetune.get_config(f"lora,source={source},targets=q_proj+k_proj")
    with pytest.raises(
        ValueError, match="a layer of RWKV7 and .* has no projection q_proj; it has .*decay.down"
    ):
        abstract(config.model)


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.slow) for k in ("rwkv7", "gated_deltanet", "mamba2")]
)
def test_devices_that_share_rows_tune_as_one(kind, tmp_path):
    source, text = write_model(tmp_path / kind, kind), write_instructions(tmp_path)
    print(
        run_with_devices(
            4, "-m", "tests.linearize.shared_rows", str(source), str(text), str(tmp_path)
        )
    )


SHARED = (
    "lora:fla-gla", "lora:transformers-qwen3_5_text", "lora:transformers-granitemoehybrid",
    "lora:transformers-granitemoehybrid-moe", "full:fla-rwkv7", "full:transformers-qwen3_5_text",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("which", SHARED)
def test_devices_that_share_packed_rows_have_the_gradients_of_one(which):
    print(run_with_devices(4, "-m", "tests.linearize.shared_gradients", which))
