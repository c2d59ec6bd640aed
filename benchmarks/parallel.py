"""Training A0.3B-2B on the cards there are: `python -m benchmarks.parallel --table=layouts|axes|lengths --output=docs/linear_moe.jsonl`.

layouts: tokens/s and memory at 2K x 8 to 16K x 1 rows a card, each mixer pure, over fsdp (Linear-MoE, arXiv 2503.05447, Table 3).
axes: the same step with every card on one axis: fsdp, expert, tensor, pipeline, and 2 x 2 x 2 of the latter where there are eight
(Table 4: 2K x 4 rows in all).
lengths: one row cut along time over all cards, `--tokens` a card, one document or packed of many (`--document`); tokens/s a card on
1, 2, 4, ... of them.
One process a mixer, or a mesh: they compile side by side, and once all have, train one after another, so that none is timed beside
another. One line a row, as JSON; a row that does not fit or compile says why and the next one runs. Times are medians of `--steps`
steps after two; memory is a card's, by XLA's analysis of the step. `--report` prints the rows of `--output` as markdown.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import math
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the processes share the cards
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")

import jax
import numpy as np

from benchmarks.timing import alone, program_bytes, provenance
from configs import linear_moe
from lsm_jax import ops
from lsm_jax.parallel import AXES, MeshConfig, make_mesh, token_sharding
from lsm_jax.training import make_program
from lsm_jax.training.metrics import read_rows

MIXERS = (
    "softmax", "linear_attention", "retnet", "gla", "deltanet", "gated_deltanet", "mamba2", "hgrn2", "rwkv6",
)  # fmt: skip
READY = "ready"
Row = tuple[str, MeshConfig, int, int]
"""(variant, mesh, rows in all, tokens a row)."""


def config_of(row: Row, args: Any) -> Any:
    """The run that a row measures."""
    variant, mesh, rows, length = row
    config = linear_moe.get_config(variant)
    for layer in config.model.layers.values():
        if args.buffer:
            layer.feedforward.expert_buffer = args.buffer
        layer.feedforward.exchange = args.exchange
        layer.feedforward.execution = args.execution
    config.model.remat, config.model.dtype = args.remat, args.dtype
    config = dataclasses.replace(config, mesh=mesh, batch_size=rows)
    config.data.sequence_length = length
    config.validate(math.prod(getattr(mesh, axis) for axis in AXES))
    return config


def batch_of(args: Any) -> dict[str, Any]:
    """The arrays of a batch, and their dtypes."""
    names = ("tokens", "labels", *(("segment_ids", "positions") if args.document else ()))
    return dict.fromkeys(names, np.int32) | dict(loss_mask=np.float32)


def build(rows: list[Row], args: Any) -> tuple[Any, Any, list[Any]]:
    """Rows of one variant and mesh: the mesh, the compiled start, and of each row its step, or the error; no array is made."""
    mesh = rows[0][1]
    devices = make_mesh(mesh, jax.devices()[: math.prod(getattr(mesh, axis) for axis in AXES)])
    lowered: list[Any] = []
    with jax.set_mesh(devices):
        program: Any = make_program(config_of(rows[0], args), devices)
        shapes = jax.eval_shape(program.init)
        state = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, program.shardings
        )  # fmt: skip
        start = program.init.lower()
        place = token_sharding(devices)
        for row in rows:
            batch = {
                name: jax.ShapeDtypeStruct(row[2:], kind, sharding=place)
                for name, kind in batch_of(args).items()
            }
            try:
                step: Any = make_program(config_of(row, args), devices).train_step
                lowered.append(step.lower(state, batch))
            except Exception as error:
                lowered.append(error)

    def compiled(stage):
        began = time.perf_counter()
        try:
            return stage.compile(), time.perf_counter() - began
        except Exception as error:  # the rows beside it may compile
            return error, 0.0

    with concurrent.futures.ThreadPoolExecutor() as pool:
        first, *steps = pool.map(
            lambda x: (x, 0.0) if isinstance(x, Exception) else compiled(x), [start, *lowered]
        )
    if isinstance(first[0], Exception):
        raise first[0]
    return devices, first[0], steps


def measure(table: str, rows: list[Row], args: Any, wait: Any) -> None:
    """Compile all rows, wait, then train each and print its line."""
    devices: Any = None
    start: Any = None
    try:
        devices, start, found = build(rows, args)
    except Exception as error:
        found = [(error, 0.0)] * len(rows)
    wait()
    with alone(args.lock):
        print_rows(table, rows, devices, start, found, args)


def named(table: str, row: Row, args: Any) -> dict[str, Any]:
    """What a row's line begins with."""
    variant, mesh, count, length = row
    axes: dict[str, Any] = {axis: n for axis in AXES if (n := getattr(mesh, axis)) > 1}
    if mesh.rounds > 1:
        axes["rounds"] = mesh.rounds
    if mesh.expert > 1 and args.exchange != "padded":
        axes["exchange"] = args.exchange
    packed = dict(document=args.document) if args.document else {}
    return dict(table=table, variant=variant, mesh=axes, rows=count, length=length, **packed)


