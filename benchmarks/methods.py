"""Every method at one small size on one text with one budget: `python -m benchmarks.methods --output docs/methods.jsonl`.

Trains `configs/lm.py:<method>-10m` for 8.4 M tokens of the demo's text (the running interpreter's own library, as bytes), one
method after another, through the same loop as `train.py`. A row a method: held-out loss, tokens/s, parameters, size of the
decode state, date, commit, device and command. Methods that have a row already are passed over. `--shard 0/4` takes every
fourth method, so that four processes can share four cards; `--report` prints the rows as markdown.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path

import jax

from benchmarks.timing import append_row, provenance
from configs import lm
from lsm_jax import mixers, models
from lsm_jax.training import train
from lsm_jax.training.metrics import read_rows

TOKENS, EVERY = 8_388_608, 16
SPEED = "perf/tokens_per_second"


def state_bytes(config: models.ModelConfig) -> int:
    """Bytes one sequence's memories take while decoding; for softmax attention at a context of 1,024."""
    model = models.abstract(config)
    shapes = jax.eval_shape(lambda m: m.init_state(1, 1024), model)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def measure(method: str, size: str, workdir: Path, tokens: int) -> dict:
    """Train one method and read its row off the run."""
    variant = f"{method}-{size}"
    config = lm.get_config(variant)
    config.total_tokens, config.model.remat, config.log_every = tokens, "dots", EVERY
    config.optimizer.warmup_tokens = tokens // 10
    config.eval_every = math.ceil(tokens / (config.batch_size * config.data.sequence_length))
    began = time.perf_counter()
    train(config, workdir)
    seconds = time.perf_counter() - began
    rows = read_rows(workdir / "metrics.jsonl")
    speeds = [r[SPEED] for r in rows if r.get(SPEED)]
    held_out = [r["val/loss"] for r in rows if r.get("val/loss") is not None]
    return dict(
        method=method,
        held_out_loss=held_out[-1],
        train_loss=[r["train/loss"] for r in rows if "train/loss" in r][-1],
        tokens_per_second=statistics.median(speeds[1:] or speeds),
        parameters=models.count_parameters(config.model)["non_embedding"],
        state_bytes=state_bytes(config.model),
        tokens=tokens,
        seconds=round(seconds, 1),
        **provenance(),
        command=command(variant, tokens, config.eval_every),
    )


def command(variant: str, tokens: int, eval_every: int) -> str:
    """What trains the same model alone; its metrics.jsonl ends with the same held-out loss."""
    return (
        f"python train.py --config=configs/lm.py:{variant} --workdir=runs/{variant} --config.total_tokens={tokens} "
        f"--config.model.remat=dots --config.optimizer.warmup_tokens={tokens // 10} --config.log_every={EVERY} "
        f"--config.eval_every={eval_every}"
    )


def report(path: Path) -> str:
    """The rows as markdown, the lowest held-out loss first."""
    rows = sorted(read_rows(path), key=lambda r: r["held_out_loss"])
    lines = [
        "| method | held-out bits a byte | tokens/s | parameters, M | decode state, KiB | date, commit |",
        "|---|---|---|---|---|---|",
    ]
    for r in rows:
        bits = r["held_out_loss"] / math.log(2)
        lines.append(
            f"| `{r['method']}` | {bits:.3f} | {r['tokens_per_second']:,.0f} | {r['parameters'] / 1e6:.1f} | "
            f"{r['state_bytes'] / 1024:,.0f} | {r['date']}, {r['commit']} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure what has no row yet, or print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("docs/methods.jsonl"))
    parser.add_argument("--methods", default=",".join(mixers.METHODS))
    parser.add_argument("--shard", default="0/1", help="which part of the methods, e.g. 0/4")
    parser.add_argument("--size", default="10m", choices=models.SIZES)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no method later")
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()
    if args.report:
        print(report(args.output))
        return
    index, count = map(int, args.shard.split("/"))
    began = time.perf_counter()
    for method in args.methods.split(",")[index::count]:
        mixers.get_method(method)
        known = args.output.exists() and [r["method"] for r in read_rows(args.output)]
        if known and method in known:
            continue
        if time.perf_counter() - began > 60 * args.minutes:
            print(f"{method}: not begun, {args.minutes:g} minutes are over", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                row = measure(method, args.size, Path(folder) / method, args.tokens)
            except Exception as error:  # one method's failure must not cost the others their rows
                print(f"{method}: FAILED: {type(error).__name__}: {str(error)[:2000]}", flush=True)
                continue
        append_row(args.output, row)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
