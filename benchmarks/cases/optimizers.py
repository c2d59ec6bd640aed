"""Compare optimizers and schedules on the demo's text, with the demo's model.

    python -m benchmarks optimizers [--settings adamw-cosine,muon-wsd] [--seeds 0,1]

Trains `configs/demo.py` (0.9 M parameters, bytes of the running interpreter's library) once for each setting and seed, in
steps of 1,024 tokens. All settings of a seed have the same initial parameters and the same tokens in the same order. Peak
rates are not tuned: AdamW, Muon and Adafactor have the demo's rate, and Lion a seventh of it with seven times the weight
decay. A row for each run, with its training and held-out loss by tokens, and the numbers that the optimizer stores for each
parameter. `python -m scripts.draw_results` draws the rows.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import options
from benchmarks.registry import Benchmark
from benchmarks.run import one_by_one
from benchmarks.timing import provenance
from benchmarks.training import train_to_end
from configs import demo
from lsm_jax.training import TrainConfig
from lsm_jax.training import read_rows as read_metrics
from lsm_jax.training.memory_plan import plan

BENCHMARK = Benchmark(
    name="optimizers",
    summary="optimizers and schedules on the demo's text",
    key=("setting", "tokens", "peak_lr", "seed"),
    output="docs/optimizers.jsonl",
    resume=True,
)

SETTINGS = "adamw-cosine,adamw-wsd,muon-cosine,muon-wsd,lion-cosine,adafactor-cosine"
TOKENS = 102_400  # 100 steps


def config_of(setting: str, tokens: int, seed: int) -> TrainConfig:
    """Return the training config of a setting OPTIMIZER-SCHEDULE: the demo's, with a quarter of its batch and another number
    of tokens, of which a tenth are the warm-up.
    """
    config = demo.get_config()
    config.seed, config.batch_size = seed, 4
    optimizer = config.optimizer
    optimizer.name, optimizer.schedule = setting.split("-")
    if optimizer.name == "lion":
        optimizer.peak_lr, optimizer.weight_decay = 6e-4, 0.7
        optimizer.b2 = 0.99  # as published, arXiv 2302.06675
    config.total_tokens, config.optimizer.warmup_tokens = tokens, tokens // 10
    config.log_every, config.eval_every, config.eval_batches = 2, 25, 16
    config.checkpoint_every = config.num_steps
    config.validate()
    return config


def measure(setting: str, tokens: int, seed: int, workdir: Path) -> dict[str, Any]:
    """Train one setting, and return the benchmark's row."""
    config = config_of(setting, tokens, seed)
    train_to_end(config, workdir)
    rows = read_metrics(workdir / "metrics.jsonl")

    def curve(key: str) -> dict[str, list[float]]:
        pairs = [(r["step"] * config.tokens_per_step, r[key]) for r in rows if key in r]
        return dict(tokens=[n for n, _ in pairs], loss=[round(x, 4) for _, x in pairs])

    planned = plan(config, 1, kernels=False)
    return dict(
        setting=setting, tokens=tokens, peak_lr=config.optimizer.peak_lr, seed=seed, train=curve("train/loss"),
        heldout=curve("val/loss"), final=rows[-1].get("val/loss"), stored=round(planned.optimizer / planned.parameters, 3),
        **provenance(),
    )  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--settings", type=options.words, default=SETTINGS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--seeds", type=options.integers, default="0,1")


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    def case(setting: str, seed: int) -> dict[str, Any]:
        rate = config_of(setting, args.tokens, seed).optimizer.peak_lr
        return dict(setting=setting, tokens=args.tokens, peak_lr=rate, seed=seed)

    return [case(setting, seed) for seed in args.seeds for setting in args.settings]


def rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    def measure_case(case: dict[str, Any]) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            return measure(case["setting"], case["tokens"], case["seed"], Path(folder) / "run")

    yield from one_by_one(cases, measure_case)
