"""Draw the plots of docs/results from the stored rows, each for a light and a dark page: `python -m scripts.draw_results`.

A plot shows the rows of a table of `benchmarks.tables`, so that it changes with them.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from benchmarks.tables import TABLES, evidence, step_profile
from benchmarks.tables.table import Row, group
from scripts.draw_figures import DARK, LIGHT, Mode, new_figure, save

DOCS = Path(__file__).resolve().parents[1] / "docs"
FOLDER = DOCS / "results" / "plots"
COMMON = "8x4096x16x128"  # the shape that most kernels were timed at


def axes_of(
    figure: Figure,
    mode: Mode,
    xlabel: str,
    ylabel: str = "",
    *,
    place: tuple[int, int, int] = (1, 1, 1),
) -> Axes:
    """Return axes of a figure with labels and lines in the mode's colours; `place` has rows, columns and the number of the
    axes in that grid, from 1."""
    axes = figure.add_subplot(*place)
    axes.patch.set_alpha(0)
    axes.tick_params(colors=mode.ink, labelsize=8)
    for name, spine in axes.spines.items():
        spine.set_color(mode.faint)
        spine.set_visible(name in ("left", "bottom"))
    axes.set_xlabel(xlabel, color=mode.ink, fontsize=9)
    axes.set_ylabel(ylabel, color=mode.ink, fontsize=9)
    return axes


def legend(axes: Axes, mode: Mode) -> None:
    """Draw the legend without a frame."""
    axes.legend(frameon=False, labelcolor=mode.ink, fontsize=8)


def bars(axes: Axes, names: Sequence[str], series: dict[str, Sequence[float | None]], colours: Sequence[str]) -> None:  # fmt: skip
    """Draw horizontal bars, the first name on top, one bar of each series for every name; None is no bar."""
    height = 0.8 / len(series)
    for i, ((label, values), colour) in enumerate(zip(series.items(), colours, strict=True)):
        places = [(n + (i - (len(series) - 1) / 2) * height, v) for n, v in enumerate(values) if v]
        axes.barh([p for p, _ in places], [v for _, v in places], 0.9 * height, color=colour, label=label)  # fmt: skip
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()


def draw_kernels(mode: Mode, rows: list[Row]) -> Figure:
    """Draw forward and backward of the kernels and of two other libraries, at the common shape."""
    rows = [row for row in rows if row["shape"] == COMMON]
    figure = new_figure(8.0, 3.6)
    axes = axes_of(figure, mode, "forward and backward, ms")
    series = {
        label: [row[key][1] if row.get(key) else None for row in rows]
        for key, label in (("kernel", "lsm_jax"), ("jla", "jax-linear-attention"), ("fla", "FLA"))
    }
    bars(axes, [row["op"] for row in rows], series, (mode.accent, mode.ink, mode.second))
    legend(axes, mode)
    return figure


def draw_steps(mode: Mode, rows: list[Row]) -> Figure:
    """Draw the speed of a training step of each method's model of 340M at the shortest and the longest rows."""
    speed = {(r["variant"], r["length"]): r["tokens_per_second"] / 1e3 for r in rows}
    short = {
        name: value
        for (name, length), value in speed.items()
        if length == 2048 and name.endswith("-340m")
    }
    names = sorted(short, key=lambda name: -short[name])
    figure = new_figure(8.0, 5.2)
    axes = axes_of(figure, mode, "10³ tokens/s, models of 340M on one NVIDIA H200")
    series = {
        "rows of 2,048": [short[n] for n in names],
        "rows of 16,384": [speed.get((n, 16384)) for n in names],
    }
    bars(axes, [n.removesuffix("-340m") for n in names], series, (mode.accent, mode.second))
    legend(axes, mode)
    return figure


