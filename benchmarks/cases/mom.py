"""Time a Mixture-of-Memories layer, and its inner mixer on the same number of tokens.

    python -m benchmarks mom [--lengths 2048,16384] [--peers fla]

A row for each length, at the shapes of `configs/mom.py:340m` (width 1,024, four heads of 256, four memories,
two per token and a shared one) in bfloat16: milliseconds of a forward and of a forward with its backward,
medians of 7 batches of 10 calls, of MoM in each form on T tokens per row, of the inner mixer on (k + 1) T
tokens, and their ratio. Inputs are random embeddings of text, also the peer's (rows without `inputs` had
random ones). The peer's "fla" is [ms forward, ms training] of flash-linear-attention's layer.
Everything is compiled before anything is timed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory too

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks import options, text
from benchmarks.peers.fla import Fla
from benchmarks.registry import Benchmark, UsageError
from benchmarks.run import log, require_gpu
from benchmarks.timing import alone, batch_milliseconds
from lsm_jax import mixers, ops

BENCHMARK = Benchmark(
    name="mom",
    summary="a Mixture-of-Memories layer beside its inner mixer and a peer",
    key=("inner", "width", "rows", "length"),
    output="docs/mom.jsonl",
)


def parameters(config, width: int) -> tuple:
    """Return the graph definition and the random parameters of the layer of a Mixture-of-Memories, or of
    its inner mixer, at width `width`.
    """
    make = lambda: mixers.build(config, width, rngs=nnx.Rngs(0))  # noqa: E731
    return nnx.graphdef(nnx.eval_shape(make)), jax.jit(lambda: nnx.state(make(), nnx.Param))()


def programs(graph, params, tokens: jax.ShapeDtypeStruct) -> tuple:
    """Return two lowered programs of the mixer layer with the definition `graph` and the parameters `params`,
    on an input x [B, T, D] of the shape and dtype of `tokens`: forward, and forward and backward.
    """

    def forward(params, x):
        return nnx.merge(graph, params)(x)[0]

    def loss(params, x):
        return jnp.sum(forward(params, x).astype(jnp.float32) ** 2)

    both = jax.jit(jax.grad(loss, argnums=(0, 1)))
    return jax.jit(forward).lower(params, tokens), both.lower(params, tokens)


def measure(case: dict, kinds: dict, layers: dict, built: dict, calls: int) -> dict[str, Any]:
    """Return the benchmark's row for one length: the milliseconds of each kind of layer, and their ratio to
    those of the inner mixer alone.
    """
    row, length = case | dict(inputs="text"), case["length"]
    for kind, (_, times) in kinds.items():
        _, params = layers[kind]
        forward, both = built[length, kind]
        x = text.activations(case["rows"], times * length, case["width"])
        x = jnp.asarray(x, jnp.bfloat16)
        row[kind] = dict(
            forward_ms=round(batch_milliseconds(forward, params, x, calls=calls), 4),
            training_ms=round(batch_milliseconds(both, params, x, calls=calls), 4),
        )
        if kind != "inner_mixer":
            row[kind] |= {
                f"{name[:-3]}_over_inner": round(row[kind][name] / value, 3)
                for name, value in row["inner_mixer"].items()
            }
    return row


def compile_all(
    lengths: dict[int, int], kinds: dict, layers: dict, width: int
) -> dict[tuple[int, str], list]:
    """Compile in parallel the forward, and the forward and backward program of each (length, kind of
    layer); `lengths` maps a length in tokens to the number of rows.
    """
    futures: dict[tuple, list] = {}
    with concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for length, rows in lengths.items():
            for kind, (_, times) in kinds.items():
                shape = (rows, times * length, width)
                graph, params = layers[kind]
                pair = programs(graph, params, jax.ShapeDtypeStruct(shape, jnp.bfloat16))
                futures[length, kind] = [pool.submit(program.compile) for program in pair]
    return {case: [future.result() for future in pair] for case, pair in futures.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", type=options.integers, default="2048,4096,8192,16384")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of all rows together")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--inner", default="gated_deltanet", help="method of the inner mixer")
    parser.add_argument(
        "--forms", type=options.names(("packed", "masked")), default="packed,masked"
    )
    parser.add_argument("--calls", type=int, default=10, help="calls in a batch")
    options.add_peers(parser)
    options.add_lock(parser)


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [
        dict(inner=args.inner, width=args.width, rows=max(1, args.tokens // length), length=length)
        for length in args.lengths
    ]


def rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    if args.peers and (args.width, args.inner) != (1024, "gated_deltanet"):
        raise UsageError("--peers fla has only a layer of width 1024 around gated_deltanet")
    if args.peers:
        require_gpu("--peers fla")
    config = mixers.MoMConfig.for_width(args.width)
    if args.inner != "gated_deltanet":
        inner = mixers.get_method(args.inner).config.for_width(args.width)
        config = dataclasses.replace(config, mixer=inner)
    more = config.top_k + config.shared_memory
    lengths = {case["length"]: case["rows"] for case in cases}
    asked = [("mom", f"{rows}x{length}") for length, rows in lengths.items()]
    peer = Fla(asked, **options.of_fla(args)) if args.peers else None
    kinds = {"inner_mixer": (config.mixer, more)} | {
        form: (dataclasses.replace(config, execution=form), 1) for form in args.forms
    }
    try:
        with alone(args.lock, shared=True):
            layers = {kind: parameters(config, args.width) for kind, (config, _) in kinds.items()}
            built = compile_all(lengths, kinds, layers, args.width)
            log("compiled")
        if peer is not None:
            peer.wait(args.patience)
        with alone(args.lock):
            for case, asked_case in zip(cases, asked, strict=True):
                row = measure(case, kinds, layers, built, args.calls)
                if peer is not None:
                    row |= peer.times(*asked_case)
                yield row | dict(implementations=ops.choices())
    finally:
        if peer is not None:
            peer.close()
