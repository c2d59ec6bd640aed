"""Profile the configured steps of a training run with JAX's profiler, and sum their time by category."""

from __future__ import annotations

import contextlib
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from lsm_jax.files import write_atomically
from lsm_jax.training.config import TrainConfig
from lsm_jax.training.device_times import CATEGORIES, busy_milliseconds, device_times
from lsm_jax.training.failures import writing
from lsm_jax.training.step import TrainState


@contextlib.contextmanager
def profiler(
    workdir: Path,
    config: TrainConfig,
    start: int,
    program_text: Callable[[], str],
    say: Callable[[str], None],
) -> Iterator[Callable[[int, TrainState], None]]:
    """Yield, for a `with` block, a function (number of steps taken, train state) to call before each training
    step, which starts and stops JAX's profiler at the steps that the config's `profile_start` and `profile_steps`
    select.

    Args:
        workdir: the run's directory; the trace is written to its folder `profile`, and the sums to
            `profile/step_times.json` by the first process.
        config: the config of the run.
        start: the training step from which this process continues the run.
        program_text: returns the text of the compiled training step.
        say: shows a message, the table of the sums.
    """
    first = start + config.profile_start
    running, began = False, 0.0
    if config.profile_steps and first + config.profile_steps >= config.num_steps:
        say(
            f"profile: there will be no table, since {config.num_steps - start} steps are left and the profile ends before one of "
            f"them: profile_start={config.profile_start} + profile_steps={config.profile_steps} must be less than that number"
        )

    def before_step(step: int, state: TrainState) -> None:
        nonlocal running, began
        if config.profile_steps and step in (first, first + config.profile_steps):
            jax.block_until_ready(state)
        if config.profile_steps and step == first and not running:  # a step may be taken again
            jax.profiler.start_trace(str(workdir / "profile"))
            running, began = True, time.perf_counter()
        elif running and step == first + config.profile_steps:
            spent = time.perf_counter() - began
            jax.profiler.stop_trace()
            running = False
            if jax.process_index() == 0:
                say(_write_times(workdir / "profile", program_text(), config.profile_steps, spent))

    try:
        yield before_step
    finally:
        if running:
            jax.profiler.stop_trace()


def _write_times(folder: Path, text: str, steps: int, seconds: float) -> str:
    """Write the time of the profiled steps by instruction and by category to `step_times.json`, and return a table.

    Args:
        folder: the folder of the trace.
        text: the text of the compiled training step.
        steps: the number of profiled steps.
        seconds: the time that all of them took.
    """
    newest = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime).parent
    try:
        rows = device_times(newest, text, steps)
    except RuntimeError as error:
        return f"profile: {error}, so there is no table; the trace is in {newest}"
    total, busy = 1e3 * seconds / steps, busy_milliseconds(newest, steps)
    times: dict[str, Any] = dict(
        milliseconds=round(total, 4),
        idle=round(max(0.0, total - busy), 4),
        categories=sums_of(rows),
        instructions=rows,
    )
    path = folder / "step_times.json"
    with writing(path):
        write_atomically(path, json.dumps(times, indent=1).encode())
    return f"{step_table(times)}\nall instructions: {path}"


def sums_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the sums of the rows of `device_times` by category, part of the model and op, in the order of `CATEGORIES` and the
    longest first: `milliseconds` and `launches` of each `category`, `part` and `op`."""
    sums: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in rows:
        entry = sums[row["category"], row["part"], row["op"]]
        entry[0] += row["milliseconds"]
        entry[1] += row["launches"]
    ordered = sorted(sums.items(), key=lambda item: (CATEGORIES.index(item[0][0]), -item[1][0]))
    return [
        dict(category=c, part=p, op=o, milliseconds=round(ms, 4), launches=launches)
        for (c, p, o), (ms, launches) in ordered
    ]


def step_table(times: dict[str, Any]) -> str:
    """Return the table of a profiled training step, from the contents of `step_times.json`: milliseconds, share of the
    step and launches for each category and part of the model, and of fused kernels for each op."""
    total = times["milliseconds"]
    lines = [f"profile: a step takes {total:.1f} ms", f"{'':45}     ms      %  launches"]
    for category in CATEGORIES:
        entries = [entry for entry in times["categories"] if entry["category"] == category]
        if not entries:
            continue
        lines.append(_line(category, entries, total))
        if len(entries) > 1 or entries[0].get("op"):
            lines += [_line(f"    {_label(entry)}", [entry], total) for entry in entries]
    return "\n".join([*lines, f"{'idle':45} {times['idle']:8.2f} {times['idle'] / total:6.1%}"])


def _label(entry: dict[str, Any]) -> str:
    return ", ".join(word for word in (entry.get("op"), entry["part"]) if word)


def _line(name: str, entries: list[dict[str, Any]], total: float) -> str:
    """Return one line of `step_table`, with the sums over its entries."""
    spent, launches = (sum(entry[key] for entry in entries) for key in ("milliseconds", "launches"))
    return f"{name:45} {spent:8.2f} {spent / total:6.1%} {launches:9,.0f}"
