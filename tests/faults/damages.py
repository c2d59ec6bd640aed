"""Read damaged inputs, each under a limit of time and memory, and count how each ended.

`python -m tests.faults.damages --folder=FOLDER` is one worker: it imports the library once, reads the cases of its
share one after another and writes a row of each to FOLDER. `Campaign` starts the workers, ends one whose case
takes too long, and starts another for the cases that are left.
"""

from __future__ import annotations

import argparse
import collections
import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.faults import inputs
from tests.faults.judging import (
    BAD,
    OUTCOMES,
    SECONDS,
    Captured,
    Case,
    judge,
    limit_memory,
    too_long,
)
from tests.faults.snapshot import changes, snapshot


class Cases:
    """Make the cases of the campaign in a folder, by number; a seed decides all choices. The second half of the
    numbers are cases of `generated`.

    Args:
        folder: has the folder intact of `intact.build`.
        seed: the seed.
        without: names of subjects that are left out; "generated" leaves out the second half.
        total: number of all cases.
    """

    def __init__(self, folder: Path, seed: int, without: tuple[str, ...] = (), total: int = 0):
        from tests.faults import generated, subjects

        (folder / "cases").mkdir(exist_ok=True)
        self.own, self.sample = total, None
        if "generated" not in without:
            self.sample = generated.Sample(folder, total // 2, seed)
            self.own = total - total // 2 if self.sample.sources else total

        self.folder, self.seed, self.subjects = folder, seed, subjects
        chosen = [subject for subject in subjects.SUBJECTS if subject.name not in without]
        weights = [subject.weight for subject in chosen]
        self.order = random.Random(0).sample(
            [s for s, n in zip(chosen, weights, strict=True) for _ in range(n)],
            sum(weights),
        )
        self.intact: dict[str, Any] = {}
        self.guard = Path.home()  # the worker's, where nothing may be written

    def make(self, number: int) -> Case:
        """Return the case of a number, with its damaged copy in the folder cases/NUMBER."""
        if self.sample is not None and number >= self.own:
            return self.sample.make(number - self.own)
        subject = self.order[number % len(self.order)]
        rng = random.Random(f"{self.seed}/{number}")
        if subject.name not in self.intact:
            self.intact[subject.name] = self._read(
                subject, f"intact-{subject.name}-{os.getpid()}", None
            )[0]
        given, out, outside = self._copy(subject, str(number))
        file, what, names = self.subjects.damage(subject, rng, given, outside)
        writable = subject.writable

        def is_fixed(name: str) -> bool:
            return writable is None or not name.startswith(writable)

        top = given.parent
        return Case(
            subject=subject.name,
            damage=f"{file}: {what}" if file else what,
            read=lambda: (subject.read(given, out), self.intact[subject.name]),
            names=frozenset({*names, "output"} if subject.name == "results" else names),
            protected=subject.protected(file),
            accept=subject.accept,
            unchanged=(
                (self.guard, lambda name: True),
                (outside, lambda name: True),
                (given, is_fixed),
                (top, lambda name: "/" not in name),
            ),
        )

    def _copy(self, subject: Any, name: str) -> tuple[Path, Path, Path]:
        top = self.folder / "cases" / name
        given, out, outside = top / "given", top / "out", top / "outside"
        out.mkdir(parents=True)
        outside.mkdir()
        (outside / "file").write_text("content\n")
        (outside / "other.yaml").write_text("task: other\n")
        (outside / "outside.py").write_text("def touch(*args):\n    return args\n")
        source = self.subjects.source_of(subject, self.folder / "intact")
        shutil.copytree(source, given, symlinks=True)
        return given, out, outside

    def _read(self, subject: Any, name: str, case: Any) -> tuple[Any, Any]:
        given, out, _ = self._copy(subject, name)
        with Captured() as output:
            try:
                value = subject.read(given, out)
            except Exception as error:
                raise RuntimeError(f"{subject.name}: the intact input was not read") from error
        del output
        shutil.rmtree(given.parent)
        return value, case

    def remove(self, number: int) -> None:
        """Remove the folder of a case."""
        shutil.rmtree(self.folder / "cases" / str(number), ignore_errors=True)


def work(
    folder: Path, numbers: range, seed: int, without: tuple[str, ...] = (), total: int = 0
) -> None:
    """Judge the cases of some numbers, and append their rows to rows-FIRST.jsonl in the folder; the number of a
    case is written before it begins."""
    os.chdir(Path.home())
    cases = Cases(folder, seed, without, total)
    signal.signal(signal.SIGALRM, too_long)
    limit_memory()
    with (folder / f"rows-{os.getpid()}.jsonl").open("a", buffering=1) as rows:
        for count, number in enumerate(numbers):
            case = cases.make(number)
            rows.write(
                json.dumps(dict(begins=number, subject=case.subject, damage=case.damage)) + "\n"
            )
            row = judge(case)
            rows.write(json.dumps(dict(number=number, **row)) + "\n")
            if row["outcome"] not in BAD:
                cases.remove(number)
            if count % 50 == 49:
                import jax

                jax.clear_caches()
                gc.collect()


class Campaign:
    """Read a number of damaged inputs in several processes.

    Args:
        folder: a new folder.
        damages: number of damaged inputs.
        seed: the seed of all choices.
        workers: number of processes at a time.
        without: names of subjects that are left out.
    """

    def __init__(
        self,
        folder: Path,
        *,
        damages: int,
        seed: int = 0,
        workers: int = 2,
        without: tuple[str, ...] = (),
    ):
        self.folder, self.damages, self.seed, self.workers = folder, damages, seed, workers
        self.without = without
        self.rows: dict[int, dict[str, Any]] = {}

    def run(self) -> list[dict[str, Any]]:
        """Build the intact inputs, read all cases, and return a row for each."""
        self.folder.mkdir(parents=True, exist_ok=True)
        code = (
            "from pathlib import Path; from tests.faults import generated, intact; "
            f"folder = Path({str(self.folder)!r}); intact.build(folder / 'intact'); "
            + f"generated.write_counts(folder, {self.seed})"
            * ("generated" not in self.without)
        )
        with (self.folder / "build.log").open("wb") as log:
            subprocess.run(
                [sys.executable, "-c", code], env=self._environment(0), cwd=inputs.ROOT,
                stdout=log, stderr=log, check=True,
            )  # fmt: skip
        before = snapshot(self.folder / "intact")
        self.began = time.monotonic()
        step = self.workers
        processes = [self._worker(range(i, self.damages, step)) for i in range(step)]
        while processes:
            processes = [p for process in processes for p in self._watch(*process)]
            time.sleep(0.2)
        if written := changes(before, snapshot(self.folder / "intact")):
            self.rows[-1] = dict(number=-1, subject="intact inputs", damage="", outcome="outside", detail="; ".join(written[:5]), seconds=0.0)  # fmt: skip
        return [self.rows[number] for number in sorted(self.rows)]

    def _environment(self, worker: int) -> dict[str, str]:
        """Return the environment of a worker: no network, and HOME is a folder in which nothing may be written."""
        guard = self.folder / f"guard-{worker}"
        guard.mkdir(exist_ok=True)
        offline = dict(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
        caches = dict(HF_HOME=str(self.folder / "hf"), MPLCONFIGDIR=str(self.folder / "matplotlib"))
        return inputs.environment("plain", self.folder / "compiled", guard)[0] | offline | caches

    def _worker(self, numbers: range) -> tuple[subprocess.Popen, range, float]:
        command = [sys.executable, "-m", "tests.faults.damages", f"--folder={self.folder}", f"--seed={self.seed}"]  # fmt: skip
        command.append(f"--total={self.damages}")
        command.append(f"--without={','.join(self.without)}")
        command.append(f"--numbers={numbers.start},{numbers.stop},{numbers.step}")
        log = (self.folder / f"worker-{numbers.start}.log").open("wb")
        process = subprocess.Popen(
            command, env=self._environment(numbers.start % numbers.step), cwd=inputs.ROOT, stdout=log, stderr=log,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        return process, numbers, time.monotonic()

    def _watch(
        self, process: subprocess.Popen, numbers: range, began: float
    ) -> Iterator[tuple[subprocess.Popen, range, float]]:
        """Read a worker's new rows; yield the worker, or another one if it ended before its last case."""
        path = self.folder / f"rows-{process.pid}.jsonl"
        ended = process.poll() is not None
        begun, lines = None, path.read_text().splitlines() if path.exists() else []
        for row in map(json.loads, lines):
            if "begins" in row:
                begun = row
            elif row["number"] not in self.rows:
                self.rows[row["number"]] = row
                self._progress(row)
        running = begun is not None and begun["begins"] not in self.rows
        late = path.exists() and time.time() - path.stat().st_mtime > SECONDS + 5
        if not ended and not (running and late):
            if begun is not None or time.monotonic() - began < 300:
                yield process, numbers, began
                return
        os.killpg(process.pid, signal.SIGKILL) if not ended else None
        process.wait()
        if not running:
            if any(number not in self.rows for number in numbers):
                raise RuntimeError(f"a worker failed; its log is in {self.folder}")
            return
        outcome, detail = ("traceback", f"the process ended with {process.returncode}") if ended else ("hang", "it was killed")  # fmt: skip
        number = begun["begins"]
        log = (self.folder / f"worker-{numbers.start}.log").read_text(errors="replace")
        row = begun | dict(number=number, outcome=outcome, detail=f"{detail}; {log[-200:]}", seconds=SECONDS + 5.0)  # fmt: skip
        del row["begins"]
        self.rows[number] = row
        self._progress(row)
        rest = range(number + numbers.step, numbers.stop, numbers.step)
        if rest:
            yield self._worker(rest)

    def _progress(self, row: dict[str, Any]) -> None:
        done = len(self.rows)
        if row["outcome"] in (*BAD, "unnamed"):
            print(f"case {row['number']} ({row['subject']}): {row['outcome']}: {row['damage']}: {row['detail'][:200]}", flush=True)  # fmt: skip
        if done % 50 == 0 or done == self.damages:
            seconds = time.monotonic() - self.began
            left = seconds / done * (self.damages - done)
            print(f"{done} of {self.damages} damaged inputs, {seconds:.0f} s, {left:.0f} s left", flush=True)  # fmt: skip


def rows_of(cases: list[dict[str, Any]], seed: int, seconds: float) -> list[dict[str, Any]]:
    """Return the rows of results: for each subject, and for all, the number of cases by outcome."""
    rows = []
    for subject in [*dict.fromkeys(sorted(case["subject"] for case in cases)), "all"]:
        part = [case for case in cases if subject in (case["subject"], "all")]
        counts = collections.Counter(case["outcome"] for case in part)
        rows.append(
            dict(
                part="damages",
                subject=subject,
                seed=seed,
                cases=len(part),
                **{name: counts[name] for name in OUTCOMES},
                longest=max(case["seconds"] for case in part),
            )
        )
    rows[-1]["seconds"] = round(seconds)
    rows[-1]["problems"] = [
        f"{case['subject']}: {case['outcome']}: {case['damage']}: {case['detail']}"[:300]
        for case in cases
        if case["outcome"] in BAD
    ][:50]
    return rows


def main() -> None:
    """Judge the cases of one worker."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.damages", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--numbers", required=True, help="START,STOP,STEP")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--total", type=int, default=0, help="number of cases of all workers")
    parser.add_argument("--without", default="", help="names of subjects to leave out")
    options = parser.parse_args()
    numbers = range(*map(int, options.numbers.split(",")))
    without = tuple(options.without.split(","))
    work(options.folder, numbers, options.seed, without, options.total)


if __name__ == "__main__":
    main()
