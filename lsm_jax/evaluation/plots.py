"""Plots of a run as PNG files, without a display: loss by position, perplexity by length, training curves,
needle scores."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter, StrMethodFormatter

from lsm_jax.evaluation.curve import LossCurve
from lsm_jax.evaluation.files import write_figure
from lsm_jax.evaluation.needle import NeedleScores
from lsm_jax.training.metrics import read_rows

COLOURS = ("#1f5a96", "#c8553d", "#3a7d44", "#8a5a9e", "#b8860b", "#4a4a4a")
WINDOW = 101  # positions, as in the published plots of long documents


def moving_average(
    values: Float[np.ndarray, " T"], window: int | None = None
) -> Float[np.ndarray, " T"]:
    """Return the centred moving average of a curve over `window` positions; positions beyond the ends and
    NaN are left out of each average.

    Args:
        values: the values of the curve at each position, [T].
        window: number of positions to average over, odd; None is the smaller of 101 and the largest odd number
            up to T / 20.

    Raises:
        ValueError: the window is even or below 1.
    """
    if window is None:
        window = min(WINDOW, max(1, (values.size // 20 - 1) | 1))
    if window < 1 or window % 2 == 0:
        raise ValueError(f"window={window}, accepted: odd numbers from 1")
    finite = np.isfinite(values)
    half = window // 2
    ends = np.arange(values.size)
    first, last = np.maximum(ends - half, 0), np.minimum(ends + half + 1, values.size)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    number = np.concatenate([[0], np.cumsum(finite)])
    count = number[last] - number[first]
    with np.errstate(invalid="ignore"):
        return (sums[last] - sums[first]) / np.where(count == 0, np.nan, count)


def trailing_mean(values: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
    """Return, for each logged value, the mean of the values up to it, of at most the last twentieth of all."""
    window = max(1, values.size // 20)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, values.size + 1)
    first = np.maximum(ends - window, 0)
    return (sums[ends] - sums[first]) / (ends - first)


def plot_loss_by_position(
    curves: Mapping[str, LossCurve] | LossCurve,
    path: str | os.PathLike[str],
    *,
    train_length: int | None = None,
    first: int | None = None,
    title: str = "Held-out loss by position",
    unit: str = "token",
) -> Path:
    """Plot the smoothed mean loss L(i) at each position and the perplexity P(l) of the first l positions,
    side by side.

    Args:
        curves: one curve, or several by name.
        path: the PNG file to write.
        train_length: length drawn as a dashed line; None draws none.
        first: the first position shown; None is the smaller of 128 and a 64th of the longest curve.
        title: text above both plots.
        unit: the word for a token, such as "byte".

    Returns:
        The path.
    """
    curves = {"": curves} if isinstance(curves, LossCurve) else dict(curves)
    longest = max(curve.length for curve in curves.values())
    first = min(128, longest // 64) if first is None else first
    figure, (left, right) = new_figure(title, columns=2)
    for colour, (name, curve) in zip(colours(len(curves)), curves.items(), strict=True):
        position = np.arange(curve.length) + 1
        shown = slice(min(first, curve.length - 1), None)
        left.plot(position[shown], moving_average(curve.loss)[shown], color=colour, label=name)
        right.plot(position[shown], curve.running_perplexity()[shown], color=colour, label=name)
    label_axes(left, f"position i ({unit}s)", f"loss L(i) (nats per {unit})")
    label_axes(right, f"length l ({unit}s)", "perplexity P(l)")
    for axes in (left, right):
        if longest >= 64:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        if train_length is not None and train_length <= longest:
            axes.axvline(train_length, color="#777777", linestyle="--", linewidth=1, zorder=1)
            axes.annotate(
                "training length",
                (train_length, 0.98),
                xycoords=("data", "axes fraction"),
                xytext=(-4, 0),
                textcoords="offset points",
                rotation=90,
                ha="right",
                va="top",
                fontsize=8,
                color="#777777",
            )
    return save_figure(figure, path, legend=left if any(curves) else None)


def read_metrics(path: str | os.PathLike[str]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return every numeric series of a run's `metrics.jsonl` by name, as (steps, values); lines that cannot be
    read are left out.

    If several lines have the same step, as after a resumed run, the last one counts.
    """
    series: dict[str, dict[int, float]] = {}
    for record in read_rows(path):
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float) and not isinstance(value, bool):
                series.setdefault(name, {})[record["step"]] = float(value)
    ordered = {name: sorted(points.items()) for name, points in series.items()}
    return {
        name: (np.array([s for s, _ in points]), np.array([v for _, v in points]))
        for name, points in ordered.items()
    }


