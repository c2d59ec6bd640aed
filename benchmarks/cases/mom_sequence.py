"""Time a Mixture-of-Memories layer on a row whose tokens are divided over devices.

    python -m benchmarks mom_sequence [--devices 1,2,4] [--documents 0,4096] [--length 65536]
    XLA_FLAGS=--xla_force_host_platform_device_count=4 python -m benchmarks mom_sequence --length 512 --width 64

A row for each number of devices (mesh axis "sequence"), documents and form, at the shapes of
`configs/mom.py:340m` (width 1,024, four heads of 256, four memories, two per token and a shared one): milliseconds of
a forward, and of a forward with its backward, of one row of `--length` tokens in all, medians of 7 batches of
`--calls` calls. Documents of `--documents` tokens are packed into the row; 0 is one document. `form` is the one that
ran: rows of several documents that devices share, and any row that GPUs share, run masked, whatever `--forms` says,
and have one row. `error` is the root mean square of the output's difference from the first case's of the same
documents, over that of the output. Inputs are random embeddings of text. Everything is compiled before anything is
timed; `--seconds` counts from then.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import os
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import options, text
from benchmarks.registry import Benchmark, UsageError
from benchmarks.run import log
from benchmarks.timing import batch_milliseconds
from lsm_jax import mixers, ops
from lsm_jax.parallel import MeshConfig, make_mesh, token_sharding

BENCHMARK = Benchmark(
    name="mom_sequence",
    summary="a Mixture-of-Memories layer on a row that devices share",
    key=("inner", "width", "length", "document", "devices", "form"),
    output="docs/mom_sequence.jsonl",
)
FORMS = ("packed", "masked")


def layer_config(args: argparse.Namespace, form: str) -> mixers.MoMConfig:
    """Return the config of the layer that is timed, in its form "packed" or "masked"."""
    config = mixers.MoMConfig.for_width(args.width)
    if args.inner != "gated_deltanet":
        config = dataclasses.replace(
            config, mixer=mixers.get_method(args.inner).config.for_width(args.width)
        )
    return dataclasses.replace(config, execution=form)


def compiled(case: dict[str, Any], args: argparse.Namespace, inputs: np.ndarray) -> tuple:
    """Compile the layer of a case; return (forward, forward with backward, parameters, x [1, T, D]), x with the
    values of `inputs`.
    """
    mesh = make_mesh(MeshConfig(data=1, sequence=case["devices"]), jax.devices()[: case["devices"]])
    length, document = case["length"], case["document"]
    ids = None
    if document:
        ids = jnp.asarray(np.arange(length, dtype=np.int32)[None] // document + 1)
    config = layer_config(args, case["form"])

    def make():
        return mixers.build(config, case["width"], rngs=nnx.Rngs(0))

    graph = nnx.graphdef(nnx.eval_shape(make))

    def forward(params, x):
        layer = nnx.merge(graph, params)
        return layer(x, segment_ids=ids, contiguous=True)[0]

    def loss(params, x):
        return jnp.sum(forward(params, x).astype(jnp.float32) ** 2)

    with jax.set_mesh(mesh):
        replicated = NamedSharding(mesh, PartitionSpec())
        params = jax.jit(lambda: nnx.state(make(), nnx.Param), out_shardings=replicated)()
        x = jax.device_put(jnp.asarray(inputs, args.dtype), token_sharding(mesh))
        both = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        lowered = jax.jit(forward).lower(params, x), both.lower(params, x)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        programs = pool.map(lambda program: program.compile(), lowered)
    return *programs, params, x


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--devices", type=options.integers, default="1,2,4")
    parser.add_argument(
        "--documents", type=options.integers, default="0,4096", help="tokens of a document; 0: one"
    )
    parser.add_argument("--forms", type=options.names(FORMS), default="packed,masked")
    parser.add_argument("--length", type=int, default=65536, help="tokens of the row")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--inner", default="gated_deltanet", help="method of the inner mixer")
    parser.add_argument("--dtype", default="bfloat16", help="of the layer's input")
    parser.add_argument("--calls", type=int, default=10, help="calls in a batch")
    parser.add_argument("--max_bytes", type=int, default=12_000_000, help="bytes of text to read")
    options.add_seconds(
        parser,
        600,
        "time of all cases once they are compiled; what is not begun by then has no row",
    )


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    fields = dict(inner=args.inner, width=args.width, length=args.length)
    on_cards = jax.default_backend() != "cpu"
    return [
        fields | dict(document=document, devices=devices, form=form)
        for document in args.documents
        for devices in args.devices
        for form in (["masked"] if devices > 1 and (document or on_cards) else args.forms)
    ]


def rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    most, began = len(jax.devices()), time.perf_counter()
    if max(args.devices) > most:
        raise UsageError(
            f"--devices {max(args.devices)}: this machine has {most}; without accelerators set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={max(args.devices)}"
        )
    if uneven := [n for n in args.devices if n < 1 or args.length % n]:
        raise UsageError(
            f"--devices {uneven[0]}: accepted are numbers that divide --length {args.length}"
        )
    inputs = text.activations(1, args.length, args.width, max_bytes=args.max_bytes)
    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        built = list(pool.map(lambda case: compiled(case, args, inputs), cases))
    log(f"compiled in {time.perf_counter() - began:.0f} s")
    began = time.perf_counter()
    outputs: dict[int, np.ndarray] = {}
    for case, (forward, both, params, x) in zip(cases, built, strict=True):
        if time.perf_counter() - began > args.seconds:
            log(
                f"{case}: not timed, the {args.seconds:g} seconds after compiling are over; a larger --seconds times it"
            )
            continue
        y = np.asarray(forward(params, x), np.float32)
        expected = outputs.setdefault(case["document"], y)
        error = float(np.sqrt(np.mean((y - expected) ** 2) / np.mean(expected**2)))
        yield case | dict(
            forward_ms=round(batch_milliseconds(forward, params, x, calls=args.calls), 3),
            training_ms=round(batch_milliseconds(both, params, x, calls=args.calls), 3),
            error=float(f"{error:.2e}"), dtype=args.dtype, inputs="text", implementations=ops.choices(),
        )  # fmt: skip
