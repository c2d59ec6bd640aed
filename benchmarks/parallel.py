"""Training A0.3B-2B on the cards there are: `python -m benchmarks.parallel --table=layouts|axes|lengths [--output=FILE]`.

layouts: tokens/s and memory at 2K x 8 and 16K x 1 rows a card, each mixer pure, over fsdp (Linear-MoE, arXiv 2503.05447, Table 3).
axes: the same step with every card on one axis: fsdp, expert, tensor, pipeline, and 2 x 2 x 2 of the latter where there are eight
(Table 4: 2K x 4 rows in all).
lengths: one document cut along time over all cards, `--tokens` a card; tokens/s a card on 1, 2, 4, ... of them.
One line a row, as JSON; a row that does not fit or compile says why and the next one runs. Times are medians of `--steps` steps after two.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from typing import Any

import jax
import numpy as np

from benchmarks.timing import provenance
from configs import linear_moe
from lsm_jax import ops
from lsm_jax.parallel import AXES, MeshConfig, make_mesh, token_sharding
from lsm_jax.training import make_program

MIXERS = (
    "softmax", "linear_attention", "retnet", "gla", "deltanet", "gated_deltanet", "mamba2", "hgrn2", "rwkv6",
)  # fmt: skip


def measure(variant: str, mesh: MeshConfig, rows: int, length: int, args: Any) -> dict[str, Any]:
    """Tokens/s and memory of a training step of `rows` rows in all, on the first cards that the mesh takes."""
    config = linear_moe.get_config(variant)
    for layer in config.model.layers.values():
        if args.buffer:
            layer.feedforward.expert_buffer = args.buffer
        layer.feedforward.exchange = args.exchange
        layer.feedforward.execution = args.execution
    config.model.remat = args.remat
    config = dataclasses.replace(config, mesh=mesh, batch_size=rows)
    config.data.sequence_length = length
    count = math.prod(getattr(mesh, axis) for axis in AXES)
    config.validate(count)
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, size=(rows, length), dtype=np.int32)  # fmt: skip
    batch = dict(tokens=tokens, labels=tokens, loss_mask=np.ones((rows, length), np.float32))
    devices = make_mesh(mesh, jax.devices()[:count])
    with jax.set_mesh(devices):
        program = make_program(config, devices)
        state = program.init()
        placed = jax.device_put(batch, token_sharding(devices))
        began = time.perf_counter()
        step = program.train_step.lower(state, placed).compile()
        compiled = time.perf_counter() - began
        memory, seconds = step.memory_analysis(), []
        for _ in range(2 + args.steps):
            began = time.perf_counter()
            state, metrics = step(state, placed)
            loss = float(metrics["train/loss"])
            seconds.append(time.perf_counter() - began)
        overflow = int(metrics.get("moe/overflow_count", 0))
    median = float(np.median(seconds[2:]))
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes
    total += memory.temp_size_in_bytes - memory.alias_size_in_bytes
    return dict(
        tokens_per_second=round(rows * length / median),
        tokens_per_second_a_card=round(rows * length / median / count),
        step_ms=round(1e3 * median, 2), gib=round(total / 2**30, 2), compile_s=round(compiled, 1),
        loss=loss, overflow=overflow,
    )  # fmt: skip


def rows_of(args: Any, count: int) -> list[tuple[str, MeshConfig, int, int]]:
    """(variant, mesh, rows in all, tokens a row) of each row of a table."""
    chosen = args.mixers.split(",")
    pattern = f",pattern={args.pattern}" if args.pattern else ""
    if args.table == "layouts":
        mesh = MeshConfig(data=1, fsdp=count)
        shapes = [tuple(map(int, shape.split("x"))) for shape in args.layouts.split(",")]
        return [
            (f"{args.size},mixer={m}{pattern}", mesh, rows * count, length)
            for m in chosen
            for length, rows in shapes
        ]
    variant = f"{args.size},mixer={chosen[0]}{pattern}"
    if args.table == "axes":
        meshes = [MeshConfig(data=1, **{axis: count}) for axis in ("fsdp", "expert", "tensor", "pipeline")]  # fmt: skip
        if count == 8:
            meshes.append(MeshConfig(data=1, expert=2, tensor=2, pipeline=2))
        return [(variant, mesh, max(4, count), 2048) for mesh in meshes]
    powers = [2**i for i in range(count.bit_length()) if 2**i <= count]
    return [
        (f"{args.size},mixer={m}{pattern}", MeshConfig(data=1, sequence=n), 1, n * args.tokens)
        for m in chosen
        for n in powers
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", choices=("layouts", "axes", "lengths"), default="layouts")
    parser.add_argument("--size", default="a0.3b-2b", help="of configs/linear_moe.py")
    parser.add_argument("--mixers", default=",".join(MIXERS))
    parser.add_argument("--pattern", default="", help="LLLN for the hybrid")
    parser.add_argument("--layouts", default="2048x8,16384x1", help="tokens x rows a card")
    parser.add_argument("--tokens", type=int, default=131072, help="a card, for lengths")
    parser.add_argument("--cards", type=int, help="of those there are; else all")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--remat", default="full")
    parser.add_argument("--buffer", type=float, help="expert_buffer")
    parser.add_argument("--exchange", default="padded")
    parser.add_argument("--execution", default="grouped")
    parser.add_argument("--output", help="a file that gets the lines too")
    args = parser.parse_args()
    for variant, mesh, rows, length in rows_of(args, args.cards or len(jax.devices())):
        axes = {axis: getattr(mesh, axis) for axis in AXES if getattr(mesh, axis) > 1}
        line = dict(table=args.table, variant=variant, mesh=axes, rows=rows, length=length)
        try:
            line |= measure(variant, mesh, rows, length, args)
        except Exception as error:  # the rows after it may fit
            line["error"] = f"{type(error).__name__}: {error}"[:300]
        line |= dict(implementations=ops.choices(), **provenance())
        jax.clear_caches()
        print(json.dumps(line), flush=True)
        if args.output:
            with open(args.output, "a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