def plot_training(
    runs: Mapping[str, str | os.PathLike[str]],
    path: str | os.PathLike[str],
    *,
    names: Sequence[str] = ("train/loss", "val/loss"),
    title: str = "Training",
    unit: str = "token",
) -> Path:
    """Plot the training curves of runs in one picture: the loss by step. The first series is smoothed (`trailing_mean`).

    Args:
        runs: run directories, or their `metrics.jsonl`, by the name to show.
        path: the PNG file to write.
        names: series to show; the first is drawn solid, the others dashed with points. Series that a run
            does not have are left out.
        title: text above the plot.
        unit: the word for a token, such as "byte".

    Returns:
        The path.

    Raises:
        ValueError: no run has any of the series.
    """
    figure, (axes,) = new_figure(title, columns=1)
    available: set[str] = set()
    for colour, (run, source) in zip(colours(len(runs)), runs.items(), strict=True):
        source = Path(source)
        metrics = read_metrics(source / "metrics.jsonl" if source.is_dir() else source)
        available |= set(metrics)
        for index, name in enumerate(names):
            if name not in metrics:
                continue
            steps, values = metrics[name]
            first = index == 0
            values = trailing_mean(values) if first else values
            marker = "" if first and steps.size > 1 else "o"
            label = " · ".join(part for part in (run, name) if part)
            line = "-" if first else "--"
            axes.plot(steps, values, color=colour, label=label, linestyle=line, marker=marker, ms=3)
    if not axes.lines:
        raise ValueError(
            f"names={tuple(names)}, the runs have: {', '.join(sorted(available)) or 'none'}"
        )
    label_axes(axes, "step", f"loss (nats per {unit})")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    return save_figure(figure, path, legend=axes)


def plot_needle(
    scores: NeedleScores,
    path: str | os.PathLike[str],
    *,
    train_length: int | None = None,
    title: str = "Needle in a haystack",
) -> Path:
    """Plot heat maps of a needle search: the share of needles found and the answer's loss, with one row of
    panels per mode.

    The lowest row of each panel is the same text without the needle.

    Args:
        scores: the result of `find_needles`.
        path: the PNG file to write.
        train_length: lengths above it are separated from the others by a dashed line; None draws none.
        title: text above the panels.

    Returns:
        The path.
    """
    lengths, depths = scores.lengths, scores.depths
    size = (1.8 + 0.62 * max(len(lengths), 5), 1.4 + 0.26 * (len(depths) + 1))
    figure, panels = new_figure(title, columns=2, rows=len(scores.found), size=size)
    most = max(scores.nll_without.max(), *(nll.max() for nll in scores.nll.values()))
    for i, mode in enumerate(scores.found):
        shown = (
            (scores.found[mode], scores.found_without, f"{mode}: found", "RdYlGn", 1.0, "{:.2g}"),
            (
                scores.nll[mode],
                scores.nll_without,
                f"{mode}: loss of the answer (nats a token)",
                "viridis_r",
                most,
                "{:.2f}",
            ),
        )
        for axes, (values, without, name, colour_map, top, text) in zip(
            panels[2 * i : 2 * i + 2], shown, strict=True
        ):
            cells = np.concatenate([values.T, without[None]])
            image = axes.imshow(cells, aspect="auto", cmap=colour_map, vmin=0, vmax=top or 1)
            for (row, column), value in np.ndenumerate(cells):
                light = np.dot(image.to_rgba(value)[:3], (0.3, 0.6, 0.1)) > 0.5
                axes.text(
                    column,
                    row,
                    text.format(value),
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="black" if light else "white",
                )
            axes.axhline(len(depths) - 0.5, color="white", linewidth=2)
            axes.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths], rotation=45)
            axes.set_yticks(range(len(depths) + 1), [*(f"{d:g} %" for d in depths), "no needle"])
            axes.tick_params(labelsize=8)
            axes.set(title=name, xlabel="length (tokens)", ylabel="depth")
            inside = sum(length <= (train_length or 0) for length in lengths)
            if train_length is not None and inside < len(lengths):
                axes.axvline(inside - 0.5, color="#4444ff", linestyle="--", linewidth=2)
                axes.set_xlabel(
                    f"length (tokens); dashed: beyond the training length {train_length:,}"
                )
    return save_figure(figure, path)


