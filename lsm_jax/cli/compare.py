"""Compare runs in one picture and one table: losses, speeds and evaluations, `lsm compare RUN RUN ...`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

_EVALUATED = ("val/loss", "val/bits_per_byte", "val/perplexity")


@dataclasses.dataclass(frozen=True)
class RunData:
    """The metrics and the newest evaluation of one run.

    Attributes:
        name: the name to show.
        folder: the run's directory.
        metrics: each series of metrics.jsonl by name, as (steps, values).
        parameters: the number of parameters of the model; None if config.json cannot be read.
        tokenizer: the tokenizer in the run's config; None if config.json cannot be read.
        results: the content of the newest results.json below eval/; empty if the run was not evaluated.
        curve: the path of the results.npz beside it; None if there is none.
    """

    name: str
    folder: Path
    metrics: dict[str, tuple[np.ndarray, np.ndarray]]
    parameters: int | None
    tokenizer: str | None
    results: dict[str, float]
    curve: Path | None

    def last(self, name: str) -> float | None:
        """Return the last value of a series of metrics; None if the run does not have it."""
        return float(self.metrics[name][1][-1]) if name in self.metrics else None

    def loss_by_tokens(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return a series by the number of tokens trained on, which is steps times the tokens of a step."""
        steps, values = self.metrics[name]
        return steps * self.tokens_per_step(), values

    def tokens_per_step(self) -> float:
        """Return the number of tokens of a training step, from the newest row that has both numbers."""
        steps, tokens = self.metrics["train/tokens"]
        return float(tokens[-1] / steps[-1])

    def speed(self) -> float | None:
        """Return the median of the logged tokens per second, without the first row, which contains compilation."""
        if "perf/tokens_per_second" not in self.metrics:
            return None
        values = self.metrics["perf/tokens_per_second"][1]
        return float(np.median(values[1:] if values.size > 1 else values))


def main(arguments: Sequence[str]) -> int:
    """Compare the runs that the command line names, and return the exit status."""
    parser = argparse.ArgumentParser(prog="lsm compare")
    parser.add_argument("runs", nargs="+", help="directories of runs, or NAME=DIR")
    parser.add_argument("--output", default="comparison.png", help="the picture to write")
    parser.add_argument("--title", default="", help="text above the picture")
    options = parser.parse_args(arguments)
    if Path(options.output).suffix != ".png":
        print(f"lsm compare: --output={options.output!r}: accepted is the path of a .png file", file=sys.stderr)  # fmt: skip
        return 2
    try:
        runs = [read_run(*name_of(run)) for run in unique(members(options.runs))]
        from rich.console import Console

        Console(highlight=False, markup=False).print(table(runs))
        print(draw(runs, options.output, title=options.title))
        if warning := tokenizers_differ(runs):
            print(f"lsm compare: {warning}", file=sys.stderr)
    except (ValueError, OSError) as error:
        print(f"lsm compare: {error}", file=sys.stderr)
        return 1
    return 0


def members(runs: Sequence[str]) -> list[str]:
    """Return the arguments RUN, with the runs of all seeds in place of a directory that `lsm train --seeds` wrote."""
    expanded = []
    for run in runs:
        name, folder = name_of(run)
        seeds = sorted(folder.glob("seed-*/metrics.jsonl"), key=lambda path: path.parent.name)
        if seeds and not (folder / "metrics.jsonl").is_file():
            expanded += [f"{name}/{path.parent.name}={path.parent}" for path in seeds]
        else:
            expanded.append(run)
    return expanded


