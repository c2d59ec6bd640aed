"""Tests of training runs with LoLCATs: their evaluation as the student model, and the variants of
`configs/liger.py` that train the LoLCATs models of Liger's Table 2.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs import liger
from lsm_jax import models
from lsm_jax.data import make_eval_iterator
from lsm_jax.evaluation import TASKS, Request, evaluate, generate
from lsm_jax.evaluation.request import run_tokenizer
from lsm_jax.linearize import base_model, lolcats_model
from lsm_jax.mixers import LoRAConfig, OpConfig
from lsm_jax.training import load_run, read_rows, train
from lsm_jax.training.partition import leaves_of, like
from lsm_jax.training.step import params_of
from tests.linearize.conftest import assert_same_bits, config_of

FIELDS = dict(window=8, op=OpConfig(chunk_size=16), feature_dim=4)


def transfer_config(llama, text, **changes):
    config = config_of(llama, text)
    base = dataclasses.replace(config.base.config(), dtype="float32", remat="none")
    config.model = lolcats_model(base, transfer=True, **FIELDS)
    config.trainable = liger.LOLCATS_MAPS
    return dataclasses.replace(config, eval_every=2, eval_batches=1, total_tokens=2048, **changes)


@pytest.fixture(scope="module")
def transferred(llama, tmp_path_factory):
    """Fixture: the config and the directory of a finished run of LoLCATs' attention transfer."""
    folder = tmp_path_factory.mktemp("transfer")
    text = folder / "alpaca.jsonl"
    row = '{"instruction": "Say %d", "output": "It is %d. It is %d."}\n'
    text.write_text("".join(row % (i, i, i) for i in range(16)))
    config = transfer_config(llama, text)
    train(config, folder / "run")
    return config, folder / "run"


def model_of(config, params):
    decoder = models.abstract(config)
    return nnx.merge(nnx.graphdef(decoder), like(params, params_of(decoder)))


@pytest.mark.slow
def test_a_transfer_run_is_evaluated_and_generates_as_its_student(transferred, tmp_path):
    config, workdir = transferred
    run = load_run(workdir)
    student = lolcats_model(base_model(config.model), **FIELDS)
    assert student.layers["L"].mixer.transfer_weight == 0
    expected = model_of(student, run.params)
    tokens = jnp.arange(24)[None] * 7 % 257
    logits = jax.jit(lambda model: model(tokens)[0])
    np.testing.assert_array_equal(logits(run.model), logits(expected))
    teacher = model_of(base_model(config.model), run.params)
    assert np.abs(logits(run.model) - logits(teacher)).max() > 1e-3
    np.testing.assert_array_equal(logits(run.teacher()), logits(teacher))

    # The held-out losses of eval.py and of the trainer.
    tokenizer = run_tokenizer(run)
    batches = list(make_eval_iterator(config.data, tokenizer, global_batch_size=4, remainder="pad"))
    losses = [evaluate(m, batches, progress=False).curve.mean for m in (expected, teacher)]
    results = TASKS["perplexity"](run, Request(batch_size=4, piece_length=64), tmp_path)
    np.testing.assert_allclose(
        [results["val/loss"], results["val/teacher_loss"]], losses, rtol=2e-6
    )
    logged = [row for row in read_rows(workdir / "metrics.jsonl") if "val/loss" in row][-1]
    np.testing.assert_allclose([logged["val/loss"], logged["val/teacher_loss"]], losses, rtol=2e-3)
    assert losses[0] != losses[1]

    text = [generate(m, tokenizer, "Say", num_tokens=4, temperature=0).tokens for m in (run.model, expected)]  # fmt: skip
    assert text[0] == text[1]


@pytest.mark.slow
def test_lora_only_keeps_maps_and_factors_at_their_initial_values(llama, transferred, tmp_path):
    config, _ = transferred
    base = base_model(config.model)
    config = dataclasses.replace(
        config,
        model=lolcats_model(base, lora=LoRAConfig(rank=2), **FIELDS),
        trainable=("lora",),
        frozen_initial=liger.LOLCATS_MAPS,
        total_tokens=1024,
        eval_every=0,
    )
    train(config, tmp_path / "run")
    run = load_run(tmp_path / "run")
    leaves = leaves_of(run.params)
    eye = np.eye(4, dtype=np.float32)
    for name, leaf in leaves.items():
        if "_map" in name:
            np.testing.assert_array_equal(leaf, np.broadcast_to(eye, leaf.shape))
        if "window_factor" in name:
            np.testing.assert_allclose(jax.nn.sigmoid(leaf.astype(jnp.float32)), 0.1, atol=1e-3)
    assert any((leaf != 0).any() for name, leaf in leaves.items() if name.endswith("lora.b"))
    # A further run can start from it, and then reads the same values.
    train(dataclasses.replace(config, init_from=str(tmp_path / "run"), base=None), tmp_path / "second")  # fmt: skip
    second = load_run(tmp_path / "second").params
    frozen = {n: x for n, x in leaves.items() if ".lora." not in n}
    assert_same_bits({n: leaves_of(second)[n] for n in frozen}, frozen)
    for message, change in {
        "frozen_initial=.*no parameter has 'maps'": dict(frozen_initial=("maps",)),
        "all parameters are trained; accepted is": dict(trainable=()),
        "lora is trained; accepted are names": dict(frozen_initial=("lora",)),
    }.items():
        with pytest.raises(ValueError, match=message):
            train(dataclasses.replace(config, **change), tmp_path / "third")


def test_variants_of_table_2_and_of_the_ablations():
    def get(options):
        return liger.get_config(f"llama3-8b,{options}")

    transfer, tuned, only = (get(f"method={m}") for m in ("lolcats_transfer", "lolcats", "lolcats_lora"))  # fmt: skip
    assert transfer.model.layers["L"].mixer.transfer_weight == 1000 / 32
    assert (transfer.trainable, transfer.frozen_initial) == (liger.LOLCATS_MAPS, ())
    assert only.model == tuned.model and only.trainable == tuned.trainable == ("lora",)
    assert (tuned.frozen_initial, only.frozen_initial) == ((), liger.LOLCATS_MAPS)
    assert tuned.model.lora == LoRAConfig(targets=("q_proj", "k_proj", "v_proj", "o_proj"), alpha=16.0)  # fmt: skip
    theirs = get("method=lolcats_lora,recipe=liger")
    assert theirs.model.lora == LoRAConfig() and theirs.model.layers["L"].mixer.feature_dim == 128
    stage = get("method=lolcats_transfer,recipe=liger")
    assert (stage.trainable, stage.frozen_initial) == (("q_map", "k_map"), ("window_factor",))

    no_gate, window = get("ablation=no_gate"), get("ablation=no_memory")
    assert no_gate.model.layers["L"].mixer.gate == "none"
    assert (window.model.layers["L"].mixer.memory_weight, window.trainable) == (0.0, ("lora",))
    bounded = get("gate=hgrn2,lower_bound=.25").model.layers["L"].mixer
    assert bounded.gate_lower_bound == 0.25
    learned = get("learned_weights=1")
    assert learned.model.layers["L"].mixer.learned_weights
    assert learned.trainable == ("lora", "branch_weights")
    for option, words in {
        "ablation=no_gate,gate=gsa": "ablation=no_gate has no gate",
        "ablation=no_memory,memory_weight=1": "without ablation=no_window or no_memory",
        "recipe=liger": "recipe requires a method of LoLCATs",
        "method=lolcats_transfer,rank=4": "rank requires adapters",
        "lower_bound=.5": "only gate='hgrn2' has a lower bound",
    }.items():
        with pytest.raises(ValueError, match=words):
            get(option)