def plot_step_times(times: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    """Draw the time of a profiled training step by category and part of the model, fused kernels by op too, and return the path.

    Args:
        times: the contents of a run's `profile/step_times.json`.
        path: the PNG file to write.
    """
    entries = [
        # A profile of an earlier release has no ops.
        entry
        | dict(
            category=f"{entry['category']}: {entry['op']}" if entry.get("op") else entry["category"]
        )
        for entry in times["categories"]
    ]
    categories = [*dict.fromkeys(entry["category"] for entry in entries), "idle"]
    figure, (axes,) = new_figure(
        f"A training step of {times['milliseconds']:.1f} ms",
        columns=1,
        size=(7.2, max(3.2, 0.5 * len(categories))),
    )
    left = dict.fromkeys(categories, 0.0)
    parts = list(dict.fromkeys(entry["part"] for entry in entries))
    for part, colour in zip(parts, colours(len(parts)), strict=True):
        spent = dict.fromkeys(categories, 0.0)
        spent |= {e["category"]: e["milliseconds"] for e in entries if e["part"] == part}
        axes.barh(
            categories, list(spent.values()), left=list(left.values()), color=colour, label=part
        )
        left = {name: left[name] + spent[name] for name in categories}
    axes.barh(["idle"], [times["idle"]], color="#dddddd")
    axes.invert_yaxis()
    label_axes(axes, "milliseconds", "")
    figure.legend(loc="outside right center", frameon=False, fontsize=9)  # bars may fill the axes
    return save_figure(figure, path)


def colours(number: int) -> list[str]:
    """Return the colours of `number` curves of a plot, as strings such as "#1f5a96". There are six; further
    curves have the same again."""
    return [COLOURS[i % len(COLOURS)] for i in range(number)]


def new_figure(
    title: str, *, columns: int, rows: int = 1, size: tuple[float, float] = (5.2, 3.6)
) -> tuple[Figure, list[Axes]]:
    """Return a new matplotlib figure and its axes, row by row; `size` is that of one panel, in inches. A title that is longer
    than the figure is wide has several lines.

    The figure does not belong to pyplot, so it has no global state and needs no display, whichever backend a
    notebook uses.
    """
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False)
    characters = max(16, int(9 * size[0] * columns))  # of a line, at 9 to the inch in this font
    figure.suptitle(textwrap.fill(title, characters), fontsize=12, fontweight="bold")
    return figure, list(axes.flat)


def label_axes(axes: Axes, x: str, y: str) -> None:
    """Set the labels of both axes of a panel and the common style: a grid behind the curves, no frame above
    and on the right."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)


def save_figure(
    figure: Figure, path: str | os.PathLike[str], *, legend: Axes | None = None
) -> Path:
    """Write a figure as a PNG file under a temporary name, then rename it; return the path."""
    if legend is not None:
        legend.legend(frameon=False, fontsize=9)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_figure(path, figure)
    return path
