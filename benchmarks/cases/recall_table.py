"""Measure the recall of many methods at many widths.

    python -m benchmarks recall_table [--suite published] [--methods gla,deltanet] [--widths 64,128]

Trains `configs/mqar.py:<method>,width=<width>,suite=<suite>` one after another in one process. A row for each
run: accuracy of the best learning rate at every length and number of pairs, the means of all rates, state
size, parameters, steps, seconds, and the command that trains the same. Processes that share the runs by
`--shard` each write their own `--output`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from benchmarks import options
from benchmarks.registry import Benchmark
from benchmarks.sweeps import add_ahead, train_each
from benchmarks.timing import provenance
from configs import mqar
from lsm_jax import mixers
from lsm_jax.training import RecallConfig

BENCHMARK = Benchmark(
    name="recall_table",
    summary="associative recall of many methods and widths",
    key=("suite", "method", "width"),
    optional_key={"num_steps": None, "epochs_at_most": None},
    output="docs/mqar.jsonl",
    resume=True,
)

SUITE_METHODS = ("softmax", "gated_deltanet", "deltanet", "gla", "mamba2")


def state_bytes(row: dict[str, Any]) -> int:
    """Return the bytes of the decode state of the model that a row of recall results describes, as the
    published figure counts them: its memories, and three tokens for each gated convolution, at 4 bytes per
    number.
    """
    convolutions = 3 * row["width"] * row["pattern"].count("C")
    return 4 * (sum(row["state_size"]["memory"]) + convolutions)


def variant(case: dict[str, Any]) -> str:
    """Return the variant of `configs/mqar.py` that trains a case, a method at one width."""
    text = f"{case['method']},width={case['width']},suite={case['suite']}"
    return text + (f",steps={case['num_steps']}" if "num_steps" in case else "")


def config_of(case: dict[str, Any], args: argparse.Namespace) -> RecallConfig:
    """Return the config of the sweep that trains a case, a method at one width with several learning rates."""
    config = mqar.get_config(variant(case))
    if args.epochs:
        config.epochs = args.epochs
    if args.dtype:
        config.model.dtype = args.dtype
    return config


def row_of(
    case: dict[str, Any], result: dict[str, Any], args: argparse.Namespace
) -> dict[str, Any]:
    """Return the benchmark's row of one case, given the result of its sweep."""
    overrides = ""
    if args.epochs:
        overrides += f" --config.epochs={args.epochs}"
    if args.dtype:
        overrides += f" --config.model.dtype={args.dtype}"
    members = [{k: m[k] for k in ("learning_rate", "mean")} for m in result.pop("members")]
    return dict(
        **case,
        **{k: v for k, v in result.items() if k not in ("name", "implementations", "seed", *case)},
        members=members,
    ) | provenance() | dict(
        command=f"python train.py --config=configs/mqar.py:{variant(case)}{overrides} --workdir=runs/mqar"
    )  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--suite", default="64x4", choices=mqar.SUITES)
    parser.add_argument(
        "--methods", type=options.words,
        help=f"all, or for the published suite {','.join(SUITE_METHODS)}",
    )  # fmt: skip
    parser.add_argument(
        "--widths", type=options.integers, help="64, or 64,128,256 for the published suite"
    )
    parser.add_argument(
        "--steps", type=options.integers, default=[], help="steps a token of gated_deltaproduct"
    )
    parser.add_argument("--epochs", type=int, help="in place of the suite's")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="dtype of activations")
    options.add_shard(parser)
    options.add_minutes(parser)
    add_ahead(parser)


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    published = args.suite == "published"
    methods = args.methods or (SUITE_METHODS if published else mixers.METHODS)
    widths = args.widths or ([64, 128, 256] if published else [64])
    for method in methods:
        mixers.get_method(method)
    return [
        dict(suite=args.suite, method=method, width=width)
        | steps
        | ({"epochs_at_most": args.epochs} if args.epochs else {})
        for width in widths
        for method in methods
        for steps in _steps(method, args)
    ]


def _steps(method: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the part of a case that says the steps a token of `method`, for each of --steps."""
    if method != "gated_deltaproduct" or not args.steps:
        return [{}]
    return [dict(num_steps=number) for number in args.steps]


def rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return train_each(
        cases,
        lambda case: config_of(case, args),
        lambda case, result: row_of(case, result, args),
        args,
    )
