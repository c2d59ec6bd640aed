"""Time released models' shapes with random weights: prefill, decoding, and a training step of adapters.

    python -m benchmarks released_models [--models qwen3.5-4b] [--layers 16] [--lengths 1024,131072] [--kernels on,off]

A model is one of the names below, or the path of a config.json, of any family that `lsm_jax.convert` reads; `--layers` is its
depth. Its matrices are drawn on the device in bfloat16; no weights are read. A row for each model, length and `--kernels`:

    inference   `--rows` prompts of so many tokens are read in pieces, then `--tokens` tokens are decoded greedily, one after
                another, as `lsm_jax.models.sample` does it
    lora        a training step with rows of `--lora` tokens: adapters of rank 16 on every dense layer, the rest frozen

`gib` is what the largest of a row's compiled programs needs: parameters, state, temporary arrays. `implementations` says by
which backend each op ran. With `--kernels off` all ops but experts' products run as XLA: XLA's product on NVIDIA multiplies each
row with every expert. All programs of a model are compiled side by side before any is timed.

`--peers transformers` times inference in Hugging Face's transformers (PyTorch) too, before JAX opens the card: rows with `kernels`
"transformers", and in `packages` which of flash-linear-attention, causal_conv1d and mamba_ssm it could call. Each row is written
as it ends; a process that takes longer than `--patience` seconds for one is ended.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.93")  # read when JAX opens the card

import jax

from benchmarks import options
from benchmarks.registry import Benchmark, UsageError
from benchmarks.released import (
    MODELS,
    draw_params,
    fields_of,
    lower_inference,
    lower_tuning,
    model_config,
    time_inference,
    time_tuning,
    with_attention,
    without_kernels,
)
from benchmarks.run import log, one_by_one
from lsm_jax import mixers
from lsm_jax.models import ModelConfig, count_parameters
from lsm_jax.ops.backends.registry import backends_of, names_of

BENCHMARK = Benchmark(
    name="released_models",
    summary="released models' shapes with random weights: prefill, decoding, a step of LoRA",
    key=("model", "layers", "work", "tokens", "rows", "kernels"),
    optional_key={"attention": None, "decode": None},
    output="docs/released_models.jsonl",
    resume=True,
)

KERNELS, PEER = ("on", "off"), "transformers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--models", type=options.words, default=",".join(MODELS),
        help=f"{', '.join(MODELS)}, or paths of config.json",
    )  # fmt: skip
    parser.add_argument(
        "--layers", type=int, help="depth, best a multiple of the pattern's length; default: "
        + ", ".join(f"{depth} of {name}" for name, (_, depth) in MODELS.items()),
    )  # fmt: skip
    parser.add_argument(
        "--lengths", type=options.integers, default="1024,8192,32768,131072",
        help="tokens of the prompts; empty for no inference; default: %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--lora", type=options.integers, default="4096",
        help="tokens of the rows of a training step; empty for none; default: %(default)s",
    )  # fmt: skip
    parser.add_argument("--rows", type=int, default=1, help="rows of a batch; default: 1")
    parser.add_argument(
        "--piece", type=int, default=4096, help="tokens of a prompt that are read in one call; default: 4096"
    )  # fmt: skip
    parser.add_argument("--tokens", type=int, default=64, help="tokens to decode; default: 64")
    parser.add_argument(
        "--kernels", type=options.names(KERNELS), default="on,off",
        help="on: the backends that run by default; off: XLA; default: %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--attention", type=options.names(names_of(backends_of("attention"))), metavar="NAMES",
        help="measure inference once with each of these backends of softmax attention, such as mosaic_gpu,xla; default: "
        "those that run by default",
    )  # fmt: skip
    parser.add_argument(
        "--unrolled_decode", action="store_true", help="decode with layers one after the other, as with `sample(unroll_layers=True)`"
    )  # fmt: skip
    parser.add_argument(
        "--unrolled", action="store_true", help="compile the training step's layers one after the other"
    )  # fmt: skip
    parser.add_argument(
        "--peers", type=options.names((PEER,)), default=[], metavar="NAMES",
        help=f"time inference in this library, too: {PEER}",
    )  # fmt: skip
    parser.add_argument(
        "--patience", type=float, default=900, metavar="SECONDS",
        help="seconds that a peer may take for a row, in which it compiles; default: 900",
    )  # fmt: skip
    parser.add_argument("--tiny", action="store_true", help="the models in a size for a CPU")
    parser.add_argument("--workers", type=int, default=8, help="threads that compile; default: 8")
    options.add_minutes(parser)


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    for name in ("rows", "piece", "tokens", "workers"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name} {getattr(args, name)}: it must be at least 1")
    for length in args.lengths:
        if length < 1 or length % min(args.piece, length):
            raise UsageError(f"--lengths {length}: accepted are multiples of --piece={args.piece}, and shorter ones")  # fmt: skip
    if wrong := [length for length in args.lora if length < 1]:
        raise UsageError(f"--lora {wrong[0]}: it must be at least 1")
    if args.peers and (unknown := [name for name in args.models if name not in MODELS]):
        raise UsageError(f"--peers {PEER}: --models {unknown[0]}; accepted are {', '.join(MODELS)}")
    work = [("inference", n) for n in args.lengths] + [("lora", n) for n in args.lora]

    def cases_of(name: str, kind: str, length: int, kernels: str) -> list[dict[str, Any]]:
        layers = model_config(name, args.layers, tiny=args.tiny).num_layers
        about = dict(model=label(args, name), layers=layers, work=kind, tokens=length)
        about |= dict(rows=args.rows, kernels=kernels)
        if kind == "inference" and args.unrolled_decode and kernels != PEER:
            about |= dict(decode="unrolled")
        if args.attention and kind == "inference" and kernels == "on":
            return [about | dict(attention=backend) for backend in args.attention]
        return [about]

    return [
        case
        for name in args.models
        for kind, length in work
        for kernels in (*args.kernels, *(args.peers if kind == "inference" else ()))
        for case in cases_of(name, kind, length, kernels)
    ]


def label(args: argparse.Namespace, name: str) -> str:
    """Return the name of a model in rows."""
    return name + ("-tiny" if args.tiny else "")


def rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    of_peer = [case for case in cases if case["kernels"] == PEER]
    yield from peer_rows(args, of_peer)
    own = [case for case in cases if case["kernels"] != PEER]
    names = {label(args, name): name for name in args.models}
    current: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {}

    def measure(case: dict[str, Any]) -> dict[str, Any]:
        model = case["model"]
        if model not in current:
            current.clear()  # which frees the parameters of the model before
            of_model = [c for c in own if c["model"] == model]
            config = model_config(names[model], args.layers, tiny=args.tiny)
            current[model] = prepare(args, config, of_model)
        return current[model](case)

    yield from one_by_one(own, measure, minutes=args.minutes)


def peer_rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the rows of transformers, of a process for each model, each as it ends: all of them before JAX takes the card's
    memory. A process that gives no row within `args.patience` seconds is ended."""
    for name in args.models:
        of_model = [case for case in cases if case["model"] == label(args, name)]
        if not of_model:
            continue
        asked = dict(
            fields=fields_of(name, args.layers, tiny=args.tiny), rows=args.rows, piece=args.piece, tokens=args.tokens,
            lengths=[case["tokens"] for case in of_model],
        )  # fmt: skip
        command = [sys.executable, "-m", "benchmarks.peers.transformers_worker", json.dumps(asked)]
        yield from worker_rows(command, of_model, args.patience)


