"""Train the same run with several seeds, one after another, and summarise their results."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lsm_jax.training.config import TrainConfig
from lsm_jax.training.loop import TrainResult
from lsm_jax.training.metrics import read_rows
from lsm_jax.training.run_files import write_json
from lsm_jax.training.start import train

_SUMMARISED = ("train/loss", "val/loss", "val/ema_loss", "perf/tokens_per_second")


def seed_directory(workdir: Path, seed: int) -> Path:
    """Return the directory of the run with one seed inside the directory of all."""
    return workdir / f"seed-{seed}"


def train_seeds(
    config: TrainConfig,
    workdir: str | Path,
    seeds: Sequence[int],
    *,
    on_end: Callable[[Path], None] | None = None,
) -> tuple[list[TrainResult], dict[str, Any]]:
    """Train one run for each seed in workdir/seed-SEED, and write a summary of all to workdir/seeds.json.

    The same call continues where an earlier one was interrupted; complete runs are not trained again. Seeds may be added.

    Args:
        config: the config of the runs; its `seed` is replaced.
        workdir: the directory of all runs.
        seeds: the seeds, all different.
        on_end: called with the directory of each run that is complete.

    Returns:
        The result of each run, up to the one that a signal ended, and the summary (`summary`) of the complete runs.

    Raises:
        ValueError: there is no seed, or one is given twice; and the errors of `train`.
    """
    workdir = Path(workdir).expanduser().absolute()
    if not seeds:
        raise ValueError("seeds=(): accepted are one seed and more")
    if twice := sorted({seed for seed in seeds if list(seeds).count(seed) > 1}):
        raise ValueError(f"seeds={tuple(seeds)}: {twice[0]} is given twice")
    configs = [dataclasses.replace(copy.deepcopy(config), seed=seed) for seed in seeds]
    for member in configs:
        member.validate()
    results, complete = [], []
    for member in configs:
        place = seed_directory(workdir, member.seed)
        results.append(train(member, place))
        if results[-1].interrupted is not None:
            break
        complete.append(member.seed)
        if on_end is not None:
            on_end(place)
    found = summary(workdir, complete)
    if complete:
        write_json(workdir / "seeds.json", found)
    return results, found


def summary(workdir: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """Return the last metrics of the runs of several seeds, their means and their sample standard deviations.

    Returns:
        `runs`: a dict for each run, its `seed` and its metrics by name; `train/loss` is the mean over the last twentieth of
        its logged steps. `mean` and `deviation`: the mean and the standard deviation of each metric that all runs have; the
        deviation of a single run is None.
    """
    runs = []
    for seed in seeds:
        rows = read_rows(seed_directory(workdir, seed) / "metrics.jsonl")
        metrics = {}
        for name in _SUMMARISED:
            values = [row[name] for row in rows if row.get(name) is not None]
            if values:
                last = values[-max(1, len(values) // 20) :] if name == "train/loss" else values[-1:]
                metrics[name] = float(np.mean(last))
        runs.append({"seed": seed, **metrics})
    names = [n for n in _SUMMARISED if runs and all(n in run for run in runs)]
    values = {name: np.array([run[name] for run in runs]) for name in names}
    return dict(
        runs=runs,
        mean={name: float(v.mean()) for name, v in values.items()},
        deviation={n: float(v.std(ddof=1)) if v.size > 1 else None for n, v in values.items()},
    )


def summary_table(found: dict[str, Any]) -> str:
    """Return a summary of several seeds as lines of text: a row for each run, and one with means and deviations."""
    names = list(found["mean"])
    rows = [["seed", *names]]
    rows += [[str(run["seed"]), *(f"{run[n]:,.4f}" for n in names)] for run in found["runs"]]
    spread = []
    for name in names:
        deviation = found["deviation"][name]
        spread.append(f"{found['mean'][name]:,.4f}" + (f" ± {deviation:,.4f}" if deviation else ""))
    rows.append(["mean", *spread])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(lines)
