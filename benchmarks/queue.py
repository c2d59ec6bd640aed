"""Run a list of measurements on this machine's GPUs within a time: `python -m benchmarks.queue JOBS --seconds 540 --output DIR`.

A line of JOBS is a job, `#` begins a comment:

    kernels  gpus=1  seconds=120  alone: python -m benchmarks.kernels --peers fla --output {out}/kernels.jsonl

its name, the GPUs it takes (1 where not said), the seconds it is expected to take, whether it is timed and so needs its GPUs
`alone` or may `share` them with `--slots` others of its kind, and a shell command, in which {out} is its own folder in DIR. Jobs
start in the order of the file as soon as GPUs for them are free and their seconds fit into what is left; one that takes twice as
long is stopped. What a job prints is in DIR/NAME/log, how all ended in DIR/summary.jsonl and, line by line, on the screen.
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

_LINE = re.compile(r"(?P<name>[\w.-]+)(?P<options>(\s+\w+=\d+)*)\s+(?P<kind>alone|share):\s*(?P<command>\S.*)")  # fmt: skip
_ACCEPTED = "accepted is NAME [gpus=N] seconds=N alone|share: COMMAND"


@dataclasses.dataclass
class Job:
    """A line of a list of jobs."""

    name: str
    command: str
    seconds: int
    gpus: int = 1
    alone: bool = True


def read_jobs(text: str) -> list[Job]:
    """The jobs of a list. A line that is none, an unknown option and a name given twice raise ValueError."""
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
    """GPUs on which the job may start, given the jobs that run on each; None where too few are free."""

    def open_to(own: list[Job]) -> bool:
        if job.alone:
            return not own
        return len(own) < slots and not any(other.alone for other in own)

    found = [gpu for gpu, own in enumerate(users) if open_to(own)]
    return found[: job.gpus] if len(found) >= job.gpus else None


def run(jobs: list[Job], folder: Path, *, gpus: int, slots: int, seconds: float) -> list[dict]:
    """Run the jobs; how each ended: its name, exit code (None: not started) and seconds."""
    for job in jobs:
        if job.gpus > gpus:
            raise ValueError(f"{job.name}: gpus={job.gpus}; this machine has {gpus}")
    began, waiting, running, rows = time.monotonic(), list(jobs), {}, []
    users: list[list[Job]] = [[] for _ in range(gpus)]

    def tell(**row) -> None:
        rows.append(row)
        with (folder / "summary.jsonl").open("a") as summary:
            summary.write(json.dumps(row) + "\n")
        print(f"{time.monotonic() - began:5.0f} s  {row}", flush=True)

    folder.mkdir(parents=True, exist_ok=True)
    try:
        while waiting or running:
            left = seconds - (time.monotonic() - began)
            for process, (job, start, log) in list(running.items()):
                took = time.monotonic() - start
                if process.poll() is None and (left <= 0 or took > 2 * job.seconds):
                    _stop(process)
                if process.poll() is not None:
                    log.close()
                    del running[process]
                    for own in users:
                        own[:] = [other for other in own if other is not job]
                    tell(name=job.name, exit=process.returncode, seconds=round(took, 1))
            held = False  # a job that waits for GPUs of its own is not overtaken for ever
            for job in list(waiting):
                chosen = None if held else free_gpus(job, users, slots)
                if job.seconds > left:
                    waiting.remove(job)
                    tell(name=job.name, exit=None, seconds=0.0)
                elif chosen is not None:
                    waiting.remove(job)
                    for gpu in chosen:
                        users[gpu].append(job)
                    process, log = _start(job, folder / job.name, chosen)
                    running[process] = job, time.monotonic(), log
                held = held or chosen is None
            time.sleep(0.2)
    finally:
        for process in running:
            _stop(process)
    return rows


def _start(job: Job, folder: Path, gpus: list[int]) -> tuple[subprocess.Popen, object]:
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
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("jobs", type=Path, help="a list of jobs")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=1, help="GPUs of this machine")
    parser.add_argument("--slots", type=int, default=4, help="jobs that may share a GPU")
    parser.add_argument("--seconds", type=float, required=True, help="for all of them")
    parser.add_argument("--only", help="names, with commas; all by default")
    args = parser.parse_args()
    try:
        jobs = read_jobs(args.jobs.read_text())
        if args.only:
            known = {job.name: job for job in jobs}
            missing = [name for name in args.only.split(",") if name not in known]
            if missing:
                raise ValueError(f"--only={args.only}: there are {', '.join(known)}")
            jobs = [known[name] for name in args.only.split(",")]
        rows = run(jobs, args.output, gpus=args.gpus, slots=args.slots, seconds=args.seconds)
    except (ValueError, OSError) as error:
        sys.exit(f"benchmarks.queue: {error}")
    sys.exit(any(row["exit"] != 0 for row in rows))


if __name__ == "__main__":
    main()