def draw_lengths(mode: Mode, rows: list[Row]) -> Figure:
    """Draw the training speed of each method's model of 340M against the length of the rows, 32,768 tokens in a step. A line joins
    rows of one commit only."""
    rows = [r for r in rows if r["variant"].endswith("-340m") and r["rows"] * r["length"] == 32_768]
    curves = {
        name: sorted(points, key=lambda row: row["length"])
        for name, points in group(rows, lambda row: row["variant"].removesuffix("-340m")).items()
        if len(points) > 1
    }
    figure = new_figure(8.0, 5.4)
    axes = axes_of(
        figure, mode, "tokens in a row", "10³ tokens/s, models of 340M on one NVIDIA H200"
    )
    for number, name in enumerate(sorted(curves, key=lambda n: -curves[n][-1]["tokens_per_second"])):  # fmt: skip
        style, colour = ("-", "--", ":")[number // 10 % 3], colormaps["tab10"](number % 10)
        for points in group(curves[name], lambda row: row["commit"]).values():
            at, speed = zip(*((r["length"], r["tokens_per_second"] / 1e3) for r in points), strict=True)  # fmt: skip
            axes.plot(at, speed, style, color=colour, marker="o", ms=3)
        axes.plot([], [], style, color=colour, marker="o", ms=3, label=name)
    ticks = sorted({row["length"] for points in curves.values() for row in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{length:,}" for length in ticks])
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, labelcolor=mode.ink, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1), handlelength=3.5)  # fmt: skip
    return figure


def draw_step_profile(mode: Mode, rows: list[Row]) -> Figure:
    """Draw the time of a training step of each model by category, of release 0.1 above the newest one."""
    pairs = step_profile.lines(rows)
    figure = new_figure(8.0, 0.8 + 0.5 * len(pairs))
    axes = axes_of(figure, mode, "ms of a step on one NVIDIA H200; the upper bar is of release 0.1")
    parts = [*step_profile.CATEGORIES, "rest"]
    colours = (mode.accent, mode.second, *(colormaps["tab10"](n) for n in (2, 1)), mode.faint)
    for place, pair in enumerate(pairs):
        for row, at, alpha in zip(pair, (place - 0.2, place + 0.2), (0.55, 1.0), strict=True):
            if row is None:
                continue
            start = 0.0
            for part, colour in zip(parts, colours, strict=True):
                spent = step_profile.left(row) if part == "rest" else row["categories"].get(part, 0)
                axes.barh(at, spent, 0.36, left=start, color=colour, alpha=alpha)
                start += spent
    for part, colour in zip(parts, colours, strict=True):
        axes.barh(0, 0, color=colour, label=step_profile.CATEGORIES.get(part, part))
    axes.set_yticks(range(len(pairs)), [after["variant"] for _, after in pairs])
    axes.invert_yaxis()
    axes.legend(frameon=False, labelcolor=mode.ink, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))  # fmt: skip
    return figure


def draw_methods(mode: Mode, rows: list[Row]) -> Figure:
    """Draw the held-out bits per byte of each method, the smallest on top."""
    rows = sorted(rows, key=lambda row: row["held_out_loss"])
    figure = new_figure(8.0, 0.8 + 0.18 * len(rows))
    axes = axes_of(figure, mode, "held-out bits per byte")
    bits = [row["held_out_loss"] / math.log(2) for row in rows]
    names = [" ".join([row["method"], row.get("fields", "")]).strip() for row in rows]
    bars(axes, names, {"": bits}, (mode.accent,))
    return figure


def draw_decoding(mode: Mode, rows: list[Row]) -> Figure:
    """Draw the newest speeds of decoding of two models: the fused step, with and without a loop over layers, and XLA's step."""
    rows = [row for row in rows if not {"by_kernels", "float32", "implementation"} & set(row)]
    cases = sorted({(row["model"], row["batch"]) for row in rows if "xla_tokens_s" in row})

    def speeds(field: str, unrolled: bool) -> list[float]:
        values = {
            (row["model"], row["batch"]): row[field] / 1e3
            for row in sorted(rows, key=lambda row: row["date"])
            if field in row and row.get("unrolled", False) == unrolled
        }
        return [values[case] for case in cases]

    figure = new_figure(8.0, 3.4)
    axes = axes_of(figure, mode, "10³ tokens/s of all rows together")
    series = {
        "unrolled layers": speeds("kernel_tokens_s", True),
        "layers in a loop, fused step": speeds("kernel_tokens_s", False),
        "layers in a loop, XLA's step": speeds("xla_tokens_s", False),
    }
    names = [f"{model}, {batch} row{'s' * (batch > 1)}" for model, batch in cases]
    bars(axes, names, series, (mode.accent, mode.second, mode.faint))
    legend(axes, mode)
    return figure


