"""Recall of many methods at many widths: `python -m benchmarks.recall_table --suite published --output docs/mqar.jsonl`.

Trains `configs/mqar.py:<method>,width=<width>,suite=<suite>` one after another in one process. A row a run: accuracy of the best
learning rate at every length and number of pairs, all rates' means, state size, parameters, steps, seconds, date, commit, device
and command. Runs that have a row already are passed over. `--minutes` begins no run that would end later, judged by the longest
so far; `--shard 0/4` takes every fourth run, so that four processes can share four cards (give each its own `--output`).
`--report` prints the rows of all `--output` files as markdown, and with `--plot FILE.png` draws accuracy by state size beside
the published points.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import jax

from benchmarks.timing import append_row, provenance
from configs import mqar
from lsm_jax import mixers
from lsm_jax.training import read_rows, train_recall

SUITE_METHODS = ("softmax", "gated_deltanet", "deltanet", "gla", "mamba2")

# Mean accuracy by the bytes of state at 4 a number, read off the figure in zoology's README (at d88d6f5) to about 0.01; widths
# 64, 128 and 256, for Mamba2 the best of 8, 16 and 24 state channels at each. RWKV7's sizes are left out: its code there counts
# heads x width^2 where heads x 64^2 are kept. Attention is 1.0 at every width.
PUBLISHED: dict[str, list[tuple[float, float]]] = {
    "gla": [(4.9e3, 0.53), (1.8e4, 0.77), (6.8e4, 0.95)],
    "mamba2": [(8.2e3, 0.52), (1.6e4, 0.69), (3.3e4, 0.785), (6.5e4, 0.83), (9.8e4, 0.84)],
    "deltanet": [(8.9e3, 0.79), (3.4e4, 0.96), (1.33e5, 0.995)],
    "gated_deltanet": [(1.7e4, 0.89), (6.7e4, 0.99), (2.6e5, 0.99)],
}
# The same by width, at the settings of `configs/mqar.py`.
PUBLISHED_AT: dict[tuple[str, int], float] = {
    **{(m, w): PUBLISHED[m][i][1] for m in ("gla", "deltanet", "gated_deltanet") for i, w in enumerate((64, 128, 256))},
    **{("mamba2", w): PUBLISHED["mamba2"][i + 1][1] for i, w in enumerate((64, 128, 256))},
    **{("rwkv7", w): a for w, a in ((64, 0.815), (128, 0.915), (256, 0.98))},
    **{("softmax", w): 1.0 for w in (64, 128)},
}  # fmt: skip


def state_bytes(row: dict[str, Any]) -> int:
    """The state as the published figure counts it: memories, and three tokens of each gated convolution, at 4 bytes a number."""
    convolutions = 3 * row["width"] * row["pattern"].count("C")
    return 4 * (sum(row["state_size"]["memory"]) + convolutions)


def measure(method: str, width: int, args: argparse.Namespace) -> dict[str, Any]:
    """One run's row."""
    variant = f"{method},width={width},suite={args.suite}"
    config = mqar.get_config(variant)
    overrides = ""
    if args.epochs:
        config.epochs = args.epochs
        overrides += f" --config.epochs={args.epochs}"
    if args.dtype:
        config.model.dtype = args.dtype
        overrides += f" --config.model.dtype={args.dtype}"
    result = train_recall(config)
    members = [{k: m[k] for k in ("learning_rate", "mean")} for m in result.pop("members")]
    return dict(
        suite=args.suite,
        **{k: v for k, v in result.items() if k not in ("name", "implementations", "seed")},
        members=members,
    ) | provenance() | dict(
        command=f"python train.py --config=configs/mqar.py:{variant}{overrides} --workdir=runs/mqar"
    )  # fmt: skip


