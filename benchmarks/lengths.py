"""Perplexity by length, up to 16 times the training length: `python -m benchmarks.lengths --output docs/lengths.jsonl`.

Trains models of one width and depth on the demo's text (the running interpreter's own library, as bytes; a fifth of its files held
out) in rows of `--length` bytes, through the loop of `train.py` with one budget and one learning rate, and evaluates each on rows
of 16 times that (`--beyond`). Models: the blocks of FoX's paper (pro, llama, transformer-pro, transformer-llama) and any method by name. A row a
model, with what a run alone would need; models that have a row are passed over; `--report` prints the rows as markdown and draws
L(i) of all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import statistics
import tempfile
from pathlib import Path

import jax
import numpy as np
from matplotlib.figure import Figure

from benchmarks.methods import SPEED
from benchmarks.timing import append_row, provenance
from lsm_jax import load_run, mixers, models
from lsm_jax.data import DataConfig, make_eval_iterator
from lsm_jax.data.demo import write_demo_store
from lsm_jax.data.tokenizers import ByteTokenizer
from lsm_jax.evaluation import evaluate, moving_average
from lsm_jax.feedforward import SwiGLUConfig
from lsm_jax.training import OptimizerConfig, TrainConfig, train
from lsm_jax.training.metrics import read_rows

MODELS = "pro,llama,transformer-pro,transformer-llama,gated_deltanet"
VOCABULARY, POINTS = 257, 512


def model_config(name: str, hidden_size: int, num_layers: int) -> models.ModelConfig:
    """A block of FoX's paper or a method, with heads of 64 or in its own proportions."""
    if name in ("pro", "llama", "transformer-pro", "transformer-llama"):
        config = models.fox(name, "125m", vocab_size=VOCABULARY)
        config.layers["L"].mixer.num_heads = hidden_size // 64
    else:
        method = mixers.get_method(name)
        inner = SwiGLUConfig.for_width(hidden_size, 64) if method.feedforward else None
        layer = models.LayerConfig(mixer=method.config.for_width(hidden_size), feedforward=inner)
        num_layers *= 1 if method.feedforward else 2
        config = models.ModelConfig(
            vocab_size=VOCABULARY, hidden_size=0, num_layers=0, layers={"L": layer}
        )
    config.hidden_size, config.num_layers = hidden_size, num_layers
    config.tie_embeddings, config.remat = False, "dots"
    config.validate()
    return config


def measure(name: str, args: argparse.Namespace, data: Path, workdir: Path) -> dict:
    """Train one model, read its row off the run, and evaluate it on long rows."""
    tokens_per_step = 131_072
    config = TrainConfig(
        name=name,
        model=model_config(name, args.width, args.layers),
        data=DataConfig(path=str(data), sequence_length=args.length),
        optimizer=OptimizerConfig(
            peak_lr=args.peak_lr, warmup_tokens=args.tokens // 10, weight_decay=0.1
        ),
        batch_size=tokens_per_step // args.length,
        total_tokens=args.tokens,
        log_every=16,
        eval_every=0,
    )
    train(config, workdir)
    rows = read_rows(workdir / "metrics.jsonl")
    speeds = [r[SPEED] for r in rows if r.get(SPEED)]
    run = load_run(workdir)
    long = dataclasses.replace(config.data, sequence_length=args.beyond * args.length)
    batches = make_eval_iterator(
        long, ByteTokenizer(), global_batch_size=args.batch_size, vocab_size=VOCABULARY, remainder="pad"
    )  # fmt: skip
    batches = itertools.islice(batches, args.batches)
    found = evaluate(run.model, batches, piece_length=min(args.length, 4096))
    lengths = [(args.length << i) // 4 for i in range(7) if 1 << i <= 4 * args.beyond]
    smooth = moving_average(found.curve.loss, 101)
    places = np.unique(np.geomspace(50, len(smooth) - 51, POINTS).astype(int))
    return dict(
        model=name,
        length=args.length,
        perplexity={n: round(found.curve.perplexity(n), 4) for n in lengths},
        curve={"position": places.tolist(), "loss": np.round(smooth[places], 4).tolist()},
        train_loss=[r["train/loss"] for r in rows if "train/loss" in r][-1],
        tokens_per_second=statistics.median(speeds[1:] or speeds),
        parameters=models.count_parameters(config.model)["non_embedding"],
        tokens=args.tokens,
        peak_lr=args.peak_lr,
        heldout_rows=found.num_sequences,
        evaluation_seconds=round(found.seconds, 1),
        **provenance(),
    )


def report(path: Path) -> str:
    """The rows as markdown, and their curves beside them as a picture."""
    rows = sorted(read_rows(path), key=lambda r: r["perplexity"][str(r["length"])])
    lengths = list(rows[0]["perplexity"])
    lines = [
        "| model | " + " | ".join(f"P({int(n):,})" for n in lengths) + " | parameters, M | tokens/s | date, commit |",
        "|---" * (len(lengths) + 4) + "|",
    ]  # fmt: skip
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for r in rows:
        values = " | ".join(f"{r['perplexity'][n]:.3f}" for n in lengths)
        lines.append(
            f"| `{r['model']}` | {values} | {r['parameters'] / 1e6:.1f} | {r['tokens_per_second']:,.0f} | "
            f"{r['date']}, {r['commit']} |"
        )
        axes.plot(r["curve"]["position"], r["curve"]["loss"], label=r["model"], linewidth=1)
    axes.axvline(rows[0]["length"], color="0.4", linestyle="--", linewidth=1)
    axes.text(rows[0]["length"], axes.get_ylim()[1], " training length", va="top", color="0.3")
    axes.set(xscale="log", xlabel="position i, bytes", ylabel="L(i), nats a byte (mean of 101)")
    axes.set_ylim(top=min(axes.get_ylim()[1], 4))
    axes.legend(frameon=False)
    figure.savefig(path.with_suffix(".png"), dpi=150)
    return "\n".join(lines)


def main() -> None:
    """Measure what has no row yet, or print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("docs/lengths.jsonl"))
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--shard", default="0/1", help="which part of the models, e.g. 0/2")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=33_554_432)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--peak_lr", type=float, default=1e-3)
    parser.add_argument("--batch_size", type=int, default=4, help="long rows at a time")
    parser.add_argument("--beyond", type=int, default=16, help="times the length, evaluated")
    parser.add_argument("--batches", type=int, help="of held-out rows; all where not given")
    parser.add_argument("--keep", type=Path, help="keep the text and the runs in this folder")
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()
    if args.report:
        print(report(args.output))
        return
    index, count = map(int, args.shard.split("/"))
    kept = contextlib.nullcontext(args.keep) if args.keep else tempfile.TemporaryDirectory()
    with kept as folder:
        data = Path(folder) / "text"
        if not data.exists():
            write_demo_store(data, row_length=args.beyond * args.length, heldout_fraction=0.2)
        for name in args.models.split(",")[index::count]:
            model_config(name, args.width, args.layers)
            if args.output.exists() and name in [r["model"] for r in read_rows(args.output)]:
                continue
            row = measure(name, args, data, Path(folder) / name)
            append_row(args.output, row)
            shown = {k: v for k, v in row.items() if k != "curve"}
            print(json.dumps(shown), flush=True)
            jax.clear_caches()


if __name__ == "__main__":
    main()