def draw_long_rows(mode: Mode, rows: list[Row]) -> Figure:
    """Draw the speed of training on one row over several cards, by its length."""
    figure = new_figure(8.0, 3.2)
    axes = axes_of(figure, mode, "tokens in the row", "10³ tokens/s")
    markers = {1: "o", 2: "s", 4: "D"}
    for row in rows:
        if row["rows"] == 1:
            cards = round(row["tokens_per_second"] / row["tokens_per_second_a_card"])
            axes.plot(row["length"], row["tokens_per_second"] / 1e3, markers[cards], color=mode.accent, ms=5)  # fmt: skip
    for cards, marker in markers.items():
        axes.plot([], [], marker, color=mode.accent, label=f"{cards} card{'s' * (cards > 1)}")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    legend(axes, mode)
    return figure


def draw_liger(mode: Mode, rows: list[Row]) -> Figure:
    """Draw the loss of SmolLM2-135M made linear by each recipe after about 5 M tokens, and of the model as it was."""
    shown = [row for row in rows if row["seed"] == 0 and "lr=" not in row["options"]]
    shown = [r for r in shown if r["name"] == "original" or 4 < r["millions"] <= 5]
    shown.sort(key=lambda row: row["nats"])
    names = [f"{r['name']}, {'tuned' if r['millions'] else 'as it was'}" if r["name"] == "original" else r["name"] for r in shown]  # fmt: skip
    figure = new_figure(8.0, 3.8)
    axes = axes_of(figure, mode, "held-out nats per token")
    bars(axes, names, {"": [row["nats"] for row in shown]}, (mode.accent,))
    return figure


def draw_demo(mode: Mode, rows: list[Row]) -> Figure:
    """Draw the bits per byte of the demo's model and of three compressors."""
    figure = new_figure(8.0, 1.7)
    axes = axes_of(figure, mode, "held-out bits per byte")
    values = [row["bits_per_byte"] for row in rows]
    bars(axes, [row["model"] for row in rows], {"": values}, (mode.accent,))
    return figure


def draw_optimizers(mode: Mode, rows: list[Row]) -> Figure:
    """Draw the held-out loss by the bytes of training, a panel for each schedule; a line is the mean of the seeds, and its
    points are the seeds."""
    curves: dict[str, dict[str, list[Row]]] = {"cosine": {}, "wsd": {}}
    for row in rows:
        optimizer, schedule = row["setting"].split("-")
        curves[schedule].setdefault(optimizer, []).append(row)
    colours = {"adamw": mode.accent, "muon": mode.second, "lion": mode.ink, "adafactor": mode.faint}
    figure = new_figure(8.0, 3.2)
    panels = [axes_of(figure, mode, "10³ bytes of training", place=(1, 2, n)) for n in (1, 2)]
    for panel, (schedule, optimizers) in zip(panels, curves.items(), strict=True):
        panel.set_title(schedule, color=mode.ink, fontsize=9)
        for name, runs in optimizers.items():
            at = [tokens / 1e3 for tokens in runs[0]["heldout"]["tokens"]]
            losses = [run["heldout"]["loss"] for run in runs]
            means = [sum(values) / len(values) for values in zip(*losses, strict=True)]
            panel.plot(at, means, color=colours[name], label=name)
            for values in losses:
                panel.plot(at, values, ".", color=colours[name], ms=4)
        panel.sharey(panels[0])
        legend(panel, mode)
    panels[0].set_ylabel("held-out nats per byte", color=mode.ink, fontsize=9)
    return figure


