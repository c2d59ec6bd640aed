"""Train the sweeps of small models of a benchmark one after another, and compile the next ones meanwhile."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from benchmarks.registry import UsageError
from benchmarks.run import one_by_one
from lsm_jax.training import CompiledSweep, SmallModelsConfig, compile_recall, train_recall

Case = dict[str, Any]


def add_ahead(parser: argparse.ArgumentParser) -> None:
    """Add to a benchmark's parser the option --ahead: how many sweeps are compiled while another one trains."""
    parser.add_argument(
        "--ahead", type=int,
        help="sweeps that are compiled at once, ahead of training; default: 4 on a GPU, else 0: each just before it trains",
    )  # fmt: skip


def train_each(
    cases: list[Case],
    config_of: Callable[[Case], SmallModelsConfig],
    row_of: Callable[[Case, dict[str, Any]], Case],
    args: argparse.Namespace,
) -> Iterator[Case]:
    """Train the sweep of each case, and yield its row as soon as it ends.

    Programs are compiled by `--ahead` threads in the order of the cases, while the sweeps before them train: a small model
    can take longer to compile than to train.

    Args:
        cases: for each case its key fields, which identify its row.
        config_of: returns the config of a case's sweep.
        row_of: returns the row of a case, given the result of `train_recall`.
        args: the options `minutes` and `ahead`.

    Raises:
        UsageError: `ahead` is negative.
    """
    threads = args.ahead
    if threads is None:
        threads = 4 if jax.default_backend() == "gpu" else 0
    if threads < 0:
        raise UsageError(f"--ahead={threads}: it must be at least 0")
    pool = ThreadPoolExecutor(max_workers=max(1, threads))
    configs = [config_of(case) for case in cases]
    futures: dict[int, Future[CompiledSweep]] = {}
    if threads:
        futures = {i: pool.submit(compile_recall, config) for i, config in enumerate(configs)}

    def measure(case: Case) -> Case:
        i = cases.index(case)
        compiled = futures.pop(i).result() if i in futures else None
        try:
            return row_of(case, train_recall(configs[i], compiled=compiled))
        finally:
            if not threads:
                jax.clear_caches()

    try:
        yield from one_by_one(cases, measure, minutes=args.minutes)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
