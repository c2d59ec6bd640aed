"""A small sample of the campaign of faults, and tests that its counts notice each kind of failure.

`make test-faults` runs the campaign itself, which is no test of pytest.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time

import pytest

from tests.faults import campaign, damages, judging, kills, mutations
from tests.faults.judging import Case, judge
from tests.faults.outcomes import compare
from tests.faults.snapshot import changes, snapshot


@pytest.mark.slow
def test_killed_runs_resume_to_the_same_bits(tmp_path):
    """A chain of three kills of one run ends with the rows and parameters of the undisturbed run."""
    chains = kills.Campaign(
        tmp_path, kills=3, seed=1, workers=1, kinds=("plain",), most=3, prepare=False
    ).run()
    assert [problem for chain in chains for problem in chain.problems] == []
    assert sum(len(chain.kills) for chain in chains) >= 3


@pytest.mark.slow
def test_damaged_inputs_end_in_a_message(tmp_path):
    """A sample of damaged inputs is read correctly or refused with a message."""
    cases = damages.Campaign(
        tmp_path / "damages", damages=40, seed=11, workers=1, without=("tasks", "generated")
    ).run()  # the harness takes ten seconds to import, and generated cases have tests of their own
    wrong = [case for case in cases if case["outcome"] in judging.BAD]
    assert len(cases) == 40 and not wrong, "\n".join(json.dumps(case) for case in wrong)


def _raise(error):
    raise error


@pytest.fixture
def alarm(monkeypatch):
    monkeypatch.setattr(judging, "SECONDS", 0.5)
    before = signal.signal(signal.SIGALRM, judging.too_long)
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    ("read", "options", "outcome"),
    [
        (lambda: (1, 1), {}, "correct"),
        (lambda: (2, 1), {}, "accepted"),
        (lambda: (2, 1), dict(protected=True), "silent"),
        (lambda: (2, 1), dict(protected=True, accept=lambda a, b: "announced"), "silent"),
        (lambda: (2, 1), dict(protected=True, accept=lambda a, b: "quiet"), "correct"),
        (lambda: _raise(ValueError("a.json: wrong")), {}, "refused"),
        (lambda: _raise(ValueError("wrong")), {}, "unnamed"),
        (lambda: _raise(OSError(28, "full", "a.json")), {}, "refused"),
        (lambda: _raise(SystemExit("a.json: wrong")), {}, "refused"),
        (lambda: _raise(SystemExit(1)), {}, "traceback"),
        (lambda: _raise(ValueError("")), {}, "traceback"),
        (lambda: _raise(ValueError("a.json\n" * 100)), {}, "traceback"),
        (lambda: _raise(TypeError("a.json")), {}, "traceback"),
        (lambda: _raise(RecursionError("a.json")), {}, "traceback"),
        (lambda: _raise(MemoryError()), {}, "memory"),
        (lambda: time.sleep(5), {}, "hang"),
    ],
)
def test_each_outcome_is_counted(alarm, read, options, outcome):
    case = Case("subject", "damage", read, names=frozenset({"a.json"}), **options)
    assert judge(case)["outcome"] == outcome


def test_a_message_must_come_with_a_partial_result(alarm):
    def read():
        os.write(2, b"a.json cannot be read\n")
        return 2, 1

    case = Case("subject", "damage", read, protected=True, accept=lambda a, b: "announced")
    assert judge(case)["outcome"] == "correct"


def test_writes_outside_and_tracebacks_in_the_output_are_counted(alarm, tmp_path):
    def write():
        (tmp_path / "b").write_text("x")
        return 1, 1

    case = Case("subject", "damage", write, unchanged=((tmp_path, lambda name: True),))
    assert judge(case) | dict(seconds=0) == dict(
        subject="subject", damage="damage", seconds=0, outcome="outside", detail="added b"
    )

    def shout():
        os.write(2, b"Traceback (most recent call last)\n")
        return 1, 1

    assert judge(Case("subject", "damage", shout))["outcome"] == "traceback"


def test_large_allocations_are_counted(alarm, monkeypatch):
    monkeypatch.setattr(judging, "SECONDS", 60)  # a busy machine needs more than the alarm's
    monkeypatch.setattr(judging, "MEMORY", 1 << 24)
    case = Case("subject", "damage", lambda: (len(b"x" * (1 << 27)), 1 << 27))
    assert judge(case)["outcome"] == "memory"


def test_snapshots_see_every_change(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "a").write_text("a")
    (tmp_path / "link").symlink_to("a")
    before = snapshot(tmp_path)
    assert not changes(before, snapshot(tmp_path))
    (tmp_path / "a").write_text("b")
    (tmp_path / "link").unlink()
    (tmp_path / "folder" / "new").symlink_to("nowhere")
    assert changes(before, snapshot(tmp_path)) == ["added folder/new", "removed link", "changed a"]


def test_outcomes_of_runs_are_compared():
    expected = dict(rows=[dict(step=1, loss=1.0), dict(step=2, loss=0.5)], step=2, params=dict(a=b"1"))  # fmt: skip
    assert compare(expected, expected) == []
    assert compare(expected, expected | dict(rows=expected["rows"][:1])) == [
        "1 rows of metrics of 2; the first difference is in row 1"
    ]
    assert compare(expected, expected | dict(params=dict(a=b"2"))) == ["1 parameters differ: a"]
    assert len(compare(expected, expected | dict(step=1))) == 1


@pytest.mark.parametrize(
    "name", ["a.json", "a.safetensors", "a.gguf", "a.jsonl", "a.yaml", "a.bin"]
)
def test_every_mutation_changes_its_file(tmp_path, name):
    """Each mutation changes the file, but for a replaced value that is equal, or a byte that had that value."""
    outside = tmp_path / "outside"
    outside.mkdir()
    header = b'{"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
    content = {
        "a.json": b'{"a": {"b": [1, 2, "x"]}, "chat_template": "x"}',
        "a.safetensors": len(header).to_bytes(8, "little") + header + bytes(8),
        "a.gguf": b"GGUF" + bytes(800) + b"llama.block_count" + bytes(range(256)),
        "a.jsonl": b'{"step": 1, "text": "a"}\n{"step": 2, "text": "b"}\n',
        "a.yaml": b"task: a\noutput_type: b\n",
        "a.bin": bytes(range(256)),
    }[name]
    for i, mutation in enumerate(dict.fromkeys(mutations.for_file(tmp_path / name))):
        changed = 0
        for seed in range(5):
            folder = tmp_path / f"{i}-{seed}"
            folder.mkdir()
            file = folder / name
            file.write_bytes(content)
            before = snapshot(folder)
            what, _ = mutation(random.Random(seed), file, outside)
            changed += bool(changes(before, snapshot(folder))) and bool(what)
        assert changed >= 3, mutation.__name__


def test_the_page_has_the_tables_of_the_last_campaign():
    text = campaign.PAGE.read_text()
    rows = campaign.read_rows()
    assert campaign.page(text, rows) == text, "run python -m tests.faults.campaign --write"
    assert {row["part"] for row in rows} == {"kills", "damages"}