def draw_fp8_curve(mode: Mode, rows: list[Row]) -> Figure:
    """Draw the held-out loss by steps of the models that were trained with products in bfloat16 and in FP8."""
    figure = new_figure(8.0, 3.2)
    axes = axes_of(figure, mode, "steps", "held-out nats per token")
    colours = {"softmax-125m": mode.accent, "gated_deltanet-125m": mode.second}
    for row in rows:
        steps, losses = zip(*row["heldout"], strict=True)
        fp8 = row["matmul"] == "fp8"
        label = f"{row['model']}, {'FP8' if fp8 else 'bfloat16'}"
        axes.plot(steps, losses, "--" if fp8 else "-", color=colours[row["model"]], lw=1.2, label=label)  # fmt: skip
    legend(axes, mode)
    return figure


def draw_evidence_loss(mode: Mode, rows: list[Row]) -> Figure:
    """Draw the loss by position in long documents, L(i), and the perplexity of their beginnings, P(l); a line is a seed, a point of L(i)
    the mean of a block that the rows store, and a vertical line the training length."""
    figure = new_figure(8.0, 3.6)
    figure.set_layout_engine("constrained")
    left = axes_of(figure, mode, "position in the document", "loss, nats a token", place=(1, 2, 1))
    right = axes_of(figure, mode, "tokens read", "perplexity", place=(1, 2, 2))
    runs = evidence.by_model([row for row in rows if "long" in row])
    for number, seeds in enumerate(runs):
        colour = colormaps["tab10"](number % 10)
        for row in seeds:
            curve, label = row["long"]["loss_by_block"], row["model"] if row is seeds[0] else None
            at = [curve["block"] * (i + 0.5) for i in range(len(curve["loss"]))]
            left.plot(at, curve["loss"], color=colour, lw=0.7, label=label)
            points = sorted((int(n), value) for n, value in row["long"]["perplexity"].items())
            right.plot(*zip(*points, strict=True), color=colour, lw=0.7)
    lengths = sorted({row["length"] for seeds in runs for row in seeds})
    for axes in (left, right):
        for length in lengths:
            axes.axvline(length, color=mode.ink, ls="--", lw=0.8)
            axes.annotate(
                f"trained on {length:,}", (length, 0.98), xycoords=("data", "axes fraction"), rotation=90,
                fontsize=6, color=mode.ink, ha="right", va="top",
            )  # fmt: skip
        axes.set_xscale("log", base=2)
    right.set_yscale("log")
    _plain_numbers(right.yaxis)
    if runs:  # a table may have rows without long documents
        legend(left, mode)
    return figure


def _plain_numbers(axis: Axis) -> None:
    """Write the numbers of a logarithmic axis without powers, those between tens only where they span less than two decades."""
    low, high = sorted(axis.get_view_interval())
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(lambda value, _: f"{value:g}" if high < 100 * low else "")
    axis.set_tick_params(which="minor", labelsize=7)
    if high < 100 * low:
        axis.set_minor_locator(LogLocator(subs=(2, 5), numticks=9))


