"""A hybrid's training curve beside softmax attention's: `python -m benchmarks.linear_moe_curve --output docs/linear_moe_curve.jsonl`.

Models of `configs/linear_moe.py`'s kind, smaller (8 layers of 384; 16 experts of 256, 4 a token; bytes): pattern N, softmax attention
alone, and pattern LLLN with a linear mixer. Same text (the demo's: the running interpreter's own library), same tokens in the same
order, same learning rate, through the loop of `train.py`. A row a model, with its training and held-out loss by tokens; models that
have a row are passed over; `--report` prints the rows as markdown and draws the curves.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.methods import SPEED
from benchmarks.timing import append_row, provenance
from configs import linear_moe
from lsm_jax import models
from lsm_jax.data import DataConfig
from lsm_jax.feedforward import MoEConfig
from lsm_jax.training import OptimizerConfig, train
from lsm_jax.training.metrics import read_rows

MODELS = "softmax,gla,gated_deltanet"
TOKENS, LENGTH, BATCH, EVERY = 26_214_400, 1024, 64, 10


def config_of(name: str, args: argparse.Namespace) -> linear_moe.TrainConfig:
    """The run of a model: "softmax", or a mixer in three layers of four."""
    pattern = "N" if name == "softmax" else "LLLN"
    config = linear_moe.get_config(f"tiny,mixer={name},pattern={pattern}")
    size = linear_moe.Size(
        hidden_size=args.width, num_layers=args.layers, experts={}, recipe=linear_moe.RECIPES["tiny"],
        head_dim=64,
    )  # fmt: skip
    for letter, method in (("L", name), ("N", "softmax")):
        layer = config.model.layers[letter]
        layer.mixer = linear_moe.mixer_config(method, size)
        layer.feedforward = MoEConfig(num_experts=16, top_k=4, expert_size=args.width * 2 // 3)
    model = config.model
    model.hidden_size, model.num_layers, model.init_std = args.width, args.layers, 0.02
    model.remat = args.remat
    config.data = DataConfig(sequence_length=args.length)
    config.optimizer = OptimizerConfig(
        peak_lr=args.peak_lr, warmup_tokens=args.tokens // 10, weight_decay=0.1
    )
    config.batch_size, config.total_tokens = args.batch_size, args.tokens
    config.log_every, config.eval_every = EVERY, args.eval_every
    config.validate()
    return config


def measure(name: str, args: argparse.Namespace, workdir: Path) -> dict:
    """Train one model and read its row off the run."""
    config = config_of(name, args)
    began = time.perf_counter()
    train(config, workdir)
    rows = read_rows(workdir / "metrics.jsonl")
    a_step = config.batch_size * config.data.sequence_length
    if rows[-1]["step"] * a_step < config.total_tokens:
        raise RuntimeError(f"{name}: stopped at step {rows[-1]['step']}, so there is no row")

    def curve(key):
        pairs = [(r["step"] * a_step, r[key]) for r in rows if r.get(key) is not None]
        return dict(tokens=[n for n, _ in pairs], loss=[round(x, 4) for _, x in pairs])

    speeds = [r[SPEED] for r in rows if r.get(SPEED)]
    counts = models.count_parameters(config.model)
    return dict(
        model=name, pattern=config.model.pattern, train=curve("train/loss"), heldout=curve("val/loss"),
        tokens_per_second=statistics.median(speeds[1:] or speeds), parameters=counts,
        tokens=args.tokens, length=args.length, batch_size=args.batch_size, peak_lr=args.peak_lr,
        seconds=round(time.perf_counter() - began, 1), **provenance(),
    )  # fmt: skip


def report(path: Path) -> str:
    """The rows as markdown, and their curves beside them as a picture."""
    rows = sorted(read_rows(path), key=lambda r: r["heldout"]["loss"][-1])
    lines = [
        "| model | pattern | tokens, M | training loss, last tenth | held-out loss | parameters, M (active) | date, commit |",
        "|---" * 7 + "|",
    ]
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for r in rows:
        name = "softmax attention" if r["model"] == "softmax" else f"{r['model']}, hybrid"
        last = r["train"]["loss"][-max(1, len(r["train"]["loss"]) // 10) :]
        counts = r["parameters"]
        active = counts["active"] - counts["embedding"]
        lines.append(
            f"| {name} | {r['pattern']} | {r['train']['tokens'][-1] / 1e6:.1f} | {statistics.mean(last):.3f} | "
            f"{r['heldout']['loss'][-1]:.3f} | "
            f"{counts['non_embedding'] / 1e6:.1f} ({active / 1e6:.1f}) | {r['date']}, {r['commit']} |"
        )
        (line,) = axes.plot(r["train"]["tokens"], r["train"]["loss"], label=name, linewidth=1)
        axes.plot(r["heldout"]["tokens"], r["heldout"]["loss"], "o", color=line.get_color())
    axes.set(
        xlabel="tokens", ylabel="nats a byte", yscale="log",
        title="Training loss, and held-out loss as dots: 8 layers, 16 experts, 4 a token",
    )  # fmt: skip
    axes.legend()
    figure.savefig(path.with_suffix(".png"), dpi=110)
    return "\n".join(lines)


def main() -> None:
    """Measure what has no row yet, or print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("docs/linear_moe_curve.jsonl"))
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--batch_size", type=int, default=BATCH)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--peak_lr", type=float, default=1e-3)
    parser.add_argument("--remat", default="dots")
    parser.add_argument("--eval_every", type=int, default=50)
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()
    if args.report:
        print(report(args.output))
        return
    for name in args.models.split(","):
        known = args.output.exists() and [r["model"] for r in read_rows(args.output)]
        if known and name in known:
            continue
        with tempfile.TemporaryDirectory() as folder:
            row = measure(name, args, Path(folder) / name)
        append_row(args.output, row)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