def worker_rows(
    command: list[str], cases: list[dict[str, Any]], patience: float
) -> Iterator[dict[str, Any]]:
    """Yield a row for each case, as a process prints its results, JSON objects with `tokens`, in the order of the cases.

    Args:
        command: the command of the process.
        cases: the cases, whose `tokens` differ.
        patience: seconds that the process may take for a row. Then it is ended, and the cases that are left have an `error`.
    """
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=errors)
        assert process.stdout is not None
        lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=read_lines, args=(process.stdout, lines), daemon=True).start()
        error = None
        try:
            for case in cases:
                if error is None:
                    try:
                        line = lines.get(timeout=patience)
                    except queue.Empty:
                        error = f"no row within {patience:g} s"
                    else:
                        if not line:
                            process.wait()
                            errors.seek(0)
                            error = " ".join(errors.read().splitlines()[-3:])[-300:] or "it ended"
                if error is not None:
                    yield case | dict(error=error)
                    continue
                row = json.loads(line)
                assert row.pop("tokens") == case["tokens"]
                yield case | row
        finally:
            process.kill()
            process.wait()


def read_lines(stream: IO[str], lines: queue.Queue[str]) -> None:
    """Put the lines of a stream that are JSON objects into a queue, and "" at its end."""
    for line in stream:
        if line.startswith("{"):
            lines.put(line)
    lines.put("")


