"""Speed of the fused kernels: `python -m benchmarks.kernels [--peers jla,fla] [--shapes 8x4096x16x128] [--output FILE.jsonl]`.

A row an op and shape (B x T x H x D, bfloat16): milliseconds forward / forward and backward of the kernel, of the XLA form with
`--xla`, and of the peers that are installed (jax-linear-attention; flash-linear-attention under PyTorch), in one run on one card.
Medians of 7 batches of 20 calls; the peers' decay is a projection's too, so its gradient counts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch wants room

import jax
import jax.numpy as jnp

from benchmarks.timing import append_row, batch_milliseconds, provenance
from lsm_jax import ops

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
)
SHAPES = (
    "8x4096x16x128", "2x16384x16x128", "4x2048x16x128", "4x4096x64x128", "8x2048x32x256", "8x1024x8x64",
    "1x8192x96x128",
)  # fmt: skip
_FLA = """
import json, sys, torch
from triton.testing import do_bench
import fla.ops.common.chunk_o as chunk_o
chunk_o.TRITON_ABOVE_3_7_1 = True  # it refuses one backward under older Triton, which gets it wrong; for speed alone, run it
from fla.ops.linear_attn import chunk_linear_attn
from fla.ops.retention import chunk_retention
from fla.ops.simple_gla import chunk_simple_gla
from fla.ops.gla import chunk_gla
from fla.ops.rwkv6 import chunk_rwkv6
from fla.ops.delta_rule import chunk_delta_rule
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.kda import chunk_kda
from fla.ops.rwkv7 import chunk_rwkv7
calls = {"no decay": lambda q, k, v, g: chunk_linear_attn(q, k, v, normalize=False),
         "constant decay": lambda q, k, v, g: chunk_retention(q, k, v),
         "scalar decay": lambda q, k, v, g: chunk_simple_gla(q, k, v, g),
         "key decay": lambda q, k, v, g: chunk_gla(q, k, v, g),
         "key decay and bonus": lambda q, k, v, g, u: chunk_rwkv6(q, k, v, g, u),
         "delta rule": lambda q, k, v, b: chunk_delta_rule(q, k, v, b),
         "gated delta rule": lambda q, k, v, b, g: chunk_gated_delta_rule(q, k, v, g, b),
         "kda": lambda q, k, v, b, g: chunk_kda(q, k, v, g, b),
         "rwkv7": lambda q, k, v, a, b, w: chunk_rwkv7(q, w, k, v, a, b)}
