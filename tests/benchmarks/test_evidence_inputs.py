"""Tests of the messages of the benchmark `evidence` about options and files that it does not accept."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.__main__ import main, make_parser
from benchmarks.cases import evidence as cases_module
from benchmarks.evidence_tasks import check_inputs, request_of
from benchmarks.queue import read_jobs
from benchmarks.registry import UsageError, get
from tests.benchmarks.evidence_corpus import write_corpus


def test_wrong_arguments_are_named(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    lists, binary, short = (tmp_path / f"{name}.jsonl" for name in ("lists", "binary", "short"))
    fields = dict(kind="rates", length=4096, batch_size=64)
    lists.write_text(json.dumps(fields | dict(model="a")) + "\n[1, 2]\n")
    binary.write_bytes(b"\xff\x00")
    short.write_text(json.dumps(fields | dict(model="fox:pro-125m")) + "\n")
    for arguments, message in (
        (["--models", "fox-pro"], "accepted is FILE:VARIANT"),
        (["--models", "fox:pro-1m"], "1m"),
        (["--share=0"], "--share=0.0: accepted are numbers between 0 and 1"),
        (["--factors=0,1"], "--factors=0,1: accepted are numbers from 0.0001 to 10000"),
        (["--factors=1e308"], "--factors=1e.308: accepted are numbers from"),
        (["--factors=inf"], "--factors=inf: accepted are numbers from"),
        (["--factors=1,2,1"], "--factors=1,2,1: accepted are numbers .* that differ"),
        (["--factors=1,1.0001"], "--factors=.*: accepted are numbers .* that differ in their first three digits"),
        (["--factors="], "--factors=: accepted are numbers"),
        (["--tasks=heldout,heldout"], "--tasks: 'heldout' is given twice; accepted are different names"),
        (["--models", "lm:gla-nano", "lm:gla-nano"], "--models: 'lm:gla-nano' is given twice"),
        ([f"--lock={tmp_path}"], f"--lock={tmp_path}: accepted is a file"),
        ([f"--lock={tmp_path / 'none' / 'lock'}"], "--lock=.*none.lock: accepted is a file, .* in a folder that exists"),
        (["--only_rates", "--factors=1"], "--only_rates requires two or more --factors"),
        (["--time_of=fox:pro-125m"], "--time_of requires --rates"),
        (["--limit=0"], "--limit=0: it must be at least 1"),
        (["--ahead=-1"], "--ahead=-1: it must be at least 0"),
        (["--whole"], "--whole requires --minutes"),
        ([f"--rates={tmp_path / 'none'}"], "--rates=.*none: it does not exist"),
        ([f"--skip={tmp_path / 'none'}"], "--skip=.*none: it does not exist"),
        ([f"--skip={lists}"], "--skip=.*lists.jsonl: line 2 is"),
        ([f"--rates={empty}"], "--rates=.*empty.jsonl: no row of fox:pro-125m .* there are none"),
        ([f"--corpus={tmp_path}", "--models", "lm:gla-nano"], "it has no train.zarr; make it with"),
        (["--seeds=-1"], "--seeds=-1: accepted are different integers from 0"),
        (["--seeds="], "--seeds=: accepted are different integers"),
        (["--seeds=1,1"], "--seeds=1,1: accepted are different integers"),
        (["--needle_lengths=-5"], "--needle_lengths=-5: accepted are different integers from 1"),
        (["--tasks="], "--tasks= is empty"),
        (["--tasks=harness", "--harness="], "--harness= is empty"),
        (["--minutes=nan"], "--minutes=nan: accepted are numbers from 0"),
        (["--minutes=-1"], "--minutes=-1: accepted are numbers from 0"),
        (["--long_documents=0"], "--long_documents=0: it must be at least 1"),
        ([f"--rates={tmp_path}"], f"--rates={tmp_path}: Is a directory; accepted is a file of JSON lines"),
        ([f"--rates={lists}"], "--rates=.*lists.jsonl: line 2 is '.1, 2.'; accepted are JSON objects"),
        ([f"--rates={binary}"], "--rates=.*binary.jsonl: it is no text in UTF-8"),
        ([f"--rates={short}"], "--rates=.*short.jsonl: the row of fox:pro-125m lacks factor, rates"),
    ):  # fmt: skip
        with pytest.raises(SystemExit, match=message):
            main(["evidence", *arguments])


def test_fields_of_rows_that_are_not_accepted_are_named(tmp_path):
    path, model = tmp_path / "rows.jsonl", "lm:gla-nano"
    right = dict(
        kind="rates", model=model, length=4096, batch_size=64, factor=1, rates={}, short_tokens=1, corpus="", rates_seconds=0,
        tokens_per_second=5.0,
    )  # fmt: skip
    common = ["evidence", "--models", model, f"--corpus={tmp_path}"]
    path.write_text(json.dumps(right))
    with pytest.raises(SystemExit, match="it has no train.zarr"):  # the row is accepted
        main([*common, f"--rates={path}"])
    for option, change, accepted in (
        ("skip", dict(model=["a"]), "texts and numbers"),
        ("rates", dict(model=["a"]), "texts and numbers"),
        ("skip", dict(time_of={}), "texts and numbers"),
        ("rates", dict(factor="x"), "a number from 0.0001 to 10000"),
        ("rates", dict(factor=True), "a number from 0.0001"),
        ("rates", dict(factor=1e308), "a number from 0.0001"),
        ("rates", dict(tokens_per_second=0), r"a number from 1 to 1e\+12"),
        ("rates", dict(tokens_per_second=None), "a number from 1"),
        ("rates", dict(short_tokens=1.5), "a number from 1"),
        ("rates", dict(rates_seconds=float("nan")), "a number from 0"),
        ("rates", dict(rates=[1]), "an object of losses by rate"),
        ("rates", dict(corpus=3), "a text"),
    ):
        ((name, value),) = change.items()
        path.write_text(json.dumps(right | change))
        with pytest.raises(SystemExit) as error:
            main([*common, f"--{option}={path}", *(["--time_of", model] if option == "rates" else [])])  # fmt: skip
        message = str(error.value)
        assert f"--{option}={path}: " in message and "\n" not in message
        assert re.search(rf"{name}={re.escape(repr(value))}; accepted (is|are) {accepted}", message)


def test_a_job_that_waits_ends_by_its_minutes_before_the_queue_kills_it():
    """The queue kills a job after twice its seconds; a call may end a minute later than its minutes."""
    jobs = read_jobs((Path(__file__).parents[2] / "benchmarks" / "pending.jobs").read_text())
    found = [(job, re.search(r"--minutes[ =]([\d.]+)", job.command)) for job in jobs]
    late = [job.name for job, given in found if given and 2 * job.seconds < 60 * float(given[1]) + 60]  # fmt: skip
    assert any(given for _, given in found) and not late


def test_a_task_of_the_harness_that_does_not_exist_is_named(tmp_path, monkeypatch):
    """Without the harness, of which stand-ins have the parts that the check reads: an index of task files, and a module's path."""
    corpus, package = tmp_path / "corpus", tmp_path / "lm_eval"
    write_corpus(corpus)
    package.mkdir()

    class TaskManager:
        all_tasks = ("piqa",)

        def __init__(self, **_):
            pass

    tasks = ModuleType("lm_eval.tasks")
    tasks.__dict__.update(__file__=str(package / "__init__.py"), TaskManager=TaskManager)
    evaluator = ModuleType("lm_eval.evaluator")
    evaluator.__dict__.update(get_git_commit_hash=lambda: None)
    harness = ModuleType("lm_eval")
    harness.__spec__ = importlib.machinery.ModuleSpec("lm_eval", None)
    harness.__dict__.update(tasks=tasks, evaluator=evaluator, __path__=[])
    for module in (harness, tasks, evaluator):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    args = make_parser(get("evidence")).parse_args([f"--corpus={corpus}", "--tasks=harness", "--harness=piqa"])  # fmt: skip
    setting = cases_module.setting_of(args)
    check_inputs(setting, given_documents=None)
    with pytest.raises(
        UsageError, match="--harness=piqa,piqb: .*'piqb' does not exist; near it are piqa"
    ):
        check_inputs(dataclasses.replace(setting, harness="piqa,piqb"), given_documents=None)


