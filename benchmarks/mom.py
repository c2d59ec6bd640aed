"""A Mixture-of-Memories layer beside its inner mixer at as many tokens: `python -m benchmarks.mom [--lengths 2048,16384]`.

At the shapes of `configs/mom.py:340m` (width 1,024, four heads of 256, four memories, two a token and a shared one), bfloat16,
prints milliseconds of a forward and of a forward with its backward, medians of 7 batches of 10 calls: MoM in each form at T tokens
a row, the inner mixer at (k + 1) T, and the one over the other. `--peers fla` times the layer of flash-linear-attention in the same
run ("fla": forward, training), where PyTorch and it are installed; everything is compiled before anything is timed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch wants room

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.fla import Fla
from benchmarks.timing import alone, append_row, batch_milliseconds, provenance
from lsm_jax import mixers, ops


def parameters(config, width: int) -> tuple:
    """The layer's graph and parameters."""
    make = lambda: mixers.build(config, width, rngs=nnx.Rngs(0))  # noqa: E731
    return nnx.graphdef(nnx.eval_shape(make)), jax.jit(lambda: nnx.state(make(), nnx.Param))()


def programs(graph, params, tokens: jax.ShapeDtypeStruct) -> tuple:
    """The layer's forward, and its forward with backward, lowered."""

    def forward(params, x):
        return nnx.merge(graph, params)(x)[0]

    def loss(params, x):
        return jnp.sum(forward(params, x).astype(jnp.float32) ** 2)

    both = jax.jit(jax.grad(loss, argnums=(0, 1)))
    return jax.jit(forward).lower(params, tokens), both.lower(params, tokens)


def measure(args, length: int, rows: int, kinds: dict, layers: dict, built: dict) -> dict:
    """The row of a length: each kind's milliseconds, and over the inner mixer's."""
    found: dict[str, Any] = dict(inner=args.inner, width=args.width, rows=rows, length=length)
    for kind, (_, times) in kinds.items():
        _, params = layers[kind]
        forward, both = built[length, kind]
        x = jax.random.normal(jax.random.key(0), (rows, times * length, args.width))
        x = x.astype(jnp.bfloat16)
        found[kind] = dict(
            forward_ms=round(batch_milliseconds(forward, params, x, calls=args.calls), 4),
            training_ms=round(batch_milliseconds(both, params, x, calls=args.calls), 4),
        )
        if kind != "inner_mixer":
            found[kind] |= {
                f"{name[:-3]}_over_inner": round(found[kind][name] / value, 3)
                for name, value in found["inner_mixer"].items()
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="2048,4096,8192,16384")
    parser.add_argument("--tokens", type=int, default=16384, help="of all rows together")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--inner", default="gated_deltanet")
    parser.add_argument("--forms", default="packed,masked")
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--peers", default="", help="fla")
    parser.add_argument(
        "--workers", type=int, default=12, help="processes that compile for the peer"
    )
    parser.add_argument("--patience", type=float, default=300, help="seconds that they may take")
    parser.add_argument(
        "--lock",
        type=Path,
        help="a file, for processes on one device: all compile before one times",
    )
    parser.add_argument("--output", type=Path, help="append the rows as JSON lines")
    args = parser.parse_args()
    if args.peers and (args.width, args.inner) != (1024, "gated_deltanet"):
        parser.error("--peers has a layer of width 1024 around gated_deltanet alone")
    config = mixers.MoMConfig.for_width(args.width)
    if args.inner != "gated_deltanet":
        inner = mixers.get_method(args.inner).config.for_width(args.width)
        config = dataclasses.replace(config, mixer=inner)
    more = config.top_k + config.shared_memory
    lengths = [int(n) for n in args.lengths.split(",")]
    rows = {length: max(1, args.tokens // length) for length in lengths}
    began = time.perf_counter()
    cases = [("mom", f"{rows[n]}x{n}") for n in lengths]
    peer = Fla(cases, args.workers) if "fla" in args.peers else None
    forms = args.forms.split(",")
    kinds = {"inner_mixer": (config.mixer, more)} | {
        form: (dataclasses.replace(config, execution=form), 1) for form in forms
    }
    with alone(args.lock, shared=True):
        layers = {kind: parameters(own, args.width) for kind, (own, _) in kinds.items()}
        built: dict[tuple, list] = {}
        with concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
            for length in lengths:
                for kind, (_, times) in kinds.items():
                    shape = (rows[length], times * length, args.width)
                    graph, params = layers[kind]
                    pair = programs(graph, params, jax.ShapeDtypeStruct(shape, jnp.bfloat16))
                    built[length, kind] = [pool.submit(program.compile) for program in pair]
        built = {case: [future.result() for future in pair] for case, pair in built.items()}
        print(f"compiled after {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    if peer is not None:
        peer.wait(args.patience)
    with alone(args.lock):
        for length, case in zip(lengths, cases, strict=True):
            found = measure(args, length, rows[length], kinds, layers, built)
            if peer is not None:
                found |= peer.times(*case)
            print(json.dumps(found), flush=True)
            if args.output:
                append_row(args.output, found | dict(implementations=ops.choices()) | provenance())
    if peer is not None:
        peer.close()
    print(json.dumps(ops.choices()), flush=True)


if __name__ == "__main__":
    main()
