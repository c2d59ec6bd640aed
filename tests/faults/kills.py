"""Kill training runs at random moments and resume them, and compare the results with runs that were not
disturbed.

A chain is one run: start, kill, resume, kill, ..., and a last resume to the end. The moment of a kill is a time
after the start, or a file or a line of the log that appears, plus a random delay. A seed decides all choices.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.faults import inputs
from tests.faults.configs import KINDS
from tests.faults.outcomes import Chain, Kill, compare, outcome
from tests.faults.snapshot import changes, snapshot
from tests.faults.watch import (
    END_SECONDS,
    MOMENTS,
    PREPARE,
    Watch,
    checkpoints,
    group_is_gone,
    is_temporary,
)

PEER_SECONDS = 3.0  # then the other process of a run is killed, as launchers do
START_SECONDS = 180.0  # a start that neither ends nor reaches its moment counts as a hang
SIGNALS = {
    "SIGKILL": (signal.SIGKILL,),
    "SIGTERM": (signal.SIGTERM,),
    "SIGINT": (signal.SIGINT,),
    "SIGHUP": (signal.SIGHUP,),
    "several": (),  # two to four of them, up to 0.3 s apart
}
WEIGHTS = (40, 20, 15, 10, 15)
_TRACEBACK = "Traceback (most recent call last)"
_TRAIN_MOMENTS = tuple(MOMENTS)


class Campaign:
    """Kill runs of all `KINDS` until a number of kills is reached.

    Args:
        folder: a new folder for all inputs, runs and logs.
        kills: number of kills.
        seed: the seed of all choices.
        workers: number of chains at a time.
        kinds: the kinds of runs; chain i is of kind i modulo their number.
        most: number of kills of a chain at most.
        prepare: whether to write the undisturbed token stores and the run plain, which the kinds "store" and
            "init_from" require.
    """

    def __init__(
        self,
        folder: Path,
        *,
        kills: int,
        seed: int = 0,
        workers: int = 2,
        kinds: tuple[str, ...] = KINDS,
        most: int = 10,
        prepare: bool = True,
    ):
        self.folder, self.inputs, self.cache = folder, folder / "inputs", folder / "compiled"
        self.target, self.seed, self.workers, self.kinds, self.most = (
            kills,
            seed,
            workers,
            kinds,
            most,
        )
        self.needs_all = prepare
        folder.mkdir(parents=True, exist_ok=True)
        self.lock, self.killed, self.began = threading.Lock(), 0, time.monotonic()
        self.expected: dict[str, Any] = {}
        self.chains: list[Chain] = []

    def run(self) -> list[Chain]:
        """Make the undisturbed runs, then run chains until the number of kills is reached; return them."""
        self.prepare()
        before = snapshot(self.inputs)
        with ThreadPoolExecutor(self.workers) as pool:
            workers = [pool.submit(self._worker) for _ in range(self.workers)]
            for worker in workers:
                worker.result()
        if differences := changes(before, snapshot(self.inputs)):
            self.chains[-1].problems.append(("outside", f"inputs: {'; '.join(differences[:5])}"))
        return self.chains

    def prepare(self) -> None:
        """Write the inputs, and train an undisturbed run of each kind."""
        inputs.write_text(self.inputs / "text")
        inputs.write_llama(self.inputs / "llama")
        reference = self.folder / "undisturbed"
        reference.mkdir()
        done = []
        if self.needs_all:
            done.append(
                self._finish("tokenize", self.inputs / "stores", reference / "tokenize.log")
            )
            self.expected["stores"] = snapshot(self.inputs / "stores")
        kinds = [
            kind for kind in KINDS if kind in self.kinds or (kind == "plain" and self.needs_all)
        ]
        for kind in kinds:  # one after another: all read and write the cache of programs
            workdir = self.inputs / "plain" if kind == "plain" else reference / kind
            done.append(self._finish(kind, workdir, reference / f"{kind}.log"))
            self.expected[kind] = outcome(workdir)
        if any(done):
            raise RuntimeError(f"an undisturbed run failed; the logs are in {reference}")

    def _finish(self, kind: str, workdir: Path, log: Path) -> int:
        home = log.with_suffix(".home")
        home.mkdir()
        processes = self._start(kind, workdir, log, home)
        return sum(abs(process.wait()) for process in processes)

    def _start(
        self, kind: str, workdir: Path, log: Path, home: Path, folder: Path | None = None
    ) -> list[subprocess.Popen]:
        """Start the processes of one run, or the program that writes token stores if `kind` is "tokenize"."""
        if kind == "tokenize":
            command = inputs.tokenize_command(self.inputs, workdir)
        else:
            command = inputs.train_command(kind, folder or self.inputs, workdir)
        return [
            subprocess.Popen(
                command,
                env=environment,
                cwd=home,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for environment in inputs.environment(kind, self.cache, home)
            for file in [log.open("ab")]
        ]

    def _worker(self) -> None:
        while True:
            with self.lock:
                if self.killed >= self.target:
                    return
                number = len(self.chains)
                chain = Chain(self.kinds[number % len(self.kinds)], number)
                self.chains.append(chain)
            try:
                self._chain(chain)
            except Exception as error:
                chain.problems.append(("lost", f"the campaign failed: {error!r}"))
            for category, text in chain.problems:
                print(f"chain {number} ({chain.kind}): {category}: {text}", flush=True)
            if not chain.problems:
                shutil.rmtree(self.folder / f"chain-{number}")

    def _chain(self, chain: Chain) -> None:
        rng = random.Random(f"{self.seed}/{chain.number}")
        folder = self.folder / f"chain-{chain.number}"
        home, workdir = folder / "home", folder / "run"
        home.mkdir(parents=True)
        given = self.inputs
        if chain.kind == "store":
            given = folder / "data"
            self._disturb(chain, rng, "tokenize", given / "stores", home, given, rng.randint(2, 4))
            if changes(self.expected["stores"], snapshot(given / "stores")):
                left = changes(self.expected["stores"], snapshot(given / "stores"))
                hidden = [x for x in left if x.startswith("added .")]
                chain.leftovers += [x.removeprefix("added ") for x in hidden if x.count("/") == 0]
                if len(hidden) < len(left):
                    chain.problems.append(("unequal", f"stores: {'; '.join(left[:3])}"))
        count = rng.randint(min(5, self.most), self.most)
        self._disturb(chain, rng, chain.kind, workdir, home, given, count)
        if any(category == "lost" for category, _ in chain.problems):
            return
        with self.lock:
            differences = compare(self.expected[chain.kind], outcome(workdir))
        chain.problems += [("unequal", text) for text in differences]
        if written := changes({}, snapshot(home)):
            chain.problems.append(("outside", f"HOME and the current folder: {written[:5]}"))
        chain.leftovers += [
            path.relative_to(folder).as_posix() for path in workdir.rglob("*") if is_temporary(path)
        ]

    def _disturb(
        self,
        chain: Chain,
        rng: random.Random,
        kind: str,
        workdir: Path,
        home: Path,
        given: Path,
        count: int,
    ) -> None:
        """Start and kill a program `count` times, then run it to its end."""
        moments = tuple(PREPARE) if kind == "tokenize" else _TRAIN_MOMENTS
        for attempt in range(count + 1):
            last = attempt == count or self.killed >= self.target
            log = home.with_name(f"{kind}-{attempt}.log")
            resumed = bool(checkpoints(workdir))
            processes = self._start(kind, workdir, log, home, given)
            chain.starts += 1
            moment = None if last else rng.choice(moments)
            most = (PREPARE if kind == "tokenize" else MOMENTS).get(moment or "", 0.0)
            reached = self._await(moment, rng, most, processes, workdir, log)
            if reached == "killed":
                kill = self._kill(rng, processes, kind, moment or "", resumed)
                if _TRACEBACK in log.read_text(errors="replace"):
                    kill.problems.append("traceback")
                chain.kills.append(kill)
                for problem in kill.problems:
                    text = f"{kill.signals} at {moment}, start {attempt} of {kind}: {log.name}"
                    chain.problems.append((problem, text))
                self._progress(chain)
                continue
            codes = [process.poll() for process in processes]
            text = log.read_text(errors="replace")
            if reached == "hang" or any(codes):
                lines = text.strip().splitlines()[-3:] or ["no output"]
                category = "hang" if reached == "hang" else "lost"
                chain.problems.append((category, f"start {attempt} of {kind}: {codes} {lines}"))
                chain.problems += [("traceback", log.name)] * (_TRACEBACK in text)
                if reached == "hang":
                    chain.problems.append(("lost", "it did not end"))
                return
            if _TRACEBACK in text:
                chain.problems.append(("traceback", f"start {attempt} of {kind}, which finished"))
            if last or kind != "tokenize":
                return  # the run is finished

    def _await(
        self,
        moment: str | None,
        rng: random.Random,
        most: float,
        processes: list[subprocess.Popen],
        workdir: Path,
        log: Path,
    ) -> str:
        """Wait for the end of the processes, or for a moment and a random delay after it.

        Returns:
            "ended" if the processes ended first, "killed" if the moment came, or "hang" if neither did.
        """
        began, delay, number = time.monotonic(), rng.uniform(0, most), rng.randint(1, 12)
        watch = None if moment is None else Watch(moment, workdir, log, number)
        while any(process.poll() is None for process in processes):
            if watch is not None and watch.reached():
                end = time.monotonic() + delay
                while time.monotonic() < end and processes[0].poll() is None:
                    time.sleep(min(0.002, max(0.0, end - time.monotonic())))
                if all(process.poll() is None for process in processes):
                    return "killed"
            codes = [process.poll() for process in processes]
            if any(codes) and None in codes:  # one process of the run failed by itself
                time.sleep(PEER_SECONDS)
                self._end(processes)
            if time.monotonic() - began > START_SECONDS:
                self._end(processes)
                return "hang"
            time.sleep(0.002 if watch is not None else 0.02)
        return "ended"

    def _kill(
        self,
        rng: random.Random,
        processes: list[subprocess.Popen],
        kind: str,
        moment: str,
        resumed: bool,
    ) -> Kill:
        """Send signals to one process of a run or to all, and wait for its end."""
        (name,) = rng.choices(tuple(SIGNALS), WEIGHTS)
        singles = [numbers[0] for numbers in SIGNALS.values() if numbers]
        several = rng.choices(singles, k=rng.randint(2, 4))
        gaps = [0.0, *(rng.uniform(0, 0.3) for _ in several[1:])]
        targets = [rng.choice(processes)] if rng.random() < 0.5 else processes
        for number, gap in zip(SIGNALS[name] or several, gaps, strict=False):
            time.sleep(gap)
            for process in targets:
                if process.poll() is None:
                    os.kill(process.pid, number)
        began, problems = time.monotonic(), []
        for process in targets:
            try:
                process.wait(max(0.1, began + END_SECONDS - time.monotonic()))
            except subprocess.TimeoutExpired:
                problems = ["hang"]
        seconds = time.monotonic() - began
        others = [process for process in processes if process not in targets]
        for process in others:
            try:
                process.wait(PEER_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()  # as a launcher does
        if kind == "tokenize" and not group_is_gone(processes[0].pid):
            problems.append("hang")  # a worker outlives the program
        self._end(processes)
        with self.lock:
            self.killed += 1
        text = "+".join(signal.Signals(n).name for n in several) if name == "several" else name
        return Kill(kind, moment, text, resumed, round(seconds, 2), problems)

    def _end(self, processes: list[subprocess.Popen]) -> None:
        for process in processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()

    def _progress(self, chain: Chain) -> None:
        seconds = time.monotonic() - self.began
        left = seconds / max(1, self.killed) * max(0, self.target - self.killed)
        kill = chain.kills[-1]
        print(
            f"chain {chain.number} ({kill.kind}): {kill.signals} at {kill.moment}; kill {self.killed} of "
            f"{self.target}, {seconds:.0f} s, {left:.0f} s left",
            flush=True,
        )