def test_needles_of_all_rows_are_hidden_in_one_text():
    """The stored rows have one, and scores in others would differ by the text, not by the seed."""
    setting = cases_module.setting_of(make_parser(get("evidence")).parse_args([]))
    assert request_of("needle", setting)[1].needle.samples == 1


def test_what_a_corpus_does_not_allow_is_named_before_anything_is_trained(tmp_path):
    """A run would end with another message: the folder of runs is a file."""
    corpus, runs = tmp_path / "corpus", tmp_path / "runs"
    write_corpus(corpus)
    runs.touch()
    common = ["evidence", "--models", "lm:gla-nano", f"--corpus={corpus}", f"--runs={runs}", "--long_length=1024", "--needle_lengths=600"]  # fmt: skip
    for arguments, message in (
        (["--needle_lengths=10"], r"--needle_lengths=10: .* require at least \d+ tokens"),
        (
            ["--needle_lengths=600,100000"],
            r"--needle_lengths=100000: .* 1024; accepted are lengths up to 1\d{3}$",
        ),
        (["--long_documents=1000"], "--long_documents=1000: .* has 2 long documents"),
        (["--long_length=2048"], "--long_length=2048: the rows of long.zarr have 1024 tokens"),
    ):
        with pytest.raises(SystemExit, match=message):
            main([*common, *arguments])
    if importlib.util.find_spec("lm_eval") is not None:
        with pytest.raises(SystemExit, match="--harness=nope: .*'nope' does not exist"):
            main([*common, "--tasks=harness", "--harness=nope"])
    (corpus / "recall" / "names.jsonl").write_text("[1]\n")
    with pytest.raises(SystemExit, match="names.jsonl"):
        main(common)
