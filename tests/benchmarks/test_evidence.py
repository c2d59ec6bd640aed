"""Tests of the benchmark `evidence`: its plan and arguments, and, marked slow, two tiny models from corpus to rows."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
import threading
import time

import jax
import numpy as np
import pytest

from benchmarks import ahead as ahead_module
from benchmarks import evidence, evidence_recall
from benchmarks.__main__ import main, make_parser
from benchmarks.cases import evidence as cases_module
from benchmarks.evidence_clock import Clock, TimeOver, counted
from benchmarks.evidence_tasks import side_by_side
from benchmarks.registry import UsageError, get
from benchmarks.run import Skipped, one_by_one
from benchmarks.tables import evidence as tables
from benchmarks.tables import evidence_claims as claims
from benchmarks.training import train_to_end
from configs import lm
from lsm_jax.data import ByteTokenizer
from lsm_jax.evaluation.suites import SuiteSettings
from lsm_jax.training import TrainConfig, TrainingDiverged, TrainingStopped
from scripts import draw_results, evidence_page
from tests.benchmarks.evidence_corpus import write_corpus


def parse(*arguments):
    return make_parser(get("evidence")).parse_args(list(arguments))


def test_every_model_of_every_table_has_a_config_at_125m():
    for table, names in cases_module.TABLES.items():
        assert len(names) == len(set(names)) >= 3
        args = parse(f"--table={table}", "--seeds=0,1")
        assert len(cases_module.cases(args)) == 2 * len(names)
    models = [case["model"] for case in cases_module.cases(parse("--seeds=0,1"))]
    assert models[:7] == models[7:]  # all models with one seed, then with the other


def test_what_a_file_of_rows_has_is_skipped_for_whichever_table_it_was_made(tmp_path):
    path = tmp_path / "rows.jsonl"
    options = ["--table=methods", "--models", "lm:gla-nano", "lm:softmax-nano", f"--skip={path}"]
    path.touch()
    args = parse(*options)
    gla, softmax = cases_module.cases(args)
    rows = [gla | dict(table="fox"), softmax | dict(tokens=1), softmax | dict(kind="rates", tasks="")]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cases_module.cases(args) == [softmax]
    assert cases_module.cases(parse(*options, "--only_rates"))[0]["model"] == "lm:gla-nano"
    assert len(cases_module.cases(parse(*options, "--only_rates"))) == 1


def test_a_run_has_the_published_fields_and_the_settings():
    setting = cases_module.setting_of(parse("--tokens=1000000", "--batch_size=8"))
    config = evidence.train_config(
        "fox:pro-125m", 3, setting, vocabulary=32_000, factor=0.5, tokens=100_000
    )
    assert config.optimizer.peak_lr == 1e-3 and config.optimizer.weight_decay == 0.1
    assert config.optimizer.warmup_tokens == 10_000 and config.seed == 3
    assert (config.model.vocab_size, config.data.sequence_length) == (32_000, 4096)
    assert config.num_steps == 3 and config.data.tokenizer == "auto"
    assert config.model.remat == "full"
    assert "--config.optimizer.peak_lr=0.001" in evidence.command(config, "fox:pro-125m", "x")
    other = dataclasses.replace(setting, remat=cases_module.setting_of(parse("--remat=none")).remat)
    config = evidence.train_config(
        "fox:pro-125m", 3, other, vocabulary=32_000, factor=0.5, tokens=100_000
    )
    assert "--config.model.remat=none" in evidence.command(config, "fox:pro-125m", "x")
    with pytest.raises(UsageError, match="--tokens: 100 tokens of a run are less than a step"):
        evidence.train_config("fox:pro-125m", 0, setting, vocabulary=32_000, factor=1, tokens=100)


def test_the_clock_ends_training_by_a_signal_and_reports_that_the_time_is_over():
    with pytest.raises(TimeOver):
        Clock(-1).check()
    Clock(math.inf).check()
    with pytest.raises(KeyboardInterrupt), Clock(math.inf).interrupting():
        raise InterruptedError  # by the user's Ctrl-C, not by the clock


def test_the_seconds_of_a_run_are_those_of_all_calls(tmp_path):
    path = tmp_path / "run" / "seconds.json"
    with pytest.raises(TimeOver), counted(path):
        raise TimeOver
    path.write_text("100.0")
    with counted(path) as seconds:
        assert 100 <= seconds() < 110
    assert 100 <= json.loads(path.read_text()) < 110


def test_a_long_run_that_would_not_end_is_not_begun_and_is_no_failure(capsys):
    clock = Clock(200, whole=True)
    clock.check_whole(100)
    clock.note_besides(150)  # of an earlier model
    with pytest.raises(Skipped, match=r"its 250 s are more than the (200|199) s that are left"):
        clock.check_whole(100)
    Clock(200).check_whole(1e9)

    def measure(case):
        return case if case["model"] == "a" else clock.check_whole(1000)

    assert list(one_by_one([dict(model="b"), dict(model="a")], measure)) == [dict(model="a")]
    assert "b: not begun: its 1150 s are more than" in capsys.readouterr().err


def test_processes_on_one_device_train_one_after_another(tmp_path, capsys):
    """A file's lock belongs to what opened it, so threads stand for processes here."""
    order, lock = [], tmp_path / "lock"

    def wait(name, clock, step_seconds=0.0):
        try:
            with clock.turn(step_seconds):
                order.append(name)
        except (TimeOver, Skipped) as error:
            order.append(f"{name} {type(error).__name__}")

    waiting = [
        threading.Thread(target=wait, args=("second", Clock(math.inf, lock=lock))),
        threading.Thread(target=wait, args=("late", Clock(0.5, lock=lock))),
        threading.Thread(target=wait, args=("long", Clock(100, whole=True, lock=lock), 1e3)),
    ]
    with Clock(math.inf, lock=lock).turn(0.0):
        for thread in waiting:
            thread.start()
        time.sleep(1.2)
        order.append("first")
    for thread in waiting:
        thread.join(10)
    assert order[0] == "first" and sorted(order[1:]) == ["late TimeOver", "long Skipped", "second"]
    assert "waited 1 s for the device" in capsys.readouterr().err