def report(rows: list[dict[str, Any]]) -> str:
    """The rows as markdown, a table a suite, the best first."""
    parts = []
    for suite in dict.fromkeys(row["suite"] for row in rows):
        own = [row for row in rows if row["suite"] == suite]
        tasks = list(own[0]["accuracy"])
        several = len(tasks) > 1
        mean = ["mean", "published"] if several else []
        head = ["method", "width", "state, KB", *mean, *tasks, "learning rate", "parameters, K", "steps", "s", "date, commit"]  # fmt: skip
        lines = [
            f"Suite `{suite}`:",
            "",
            "| " + " | ".join(head) + " |",
            "|" + "---|" * len(head),
        ]
        for row in sorted(own, key=lambda r: (r["width"], -r["mean"])):
            known = PUBLISHED_AT.get((row["method"], row["width"]))
            means = [f"{row['mean']:.3f}", "" if known is None else f"{known:g}"] if several else []
            cells = [
                f"`{row['method']}`",
                str(row["width"]),
                f"{state_bytes(row) / 1e3:.1f}",
                *means,
                *(f"{row['accuracy'][task]:.3f}" for task in tasks),
                f"{row['learning_rate']:.1e}",
                f"{row['parameters']['non_embedding'] / 1e3:.0f}",
                f"{row['steps']:,}",
                f"{row['seconds']:.0f}",
                f"{row['date']}, {row['commit']}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Mean accuracy by state size, ours solid and the published dashed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from lsm_jax.evaluation.plots import COLOURS

    figure = Figure(figsize=(6.4, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    own = [row for row in rows if row["suite"] == "published"]
    names = list(dict.fromkeys([*PUBLISHED, *(row["method"] for row in own)]))
    for i, name in enumerate(names):
        colour = COLOURS[i % len(COLOURS)]
        points = sorted((state_bytes(r), r["mean"]) for r in own if r["method"] == name)
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, marker="o", label=name)
        if name in PUBLISHED:
            axes.plot(
                *zip(*PUBLISHED[name], strict=True),
                color=colour, linestyle="--", marker="x", alpha=0.7, label=f"{name}, published",
            )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlabel("state of one sequence (bytes, 4 a number)")
    axes.set_ylabel("mean accuracy")
    axes.set_title("Multi-query associative recall")
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def main() -> None:
    """Measure what has no row yet, or print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, nargs="+", default=[Path("docs/mqar.jsonl")])
    parser.add_argument("--suite", default="64x4", choices=mqar.SUITES)
    parser.add_argument("--methods", help="names by commas; all, or the suite's five")
    parser.add_argument("--widths", help="by commas; 64, or 64,128,256 for the published suite")
    parser.add_argument("--epochs", type=int, help="instead of the suite's")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of activations")
    parser.add_argument("--shard", default="0/1", help="which part of the runs, e.g. 0/4")
    parser.add_argument("--minutes", type=float, default=math.inf, help="end by then")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--plot", type=Path, help="with --report: the PNG to write")
    args = parser.parse_args()
    rows = [row for path in args.output for row in read_rows(path)]
    if args.report:
        print(report(rows))
        if args.plot:
            plot(rows, args.plot)
        return
    whole = args.suite == "published"
    methods = (args.methods or ",".join(SUITE_METHODS if whole else mixers.METHODS)).split(",")
    widths = [int(w) for w in (args.widths or ("64,128,256" if whole else "64")).split(",")]
    index, count = map(int, args.shard.split("/"))
    known = {(row["suite"], row["method"], row["width"]) for row in rows}
    runs = [(m, w) for w in widths for m in methods if mixers.get_method(m)][index::count]
    began, longest = time.perf_counter(), 0.0
    for method, width in runs:
        if (args.suite, method, width) in known:
            continue
        start = time.perf_counter()
        if start - began + longest > 60 * args.minutes:
            print(f"{method}, {width}: not begun, {args.minutes:g} minutes are nearly over", flush=True)  # fmt: skip
            continue
        try:
            row = measure(method, width, args)
        except Exception as error:  # one method's failure must not cost the others their rows
            print(f"{method}, {width}: FAILED: {type(error).__name__}: {str(error)[:2000]}", flush=True)  # fmt: skip
            continue
        finally:
            jax.clear_caches()
            longest = max(longest, time.perf_counter() - start)
        append_row(args.output[0], row)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
