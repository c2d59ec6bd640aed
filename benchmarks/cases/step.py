"""Measure the cost of a training step besides its arithmetic.

    python -m benchmarks step [--variant gated_deltanet-10m] [--long]

One row: the host's time to dispatch the arguments of a step (`dispatch_ms`), to hand a complete step to an
idle device, transfer and kernel launches included (`host_ms`), the time of the step (`step_ms`), and peak
memory. `--long` trains on one document of 65,536 tokens with a vocabulary of 50,257, whose logits alone would
have 13.2 GB in float32.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from benchmarks import text
from benchmarks.registry import Benchmark
from configs import lm
from lsm_jax.parallel import batch_sharding, make_mesh
from lsm_jax.training import TrainConfig, make_program

BENCHMARK = Benchmark(
    name="step",
    summary="the host's time in a training step: dispatch, transfer, launches",
    key=("variant", "tokens", "vocab_size"),
)


def make_config(args: argparse.Namespace) -> TrainConfig:
    """Return the training config of the run whose step is timed, as the command line's options describe it."""
    config = lm.get_config(args.variant)
    if args.long:
        config.model.vocab_size, config.batch_size, config.data.sequence_length = 50257, 1, 65536
    else:
        config.model.remat = "none"
    return config


def measure(config: TrainConfig, steps: int) -> dict[str, Any]:
    """Train for `steps` steps with this config, and return the row with the host's times, the step's time
    and peak memory.
    """
    mesh = make_mesh(config.mesh)
    shape = (config.batch_size, config.data.sequence_length)
    batch = text.stream(*shape, config.model.vocab_size)
    rows = batch_sharding(mesh)
    with jax.set_mesh(mesh):
        program = make_program(config, mesh)
        state = program.init()
        began = time.perf_counter()
        compiled = program.train_step.lower(state, jax.device_put(batch, rows)).compile()
        compile_seconds = time.perf_counter() - began
        memory = compiled.memory_analysis()
        # It computes nothing: its arguments are flattened, checked and donated as those of a step.
        nothing = jax.jit(lambda state, batch: (state, batch), donate_argnums=(0, 1))
        placed, dispatch = jax.device_put(batch, rows), []
        for _ in range(steps):
            began = time.perf_counter()
            state, placed = nothing(state, placed)
            dispatch.append(time.perf_counter() - began)
            jax.block_until_ready((state, placed))
        host, complete = [], []
        for _ in range(steps):
            began = time.perf_counter()
            state, metrics = program.train_step(state, jax.device_put(batch, rows))
            host.append(time.perf_counter() - began)
            jax.block_until_ready((state, metrics))
            complete.append(time.perf_counter() - began)
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "compile_s": round(compile_seconds, 1),
        "dispatch_ms": round(1e3 * float(np.median(dispatch[2:])), 3),
        "host_ms": round(1e3 * float(np.median(host[2:])), 3),
        "step_ms": round(1e3 * float(np.median(complete[2:])), 3),
        "temporary_gib": round(memory.temp_size_in_bytes / 2**30, 3),
        "peak_gib": round(stats.get("peak_bytes_in_use", 0) / 2**30, 3) or None,
        "whole_logits_gib": round(4 * np.prod(shape) * config.model.vocab_size / 2**30, 3),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--variant", default="gated_deltanet-10m", help="of configs/lm.py")
    parser.add_argument("--long", action="store_true", help="one document of 65,536 tokens")
    parser.add_argument("--steps", type=int, default=30)


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    config = make_config(args)
    tokens = config.batch_size * config.data.sequence_length
    return [dict(variant=args.variant, tokens=tokens, vocab_size=config.model.vocab_size)]


def rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for case in cases:
        yield case | measure(make_config(args), args.steps)
