"""Time forgetting attention, cuDNN's attention without gates, and flash-linear-attention.

    python -m benchmarks attention [--shapes 1x16384x16x128] [--gates text,made-up] [--peers fla]

A row for each shape (B x T x H x D, bfloat16): [ms forward, ms forward and backward] of the fused kernel
without and with pruning, of causal softmax attention without gates in cuDNN, and of flash-linear-attention's
kernel, all in one run on one card. The effect of pruning depends on the gates, which a row names in `gates`:

text: queries, keys and gates of a FoX (Pro) that is trained first, for `--train_steps` steps on real text, one for
each D (`benchmarks.forget_gates`). It reads held-out text, each row as one document; the H heads are those of all layers.
made-up: sigmoid(x + b) of normal x, the same for all heads; `--bias` sets b (2: a mean of about 0.87). Queries and
keys are normal. Rows without `gates` are of this kind.
recorded: with `--run DIR` the gates, queries and keys of each layer of that run's trained FoX, on a row of the run's
held-out data; heads are repeated up to `--heads`. The row has the times of the layer whose time is the median.

Values and gradients are normal in all rows. The gates of a FoX with initial parameters, near 1/2 at every token, are
in no row. flash-linear-attention computes all keys and is timed with the gates of `--bias` in every row.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory too

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import forget_gates, options
from benchmarks.peers.fla import Fla
from benchmarks.registry import Benchmark
from benchmarks.run import log
from benchmarks.timing import alone, batch_milliseconds
from pallas_kernels.forgetting_attention import forgetting_attention
from pallas_kernels.forgetting_attention.bounds import Rows, find_bounds
from pallas_kernels.forgetting_attention.cases import TIMED

BENCHMARK = Benchmark(
    name="attention",
    summary="forgetting attention, with and without pruning, beside cuDNN and a peer",
    key=("op", "shape"),
    optional_key={"bias": None, "gates": "made-up"},
    output="docs/attention.jsonl",
    requires_gpu=True,
)

OP = "forgetting attention"
GATES = ("text", "made-up")
_TILE, _BATCH_MS = 128, 60


def shape_of(case: dict[str, Any]) -> tuple[int, ...]:
    """Return the sizes B, T, H, D of a case."""
    return tuple(map(int, case["shape"].split("x")))


def split_sums(gates: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Return the cumulative sums of log gates [B, T, H] along T, as a high and a low part in float32."""
    exact = np.cumsum(gates.astype(np.float64), axis=1)
    high = exact.astype(np.float32)
    return jnp.asarray(high), jnp.asarray(exact - high, jnp.float32)


def made_up_inputs(shape: str, bias: float) -> tuple[jax.Array, ...]:
    """Return q, k, v, the gradient of the output, and the high and low float32 parts of the cumulative sums of the log gates,
    which are sigmoid(x + bias) of normal x.
    """
    batch, length, heads, dim = map(int, shape.split("x"))
    rng = np.random.default_rng(0)
    gates = -np.logaddexp(0, -(rng.normal(size=(batch, length, heads)) + bias))
    keys = jax.random.split(jax.random.key(0), 4)
    normal = (jax.random.normal(key, (batch, length, heads, dim), jnp.bfloat16) for key in keys)
    return *normal, *split_sums(gates)


def text_inputs(
    shape: str, model: Any, training: forget_gates.Training
) -> tuple[tuple[jax.Array, ...], float]:
    """Return the inputs as `made_up_inputs` does, with the queries, keys and gates of a trained FoX on held-out text,
    and the mean gate.
    """
    batch, length, heads, _ = map(int, shape.split("x"))
    tokens = forget_gates.heldout_rows(batch, length, training)
    q, k, gates = forget_gates.attention_inputs(model, tokens, heads)
    v, do = jax.random.normal(jax.random.key(0), (2, *q.shape), jnp.bfloat16)
    return (q, k, v, do, *split_sums(gates)), float(np.exp(gates).mean())


def fused(q, k, v, high, low, *, prune: bool) -> jax.Array:
    return forgetting_attention(q, k, v, (high, low), scale=q.shape[-1] ** -0.5, prune=prune)


def cudnn(q, k, v) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


