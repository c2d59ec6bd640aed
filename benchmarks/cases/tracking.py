"""Measure state tracking: parity and words of permutation groups, by method, eigenvalues and steps a token.

    python -m benchmarks tracking [--size published] [--tasks parity,S3] [--models deltanet+negative,gated_deltaproduct+negative+2]

Trains `configs/tracking.py:<method>,task=<task>,size=<size>` one after another in one process. A row for each run: the
accuracy of the best of three seeds on words of the trained lengths and on longer ones, and the same of every seed. A model is
a method, with `+negative` (β in (0, 2)) or `+positive` (β in (0, 1)) where it has the choice, and the number of steps a token of
Gated DeltaProduct.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from benchmarks import options
from benchmarks.registry import Benchmark, UsageError
from benchmarks.sweeps import add_ahead, train_each
from benchmarks.timing import provenance
from configs import tracking
from lsm_jax.training import TrackingConfig

BENCHMARK = Benchmark(
    name="tracking",
    summary="state tracking: parity and words of permutation groups",
    key=("task", "size", "model"),
    optional_key={"epochs_at_most": None},
    output="docs/tracking.jsonl",
    resume=True,
)

# The pairs that the papers compare come first.
PARITY = "deltanet+negative,deltanet+positive,gated_deltanet+negative,gated_deltanet+positive,gated_deltaproduct+negative+2,mamba2,rwkv7,gated_deltaproduct+negative+3,slstm"  # fmt: skip
GROUP = "gated_deltaproduct+negative+2,gated_deltaproduct+negative+1,gated_deltaproduct+positive+2,deltanet+positive,gated_deltaproduct+negative+3,mamba2,slstm"  # fmt: skip
MODELS = {
    "parity": PARITY,
    "S3": GROUP,
    "S5-swaps": "gated_deltaproduct+negative+1,deltanet+positive,gated_deltaproduct+negative+2,mamba2,slstm",
    "S5": "gated_deltaproduct+negative+4,gated_deltaproduct+negative+1,gated_deltaproduct+negative+2,gated_deltaproduct+negative+3,gated_deltaproduct+positive+4,deltanet+positive,mamba2,slstm",
    "S5-mixed": "gated_deltaproduct+negative+4,gated_deltaproduct+negative+1,gated_deltaproduct+positive+4,gated_deltaproduct+negative+3,gated_deltaproduct+negative+2,mamba2",
}
"""The models of each task by default. One step without decay, `gated_deltaproduct+negative+1`, is DeltaNet's recurrence."""


def variant(model: str, task: str, size: str) -> str:
    """Return the variant of `configs/tracking.py` that trains a model, such as "gated_deltaproduct+negative+2", on a task.

    Raises:
        UsageError: a word of the model after the method is neither the eigenvalues nor a number of steps.
    """
    method, *words = model.split("+")
    given = ""
    for word in words:
        if word in ("positive", "negative"):
            given += f",negative={int(word == 'negative')}"
        elif word.isdecimal():
            given += f",steps={word}"
        else:
            raise UsageError(
                f"model {model!r}: {word!r}; accepted are <method>[+negative|+positive][+<steps>]"
            )
    return f"{method},task={task},size={size}{given}"


def config_of(case: dict[str, Any], args: argparse.Namespace) -> TrackingConfig:
    """Return the config of the sweep that trains a case, a model on a task."""
    config = tracking.get_config(variant(case["model"], case["task"], case["size"]))
    if args.epochs is not None:
        config.epochs = args.epochs
    return config


def row_of(
    case: dict[str, Any], result: dict[str, Any], args: argparse.Namespace
) -> dict[str, Any]:
    """Return the benchmark's row of one case, given the result of its sweep."""
    text = variant(case["model"], case["task"], case["size"])
    overrides = "" if args.epochs is None else f" --config.epochs={args.epochs}"
    members = [
        {k: m[k] for k in ("learning_rate", "seed", "accuracy")} for m in result.pop("members")
    ]
    left_out = ("name", "implementations", "method")
    return dict(
        **case, **{k: v for k, v in result.items() if k not in left_out}, members=members
    ) | provenance() | dict(
        command=f"python train.py --config=configs/tracking.py:{text}{overrides} --workdir=runs/tracking"
    )  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", default="small", choices=tracking.SIZES)
    parser.add_argument(
        "--tasks", type=options.names(tracking.TASKS), default="parity,S3,S5-swaps",
        help=f"of {', '.join(tracking.TASKS)}; default: parity,S3,S5-swaps",
    )  # fmt: skip
    parser.add_argument(
        "--models", type=options.words, help="in place of those of each task, such as mamba2"
    )
    parser.add_argument("--epochs", type=int, help="in place of the size's")
    options.add_shard(parser)
    options.add_minutes(parser)
    add_ahead(parser)


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    if args.epochs is not None and args.epochs < 1:
        raise UsageError(f"--epochs={args.epochs}: it must be at least 1")
    selected = [
        dict(task=task, size=args.size, model=model)
        | ({} if args.epochs is None else {"epochs_at_most": args.epochs})
        for task in args.tasks
        for model in args.models or options.words(MODELS[task])
    ]
    for case in selected:
        tracking.get_config(variant(case["model"], case["task"], case["size"]))
    return selected


def rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return train_each(
        cases,
        lambda case: config_of(case, args),
        lambda case, result: row_of(case, result, args),
        args,
    )
