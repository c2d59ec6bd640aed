"""Run a list of commands on this machine's GPUs within a given time.

    python -m benchmarks queue JOBS --seconds 540 --output DIR

Each line of JOBS is a job, `#` begins a comment:

    kernels  gpus=1  seconds=120  alone: python -m benchmarks kernels --peers fla --output {out}/kernels.jsonl

A line has the job's name, the number of GPUs (1 by default), the seconds that the job is expected to run,
whether it is timed and so must have its GPUs `alone` or may `share` each with up to `--slots` such jobs, and
a shell command, in which {out} is the job's folder in DIR. Jobs start in the order of the file as soon as
enough GPUs are free for them and their seconds fit into the time that is left. A job that runs twice as long
as expected is stopped. The output of a job is in DIR/NAME/log. How each job ended is printed and written to
DIR/summary.jsonl.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_LINE = re.compile(r"(?P<name>[\w.-]+)(?P<options>(\s+\w+=\d+)*)\s+(?P<kind>alone|share):\s*(?P<command>\S.*)")  # fmt: skip
_ACCEPTED = "accepted is NAME [gpus=N] seconds=N alone|share: COMMAND"


@dataclasses.dataclass
class Job:
    """A job of the queue, one line of its list: a name, a shell command, and the GPUs and seconds that it
    requires.
    """

    name: str
    command: str
    seconds: int
    gpus: int = 1
    alone: bool = True


def read_jobs(text: str) -> list[Job]:
    """Return the jobs that the text of a job list describes, one for each line.

    Raises:
        ValueError: a line is no job, a job's option is unknown, or two jobs have one name.
    """
    jobs: list[Job] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise ValueError(f"line {number}: {line.strip()!r}; {_ACCEPTED}")
        options = {k: int(v) for k, v in (x.split("=") for x in match["options"].split())}
        if "seconds" not in options or set(options) - {"gpus", "seconds"} or 0 in options.values():
            raise ValueError(f"line {number}: {match['options'].strip()!r}; {_ACCEPTED}")
        if any(match["name"] == job.name for job in jobs):
            raise ValueError(f"line {number}: there is a job {match['name']!r} already")
        jobs.append(Job(match["name"], match["command"], alone=match["kind"] == "alone", **options))
    return jobs


def free_gpus(job: Job, users: list[list[Job]], slots: int) -> list[int] | None:
    """Return the indices of GPUs on which a job may start, or None if too few are free.

    Args:
        job: the job that waits to start.
        users: for each GPU, the list of the jobs that run on it.
        slots: how many jobs that may `share` can run on one GPU at once.
    """

    def is_free(jobs: list[Job]) -> bool:
        if job.alone:
            return not jobs
        return len(jobs) < slots and not any(other.alone for other in jobs)

    free = [gpu for gpu, jobs in enumerate(users) if is_free(jobs)]
    return free[: job.gpus] if len(free) >= job.gpus else None


def run(
    jobs: list[Job], folder: Path, *, gpus: int, slots: int, seconds: float
) -> list[dict[str, Any]]:
    """Run the queue's jobs on `gpus` GPUs within `seconds`; their logs are written below `folder`.

    Returns:
        For each job, in the order in which they ended, its name, exit code (None: not started) and seconds; `reason` says why it
        was not started.

    Raises:
        ValueError: a job requires more GPUs than there are.
    """
    for job in jobs:
        if job.gpus > gpus:
            raise ValueError(
                f"job {job.name}: gpus={job.gpus}; accepted are up to the {gpus} of this machine"
            )
    folder.mkdir(parents=True, exist_ok=True)
    queue = _Queue(jobs, folder, gpus, slots, seconds)
    try:
        while queue.waiting or queue.running:
            left = queue.end - time.monotonic()
            queue.collect(left)
            queue.start(left)
            time.sleep(0.2)
    finally:
        for process in queue.running:
            _stop(process)
    return queue.rows


class _Queue:
    """The state of the queue: the jobs that wait, the jobs that run on each GPU, and the result rows of
    those that ended.
    """

    def __init__(self, jobs: list[Job], folder: Path, gpus: int, slots: int, seconds: float):
        self.waiting = list(jobs)
        self.running: dict[subprocess.Popen, tuple[Job, float, Any]] = {}
        self.rows: list[dict[str, Any]] = []
        self.end = time.monotonic() + seconds
        self._folder, self._slots, self._began = folder, slots, time.monotonic()
        self._users: list[list[Job]] = [[] for _ in range(gpus)]

    def collect(self, left: float) -> None:
        """Stop the running jobs whose time is over, and record the result of each job that ended; `left` is
        the seconds until the queue must end.
        """
        for process, (job, start, log) in list(self.running.items()):
            elapsed = time.monotonic() - start
            if process.poll() is None and (left <= 0 or elapsed > 2 * job.seconds):
                _stop(process)
            if process.poll() is None:
                continue
            log.close()
            del self.running[process]
            for users in self._users:
                users[:] = [other for other in users if other is not job]
            self._record(job, process.returncode, elapsed)

    def start(self, left: float) -> None:
        """Start the waiting jobs for which GPUs are free, and drop those that would not end in the `left`
        seconds.
        """
        blocked = False  # once a job must wait for GPUs, later ones wait too, so that it starts at some time
        for job in list(self.waiting):
            gpus = None if blocked else free_gpus(job, self._users, self._slots)
            if job.seconds > left:
                self.waiting.remove(job)
                reason = (
                    f"not started: its {job.seconds} s are more than the {left:.0f} s that are left"
                )
                self._record(job, None, 0.0, reason=reason)
            elif gpus is not None:
                self.waiting.remove(job)
                for gpu in gpus:
                    self._users[gpu].append(job)
                process, log = _start(job, self._folder / job.name, gpus)
                self.running[process] = job, time.monotonic(), log
            blocked = blocked or gpus is None

    def _record(self, job: Job, code: int | None, seconds: float, **more: str) -> None:
        row = dict(name=job.name, exit=code, seconds=round(seconds, 1), **more)
        self.rows.append(row)
        with (self._folder / "summary.jsonl").open("a") as summary:
            summary.write(json.dumps(row) + "\n")
        print(f"{time.monotonic() - self._began:5.0f} s  {row}", flush=True)


def _start(job: Job, folder: Path, gpus: list[int]) -> tuple[subprocess.Popen, Any]:
    """Start a job's shell command on these GPUs; returns its process and its log file."""
    folder.mkdir(parents=True, exist_ok=True)
    log = (folder / "log").open("w")
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
    command = job.command.replace("{out}", str(folder.resolve()))
    process = subprocess.Popen(
        command, shell=True, stdout=log, stderr=subprocess.STDOUT, env=environment,
        start_new_session=True,
    )  # fmt: skip
    return process, log


