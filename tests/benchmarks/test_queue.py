"""Tests of the queue of benchmark commands: parsing of job lists, assignment of GPUs, and the row of results
that is written for each job.
"""

from __future__ import annotations

import itertools
import json
import shlex
from pathlib import Path

import pytest

from benchmarks import registry
from benchmarks.__main__ import make_parser
from benchmarks.queue import Job, count_gpus, free_gpus, read_jobs, run


def test_a_list_is_read():
    jobs = read_jobs(
        "# none\n\n a  gpus=2 seconds=30 alone: echo 1 : 2\nb-2 seconds=5 share: echo {out}\n"
    )
    assert jobs == [
        Job("a", "echo 1 : 2", 30, gpus=2, alone=True),
        Job("b-2", "echo {out}", 5, gpus=1, alone=False),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a alone: x", "line 1: ''; accepted is NAME"),
        ("\na seconds=1 apart: x", "line 2: 'a seconds=1 apart: x'; accepted is NAME"),
        ("a seconds=1 alone:", "line 1: .*; accepted is NAME"),
        ("a seconds=0 alone: x", "line 1: 'seconds=0'; accepted is NAME"),
        ("a seconds=1 cards=1 alone: x", "line 1: 'seconds=1 cards=1'; accepted is NAME"),
        ("a seconds=1 alone: x\na seconds=1 share: x", "line 2: there is a job 'a' already"),
    ],
)
def test_invalid_lines_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        read_jobs(text)


def test_a_job_that_is_timed_shares_no_gpu():
    alone, share = Job("a", "", 1), Job("b", "", 1, alone=False)
    assert free_gpus(alone, [[share], []], slots=2) == [1]
    assert free_gpus(share, [[alone], [share]], slots=2) == [1]
    assert free_gpus(share, [[alone], [share, share]], slots=2) is None
    assert free_gpus(Job("c", "", 1, gpus=2), [[], [share]], slots=2) is None


def test_jobs_run_and_their_results_are_written(tmp_path):
    rows = run(
        read_jobs(
            "good seconds=5 share: echo $CUDA_VISIBLE_DEVICES > {out}/seen; echo said\n"
            "bad  seconds=5 share: exit 3\n"
            "pair gpus=2 seconds=5 alone: echo $CUDA_VISIBLE_DEVICES > {out}/seen\n"
            "slow seconds=1 alone: sleep 60\n"
            "late seconds=500 alone: echo\n"
        ),
        tmp_path, gpus=2, slots=2, seconds=60,
    )  # fmt: skip
    ends = {row["name"]: row["exit"] for row in rows}
    assert ends == {"good": 0, "bad": 3, "pair": 0, "slow": -9, "late": None}
    late = next(row for row in rows if row["name"] == "late")
    assert late["reason"].startswith("not started: its 500 s are more than the ")
    assert (tmp_path / "good" / "seen").read_text() == "0\n"
    assert (tmp_path / "good" / "log").read_text() == "said\n"
    assert (tmp_path / "pair" / "seen").read_text() == "0,1\n"
    lines = (tmp_path / "summary.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == rows


def test_more_gpus_than_the_machine_has_are_refused(tmp_path):
    with pytest.raises(ValueError, match="job a: gpus=2; accepted are up to the 1 of"):
        run([Job("a", "", 1, gpus=2)], tmp_path, gpus=1, slots=1, seconds=1)


def test_the_pending_jobs_name_benchmarks_and_options_that_exist():
    text = (Path(__file__).parents[2] / "benchmarks" / "pending.jobs").read_text()
    for job in read_jobs(text):
        words = itertools.dropwhile(lambda word: "=" in word, shlex.split(job.command))
        python, flag, package, name, *options = words
        assert (python, flag, package) == ("python", "-m", "benchmarks")
        make_parser(registry.get(name)).parse_args(options)


def test_all_gpus_of_the_machine_run_jobs_by_default(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: a)'\necho 'GPU 1: NVIDIA H200 (UUID: b)'\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert count_gpus() == 2
    monkeypatch.setenv("PATH", "")
    assert count_gpus() == 1
