"""Run a benchmark: skip the cases that have a row, print the rows, append them to a file, report progress."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from benchmarks import options
from benchmarks.registry import Benchmark, UsageError
from benchmarks.timing import append_row, provenance

_started = time.perf_counter()


def log(text: str) -> None:
    """Print a line of progress to stderr, after the seconds since this process began."""
    print(f"{time.perf_counter() - _started:.1f} s: {text}", file=sys.stderr, flush=True)


def require_gpu(what: str) -> None:
    """Raise UsageError if JAX has no GPU; `what`, such as "this benchmark", begins its message."""
    if (backend := jax.default_backend()) != "gpu":
        raise UsageError(f"{what} requires an NVIDIA Hopper GPU; JAX runs on {backend!r} here")


def read_rows(path: Path | None) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines, without a line that was cut short; none if there is no file.

    Raises:
        UsageError: the file cannot be read, or a line is no JSON object.
    """
    rows = []
    try:
        lines = path.read_text().splitlines() if path is not None and path.exists() else ()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise UsageError(f"{path}: {why}; accepted is a file of JSON lines") from error
    for number, line in enumerate(lines, 1):
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
            if not isinstance(rows[-1], dict):
                raise UsageError(
                    f"{path}: line {number} is {line[:40]!r}; accepted are JSON objects, one a line"
                )
    return rows


class Skipped(Exception):
    """Raised by the function that measures a case if it is left out, which is no failure; the message is the reason."""


class Progress:
    """Counts the cases of a benchmark run that have a row, and estimates the time that the others need.

    Args:
        benchmark: description of the benchmark, whose key fields match rows with cases.
        cases: the key fields of every row that this run measures.
    """

    def __init__(self, benchmark: Benchmark, cases: list[dict[str, Any]]):
        self._benchmark, self._began, self._first = benchmark, time.perf_counter(), math.nan
        self._left = [benchmark.identity(case) for case in cases]
        self._count = len(cases)

    def line(self, row: dict[str, Any]) -> str:
        """Return the line of progress to print once a row is measured, such as "3 of 12, gla 2048, about 80
        s left".
        """
        now, identity = time.perf_counter(), self._benchmark.identity(row)
        if identity in self._left:
            self._left.remove(identity)
        done = self._count - len(self._left)
        text = f"{done} of {self._count}, {self._benchmark.label(row)}"
        if (
            done <= 1
        ):  # the time until the first row contains what all cases need, such as compiling
            self._first, seconds = now, now - self._began
        else:
            seconds = (now - self._first) / (done - 1)
        return f"{text}, about {seconds * len(self._left):.0f} s left" if self._left else text


def run(benchmark: Benchmark, args: argparse.Namespace) -> None:
    """Measure the cases of a benchmark that its options ask for; each row is printed and appended to the
    output file.

    Raises:
        UsageError: the benchmark cannot run with these options or on this machine.
    """
    module = benchmark.load()
    options.check_peers(args)
    if benchmark.requires_gpu:
        require_gpu("this benchmark")
    try:
        cases = module.cases(args)
    except ValueError as error:  # such as the name of a method or the variant of a config
        raise UsageError(str(error)) from error
    cases = cases[getattr(args, "shard", slice(None))]
    measured = (
        {_hashable(benchmark, row) for row in read_rows(args.output)} if args.resume else set()
    )
    missing = [case for case in cases if _hashable(benchmark, case) not in measured]
    if len(missing) < len(cases):
        log(f"{len(cases) - len(missing)} of {len(cases)} cases have a row in {args.output}")
    if not missing:
        return
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        _end_last_line(args.output)
    progress, text_of = Progress(benchmark, missing), getattr(module, "line", json.dumps)
    with contextlib.closing(module.rows(args, missing)) as rows:
        for row in rows:
            if "date" not in row:
                row = row | provenance()
            if _hashable(benchmark, row) in measured:
                continue
            print(text_of(row), flush=True)
            if args.output is not None:
                append_row(args.output, row)
            log(progress.line(row))


def _end_last_line(path: Path) -> None:
    """Add the missing newline to a file of rows whose last row was cut short, so that the next row begins a
    line.
    """
    text = path.read_text() if path.exists() else ""
    if text and not text.endswith("\n"):
        with path.open("a") as file:
            file.write("\n")


def _hashable(benchmark: Benchmark, row: dict[str, Any]) -> str:
    return json.dumps(benchmark.identity(row), sort_keys=True)


def one_by_one(
    cases: list[dict[str, Any]],
    measure: Callable[[dict[str, Any]], dict[str, Any]],
    *,
    minutes: float = math.inf,
) -> Iterator[dict[str, Any]]:
    """Measure the cases of a benchmark one after another, and yield the row of results of each.

    A case that fails is reported on stderr; the process ends with an error once all other cases are measured.

    Args:
        cases: for each case its key fields, which identify its row.
        measure: returns the row of one case, given its key fields; raises Skipped for a case that is left out.
        minutes: time limit for all cases: a case is skipped if it would exceed the limit by taking as long as
            the slowest case so far.
    """
    began, longest, failed = time.perf_counter(), 0.0, 0
    for case in cases:
        name = ", ".join(map(str, case.values()))
        start = time.perf_counter()
        if start - began + longest > 60 * minutes:
            log(f"{name}: not begun, the {minutes:g} minutes are nearly over")
            continue
        try:
            row = measure(case)
        except UsageError:
            raise
        except Skipped as reason:
            log(f"{name}: not begun: {reason}")
            continue
        except Exception as error:
            failed += 1
            log(f"{name}: FAILED: {type(error).__name__}: {str(error)[:2000]}")
            continue
        finally:
            longest = max(longest, time.perf_counter() - start)
        yield row
    if failed:
        sys.exit(f"{failed} of {len(cases)} cases failed")
