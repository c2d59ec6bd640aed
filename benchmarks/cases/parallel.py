"""Time training of A0.3B-2B on the cards of this machine.

    python -m benchmarks parallel [--table layouts,axes,lengths] [--mixers gla,softmax] [--cards 4]

A row for each step, in three tables:
layouts: tokens/s and memory at 2K x 8 to 16K x 1 rows per card, each mixer pure, over fsdp (Linear-MoE, arXiv
2503.05447, Table 3).
axes: the same step with all cards on one axis: fsdp, expert, tensor, pipeline, and on 8 cards 2 x 2 x 2 of
the last three (Table 4: 2K x 4 rows in all).
lengths: one row divided along time over all cards, `--tokens` per card, one document or packed of several
(`--document`), on 1, 2, 4, ... of the cards. There is one process for each mixer, or each mesh. They compile
side by side, and then train one after another, so that none is timed while another runs. A step that does not
fit or compile has its error in its row. Times are medians of `--steps` steps after two; memory is that of one
card, by XLA's analysis of the step. Tokens are BPE text, since random ids load experts evenly; where choices of experts
do not fit into the buffers between cards, the row has their number, and is that of the buffers into which all
fit. Rows without `remat` recompute everything in the backward pass. Rows without `inputs` had random ids.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import math
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the processes share the cards
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")

import jax
import numpy as np

from benchmarks import options, text
from benchmarks.registry import Benchmark, UsageError
from benchmarks.released import without_kernels
from benchmarks.timing import alone, program_bytes, provenance
from configs import linear_moe
from lsm_jax import ops
from lsm_jax.feedforward.moe import MATMUL
from lsm_jax.ops.backends.registry import names_of_ops
from lsm_jax.parallel import AXES, MeshConfig, make_mesh, token_sharding
from lsm_jax.training import make_program

BENCHMARK = Benchmark(
    name="parallel",
    summary="training steps on one or several cards: layouts, mesh axes, long rows",
    key=("table", "variant", "mesh", "rows", "length"),
    optional_key={"document": 0, "remat": "full", "without": "", "experts_matmul": "default"},
    output="docs/linear_moe.jsonl",
)

TABLES = ("layouts", "axes", "lengths")
MIXERS = (
    "softmax", "linear_attention", "retnet", "gla", "deltanet", "gated_deltanet", "mamba2", "hgrn2", "rwkv6",
)  # fmt: skip
READY = "ready"
Row = tuple[str, MeshConfig, int, int]
"""(variant, mesh, rows in all, tokens of a row)."""


def config_of(row: Row, args: Any) -> Any:
    """Return the training config that one row of the benchmark times: (variant, mesh, rows of the batch,
    tokens of a row).
    """
    variant, mesh, rows, length = row
    config = linear_moe.get_config(variant)
    for layer in config.model.layers.values():
        if args.buffer:
            layer.feedforward.expert_buffer = args.buffer
        layer.feedforward.exchange = args.exchange
        layer.feedforward.execution = args.execution
        layer.feedforward.matmul = args.experts_matmul
    config.model.remat, config.model.dtype = args.remat, args.dtype
    config = dataclasses.replace(config, mesh=mesh, batch_size=rows)
    config.data.sequence_length = length
    config.validate(math.prod(getattr(mesh, axis) for axis in AXES))
    return config


def batch_of(args: Any) -> dict[str, Any]:
    """Return the dtypes of a training batch's arrays by name; with `args.document` the batch has segment
    ids and positions.
    """
    names = ("tokens", "labels", *(("segment_ids", "positions") if args.document else ()))
    return dict.fromkeys(names, np.int32) | dict(loss_mask=np.float32)


def build(rows: list[Row], args: Any) -> tuple[Any, Any, list[Any]]:
    """Compile the initialisation and the training steps for benchmark rows of one variant and mesh;
    allocates no array.

    Returns:
        The mesh, the compiled initialisation, and for each row (its compiled step or the error, seconds of
        compiling).
    """
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
        except Exception as error:  # other rows may compile
            return error, 0.0

    with concurrent.futures.ThreadPoolExecutor() as pool:
        first, *steps = pool.map(
            lambda x: (x, 0.0) if isinstance(x, Exception) else compiled(x), [start, *lowered]
        )
    if isinstance(first[0], Exception):
        raise first[0]
    return devices, first[0], steps


def measure(table: str, rows: list[Row], args: Any, wait: Callable[[], None]) -> None:
    """Compile the training steps of the benchmark rows `rows`, call `wait`, which returns when this process
    may use the devices, then time each step and print its row of results.
    """
    devices: Any = None
    start: Any = None
    try:
        devices, start, steps = build(rows, args)
    except Exception as error:
        steps = [(error, 0.0)] * len(rows)
    wait()
    with alone(args.lock):
        print_rows(table, rows, devices, start, steps, args)


def identify(table: str, row: Row, args: Any) -> dict[str, Any]:
    """Return the fields of a benchmark row that say what it measured: its table, variant, mesh, rows,
    length and kind of documents.
    """
    variant, mesh, count, length = row
    axes: dict[str, Any] = {axis: n for axis in AXES if (n := getattr(mesh, axis)) > 1}
    if mesh.rounds > 1:
        axes["rounds"] = mesh.rounds
    if mesh.expert > 1 and args.exchange != "padded":
        axes["exchange"] = args.exchange
    more = dict(document=args.document) if args.document else {}
    if args.remat != "full":
        more["remat"] = args.remat
    if args.without:
        more["without"] = ",".join(args.without)
    if args.experts_matmul != "default":
        more["experts_matmul"] = args.experts_matmul
    return dict(table=table, variant=variant, mesh=axes, rows=count, length=length, **more)


def print_rows(
    table: str, rows: list[Row], devices: Any, start: Any, steps: Any, args: Any
) -> None:
    """Time the training step of each benchmark row and print the row; `steps` are the compiled steps that
    `build` returned.
    """
    state = None
    for row, (step, compile_seconds) in zip(rows, steps, strict=True):
        _, mesh, count, length = row
        cards = math.prod(getattr(mesh, axis) for axis in AXES)
        line = identify(table, row, args)
        try:
            if isinstance(step, Exception):
                raise step
            with jax.set_mesh(devices):
                state = start() if state is None else state
                more, state = train(step, state, devices, count, length, args)
            if more["overflow"]:
                grown, state = train_with_larger_buffers(row, state, more["overflow"], args)
                more |= grown
            more["tokens_per_second_a_card"] = round(more["tokens_per_second"] / cards)
            line |= more | dict(compile_s=round(compile_seconds, 1))
        except Exception as error:  # the next rows may fit
            state = None
            line["error"] = f"{type(error).__name__}: {error}"[:300]
        line |= dict(implementations=ops.choices(), **provenance())
        print(json.dumps(line), flush=True)


def train_with_larger_buffers(row: Row, state: Any, overflow: int, args: Any) -> Any:
    """Repeat the training of one benchmark case, from the training state `state`, with `expert_buffer`
    doubled until all choices of experts fit; return (fields of the row of results, training state), as
    `train` does.

    A step in which choices did not fit has changed no parameter. The returned fields have the number of these
    choices and the last buffer.
    """
    buffer = max(
        getattr(layer.feedforward, "expert_buffer", 0.0)
        for layer in config_of(row, args).model.layers.values()
    )
    total, more = 0, dict(overflow=overflow)
    while more["overflow"]:
        total, buffer = total + more["overflow"], 2 * buffer
        larger = argparse.Namespace(**vars(args) | dict(buffer=buffer))
        devices, _, ((step, _),) = build([row], larger)
        if isinstance(step, Exception):
            raise step
        with jax.set_mesh(devices):
            more, state = train(step, state, devices, *row[2:], args)
    return more | dict(overflow=total, expert_buffer=buffer), state


def train(step: Any, state: Any, devices: Any, rows: int, length: int, args: Any) -> Any:
    """Time training steps on one batch of text; return the fields of the benchmark row (times, memory,
    loss) and the training state after it.
    """
    vocabulary = next(p for p in jax.tree.leaves(state.params) if p.ndim == 2).shape
    place = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
    values: dict[str, Any] = text.stream(rows, length, max(vocabulary))
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
        loss=loss, inputs="text", overflow=int(metrics.get("moe/overflow_count", 0)),
    ), state  # fmt: skip


def groups_of(table: str, args: Any, count: int) -> list[list[Row]]:
    """Return the rows of the benchmark's table `table` on `count` cards, in one list for each process that
    will time them.
    """
    pattern = f",pattern={args.pattern}" if args.pattern else ""
    variants = [f"{args.size},mixer={m}{pattern}" for m in args.mixers]
    if table == "layouts":
        mesh = MeshConfig(data=1, fsdp=count)
        shapes = [tuple(map(int, shape.split("x"))) for shape in args.layouts]
        return [[(v, mesh, rows * count, length) for length, rows in shapes] for v in variants]
    if table == "axes":
        meshes = [MeshConfig(data=1, **{axis: count}) for axis in args.axes]
        if "pipeline" in args.axes and count > 1:
            meshes += [MeshConfig(data=1, pipeline=count, rounds=n) for n in args.rounds]
        if count == 8:
            meshes.append(MeshConfig(data=1, expert=2, tensor=2, pipeline=2))
        return [[(v, mesh, max(4, count), args.length)] for v in variants for mesh in meshes]
    powers = [2**i for i in range(count.bit_length()) if 2**i <= count]
    numbers = args.counts or powers
    sizes = [(n, args.tokens) for n in numbers]
    sizes += [(max(numbers), tokens) for tokens in args.longest]
    return [
        [(v, MeshConfig(data=1, sequence=n), 1, n * tokens)]
        for v in variants
        for n, tokens in sizes
    ]


def side_by_side(
    groups: list[list[Row]], args: argparse.Namespace, names: list[list[dict[str, Any]]]
) -> Iterator[dict[str, Any]]:
    """Start a process for each group of benchmark rows, and yield the rows that they print.

    The processes train one after another, once all have compiled or `args.patience` seconds are over.

    Args:
        groups: for each process the rows (variant, mesh, rows of the batch, tokens of a row) that it times.
        args: the options of the benchmark's command line.
        names: for each row the fields that identify it, for the rows of a process that ends early.
    """
    missing = [list(group) for group in names]
    messages: queue.Queue = queue.Queue()
    processes = [start_process(group, names[i][0]["table"], args) for i, group in enumerate(groups)]
    for index, process in enumerate(processes):
        threading.Thread(target=_listen, args=(index, process, messages), daemon=True).start()
    compiling, waiting, training = set(range(len(groups))), [], None
    end = time.monotonic() + args.patience
    while compiling or waiting or training is not None:
        late = time.monotonic() >= end
        if waiting and training is None and (late or not compiling):
            training = waiting.pop(0)
            print("go", file=processes[training].stdin, flush=True)
        try:
            index, line = messages.get(timeout=1)
        except queue.Empty:
            continue
        if line == READY:
            compiling.discard(index)
            waiting.append(index)
        elif line is None:  # the process has ended, so its memory is free
            compiling.discard(index)
            waiting = [other for other in waiting if other != index]
            code = processes[index].wait()
            for name in missing[index]:  # as after a crash of XLA's compiler
                yield name | dict(error=f"its process ended with {code}") | provenance()
            training = None if training == index else training
        elif line.startswith("{"):
            del missing[index][:1]
            yield json.loads(line)
        else:
            print(line, flush=True)


def start_process(group: list[Row], table: str, args: argparse.Namespace) -> subprocess.Popen:
    """Start the process that compiles and times a group of benchmark rows; its argument is the JSON that
    `serve` reads.
    """
    rows = [[variant, dataclasses.asdict(mesh), *shape] for variant, mesh, *shape in group]
    message = json.dumps(dict(table=table, rows=rows, args=vars(args)), default=str)
    command = [sys.executable, "-m", "benchmarks.cases.parallel", message]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _listen(index: int, process: subprocess.Popen, messages: queue.Queue) -> None:
    """Put each line that process number `index` prints into a queue, as (index, line), and (index, None)
    once it has ended.
    """
    for line in process.stdout or ():
        messages.put((index, line.strip()))
    messages.put((index, None))


def serve(message: dict[str, Any]) -> None:
    """Be the process of a group of benchmark rows: compile their training steps, print READY, wait for a
    line on stdin, then time each step and print its row.
    """
    args = argparse.Namespace(**message["args"])
    args.lock = Path(args.lock) if args.lock else None
    rows = [(variant, MeshConfig(**mesh), *shape) for variant, mesh, *shape in message["rows"]]

    def wait():
        print(READY, flush=True)
        if not sys.stdin.readline():  # the process that starts the training has ended
            sys.exit(1)

    off = without_kernels(*args.without) if args.without else contextlib.nullcontext()
    with off:
        measure(message["table"], rows, args, wait)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--table", type=options.names(TABLES), default="layouts", help=", ".join(TABLES)
    )
    parser.add_argument("--size", default="a0.3b-2b", help="of configs/linear_moe.py")
    parser.add_argument("--mixers", type=options.words, default=",".join(MIXERS))
    parser.add_argument("--pattern", default="", help="LLLN for the hybrid")
    parser.add_argument(
        "--layouts",
        type=options.words,
        default="2048x8,16384x1",
        help="layouts: tokens x rows per card",
    )
    parser.add_argument(
        "--axes",
        type=options.words,
        default="fsdp,expert,tensor,pipeline",
        help="axes: the mesh axes",
    )
    parser.add_argument(
        "--rounds",
        type=options.integers,
        default="",
        help="axes: further pipelines with so many rounds",
    )
    parser.add_argument("--length", type=int, default=2048, help="axes: tokens of a row")
    parser.add_argument("--tokens", type=int, default=131072, help="lengths: tokens per card")
    parser.add_argument(
        "--longest",
        type=options.integers,
        default="",
        help="lengths: further tokens per card, on all cards",
    )
    parser.add_argument(
        "--document",
        type=int,
        default=0,
        help="tokens of each document of a row; 0: a row is one document",
    )
    parser.add_argument(
        "--counts",
        type=options.integers,
        default="",
        help="lengths: numbers of cards; default: 1, 2, 4, ...",
    )
    parser.add_argument("--cards", type=int, help="number of cards to use; all by default")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--remat", default="full")
    parser.add_argument(
        "--without",
        type=options.words,
        default="",
        help="ops that use no kernel, such as grouped_swiglu",
    )
    parser.add_argument("--dtype", default="bfloat16", help="dtype of activations")
    parser.add_argument("--buffer", type=float, help="expert_buffer of the layers")
    parser.add_argument("--exchange", default="padded", help="exchange of the layers' tokens")
    parser.add_argument("--execution", default="grouped", help="execution of the experts")
    parser.add_argument(
        "--experts_matmul", choices=MATMUL, default="default", help="how the experts multiply"
    )
    parser.add_argument(
        "--patience", type=float, default=600, help="seconds that compiling may take"
    )
    options.add_lock(parser)


def all_groups(args: argparse.Namespace) -> list[tuple[str, list[Row]]]:
    """Return, for each process that the benchmark must start for its options, (name of the results table, the
    cases that the process times).
    """
    count = args.cards or len(jax.devices())
    return [(table, group) for table in args.table for group in groups_of(table, args, count)]


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    if args.document < 0:
        raise UsageError(f"--document {args.document}: accepted are 0 and more")
    if unknown := set(args.without) - set(names_of_ops()):
        accepted = ", ".join(names_of_ops())
        raise UsageError(f"--without {','.join(unknown)}: accepted are {accepted}")
    return [identify(table, row, args) for table, group in all_groups(args) for row in group]


def rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    groups, names = [], []
    for table, group in all_groups(args):
        wanted = [row for row in group if identify(table, row, args) in cases]
        if wanted:
            groups.append(wanted)
            names.append([identify(table, row, args) for row in wanted])
    return side_by_side(groups, args, names)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