CALLS = {
    "kernel": functools.partial(fused, prune=False),
    "pruned": functools.partial(fused, prune=True),
    "cudnn, no gates": cudnn,
}


def lower(call, shape: str) -> list:
    """Return two programs of an attention function `call`, lowered and not yet compiled: forward, and
    forward and backward.

    The programs' arguments are q, k, v and the gradient of the output, each [B, T, H, D], and, unless `call` is cuDNN's
    attention without gates, the high and the low float32 part of the cumulative sums of log gates, each [B, T, H].
    """
    batch, length, heads, dim = map(int, shape.split("x"))
    array = jax.ShapeDtypeStruct((batch, length, heads, dim), jnp.bfloat16)
    part = jax.ShapeDtypeStruct((batch, length, heads), jnp.float32)
    parts = () if call is cudnn else (part, part)

    def forward(q, k, v, do, *sums):
        return call(q, k, v, *sums)

    def both(q, k, v, do, *sums):
        output, pull = jax.vjp(call, q, k, v, *sums)
        return output, pull(do)

    return [jax.jit(f).lower(*(array,) * 4, *parts) for f in (forward, both)]


def compile_all(cases: dict) -> dict:
    """Compile the programs (forward, and forward and backward) of all attention cases in parallel threads,
    and return them by case.
    """
    with concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        futures = {case: [pool.submit(p.compile) for p in pair] for case, pair in cases.items()}
        return {case: [future.result() for future in pair] for case, pair in futures.items()}


def calls_of(program, inputs) -> int:
    """Return how many calls of a compiled program one timed batch has: 20, or fewer if 20 would take longer
    than 60 ms.
    """
    jax.block_until_ready(program(*inputs))
    began = time.perf_counter()
    jax.block_until_ready(program(*inputs))
    return max(1, min(20, round(_BATCH_MS / (1e3 * (time.perf_counter() - began)))))


def measure(name: str, pair: list, inputs: tuple) -> list[float]:
    """Return the times [ms forward, ms forward and backward] of one attention implementation, given its two
    compiled programs as `pair`.
    """
    inputs = inputs[:4] if CALLS[name] is cudnn else inputs
    times = (batch_milliseconds(p, *inputs, calls=calls_of(p, inputs)) for p in pair)
    return [round(ms, 4) for ms in times]


def pruned_share(inputs: tuple) -> float:
    """Return the fraction of the causal tiles (pairs of a block of queries and a block of keys) that pruning
    skips in forgetting attention.
    """
    q, k, _, _, *sums = inputs
    gates = tuple(jnp.swapaxes(x, 1, 2) for x in sums)
    options = dict(scale=q.shape[-1] ** -0.5, window=None, prune=True, tile_size=_TILE)
    first = jax.jit(lambda q, k, gates: find_bounds(q, k, Rows(gates, None), **options).first)
    skipped = np.asarray(first(q, k, gates))
    count = skipped.shape[-1]
    return float(skipped.mean() / ((count + 1) / 2))