for op, shape in json.loads(sys.argv[1]):
    if op not in calls: continue
    B, T, H, D = map(int, shape.split("x"))
    x = [torch.randn(B, T, H, D, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    g = torch.nn.functional.logsigmoid(torch.randn(B, T, H, *[D] * ("key" in op or op == "kda"), device="cuda") + 3)
    inputs = [*x[:3], g]
    if "bonus" in op: inputs[3:] = [g.bfloat16(), torch.randn(H, D, device="cuda", dtype=torch.bfloat16)]
    if op == "rwkv7":
        a = -torch.nn.functional.normalize(x[1].float(), dim=-1).bfloat16()
        inputs[3:] = [a, -a * torch.rand_like(a), -0.6 * torch.rand_like(a)]
    if "delta" in op or op == "kda":
        inputs[1] = torch.nn.functional.normalize(x[1].float(), dim=-1).bfloat16()
        inputs[3:] = [torch.rand(B, T, H, device="cuda", dtype=torch.bfloat16), *inputs[3:] * (op != "delta rule")]
    for t in inputs: t.requires_grad_(True)
    def forward(): return calls[op](*inputs)[0]
    def both():
        for t in inputs: t.grad = None
        forward().backward(x[3])
    with torch.no_grad():
        first = do_bench(forward, warmup=50, rep=150, return_mode="median")
    print(json.dumps([op, shape, first, do_bench(both, warmup=50, rep=200, return_mode="median")]), flush=True)
"""


def make_inputs(op: str, shape: str) -> tuple[jax.Array, ...]:
    batch, length, heads, dim = map(int, shape.split("x"))
    keys = jax.random.split(jax.random.key(0), 6)
    q, k, v, do = (jax.random.normal(key, (batch, length, heads, dim), jnp.bfloat16) for key in keys[:4])  # fmt: skip
    unit = (k / jnp.linalg.norm(k.astype(jnp.float32), axis=-1, keepdims=True)).astype(k.dtype)
    if op == "kda":
        beta = jax.nn.sigmoid(jax.random.normal(keys[4], q.shape[:3]))
        return q, unit, v, do, beta, jax.nn.log_sigmoid(jax.random.normal(keys[5], q.shape) + 3)
    if op == "rwkv7":
        share, decay = jax.random.uniform(keys[4], (2, *q.shape))
        return q, k, v, do, -unit, unit * share.astype(k.dtype), -0.6 * decay
    if "delta" in op:
        beta, decay = jax.nn.sigmoid(jax.random.normal(keys[4], (2, batch, length, heads)))
        return q, unit, v, do, beta, *[jnp.log(0.9 + 0.1 * decay)] * ("gated" in op)
    if any(kind in op for kind in ("scalar", "key", "value")):
        size = (batch, length, heads) if "scalar" in op else q.shape
        decay = jax.nn.log_sigmoid(jax.random.normal(keys[4], size) + 3)
        bonus = [jax.random.normal(keys[5], (heads, dim))] if "bonus" in op else []
        return q, k, v, do, decay, *bonus
    return q, k, v, do


def ours(op: str, implementation: str):
    if op == "rwkv7":
        return lambda *inputs: ops.dplr_memory(*inputs, implementation=implementation)[0]
    if "delta" in op or op == "kda":
        return lambda *inputs: ops.delta_memory(*inputs, implementation=implementation)[0]

    def call(q, k, v, *decay):
        if op == "constant decay":
            decay = (jnp.log1p(-(2.0 ** (-5 - jnp.arange(q.shape[2])))),)
        decay, bonus = (*decay, None, None)[:2]
        given = {"value_log_decay" if op == "value decay" else "log_decay": decay}
        return ops.linear_memory(q, k, v, bonus=bonus, implementation=implementation, **given)[0]

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


def measure(call, inputs) -> tuple[float, float]:
    q, k, v, do, *decay = inputs

    def both(do, *inputs):
        output, pull = jax.vjp(call, *inputs)
        return output, pull(do)

    first = batch_milliseconds(jax.jit(call), q, k, v, *decay)
    return first, batch_milliseconds(jax.jit(both), do, q, k, v, *decay)


def measure_fla(cases: list[tuple[str, str]]) -> dict[tuple[str, str], tuple[float, float]]:
    """The peer in PyTorch, in a process of its own."""
    command = [sys.executable, "-c", _FLA, json.dumps(cases)]
    lines = subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("[")]
    return {(op, shape): (first, both) for op, shape, first, both in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--peers", default="", help="jla, fla")
    parser.add_argument("--xla", action="store_true", help="time the XLA form too")
    parser.add_argument("--output", type=Path, help="append the rows as JSON lines")
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        sys.exit("benchmarks.kernels: the kernels run on an NVIDIA Hopper GPU; none is here")
    cases = [(op, shape) for shape in args.shapes.split(",") for op in args.ops.split(",")]
    rows = []
    for op, shape in cases:
        inputs = make_inputs(op, shape)
        row: dict = {"op": op, "shape": shape}
        try:
            row["kernel"] = measure(ours(op, "mosaic_gpu"), inputs)
        except NotImplementedError as error:
            print(error)
        if args.xla:
            row["xla"] = measure(ours(op, "xla"), inputs)
        if "jla" in args.peers and (peer := jla(op)):
            row["jla"] = measure(peer, inputs)
        rows.append(row)
        print(_line(row), flush=True)
        if "fla" not in args.peers:
            _write(args.output, row)
    if "fla" in args.peers:
        del inputs
        found = measure_fla(cases)
        for row in rows:
            if (row["op"], row["shape"]) in found:
                row["fla"] = found[row["op"], row["shape"]]
                print(_line(row), flush=True)
            _write(args.output, row)


def _write(path: Path | None, row: dict) -> None:
    if path is not None:
        append_row(path, row | provenance())


def _line(row) -> str:
    names = [n for n in ("kernel", "jla", "fla", "xla") if n in row]
    times = "   ".join(f"{n} {row[n][0]:.3f} / {row[n][1]:.3f}" for n in names)
    return f"{row['op']:16s} {row['shape']:16s} {times} ms"


if __name__ == "__main__":
    main()