def _stop(process: subprocess.Popen) -> None:
    """End the process of a job and all processes that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def count_gpus() -> int:
    """Return the number of NVIDIA GPUs that the tool nvidia-smi lists; 1 if it is not there or lists none."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return 1
    return max(1, sum(line.startswith("GPU ") for line in listed.stdout.splitlines()))


def main(argv: list[str]) -> None:
    """Parse the command line of `python -m benchmarks queue` and run the jobs; the exit status is 1 if a
    job failed or did not start.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks queue", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("jobs", type=Path, help="a list of jobs")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--gpus",
        type=int,
        help="GPUs of this machine that run jobs; default: those that nvidia-smi lists",
    )
    parser.add_argument("--slots", type=int, default=4, help="jobs that may share a GPU")
    parser.add_argument("--seconds", type=float, required=True, help="time for all jobs together")
    parser.add_argument("--only", help="names of jobs, with commas; all by default")
    args = parser.parse_args(argv)
    try:
        jobs = read_jobs(args.jobs.read_text())
        if args.only:
            known = {job.name: job for job in jobs}
            if missing := [name for name in args.only.split(",") if name not in known]:
                raise ValueError(f"--only {missing[0]}: accepted are {', '.join(known)}")
            jobs = [known[name] for name in args.only.split(",")]
        gpus = count_gpus() if args.gpus is None else args.gpus
        rows = run(jobs, args.output, gpus=gpus, slots=args.slots, seconds=args.seconds)
    except (ValueError, OSError) as error:
        sys.exit(f"{parser.prog}: {error}")
    sys.exit(any(row["exit"] != 0 for row in rows))
