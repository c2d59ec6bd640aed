"""Read damaged inputs, each under a limit of time and memory, and count how each ended.

`python -m tests.faults.damages --folder=FOLDER` is one worker: it imports the library once, reads the cases of its
share one after another and writes a row of each to FOLDER. `Campaign` starts the workers, ends one whose case
takes too long, and starts another for the cases that are left.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import gc
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.faults import inputs
from tests.faults.snapshot import changes, snapshot

SECONDS = 10  # a case that takes longer is a hang
MEMORY = 1 << 30  # bytes that a case may add to the process
MOST_LINES = 40  # of an error or of output to stderr
OUTCOMES = {
    "correct": "what was read equals the intact input, or the intact part and a message",
    "accepted": "a changed value was read, of a file without a checksum",
    "refused": "an error that names the file or the field",
    "unnamed": "an error that names neither",
    "silent": "a changed value was read, of a file with a checksum",
    "traceback": "an exception that the programs do not turn into a message, or a traceback in the output",
    "hang": f"more than {SECONDS} s",
    "memory": "more than 1 GiB",
    "outside": "a file outside of the given folders was changed",
}
BAD = ("silent", "traceback", "hang", "memory", "outside")


class TooLong(BaseException):
    """Raised by the alarm; no `except Exception` of a library stops it."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One damaged input.

    Attributes:
        subject: the kind of input, a name in the results.
        damage: what was done to it.
        read: a call without arguments that reads it and returns (value, intact value).
        names: an error must contain one of them; empty requires no name.
        protected: whether a changed value must be detected.
        accept: see `subjects.Subject`.
        unchanged: folders and snapshots of what `read` must not change, as (folder, filter of relative paths).
    """

    subject: str
    damage: str
    read: Callable[[], tuple[Any, Any]]
    names: frozenset[str] = frozenset()
    protected: bool = False
    accept: Callable[[Any, Any], str] = lambda value, intact: "no"
    unchanged: tuple[tuple[Path, Callable[[str], bool]], ...] = ()


def judge(case: Case) -> dict[str, Any]:
    """Read a case under the limits, and return its row: outcome, seconds, and the error or the reason."""
    before = [_kept(folder, wanted) for folder, wanted in case.unchanged]
    error, value, intact, began = None, None, None, time.perf_counter()
    base = _reset_peak()
    with _captured() as output:
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            value, intact = case.read()
        except BaseException as raised:
            error = raised
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        seconds = time.perf_counter() - began
    added = max(0, _peak() - base)
    row = dict(subject=case.subject, damage=case.damage, seconds=round(seconds, 2))
    outcome, detail = _outcome(case, error, value, intact, output[0])
    if added > MEMORY and outcome != "hang":
        outcome, detail = "memory", f"{added / 2**30:.1f} GiB; {detail}"
    after = [_kept(folder, wanted) for folder, wanted in case.unchanged]
    if written := [line for a, b in zip(before, after, strict=True) for line in changes(a, b)]:
        outcome, detail = "outside", "; ".join(written[:3])
    return row | dict(outcome=outcome, detail=detail)


def _outcome(
    case: Case, error: BaseException | None, value: Any, intact: Any, output: str
) -> tuple[str, str]:
    """Return (outcome, detail) of a case, from its error or its value and its output."""
    if isinstance(error, TooLong):
        return "hang", "".join(traceback.format_tb(error.__traceback__)[-2:])[-300:]
    if isinstance(error, MemoryError):
        return "memory", repr(error)[:200]
    noisy = "Traceback (most recent call last)" in output or output.count("\n") > MOST_LINES
    if error is None:
        if value == intact:
            return ("traceback", output[-300:]) if noisy else ("correct", "")
        accepted = case.accept(value, intact)
        if accepted == "quiet" or (accepted == "announced" and _announced(case, output)):
            return ("traceback", output[-300:]) if noisy else ("correct", f"{accepted}: a part")
        what = f"read {str(value)[:80]}, not {str(intact)[:80]}"
        return ("silent" if case.protected else "accepted"), what
    text = str(error)
    from lsm_jax.training import TrainingStopped

    messages = (ValueError, OSError, TrainingStopped)
    if isinstance(error, SystemExit):
        messages = (SystemExit,) if isinstance(error.code, str) else ()
    if not isinstance(error, messages) or not text.strip() or noisy:
        where = traceback.extract_tb(error.__traceback__)[-1:]
        place = f"{Path(where[0].filename).name}:{where[0].lineno}" if where else ""
        return "traceback", f"{type(error).__name__}: {text[:200]} ({place})"
    if text.count("\n") > MOST_LINES:
        return "traceback", f"a message of {text.count(chr(10))} lines"
    names = [name for name in case.names if len(name) > 2 and not name.isdecimal()]
    if names and not any(name in text for name in names):
        return "unnamed", text[:300]
    return "refused", text[:200]


def _announced(case: Case, output: str) -> bool:
    words = [name for name in case.names if "." in name or name.startswith("checkpoint ")]
    return any(word in output for word in (*words, "cannot be read"))


def _kept(folder: Path, wanted: Callable[[str], bool]) -> dict[str, str]:
    return {name: entry for name, entry in snapshot(folder).items() if wanted(name)}


class _captured:
    """Send file descriptors 1 and 2 to a file inside a `with` block; returns a list that has its text later."""

    def __enter__(self) -> list[str]:
        sys.stdout.flush(), sys.stderr.flush()
        self.file = tempfile.TemporaryFile()
        self.saved = [os.dup(number) for number in (1, 2)]
        for number in (1, 2):
            os.dup2(self.file.fileno(), number)
        self.text: list[str] = []
        return self.text

    def __exit__(self, *exception: object) -> None:
        sys.stdout.flush(), sys.stderr.flush()
        for number, saved in zip((1, 2), self.saved, strict=True):
            os.dup2(saved, number)
            os.close(saved)
        self.file.seek(0)
        self.text.append(self.file.read().decode(errors="replace"))
        self.file.close()


def _reset_peak() -> int:
    """Set the process's peak of resident memory to the present size, and return it in bytes."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # not Linux, or not permitted: then the peak is that of the whole process
        pass
    return _peak()


def _peak() -> int:
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _limit_memory() -> None:
    """Let the process allocate at most four times `MEMORY` of addresses more than it has."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmSize"))
        most = int(line.split()[1]) * 1024 + 4 * MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


class Cases:
    """Make the cases of the campaign in a folder, by number; a seed decides all choices. The second half of the
    numbers are cases of `generated`.

    Args:
        folder: has the folder intact of `subjects.build`.
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
        with _captured() as output:
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


def _too_long(number: int, frame: object) -> None:
    raise TooLong


def work(
    folder: Path, numbers: range, seed: int, without: tuple[str, ...] = (), total: int = 0
) -> None:
    """Judge the cases of some numbers, and append their rows to rows-FIRST.jsonl in the folder; the number of a
    case is written before it begins."""
    os.chdir(Path.home())
    cases = Cases(folder, seed, without, total)
    signal.signal(signal.SIGALRM, _too_long)
    _limit_memory()
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
            "from pathlib import Path; from tests.faults import generated, subjects; "
            f"folder = Path({str(self.folder)!r}); subjects.build(folder / 'intact'); "
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