def _wait_until(true):
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_programs_are_compiled_ahead_in_order_and_a_failure_is_left_to_training(monkeypatch, capsys):  # fmt: skip
    begun, may_end = [], threading.Event()

    def compiled(config):
        begun.append(config.name)
        assert may_end.wait(5)
        if config.name == "c":
            raise RuntimeError("no memory")
        return config.name.upper()

    monkeypatch.setattr(ahead_module, "compiled_program", compiled)
    configs = {name: TrainConfig(name=name, model=None) for name in "abcde"}
    with contextlib.closing(ahead_module.Ahead(2, threads=1)) as ahead:
        ahead.plan([configs[name] for name in "abcd"])
        assert ahead.take(configs["e"]) is None and not ahead.idle  # was not planned
        assert ahead.take(configs["b"]) is None  # waits for the thread, and is compiled by training
        may_end.set()
        _wait_until(lambda: "c" in begun)
        assert ahead.take(configs["c"]) is None and "no memory" in capsys.readouterr().err
        assert ahead.take(configs["a"]) is None  # was left out when a later one was taken
        _wait_until(lambda: "d" in begun)
        assert ahead.take(configs["d"]) == "D" and ahead.idle
    assert begun == ["a", "c", "d"]


def test_a_learning_rate_that_diverges_is_left_out(monkeypatch, tmp_path, capsys):
    setting = dataclasses.replace(cases_module.setting_of(parse("--tokens=10000000")), runs=tmp_path)  # fmt: skip

    def train(config, workdir, clock, ahead):
        with counted(evidence._seconds_file(workdir)):
            if config.optimizer.peak_lr > 3e-3:
                raise TrainingDiverged("loss is not finite")
        return dict(loss=1 / config.optimizer.peak_lr, wall_seconds=2.0)

    monkeypatch.setattr(evidence, "_train", train)
    found = evidence.learning_rates("fox:pro-125m", setting, 32_000, Clock(math.inf), None)
    assert [result["loss"] for result in found.values()] == [1000.0, 500.0, None]
    assert "rate-2: this learning rate is left out: loss is not finite" in capsys.readouterr().err
    assert evidence._best("fox:pro-125m", found) == 1
    assert evidence._by_rate(1e-3, found) == {"0.0005": 1000.0, "0.001": 500.0, "0.002": None}

    def lose_disk(*_):
        raise TrainingStopped("disk full")

    monkeypatch.setattr(evidence, "_train", lose_disk)
    setting = dataclasses.replace(setting, runs=tmp_path / "other")
    with pytest.raises(TrainingStopped, match="disk full"):  # says nothing about the rate
        evidence.learning_rates("fox:pro-125m", setting, 32_000, Clock(math.inf), None)


