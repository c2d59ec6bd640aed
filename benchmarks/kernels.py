"""Speed of the fused kernels: `python -m benchmarks.kernels [--peers jla,fla] [--shapes 8x4096x16x128] [--segments 8] [--output FILE.jsonl]`.

A row an op and shape (B x T x H x D, bfloat16): milliseconds forward / forward and backward of the kernel, of the XLA form with
`--xla`, and of the peers that are installed (jax-linear-attention; flash-linear-attention under PyTorch, see `benchmarks.fla`), in
one run on one card, one after the other. Medians of 7 batches of 20 calls; the peers' decay is a projection's too, so its gradient
counts. All programs are compiled before any is timed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch wants room

import jax
import jax.numpy as jnp

from benchmarks.fla import Fla
from benchmarks.timing import alone, append_row, batch_milliseconds, provenance
from lsm_jax import ops
from pallas_kernels.hopper import parts as hopper_parts

KINDS = {"kernel": "mosaic_gpu", "xla": "xla"}
OPS = (
    "no decay",
    "constant decay",
    "scalar decay",
    "key decay",
    "key decay and bonus",
    "value decay",
    "delta rule",
    "gated delta rule",
    "kda",
    "rwkv7",
    "slot memory",
)
SHAPES = (
    "8x4096x16x128", "2x16384x16x128", "4x2048x16x128", "4x4096x64x128", "8x2048x32x256", "8x1024x8x64",
    "1x8192x96x128",
)  # fmt: skip


def make_inputs(op: str, shape: str, stronger: float = 1.0) -> tuple[jax.Array, ...]:
    """q, k, v, the output's gradient and the op's gates, with log decays `stronger` times as large."""
    batch, length, heads, dim = map(int, shape.split("x"))
    keys = jax.random.split(jax.random.key(0), 6)
    q, k, v, do = (jax.random.normal(key, (batch, length, heads, dim), jnp.bfloat16) for key in keys[:4])  # fmt: skip
    unit = (k / jnp.linalg.norm(k.astype(jnp.float32), axis=-1, keepdims=True)).astype(k.dtype)
    if op == "kda":
        beta = jax.nn.sigmoid(jax.random.normal(keys[4], q.shape[:3]))
        decay = jax.nn.log_sigmoid(jax.random.normal(keys[5], q.shape) + 3)
        return q, unit, v, do, beta, decay * stronger
    if op == "rwkv7":
        share, decay = jax.random.uniform(keys[4], (2, *q.shape))
        return q, k, v, do, -unit, unit * share.astype(k.dtype), -0.6 * decay * stronger
    if op == "slot memory":  # of 64 slots
        decay = jax.nn.log_sigmoid(jax.random.normal(keys[4], (*q.shape[:3], 64))) / 8
        return q, k, v, do, -jnp.expm1(decay).astype(k.dtype), decay * stronger
    if "delta" in op:
        beta, decay = jax.nn.sigmoid(jax.random.normal(keys[4], (2, batch, length, heads)))
        return q, unit, v, do, beta, *[jnp.log(0.9 + 0.1 * decay) * stronger] * ("gated" in op)
    if any(kind in op for kind in ("scalar", "key", "value")):
        size = (batch, length, heads) if "scalar" in op else q.shape
        decay = jax.nn.log_sigmoid(jax.random.normal(keys[4], size) + 3)
        bonus = [jax.random.normal(keys[5], (heads, dim))] if "bonus" in op else []
        return q, k, v, do, decay * stronger, *bonus
    return q, k, v, do


def ours(op: str, implementation: str, segments: int = 0):
    """The op; with `segments`, of as many documents a row, each with a state of its own in and out."""

    def rest(empty, q) -> dict[str, Any]:
        if not segments:
            return dict(implementation=implementation)
        batch, length, heads, dim = q.shape
        ids = jnp.broadcast_to(1 + jnp.arange(length) * segments // length, (batch, length))
        state = empty(batch, heads, dim, dim, num_segments=segments)
        return dict(implementation=implementation, segment_ids=ids, initial_state=state)

    if op == "slot memory":
        slots: Any = lambda *sizes, **more: ops.slot_state(*sizes[:2], 64, *sizes[2:], **more)  # noqa: E731
        return lambda q, *x: ops.slot_memory(q, *x, **rest(slots, q))[0]
    if op == "rwkv7":
        return lambda q, *x: ops.dplr_memory(q, *x, **rest(ops.delta_state, q))[0]
    if "delta" in op or op == "kda":
        return lambda q, *x: ops.delta_memory(q, *x, **rest(ops.delta_state, q))[0]

    def call(q, k, v, *decay):
        if op == "constant decay":
            decay = (jnp.log1p(-(2.0 ** (-5 - jnp.arange(q.shape[2])))),)
        decay, bonus = (*decay, None, None)[:2]
        given: dict[str, Any] = {"value_log_decay" if op == "value decay" else "log_decay": decay}
        given |= rest(ops.linear_state, q)
        return ops.linear_memory(q, k, v, bonus=bonus, **given)[0]

    return call


def jla(op: str):
    from jla import ops as peer  # pyrefly: ignore[missing-import]

    kind, *names = {
        "scalar decay": ("simple_gla", "g"),
        "key decay": ("gla", "g"),
        "delta rule": ("deltanet", "beta"),
        "gated delta rule": ("gated_deltanet", "beta", "g"),
        "kda": ("kda", "beta", "g"),
    }.get(op, (None,))
    if kind is None:
        return None

    def call(q, k, v, *gates):
        gates = dict(zip(names, gates, strict=True))
        return peer.linear_attention(kind, q, k, v, impl="mosaic_gpu", **gates)[0]

    return call


def programs_of(call, inputs: tuple[jax.ShapeDtypeStruct, ...]) -> list:
    """Forward, and forward and backward with gradients of every input, of (the output's gradient, inputs); lowered."""

    def forward(do, *inputs):
        return call(*inputs)

    def both(do, *inputs):
        output, pull = jax.vjp(call, *inputs)
        return output, pull(do)

    q, k, v, do, *gates = inputs
    return [jax.jit(f).lower(do, q, k, v, *gates) for f in (forward, both)]


def compiled(cases: list[tuple[str, str]], kinds: list[str], segments: int = 0) -> dict:
    """(op, shape, kind) to both programs or what kept them from being built; all are compiled side by side."""
    found: dict = {}
    with concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for op, shape in cases:
            inputs = jax.eval_shape(functools.partial(make_inputs, op, shape))
            for kind in kinds:
                try:
                    call = jla(op) if kind == "jla" else ours(op, KINDS[kind], segments)
                    if call is None:
                        continue
                    lowered = programs_of(call, inputs)
                    found[op, shape, kind] = [pool.submit(p.compile) for p in lowered]
                except Exception as error:  # a peer's reason, or the kernel's
                    found[op, shape, kind] = error
        for case, pair in found.items():
            try:
                found[case] = pair if isinstance(pair, Exception) else [p.result() for p in pair]
            except Exception as error:
                found[case] = error
    return found


def measure(pair, inputs) -> list[float]:
    """Milliseconds of both programs."""
    q, k, v, do, *gates = inputs
    return [round(batch_milliseconds(p, do, q, k, v, *gates), 4) for p in pair]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--peers", default="", help="jla, fla")
    parser.add_argument("--xla", action="store_true", help="time the XLA form too")
    parser.add_argument(
        "--workers", type=int, default=12, help="processes that compile FLA's kernels"
    )
    parser.add_argument("--patience", type=float, default=300, help="seconds that they may take")
    parser.add_argument(
        "--parts",
        type=int,
        help="parts of a long row in the delta rules' kernels, in place of their rule's",
    )
    parser.add_argument(
        "--segments", type=int, default=0, help="documents a row, each with a state in and out"
    )
    parser.add_argument(
        "--stronger", type=float, default=1.0, help="multiply the log decays, for all but FLA"
    )
    parser.add_argument(
        "--lock", type=Path, help="a file, for processes on one card: all compile before one times"
    )
    parser.add_argument("--output", type=Path, help="append the rows as JSON lines")
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        sys.exit("benchmarks.kernels: the kernels run on an NVIDIA Hopper GPU; none is here")
    if args.parts is not None:
        hopper_parts.count_parts = lambda q, k, v: args.parts
    cases = [(op, shape) for shape in args.shapes.split(",") for op in args.ops.split(",")]
    kinds = ["kernel", *["xla"] * args.xla, *["jla"] * ("jla" in args.peers)]
    peer = Fla(cases, args.workers) if "fla" in args.peers else None
    with alone(args.lock, shared=True):
        programs = compiled(cases, kinds, args.segments)
        if peer is not None:
            peer.wait(args.patience)
    with alone(args.lock):
        for op, shape in cases:
            row: dict = {"op": op, "shape": shape}
            if args.parts is not None:
                row["parts"] = args.parts
            if args.segments:
                row["segments"] = args.segments
            if args.stronger != 1:
                row["stronger"] = args.stronger
            inputs = make_inputs(op, shape, args.stronger)
            for kind in kinds:
                pair = programs.pop((op, shape, kind), None)
                try:
                    if isinstance(pair, Exception):
                        raise pair
                    if pair is not None:
                        row[kind] = measure(pair, inputs)
                except Exception as error:  # one kind's; the others stand
                    row[f"{kind}_error"] = f"{type(error).__name__}: {error}"[:300]
            del inputs, pair
            if peer is not None:
                row |= peer.times(op, shape)
            print(_line(row), flush=True)
            if args.output is not None:
                append_row(args.output, row | provenance())
    if peer is not None:
        peer.close()


def _line(row) -> str:
    names = [n for n in ("kernel", "jla", "fla", "xla") if n in row]
    times = "   ".join(f"{n} {row[n][0]:.3f} / {row[n][1]:.3f}" for n in names)
    errors = "".join(f"   {k}: {v[:100]}" for k, v in row.items() if k.endswith("_error"))
    return f"{row['op']:16s} {row['shape']:16s} {times} ms{errors}"


if __name__ == "__main__":
    main()