def unique(runs: Sequence[str]) -> Sequence[str]:
    """Return the arguments RUN, after checking that no two have the same name.

    Raises:
        ValueError: two runs have the same name.
    """
    names = [name_of(run)[0] for run in runs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two runs are called {name!r}; name them: NAME=DIR")
    return runs


def name_of(run: str) -> tuple[str, Path]:
    """Return the name and the directory of an argument RUN, which is DIR or NAME=DIR."""
    name, equals, folder = run.partition("=")
    if equals and name and not Path(run).exists():
        return name, Path(folder).expanduser()
    path = Path(run).expanduser()
    return path.resolve().name, path


def read_run(name: str, folder: Path) -> RunData:
    """Read the metrics and the newest evaluation of a run.

    Raises:
        ValueError: the directory has no metrics of training.
    """
    from lsm_jax.evaluation import read_metrics
    from lsm_jax.models.counts import count_parameters
    from lsm_jax.training import read_config

    if not (folder / "metrics.jsonl").is_file():
        raise ValueError(f"RUN={str(folder)!r}: there is no metrics.jsonl; accepted is the directory of a run")  # fmt: skip
    metrics = read_metrics(folder / "metrics.jsonl")
    if "train/loss" not in metrics or "train/tokens" not in metrics:
        raise ValueError(f"RUN={str(folder)!r}: metrics.jsonl has no train/loss and train/tokens; accepted is the run of a language model")  # fmt: skip
    try:
        config = read_config(folder)
        parameters, tokenizer = count_parameters(config.model)["total"], config.data.tokenizer
    except ValueError:
        parameters, tokenizer = None, None
    newest = max(folder.glob("eval/*/results.json"), key=lambda p: p.stat().st_mtime, default=None)
    results = json.loads(newest.read_text()) if newest else {}
    curve = newest.with_suffix(".npz") if newest else None
    return RunData(name, folder, metrics, parameters, tokenizer, results, curve if curve and curve.is_file() else None)  # fmt: skip


def unit_of(runs: Sequence[RunData]) -> str:
    """Return the word for what the runs count: "byte" if all of them read bytes, otherwise "token"."""
    return "byte" if all(run.tokenizer == "bytes" for run in runs) else "token"


def tokenizers_differ(runs: Sequence[RunData]) -> str:
    """Return a warning if the runs were trained with different tokenizers; empty if not."""
    known = {run.name: run.tokenizer for run in runs if run.tokenizer is not None}
    if len(set(known.values())) < 2:
        return ""
    listed = ", ".join(f"{name}: {tokenizer}" for name, tokenizer in known.items())
    return (
        f"the runs have different tokenizers ({listed}); their losses per token cannot be compared"
    )


def table(runs: Sequence[RunData]):
    """Return a table for the terminal with a row for each run."""
    from rich.table import Table

    from lsm_jax.evaluation.plots import trailing_mean

    units = f"{unit_of(runs)}s"
    columns = ("run", "parameters", "steps", units, "train loss", "held-out loss", f"{units}/s")
    shown = [name for name in _EVALUATED if any(name in run.results for run in runs)]
    result = Table(box=None, pad_edge=False, header_style="bold")
    for column in (*columns, *(f"eval: {name.removeprefix('val/')}" for name in shown)):
        result.add_column(column, justify="left" if column == "run" else "right")
    for run in runs:
        steps = run.metrics["train/loss"][0][-1]
        cells = (
            run.name,
            number(run.parameters, ",.0f"),
            number(steps, ",.0f"),
            number(steps * run.tokens_per_step(), ",.0f"),
            number(trailing_mean(run.metrics["train/loss"][1])[-1], ".4f"),
            number(run.last("val/loss"), ".4f"),
            number(run.speed(), ",.0f"),
            *(number(run.results.get(name), ".4f") for name in shown),
        )
        result.add_row(*cells)
    return result


def number(value: float | None, form: str) -> str:
    """Return a number in the given format; "-" for None."""
    return "-" if value is None else format(value, form)


def draw(runs: Sequence[RunData], path: str, *, title: str = "") -> Path:
    """Draw losses by tokens, speeds and, where runs have been evaluated, the loss by position; return the picture's path."""
    from matplotlib.ticker import EngFormatter

    from lsm_jax.evaluation import LossCurve, moving_average
    from lsm_jax.evaluation.plots import (
        colours,
        label_axes,
        new_figure,
        save_figure,
        trailing_mean,
    )

    evaluated = [run for run in runs if run.curve is not None]
    figure, axes = new_figure(title or "Comparison of runs", columns=3 if evaluated else 2)
    for colour, run in zip(colours(len(runs)), runs, strict=True):
        tokens, losses = run.loss_by_tokens("train/loss")
        marker = "o" if len(tokens) == 1 else ""  # one point has no line
        axes[0].plot(tokens, trailing_mean(losses), color=colour, label=run.name, marker=marker)
        if "val/loss" in run.metrics:
            axes[0].plot(*run.loss_by_tokens("val/loss"), color=colour, linestyle="--", marker="o", ms=3)  # fmt: skip
        if run.curve is not None:
            curve = LossCurve.load(run.curve)
            axes[2].plot(np.arange(curve.length) + 1, moving_average(curve.loss), color=colour)
    unit = unit_of(runs)
    label_axes(axes[0], f"{unit}s", f"loss (nats per {unit})")
    axes[0].xaxis.set_major_formatter(EngFormatter())
    axes[0].set_title("training loss, smoothed; dashed: held out", fontsize=9)
    speeds = [run.speed() or 0.0 for run in runs]
    axes[1].barh([run.name for run in runs], speeds, color=colours(len(runs)))
    axes[1].invert_yaxis()
    label_axes(axes[1], f"{unit}s per second (median)", "")
    axes[1].xaxis.set_major_formatter(EngFormatter())
    axes[1].set_title("speed of training", fontsize=9)
    if evaluated:
        label_axes(axes[2], f"position ({unit}s)", f"loss (nats per {unit})")
        axes[2].set_xscale("log", base=2)
        axes[2].set_title("held-out loss by position, newest evaluation", fontsize=9)
    return save_figure(figure, path, legend=axes[0])