def test_an_evaluation_that_fails_does_not_lose_the_others(capsys):
    def evaluate(task):
        if task == "needle":
            raise ValueError("no text")
        return dict(loss=1.0)

    results, failed = side_by_side(["heldout", "needle", "long"], evaluate)
    assert list(results) == ["heldout", "long"] and failed == {"needle": "ValueError: no text"}
    assert "evaluation needle: FAILED" in capsys.readouterr().err

    def computed_otherwise(task):
        raise UsageError("give another folder by --runs")

    with pytest.raises(UsageError, match="another folder"):
        side_by_side(["heldout"], computed_otherwise)


def test_a_run_whose_checkpoint_stayed_on_another_machine_is_trained_again(tmp_path):
    setting = dataclasses.replace(cases_module.setting_of(parse()), tasks=("heldout", "needle"))
    for checkpoint, results, kept in (
        (False, ["", "-heldout"], False),
        (True, ["", "-heldout"], True),
        (False, ["", "-heldout", "-needle"], True),
    ):
        workdir = tmp_path / f"{checkpoint}{len(results)}"
        (workdir / "checkpoints" / ("1" if checkpoint else "")).mkdir(parents=True)
        paths = [workdir / f"evidence{name}.json" for name in results]
        for path in paths:
            path.write_text("{}")
        evidence.forget_if_lost(workdir, setting)
        assert [path.exists() for path in paths] == [kept] * len(paths)


def test_wrong_recall_questions_are_named(tmp_path):
    right = dict(context="zv is 3", question="zv is", answers=["3"])
    for change, message in (
        (dict(answers="3"), "answers='3'; accepted is a list of texts"),
        (dict(answers=["4"]), "accepted are answers of which the context has one"),
        (None, "it lacks question"),
    ):
        wrong = right | change if change else {k: v for k, v in right.items() if k != "question"}
        path = tmp_path / "fields.jsonl"
        path.write_text(f"{json.dumps(right)}\n{json.dumps(wrong)}\n")
        with pytest.raises(ValueError, match=f"row 2: .*{message}"):
            evidence_recall.questions(path, None)
        assert evidence_recall.questions(path, 1) == [right]


def row(model, seed=0, loss=3.0, **fields):
    needle = dict(
        lengths=[1024, 8192],
        easy=dict(found=[[1, 0.5], [0, 0]], nll=[[0.5, 2.0], [3.0, 4.0]]),
        standard=dict(found=[[0, 0], [0, 0]], nll=[[5.0, 6.0], [7.0, 8.0]]),
    )
    return dict(
        table="fox", corpus="c", model=model, seed=seed, tokens=10**8, length=4096, batch_size=64, peak_lr=1e-3,
        parameters=dict(active=125_000_000), state_bytes=10**6, tokens_per_second=350_000, card_seconds=1800,
        rates={}, rates_corpus="c", rates_seconds=360, training_seconds=3000, evaluation_seconds=240,
        tasks="heldout,long,needle,recall",
        heldout=dict(loss=loss), needle=needle, recall=dict(fields=dict(contains=0.25)),
        long=dict(perplexity={"4096": 20.0, "65536": 30.0}, loss_by_block=dict(block=512, loss=[3.0] * 128)),
        date="2026-01-01", commit="abc", device="H200",
    ) | fields  # fmt: skip


