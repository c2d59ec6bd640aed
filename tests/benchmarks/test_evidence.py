"""Tests of the benchmark `evidence`: its plan and arguments, and, marked slow, two tiny models from corpus to rows."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from benchmarks import evidence
from benchmarks.__main__ import main, make_parser
from benchmarks.cases import evidence as cases_module
from benchmarks.registry import UsageError, get
from lsm_jax.data.writer import StoreWriter


def parse(*arguments):
    return make_parser(get("evidence")).parse_args(list(arguments))


def test_every_model_of_every_table_has_a_config_at_125m():
    for table, names in cases_module.TABLES.items():
        assert len(names) == len(set(names)) >= 3
        args = parse(f"--table={table}", "--seeds=0,1")
        assert len(cases_module.cases(args)) == 2 * len(names)
    models = [case["model"] for case in cases_module.cases(parse("--seeds=0,1"))]
    assert models[:7] == models[7:]  # all models with one seed, then with the other


def test_a_run_has_the_published_fields_and_the_settings():
    setting = cases_module.setting_of(parse("--tokens=1000000", "--batch_size=8"))
    config = evidence.train_config(
        "fox:pro-125m", 3, setting, vocabulary=32_000, factor=0.5, tokens=100_000
    )
    assert config.optimizer.peak_lr == 1e-3 and config.optimizer.weight_decay == 0.1
    assert config.optimizer.warmup_tokens == 10_000 and config.seed == 3
    assert (config.model.vocab_size, config.data.sequence_length) == (32_000, 4096)
    assert config.num_steps == 3 and config.data.tokenizer == "auto"
    assert "--config.optimizer.peak_lr=0.001" in evidence.command(config, "fox:pro-125m", "x")
    with pytest.raises(UsageError, match="--tokens: 100 tokens of a run are less than a step"):
        evidence.train_config("fox:pro-125m", 0, setting, vocabulary=32_000, factor=1, tokens=100)


def test_wrong_arguments_are_named(tmp_path):
    for arguments, message in (
        (["--models", "fox-pro"], "accepted is FILE:VARIANT"),
        (["--models", "fox:pro-1m"], "1m"),
        (["--share=0"], "--share=0.0: accepted are numbers between 0 and 1"),
        (["--factors=0,1"], "accepted are positive numbers"),
        ([f"--corpus={tmp_path}", "--models", "lm:gla-nano"], "it has no train.zarr; make it with"),
    ):
        with pytest.raises(SystemExit, match=message):
            main(["evidence", *arguments])


def test_the_clock_ends_training_by_a_signal_and_reports_that_the_time_is_over():
    with pytest.raises(evidence.TimeOver):
        evidence.Clock(-1).check()
    evidence.Clock(math.inf).check()
    with pytest.raises(KeyboardInterrupt), evidence.Clock(math.inf).interrupting():
        raise InterruptedError  # by the user's Ctrl-C, not by the clock


@pytest.mark.slow
def test_two_tiny_models_from_corpus_to_rows(tmp_path, capsys):
    corpus, output = tmp_path / "corpus", tmp_path / "rows.jsonl"
    words = np.random.default_rng(0).integers(97, 123, 200_000).astype(np.uint16)
    for name, rows, length in (("train", 64, 1024), ("heldout", 8, 1024), ("long", 2, 1024)):
        with StoreWriter(corpus / f"{name}.zarr", length, vocab_size=257, attributes=dict(encoder="bytes")) as writer:  # fmt: skip
            writer.add(words[: rows * length].reshape(rows, length))
    arguments = [
        "evidence", "--models", "lm:gla-nano", "lm:softmax-nano", f"--corpus={corpus}", f"--runs={tmp_path / 'runs'}",
        f"--output={output}", "--tokens=16384", "--length=256", "--batch_size=8", "--factors=1,2", "--share=0.5",
        "--long_length=1024", "--long_documents=2", "--needle_lengths=600", "--tasks=heldout,long,needle",
    ]  # fmt: skip
    main([*arguments, "--minutes=0"])
    assert not output.exists() or not output.read_text()
    assert "the same command continues" in capsys.readouterr().err
    main(arguments)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["model"] for row in rows] == ["lm:gla-nano", "lm:softmax-nano"]
    for row in rows:
        best = min(row["rates"], key=row["rates"].get)
        assert float(best) == pytest.approx(row["peak_lr"], rel=1e-2) and len(row["rates"]) == 2
        assert set(row["long"]["perplexity"]) >= {"1024", "512"}
        assert np.isfinite(row["heldout"]["loss"]) and len(row["long"]["loss_by_block"]["loss"]) == 2  # fmt: skip
        assert np.shape(row["needle"]["easy"]["found"]) == (1, 5)
        assert row["state_bytes"] > 0 and row["parameters"]["total"] > 0
    main(arguments)
    assert len(output.read_text().splitlines()) == 2
    with pytest.raises(SystemExit, match="was computed with other options; give another folder"):
        main([*arguments, "--batch_size=4", "--output=-"])