def draw_evidence_recall(mode: Mode, rows: list[Row]) -> Figure:
    """Draw the recall of real text against the size of the decode state after a row of training, a mean over seeds."""
    tasks, every = ("multikey", "fields", "names"), evidence.by_model(rows)
    figure = new_figure(8.0, 2.6 + 0.12 * len(every))
    figure.set_layout_engine("constrained")
    panels = [axes_of(figure, mode, "state, MB", task, place=(1, 3, n)) for n, task in enumerate(tasks, 1)]  # fmt: skip
    shown = {}
    for number, runs in enumerate(every):
        colour, marker = colormaps["tab10"](number % 10), "os^"[number // 10 % 3]
        for axes, task in zip(panels, tasks, strict=True):
            value = evidence.mean(runs, evidence.recall(task))
            if math.isfinite(value):
                (point,) = axes.plot(runs[0]["state_bytes"] / 1e6, value, marker, color=colour, ms=5)  # fmt: skip
                shown[runs[0]["model"].partition(":")[2].removesuffix("-125m")] = point
    for axes in panels:
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        _plain_numbers(axes.xaxis)
    if shown:
        figure.legend(shown.values(), shown, loc="outside lower center", ncols=3, fontsize=6, frameon=False, labelcolor=mode.ink)  # fmt: skip
    return figure


def draw_evidence_routing(mode: Mode, rows: list[Row]) -> Figure:
    """Draw, for each seed of each Mixture-of-Memories, the smallest and the largest load of a memory in each layer over training."""
    shown = [row for runs in evidence.routed(rows) for row in runs]
    figure = new_figure(8.0, 2.6 * -(-len(shown) // 3))
    figure.set_layout_engine("constrained")
    for number, row in enumerate(shown, 1):
        place = (-(-len(shown) // 3), 3, number)
        axes = axes_of(figure, mode, "step", "least and largest load", place=place)
        axes.set_title(f"{row['model'].partition(':')[2]}, seed {row['seed']}", fontsize=7, color=mode.ink)  # fmt: skip
        load, colours = row["router"]["load"], colormaps["viridis"]
        for layer in range(len(load[0])):
            for choose in (min, max):
                values = [choose(step[layer]) for step in load]
                axes.plot(row["router"]["steps"], values, lw=0.9, color=colours(layer / max(1, len(load[0]) - 1)))  # fmt: skip
        axes.axhline(1 / len(load[0][0]), color=mode.ink, ls="--", lw=0.8)
        axes.set_ylim(bottom=0)
    return figure


PLOTS: dict[str, tuple[str, Callable[[Mode, list[Row]], Figure]]] = {
    "kernels": ("kernels", draw_kernels),
    "training_steps": ("model_step", draw_steps),
    "training_lengths": ("model_step", draw_lengths),
    "step_profile": ("model_step_profile", draw_step_profile),
    "methods": ("methods", draw_methods),
    "decoding": ("decode_step_models", draw_decoding),
    "long_rows": ("cut_rows", draw_long_rows),
    "liger": ("liger", draw_liger),
    "demo": ("demo", draw_demo),
    "optimizers": ("optimizers", draw_optimizers),
    "fp8_curve": ("fp8_curve", draw_fp8_curve),
}
_EVIDENCE = {
    "evidence_fox_loss": ("evidence_fox", draw_evidence_loss),
    "evidence_fox_recall": ("evidence_fox", draw_evidence_recall),
    "evidence_mom_loss": ("evidence_mom", draw_evidence_loss),
    "evidence_mom_recall": ("evidence_mom", draw_evidence_recall),
    "evidence_mom_routing": ("evidence_routing", draw_evidence_routing),
    "evidence_moe_loss": ("evidence_moe", draw_evidence_loss),
    "evidence_moe_recall": ("evidence_moe", draw_evidence_recall),
    "evidence_recall": ("evidence_methods", draw_evidence_recall),
}
PLOTS |= {name: plot for name, plot in _EVIDENCE.items() if plot[0] in TABLES}
"""Each plot by name: the table whose rows it shows, and the function that draws them."""


def write(folder: Path) -> list[Path]:
    """Draw every plot in both modes; return the paths of the SVG files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, (table, draw) in PLOTS.items():
        rows = TABLES[table].rows(DOCS)
        for mode in (LIGHT, DARK):
            paths.append(save(draw(mode, rows), folder / f"{name}-{mode.name}.svg", tight=True))
    return paths


def main() -> None:
    """Write the plots into docs/results/plots, or into the folder --output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=FOLDER, help="the folder to write")
    print(*write(parser.parse_args().output), sep="\n")


if __name__ == "__main__":
    main()