def print_rows(
    table: str, rows: list[Row], devices: Any, start: Any, found: Any, args: Any
) -> None:
    """Train each row, compiled or an error in `found`, and print its line."""
    state = None
    for row, (step, compile_seconds) in zip(rows, found, strict=True):
        _, mesh, count, length = row
        cards = math.prod(getattr(mesh, axis) for axis in AXES)
        line = named(table, row, args)
        try:
            if isinstance(step, Exception):
                raise step
            with jax.set_mesh(devices):
                state = start() if state is None else state
                more, state = train(step, state, devices, count, length, args)
            more["tokens_per_second_a_card"] = round(more["tokens_per_second"] / cards)
            line |= more | dict(compile_s=round(compile_seconds, 1))
        except Exception as error:  # the rows after it may fit
            state = None
            line["error"] = f"{type(error).__name__}: {error}"[:300]
        line |= dict(implementations=ops.choices(), **provenance())
        print(json.dumps(line), flush=True)


def train(step: Any, state: Any, devices: Any, rows: int, length: int, args: Any) -> Any:
    """What steps of one batch take, and the state after them."""
    vocabulary = next(p for p in jax.tree.leaves(state.params) if p.ndim == 2).shape
    tokens = np.random.default_rng(0).integers(0, max(vocabulary), (rows, length), dtype=np.int32)
    place = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
    values = dict(tokens=tokens, labels=tokens, loss_mask=np.ones((rows, length), np.float32))
    if args.document:
        values |= dict(segment_ids=place // args.document + 1, positions=place % args.document)
    batch = {name: values[name] for name in batch_of(args)}
    placed, seconds = jax.device_put(batch, token_sharding(devices)), []
    for _ in range(2 + args.steps):
        began = time.perf_counter()
        state, metrics = step(state, placed)
        loss = float(metrics["train/loss"])
        seconds.append(time.perf_counter() - began)
    median = float(np.median(seconds[2:]))
    return dict(
        tokens_per_second=round(rows * length / median), step_ms=round(1e3 * median, 2), gib=round(program_bytes(step) / 2**30, 2),
        loss=loss, overflow=int(metrics.get("moe/overflow_count", 0)),
    ), state  # fmt: skip


def groups_of(table: str, args: Any, count: int) -> list[list[Row]]:
    """A table's rows, those of one process together."""
    pattern = f",pattern={args.pattern}" if args.pattern else ""
    variants = [f"{args.size},mixer={m}{pattern}" for m in args.mixers.split(",")]
    if table == "layouts":
        mesh = MeshConfig(data=1, fsdp=count)
        shapes = [tuple(map(int, shape.split("x"))) for shape in args.layouts.split(",")]
        return [[(v, mesh, rows * count, length) for length, rows in shapes] for v in variants]
    if table == "axes":
        meshes = [MeshConfig(data=1, **{axis: count}) for axis in args.axes.split(",")]
        if "pipeline" in args.axes and count > 1:
            more = [int(n) for n in args.rounds.split(",") if n]
            meshes += [MeshConfig(data=1, pipeline=count, rounds=n) for n in more]
        if count == 8:
            meshes.append(MeshConfig(data=1, expert=2, tensor=2, pipeline=2))
        return [[(v, mesh, max(4, count), args.length)] for v in variants for mesh in meshes]
    powers = [2**i for i in range(count.bit_length()) if 2**i <= count]
    numbers = args.counts and [int(n) for n in args.counts.split(",")] or powers
    sizes = [(n, args.tokens) for n in numbers]
    sizes += [(max(numbers), int(tokens)) for tokens in args.longest.split(",") if tokens]
    return [
        [(v, MeshConfig(data=1, sequence=n), 1, n * tokens)]
        for v in variants
        for n, tokens in sizes
    ]


def side_by_side(groups: list[list[dict]], keep: Any, patience: float) -> None:
    """A process a group of lines: told to train, one after another, when all have compiled or `patience` seconds are over."""
    total, missing = len(groups), [list(group) for group in groups]
    heard: queue.Queue = queue.Queue()

    def listen(index, process):
        for line in process.stdout:
            heard.put((index, line.strip()))
        heard.put((index, None))

    command = [sys.executable, "-m", "benchmarks.parallel", *sys.argv[1:]]
    processes = [
        subprocess.Popen([*command, f"--group={i}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for i in range(total)
    ]  # fmt: skip
    for index, process in enumerate(processes):
        threading.Thread(target=listen, args=(index, process), daemon=True).start()
    compiling, waiting, training = set(range(total)), [], None
    end = time.monotonic() + patience
    while compiling or waiting or training is not None:
        late = time.monotonic() >= end
        if waiting and training is None and (late or not compiling):
            training = waiting.pop(0)
            print("go", file=processes[training].stdin, flush=True)
        try:
            index, line = heard.get(timeout=1)
        except queue.Empty:
            continue
        if line == READY:
            compiling.discard(index)
            waiting.append(index)
        elif line is None:  # it has ended, and holds no memory
            compiling.discard(index)
            waiting = [other for other in waiting if other != index]
            code = processes[index].wait()
            for row in missing[index]:  # as where XLA's compiler crashed
                keep(json.dumps(row | dict(error=f"its process ended with {code}") | provenance()))
            training = None if training == index else training
        else:
            keep(line)
            del missing[index][: line.startswith("{")]


def _ratio(a: float | None, b: float | None) -> str:
    return f"{a / b:.2f}" if a and b else ""


def report(path: Path) -> str:
    """The rows as markdown, a table each; of two rows of one thing the later counts."""
    rows = {
        (r["table"], r["variant"], json.dumps(r["mesh"]), r["rows"], r["length"], r.get("document")): r for r in read_rows(path)
    }.values()  # fmt: skip

    def cell(row):
        if row is None:
            return " | "
        if "error" in row:
            return f"{row['error'].split(':')[0]} | "
        return f"{row['tokens_per_second'] / 1e3:.1f} | {row['gib']:.1f}"

    def name_of(row):
        packed = f", documents of {row['document']:,}" if "document" in row else ""
        return "`" + row["variant"].split("mixer=")[1] + "`" + packed

    def of(table):
        return [r for r in rows if r["table"] == table]

    lines: list[str] = []
    for cards in sorted({r["mesh"].get("fsdp", 1) for r in of("layouts")}):
        table = [r for r in of("layouts") if r["mesh"].get("fsdp", 1) == cards]
        shapes = sorted({(r["length"], r["rows"] // cards) for r in table})
        heads = " | ".join(f"{n // 1024}K x {b}: 10³ tokens/s | GiB" for n, b in shapes)
        first = "mixer" if cards == 1 else f"mixer, {cards} cards (fsdp), rows a card"
        lines += ["", f"| {first} | {heads} | longest / shortest |", "|---" * (2 * len(shapes) + 2) + "|"]  # fmt: skip
        for name in dict.fromkeys(map(name_of, table)):
            own = {(r["length"], r["rows"] // cards): r for r in table if name_of(r) == name}
            ends = [own.get(shape, {}).get("tokens_per_second") for shape in (shapes[0], shapes[-1])]  # fmt: skip
            cells = " | ".join(cell(own.get(s)) for s in shapes)
            lines.append(f"| {name} | {cells} | {_ratio(ends[1], ends[0])} |")
    if of("axes"):
        lines += ["", "| mixer | mesh | rows x tokens | 10³ tokens/s | GiB a card |", "|---" * 5 + "|"]  # fmt: skip
    for r in of("axes"):
        mesh = " x ".join(f"{axis} {n}" for axis, n in r["mesh"].items()) or "one card"
        lines.append(f"| {name_of(r)} | {mesh} | {r['rows']} x {r['length']:,} | {cell(r)} |")
    made = sorted(of("lengths"), key=lambda r: (r["variant"], r["length"]))
    if made:
        lines += ["", "| mixer | cards | tokens in the row | 10³ tokens/s | GiB a card | a card's speed / one card's |"]  # fmt: skip
        lines += ["|---" * 6 + "|"]
    for r in made:
        cards = r["mesh"].get("sequence", 1)
        alone = [
            a for a in made
            if name_of(a) == name_of(r) and not a["mesh"] and a["length"] * cards == r["length"]
        ]  # fmt: skip
        one = alone[-1].get("tokens_per_second_a_card") if alone else None
        part = _ratio(r.get("tokens_per_second_a_card"), one)
        lines.append(f"| {name_of(r)} | {cards} | {r['length']:,} | {cell(r)} | {part} |")
    return "\n".join(lines).lstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", default="layouts", help="of layouts, axes, lengths; or several")
    parser.add_argument("--size", default="a0.3b-2b", help="of configs/linear_moe.py")
    parser.add_argument("--mixers", default=",".join(MIXERS))
    parser.add_argument("--pattern", default="", help="LLLN for the hybrid")
    parser.add_argument("--layouts", default="2048x8,16384x1", help="tokens x rows a card")
    parser.add_argument("--axes", default="fsdp,expert,tensor,pipeline", help="of the table axes")
    parser.add_argument("--rounds", default="", help="of more pipelines, each once, for axes")
    parser.add_argument("--length", type=int, default=2048, help="of a row, for axes")
    parser.add_argument("--tokens", type=int, default=131072, help="a card, for lengths")
    parser.add_argument("--longest", default="", help="tokens a card to try too, on all cards")
    parser.add_argument("--document", type=int, default=0, help="tokens of each that a row is packed of; 0: rows are whole")  # fmt: skip
    parser.add_argument("--counts", default="", help="of cards, for lengths; else 1, 2, 4, ...")
    parser.add_argument("--cards", type=int, help="of those there are; else all")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--remat", default="full")
    parser.add_argument("--dtype", default="bfloat16", help="of activations")
    parser.add_argument("--buffer", type=float, help="expert_buffer")
    parser.add_argument("--exchange", default="padded")
    parser.add_argument("--execution", default="grouped")
    parser.add_argument("--output", type=Path, help="a file that gets the lines too")
    parser.add_argument(
        "--lock", type=Path, help="a file, held while training, for other programs that time"
    )
    parser.add_argument("--patience", type=float, default=600, help="seconds all may compile")
    parser.add_argument("--group", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()
    if args.report:
        print(report(args.output or Path("docs/linear_moe.jsonl")))
        return
    if args.document < 0:
        parser.error(f"--document={args.document}: accepted are 0 and more")
    tables, cards = args.table.split(","), args.cards or len(jax.devices())
    if set(tables) - {"layouts", "axes", "lengths"}:
        parser.error(f"--table={args.table}: accepted are layouts, axes, lengths")
    groups = [(table, group) for table in tables for group in groups_of(table, args, cards)]

    def wait():
        print(READY, flush=True)
        if not sys.stdin.readline():  # the one who would say go has ended
            sys.exit(1)

    def keep(line):
        print(line, flush=True)
        if args.output and line.startswith("{"):
            with args.output.open("a") as file:
                file.write(line + "\n")

    if args.group is None:
        lines = [[named(table, row, args) for row in rows] for table, rows in groups]
        side_by_side(lines, keep, args.patience)
    else:
        table, rows = groups[args.group]
        measure(table, rows, args, wait)


if __name__ == "__main__":
    main()