def recorded(run_folder: Path, heads: int):
    """Yield, for each layer of a trained FoX on a held-out row, its number, the inputs to time (its q, k
    and sums of log gates; v and the gradient of the output are random) and its log gates [T, H].
    """
    from lsm_jax import load_run
    from lsm_jax.data import make_eval_iterator
    from lsm_jax.data.tokenizers import ByteTokenizer
    from lsm_jax.evaluation.maps import run_layers

    run = load_run(run_folder)
    batches = make_eval_iterator(
        run.config.data, ByteTokenizer(), global_batch_size=1, vocab_size=run.config.model.vocab_size, remainder="pad"
    )  # fmt: skip
    tokens = np.asarray(next(iter(batches))["tokens"])[0]
    for layer, inputs, _ in run_layers(run.model, tokens, range(run.config.model.num_layers)):
        gates = np.asarray(inputs["log_forget"], np.float32)
        copies = -(-heads // gates.shape[2])
        q, k = (jnp.tile(inputs[n].astype(jnp.bfloat16), (1, 1, copies, 1))[:, :, :heads] for n in "qk")  # fmt: skip
        v, do = jax.random.normal(jax.random.key(layer), (2, *q.shape), jnp.bfloat16)
        sums = split_sums(np.tile(gates, (1, 1, copies))[:, :, :heads])
        yield layer, (q, k, v, do, *sums), gates[0]


def measure_run(run_folder: Path, heads: int, save: Path | None) -> dict:
    """Time forgetting attention with a trained model's gates and return the benchmark's row; `save` is a
    file for the gates of all layers.
    """
    layers, programs, all_gates, inputs, shape = [], {}, [], (), ""
    for layer, inputs, gates in recorded(run_folder, heads):
        if not programs:
            shape = "x".join(map(str, inputs[0].shape))
            programs = compile_all({name: lower(call, shape) for name, call in CALLS.items()})
        all_gates.append(gates)
        row_of_layer = dict(
            layer=layer,
            pruned_share=round(pruned_share(inputs), 4),
            mean_gate=round(float(np.exp(gates).mean()), 4),
            pruned=measure("pruned", programs["pruned"], inputs),
        )
        log(json.dumps(row_of_layer))
        layers.append(row_of_layer)
    if save is not None:
        np.savez_compressed(save, log_forget=np.stack(all_gates).astype(np.float16))
    middle = sorted(layers, key=lambda layer: layer["pruned"][1])[len(layers) // 2]
    row = dict(op=OP, shape=shape, gates="recorded", median_layer=middle["layer"], layers=layers)  # fmt: skip
    row |= {n: measure(n, programs[n], inputs) for n in CALLS if n != "pruned"}
    return row | dict(pruned=middle["pruned"], pruned_share=middle["pruned_share"])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shapes", type=options.words, default=options.shapes(TIMED), help="BxTxHxD,..."
    )
    parser.add_argument(
        "--gates", type=options.names(GATES), default="text", help="text, made-up or both"
    )
    parser.add_argument(
        "--train_steps",
        type=int,
        default=forget_gates.Training.steps,
        help="steps that train the FoX whose gates on text are timed",
    )
    parser.add_argument("--bias", type=float, default=2.0, help="b of made-up gates sigmoid(x + b)")
    parser.add_argument("--run", type=Path, help="a run of a trained FoX, in place of --shapes")
    parser.add_argument("--heads", type=int, default=24, help="heads of the calls with --run")
    parser.add_argument(
        "--save_gates",
        type=Path,
        metavar="FILE",
        help="with --run: an npz file for log gates [L, T, H]",
    )
    options.add_peers(parser, workers=2, patience=200)
    options.add_lock(parser)


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    if args.run is not None:
        return [dict(op=OP, shape=str(args.run), gates="recorded")]
    return [
        dict(op=OP, shape=shape, gates=gates) | (dict(bias=args.bias) if gates == "made-up" else {})
        for gates in args.gates
        for shape in args.shapes
    ]


def rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    if args.run is not None:
        yield measure_run(args.run, args.heads, args.save_gates)
        return
    shapes = list(dict.fromkeys(case["shape"] for case in cases))
    asked = [(OP, shape) for shape in shapes]
    peer = Fla(asked, bias=args.bias, **options.of_fla(args)) if args.peers else None
    training = forget_gates.Training(steps=args.train_steps)
    model_of = functools.cache(lambda dim: forget_gates.train_fox(dim, training))
    try:
        programs = compile_all(
            {(s, n): lower(call, s) for s in shapes for n, call in CALLS.items()}
        )
        for dim in {shape_of(case)[-1] for case in cases if case["gates"] == "text"}:
            model_of(dim)
        if peer is not None:
            peer.wait(args.patience)
        with alone(args.lock):
            for case in cases:
                row = dict(case)
                if case["gates"] == "text":
                    model, trained = model_of(shape_of(case)[-1])
                    inputs, mean = text_inputs(case["shape"], model, training)
                    row |= dict(mean_gate=round(mean, 4), trained=trained)
                else:
                    inputs = made_up_inputs(case["shape"], args.bias)
                row |= {
                    name: measure(name, programs[case["shape"], name], inputs) for name in CALLS
                }
                row["pruned_share"] = round(pruned_share(inputs), 4)
                if peer is not None:
                    row |= peer.times(OP, case["shape"])
                yield row
    finally:
        if peer is not None:
            peer.close()
