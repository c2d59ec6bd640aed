"""Tests of the messages of the benchmark `evidence` about options and files that it does not accept."""

from __future__ import annotations

import importlib.util
import json

import pytest

from benchmarks.__main__ import main
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
        (["--factors=0,1"], "accepted are positive numbers"),
        (["--only_rates", "--factors=1"], "--only_rates requires two or more --factors"),
        (["--time_of=fox:pro-125m"], "--time_of requires --rates"),
        (["--limit=0"], "--limit=0: it must be at least 1"),
        (["--ahead=-1"], "--ahead=-1: it must be at least 0"),
        (["--whole"], "--whole requires --minutes"),
        ([f"--rates={tmp_path / 'none'}"], "--rates=.*none: it does not exist"),
        ([f"--skip={tmp_path / 'none'}"], "--skip=.*none: it does not exist"),
        ([f"--skip={lists}"], "--skip=.*lists.jsonl: line 2 is"),
        ([f"--rates={empty}"], "--rates: no row of fox:pro-125m .* there are none"),
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
        ([f"--rates={short}"], "--rates: the row of fox:pro-125m lacks factor, rates"),
    ):  # fmt: skip
        with pytest.raises(SystemExit, match=message):
            main(["evidence", *arguments])


def test_what_a_corpus_does_not_allow_is_named_before_anything_is_trained(tmp_path):
    """A run would end with another message: the folder of runs is a file."""
    corpus, runs = tmp_path / "corpus", tmp_path / "runs"
    write_corpus(corpus)
    runs.touch()
    common = ["evidence", "--models", "lm:gla-nano", f"--corpus={corpus}", f"--runs={runs}", "--long_length=1024"]  # fmt: skip
    for arguments, message in (
        (["--needle_lengths=10"], r"--needle_lengths=10: .* require at least \d+ tokens"),
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
