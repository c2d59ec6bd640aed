"""Train experts that are sharded over devices on text, and count the choices that do not fit into the buffers.

    python -m benchmarks expert_overflow [--balances 0,1e-2] [--steps 300]
    python -m benchmarks expert_overflow --variant a0.3b-2b,mixer=gla --batch_size 8 --length 2048 --vocab_size 32000 \
        --unsaved --seconds 120

A row for each factor of the balance loss: a run of `train.py`'s loop with the expert layout of A0.3B-2B (64
experts of 7/8 width, eight per token, in every layer), all devices on the axis "expert", and BPE text of the
running interpreter's library. Rows have every growth of the buffers, the choices that did not fit before it,
and the loss. Without GPUs the devices are virtual: XLA_FLAGS=--xla_force_host_platform_device_count=8. On one
device no choice is exchanged, so that the row has the loads of the experts and the loss, and no overflow.

`--variant` trains a model of configs/linear_moe.py instead of the narrow one of `--width` and `--layers`. With
`--unsaved` a run saves no checkpoint (26 GB for A0.3B-2B). A run that is not complete after `--seconds` ends
early; its row has the step that it reached, and no held-out loss.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import options, text
from benchmarks.registry import Benchmark, UsageError
from benchmarks.run import log, one_by_one
from benchmarks.timing import provenance
from benchmarks.training import SPEED, StepClock, StepTimeOver, median_speed, train_to_end
from configs import linear_moe
from lsm_jax.feedforward import MoEConfig
from lsm_jax.parallel import MeshConfig
from lsm_jax.training import OptimizerConfig
from lsm_jax.training.expert_buffers import ExpertBuffers
from lsm_jax.training.metrics import read_rows
from lsm_jax.training.step import OVERFLOW

BENCHMARK = Benchmark(
    name="expert_overflow",
    summary="choices of experts that do not fit between devices, on text",
    key=("balance_scale", "devices", "width", "layers", "steps", "batch_size", "length"),
    output="docs/linear_moe_overflow.jsonl",
)


def config_of(balance: float, args: argparse.Namespace) -> linear_moe.TrainConfig:
    """Return the training config of a run of sharded experts whose balance loss has the factor `balance`."""
    config = linear_moe.get_config(args.variant or "tiny")
    tokens = args.batch_size * args.length
    if args.variant is None:
        config.model.layers["L"].feedforward = MoEConfig.for_width(args.width, 1)
        config.model.hidden_size, config.model.num_layers = args.width, args.layers
    for layer in config.model.layers.values():
        layer.feedforward = dataclasses.replace(
            layer.feedforward, balance_scale=balance, expert_buffer=args.buffer
        )
    config.model.vocab_size = args.vocab_size
    config.data = text.data_config(args.length, args.vocab_size)
    config.optimizer = OptimizerConfig(
        peak_lr=args.peak_lr, warmup_tokens=min(30, args.steps // 2) * tokens
    )
    config.mesh = MeshConfig(data=1, expert=len(jax.devices()))
    config.batch_size, config.total_tokens = args.batch_size, args.steps * tokens
    config.log_every, config.eval_every = 1, args.steps
    config.eval_batches = 4
    config.validate(len(jax.devices()))
    return config


def measure(case: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Train one run of sharded experts and return its row: the growths of the expert buffers, the choices
    of experts that did not fit, and the loss.
    """
    config, began = config_of(case["balance_scale"], args), time.perf_counter()
    clock = StepClock(args.steps, args.seconds)
    with tempfile.TemporaryDirectory() as folder:
        workdir = Path(folder) / "run"
        try:
            train_to_end(config, workdir, clock, checkpoints=not args.unsaved)
        except StepTimeOver as end:
            log(f"the time of this run is over: {end}")
        rows = read_rows(workdir / "metrics.jsonl")
        growths = ExpertBuffers(config, workdir).growths
    ended = clock.step
    losses = {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}
    heldout = [round(row["val/loss"], 4) for row in rows if "val/loss" in row]
    last = [row for row in rows if "moe/load" in row][-1]
    experts = config.model.layers["L"].feedforward
    return case | dict(
        experts=experts.num_experts, top_k=experts.top_k, vocab_size=args.vocab_size, expert_buffer=args.buffer,
        ended_at_step=ended, skipped=last["train/skipped_steps"], overflow_count=last.get(OVERFLOW, 0),
        largest_expert_buffer=last.get("moe/expert_buffer"),
        growths=[growth | dict(expert_buffer=growth["expert_buffer"]["L"]) for growth in growths],
        largest_load=round(float(np.max(last["moe/load"])), 4), even_load=round(1 / experts.num_experts, 4),
        loss={step: round(losses[step], 4) for step in sorted({1, max(1, ended // 3), max(1, 2 * ended // 3), ended})},
        heldout_loss=heldout[-1] if heldout else None, checkpoints=not args.unsaved,
        tokens_per_second=round(median_speed(rows)) if any(SPEED in row for row in rows) else None,
        seconds_to_first_step=round(clock.first, 1),
        seconds=round(time.perf_counter() - began, 1), **provenance(),
    )  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--balances", type=options.floats, default="0,1e-2")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--variant", help="of configs/linear_moe.py; replaces --width and --layers")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--vocab_size", type=int, default=4096)
    parser.add_argument("--peak_lr", type=float, default=1e-3)
    parser.add_argument("--buffer", type=float, default=2.0, help="expert_buffer at the start")
    parser.add_argument("--unsaved", action="store_true", help="save no checkpoints")
    options.add_seconds(parser, math.inf, "time of a run, after which it ends")


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    fields = dict(steps=args.steps, batch_size=args.batch_size, length=args.length)
    if args.variant is None:
        fields |= dict(width=args.width, layers=args.layers)
    else:
        model = linear_moe.get_config(args.variant).model
        fields |= dict(width=model.hidden_size, layers=model.num_layers, variant=args.variant)
    return [
        dict(balance_scale=balance, devices=len(jax.devices()), **fields)
        for balance in args.balances
    ]


def rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    devices = len(jax.devices())
    if 64 % devices or args.batch_size % devices:
        raise UsageError(
            f"{devices} devices: accepted are 1, 2, 4, ... 64 that divide --batch_size {args.batch_size}; without accelerators set "
            "XLA_FLAGS=--xla_force_host_platform_device_count=8"
        )
    return one_by_one(cases, lambda case: measure(case, args))