def test_the_tables_have_a_line_a_model_with_the_mean_of_its_seeds(tmp_path):
    rows = [
        row("a", 0, 3.0), row("a", 1, 3.2), row("b", loss=2.5), row("b", loss=2.4, time_of="a"),
        *(row(name, kind="rates", factor=1, short_tokens=10**7, rates={"0.001": 4.0, "0.002": 3.5}) for name in "ab"),
    ]  # fmt: skip
    (tmp_path / "evidence.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    found = {table.name: table for table in tables.with_rows(tmp_path)}
    assert list(found) == ["evidence_fox", "evidence_rates"]
    lines = found["evidence_fox"].markdown(tmp_path, tmp_path / "page.md").splitlines()
    cells = [line.split(" | ") for line in lines if line.startswith("| `")]
    assert [line[0] for line in cells] == ["| `b`, in the time of `a`", "| `b`", "| `a`"]
    assert cells[2][-1] == "1.90 |" and cells[0][-1] == "1.00 |"  # the learning rate is chosen once
    assert cells[2][1] == "0, 1" and cells[2][5] == "3.100 (3.000, 3.200)"
    assert cells[1][6:13] == ["20.00", "", "30.00", "0.75", "0.50", "0.00", "0.00"]
    assert cells[1][16:18] == ["0.250", ""]
    assert "0.001: 4.000, 0.002: 3.500" in found["evidence_rates"].markdown(
        tmp_path, tmp_path / "x.md"
    )
    for draw in (draw_results.draw_evidence_loss, draw_results.draw_evidence_recall):
        assert draw(draw_results.LIGHT, rows[:4]).axes


def test_a_method_trained_for_another_table_stands_among_the_methods_too(tmp_path):
    rows = [row("lm:a-125m"), row("fox:b-125m"), row("lm:c-125m", table="methods")]
    (tmp_path / "evidence.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    found = {table.name: table.rows(tmp_path) for table in tables.with_rows(tmp_path)}
    assert {r["model"] for r in found["evidence_methods"]} == {"lm:a-125m", "lm:c-125m"}
    assert {r["model"] for r in found["evidence_fox"]} == {"lm:a-125m", "fox:b-125m"}


def test_the_routing_of_memories_is_read_from_a_run_and_shown(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(json.dumps({"step": 20, "train/loss": 1.0}) + "\n")
    assert evidence.router_of(metrics) == {}
    load = lambda step: [[0.25, 0.25, 0.25, 0.25], [0.5, 0.48, 0.02 - step / 1e4, step / 1e4]]  # noqa: E731
    lines = [
        {"step": step, "mom/load": load(step), "mom/entropy": [1.0, 0.5]}
        for step in range(20, 220, 20)
    ]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = evidence.router_of(metrics, points=3)["router"]
    assert found["steps"] == [20, 100, 200] and np.shape(found["load"]) == (3, 2, 4)
    assert found["load"][-1] == [[0.25] * 4, [0.5, 0.48, 0.0, 0.02]] and found["entropy"][0] == [
        1.0,
        0.5,
    ]
    rows = [
        row("mom:125m", 0, 3.0, table="mom", router=found),
        row("mom:125m,baseline=inner", 0, 3.0, table="mom"),
    ]
    (tmp_path / "evidence.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    shown = {table.name: table for table in tables.with_rows(tmp_path)}
    assert list(shown) == ["evidence_mom", "evidence_routing"]
    text = shown["evidence_routing"].markdown(tmp_path, tmp_path / "page.md")
    assert "| `mom:125m` | 0 | 0.00 | 0.50 | 0.25 | 1 | 0.75 |" in text and "baseline" not in text
    (axes,) = draw_results.draw_evidence_routing(draw_results.LIGHT, rows).axes
    assert len(axes.lines) == 2 * 2 + 1  # least and largest of two layers, and the even load


def test_the_page_begins_with_what_holds_and_what_does_not(monkeypatch, tmp_path):
    moe = dict(table="moe", tokens=10**7)
    needles = "finds at least 0.9 of the easy needles in texts up to the training length"
    low, high = [0.1, 0.2, 0.3, 0.4, 0.5], [1, 2, 3, 4, 5]
    few = dict(lengths=[1024, 8192], easy=dict(found=[[1, 0, 0, 0, 0], [0] * 5], nll=[low, high]))
    every = dict(lengths=[1024, 8192], easy=dict(found=[[1] * 5, [0] * 5], nll=[high, low]))
    hybrid, softmax = "linear_moe:a-small,mixer=gla,pattern=LLLN", "linear_moe:a-small,pattern=N"
    rows = [
        row("fox:pro-125m", 0, 2.9, needle=few), row("fox:pro-125m", 1, 3.0, needle=few), row("fox:transformer-pro-125m", 0, 3.1, needle=every),
        row("fox:transformer-pro-125m", 0, 2.0, tokens=1), row("fox:hgrn2-125m", 0, 2.0),
        row(hybrid, 0, 3.0, **moe), row(softmax, 0, 3.2, **moe), row(hybrid, 0, 3.1, **moe | dict(time_of=softmax, tokens=2)),
        row("mom:125m", 0, 3.0, table="mom"), row("mom:125m,baseline=inner", 0, 3.2, table="mom", batch_size=8),
    ]  # fmt: skip
    holds = {c.what: c.holds for c in claims.comparisons(rows)}
    assert holds == {
        "`fox:pro-125m` below `fox:transformer-pro-125m` in held-out loss": True,
        "`fox:pro-125m` below `fox:transformer-pro-125m` in P(65,536)": None,  # 30.0 both
        "`fox:pro-125m` below `fox:hgrn2-125m` in held-out loss": False,
        f"`fox:pro-125m` {needles}, by its continuation": False,
        f"`fox:transformer-pro-125m` {needles}, by its continuation": True,
        f"`fox:pro-125m` {needles}, by a loss of the answer below 1 nat": True,
        f"`fox:transformer-pro-125m` {needles}, by a loss of the answer below 1 nat": False,
        f"`{hybrid}` at or below `{softmax}` in held-out loss": True,
        f"`{hybrid}` at or below `{softmax}` in held-out loss, in equal time": None,
    }
    text = claims.sentences(rows)
    found, _, *lists = text.split("\n")
    assert found.count(". ") == 1 and found.endswith(".")  # two sentences
    assert found.startswith("7 models of 125 million active parameters were trained on 0 to 100 ")
    order = "`fox:hgrn2-125m` (2.000), `fox:pro-125m` (2.950), `fox:transformer-pro-125m` (3.100)"
    assert f"by held-out loss those of FoX's table with 100 million tokens are in the order {order}. Of" in found  # fmt: skip
    assert "those with 10 million tokens are in the order `linear_moe" in claims.sentences(rows[5:8])  # fmt: skip
    assert "Of 8 statements of the papers 4 hold, 3 do not, and 1 is within the noise (1 by seeds); of 1 comparison of this project 0 hold, 0 do not, and 1 is" in found  # fmt: skip
    hold, fail = lists
    assert hold.startswith("- Statements of the papers that hold here: `fox:pro-125m` below")
    assert f"`fox:transformer-pro-125m` {needles}, by its continuation (1.00)" in hold
    assert "(2.950 and 3.100)" in hold and fail.count("; ") == 2 and "do not hold" in fail
    whose = {c.claim.whose for c in claims.comparisons(rows)}
    assert whose == {"FoX", "FoX (760M, 48 B tokens)", "Linear-MoE", "this project, on Linear-MoE's models"}  # fmt: skip
    assert "No pair of models is complete" in claims.sentences(rows[4:5])
    (tmp_path / "evidence.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    for page in ("index.md", "results/README.md"):
        (tmp_path / page).parent.mkdir(exist_ok=True)
        (tmp_path / page).write_text((evidence_page.DOCS / page).read_text())
    monkeypatch.setattr(
        evidence_page, "TABLES", {t.name: t for t in (*claims.tables(tmp_path), *tables.with_rows(tmp_path))}
    )  # fmt: skip
    marks = re.findall(r"<!-- table: (\w+) -->", evidence_page.page())
    assert marks == ["evidence_found", "evidence_claims", "evidence_fox", "evidence_mom", "evidence_moe"]  # fmt: skip
    for _ in range(2):
        evidence_page.add_to_contents(tmp_path)
    assert (tmp_path / "index.md").read_text().count("results/evidence\n") == 1
    assert (tmp_path / "results/README.md").read_text().count("| [evidence.md](evidence.md) |") == 1
    found, table = claims.tables(tmp_path)
    assert found.markdown(tmp_path, tmp_path / "x.md") == text
    assert table.markdown(tmp_path, tmp_path / "x.md").count("**no**") == 3


def test_the_tokens_of_equal_time_follow_from_the_speeds(tmp_path, monkeypatch):
    path = tmp_path / "rates.jsonl"
    fields = dict(
        kind="rates",
        length=4096,
        batch_size=64,
        factor=1,
        rates={},
        short_tokens=1,
        corpus="",
        rates_seconds=0,
    )
    rows = [
        dict(model=f"lm:{m}-nano", tokens_per_second=s, **fields)
        for m, s in (("gla", 300.0), ("softmax", 200.0))
    ]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    args = parse(
        f"--rates={path}",
        "--models",
        "lm:gla-nano",
        "--time_of=lm:softmax-nano",
        "--tokens=10000000",
    )
    (case,) = cases_module.cases(args)
    assert case["tokens"] == 15_000_000 and case["time_of"] == "lm:softmax-nano"
    # The configs that are compiled ahead equal those that `measure` trains.
    monkeypatch.setattr(evidence, "vocab_size", lambda corpus: 128)
    setting = cases_module.setting_of(args)
    (ahead,) = evidence.planned_configs([case], setting, short=False)
    setting = dataclasses.replace(setting, tokens=case["tokens"])
    options = dict(vocabulary=128, factor=1, tokens=case["tokens"])
    assert repr(ahead) == repr(evidence.train_config(case["model"], 0, setting, **options))


def test_questions_of_several_keys_that_are_too_long_are_counted(tmp_path):
    path = tmp_path / "multikey.jsonl"
    texts = [dict(context=" " * n + "key: v", question="\nkey:", answers=["v"]) for n in (0, 900)]
    path.write_text("".join(json.dumps(text) + "\n" for text in texts))
    settings = SuiteSettings(ByteTokenizer(), bos_id=256, max_length=100)
    found, too_long = evidence_recall.prompts(path, settings, None)
    assert too_long == 1 and bytes(found[0][0][1:].tolist()) == b"key: v\nkey:"
    path.write_text(json.dumps(texts[1]) + "\n")
    with pytest.raises(ValueError, match="none of 1 questions fits 100 tokens"):
        evidence_recall.prompts(path, settings, None)


@pytest.mark.slow
def test_two_tiny_models_from_corpus_to_rows(tmp_path, capsys):
    corpus, output, rates = (tmp_path / name for name in ("corpus", "rows.jsonl", "rates.jsonl"))
    write_corpus(corpus)
    common = [
        "evidence", "--models", "lm:gla-nano", "lm:softmax-nano", f"--corpus={corpus}", f"--runs={tmp_path / 'runs'}",
        "--tokens=16384", "--length=512", "--batch_size=8", "--factors=1,2", "--share=0.5",
        "--long_length=1024", "--long_documents=2", "--needle_lengths=600",
    ]  # fmt: skip
    main([*common, "--only_rates", f"--output={rates}"])
    chosen = [json.loads(line) for line in rates.read_text().splitlines()]
    assert [row["kind"] for row in chosen] == ["rates", "rates"]
    arguments = [*common, f"--rates={rates}", f"--output={output}"]
    main([*arguments, "--minutes=0"])
    assert not output.exists() or not output.read_text()
    assert "the same command continues" in capsys.readouterr().err
    main(arguments)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["model"] for row in rows] == ["lm:gla-nano", "lm:softmax-nano"]
    for row, short in zip(rows, chosen, strict=True):
        best = min(row["rates"], key=row["rates"].get)
        assert float(best) == pytest.approx(row["peak_lr"], rel=1e-2) and len(row["rates"]) == 2
        assert row["rates"] == short["rates"] and row["rates_tokens"] == 8192
        assert set(row["long"]["perplexity"]) >= {"1024", "512"}
        assert np.isfinite(row["heldout"]["loss"]) and len(row["long"]["loss_by_block"]["loss"]) == 2  # fmt: skip
        needle = row["needle"]
        assert {np.shape(needle["easy"][k]) for k in ("found", "below_one", "place")} == {(1, 5)}
        assert np.isfinite(needle["without_needle"]["nll"]).all()
        assert (
            set(row["recall"]) == {*evidence_recall.TASKS, "seconds"}
            and row["recall"]["names"]["questions"] == 2
        )
        assert row["state_bytes"] > 0 and row["parameters"]["total"] > 0 and row["card_seconds"] > 0
        assert row["training_seconds"] > row["card_seconds"] > 0 and row["evaluation_seconds"] > 0
        assert row["rates_seconds"] == short["rates_seconds"] > 0
    main(arguments)
    assert len(output.read_text().splitlines()) == 2
    with pytest.raises(SystemExit, match="was computed with other options; give another folder"):
        main([*common, "--warmup=0.2", f"--output={tmp_path / 'x'}"])


@pytest.mark.slow
def test_a_run_compiles_nothing_that_was_compiled_ahead(tmp_path):
    config = dataclasses.replace(
        lm.get_config("gla-nano"), batch_size=2, total_tokens=2048, eval_every=4, eval_batches=1
    )
    config.data.sequence_length, config.optimizer.warmup_tokens = 128, 512
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    )
    try:
        with contextlib.closing(ahead_module.Ahead(1)) as ahead:
            ahead.plan([config])
            program = ahead.take(config)
        assert len(compiled) >= 3
        before = len(compiled)
        train_to_end(config, tmp_path / "run", program=program)
        assert compiled[before:] == []
    finally:
        jax.monitoring.clear_event_listeners()