def prepare(
    args: argparse.Namespace, config: ModelConfig, cases: list[dict[str, Any]]
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Compile the programs of one model's cases side by side; return the function that times a case and returns its row."""
    with ThreadPoolExecutor(args.workers) as pool:

        def submit(lowered: Any) -> Future:
            return pool.submit(lowered.compile)

        def lower(case: dict[str, Any]) -> Any:
            off = case["kernels"] == "off"
            with without_kernels() if off else contextlib.nullcontext():
                if case["work"] == "inference":
                    model = with_attention(config, case.get("attention"))
                    sizes = args.rows, case["tokens"], args.piece, args.tokens
                    return lower_inference(model, *sizes, submit, unrolled=args.unrolled_decode)
                return lower_tuning(config, args.rows, case["tokens"], args.unrolled, submit)

        def attempt(case: dict[str, Any]) -> Any:
            try:
                return lower(case)
            except Exception as error:  # reported with its case, so that the others are measured
                return error

        lowered = {tuple(case.values()): attempt(case) for case in cases}
        log(f"{cases[0]['model']}: {len(cases)} cases traced")
    log(f"{cases[0]['model']}: compiled")
    params: list[Any] = []  # of inference, while its cases are timed
    used = Counter(mixers.method_of(config.layers[x].mixer).name for x in config.letters())
    about = dict(
        mixers=dict(used), parameters=count_parameters(config)["total"], unrolled=args.unrolled
    )

    def measure(case: dict[str, Any]) -> dict[str, Any]:
        program = lowered.pop(tuple(case.values()))
        if isinstance(program, Exception):
            raise program
        if case["work"] == "inference":
            if not params:
                params.append(jax.block_until_ready(draw_params(config)))
            return case | about | time_inference(program, params[0], args.rows, config.vocab_size)
        params.clear()
        return case | about | time_tuning(program, config, args.rows, case["tokens"])

    return measure


def line(row: dict[str, Any]) -> str:
    """Return the text that is printed for a row: times and memory, and the backends of the ops."""
    name = f"{row['model']}, {row['layers']} layers"
    if "attention" in row:
        name += f", attention {row['attention']}"
    if "decode" in row:
        name += ", decoded in unrolled layers"
    if "error" in row:
        return f"{name}, {row['kernels']}, {row['tokens']:,}: {row['error']}"
    if row["work"] == "inference":
        times = (
            f"prefill {row['prefill_ms']:,.1f} ms ({row['prefill_tokens_per_second']:,} tokens/s), decode {row['decode_ms']:.2f} ms "
            f"({row['decode_tokens_per_second']:,} tokens/s)"
        )  # fmt: skip
    else:
        times = f"step {row['milliseconds']:,.1f} ms ({row['tokens_per_second']:,} tokens/s)"
    of = ", ".join(f"{count} {mixer}" for mixer, count in row.get("mixers", {}).items())
    chosen = "; ".join(
        f"{part}: " + ", ".join(f"{op} {text.split(' (')[0]}" for op, text in choices.items())
        for part, choices in row.get("implementations", {}).items()
    )
    return (
        f"{name} ({of or ', '.join(row.get('packages', ()))}), {row['work']} of {row['rows']} x {row['tokens']:,}, kernels "
        f"{row['kernels']}: {times}, {row['gib']:.2f} GiB. {chosen}"
    )
