"""Speed of forgetting attention: `python -m benchmarks.attention [--shapes 1x16384x16x128] [--peers fla] [--output FILE.jsonl]`.

A row a shape (B x T x H x D, bfloat16): milliseconds forward / forward and backward of the fused kernel without pruning and with it,
of causal softmax attention without gates in cuDNN, and of flash-linear-attention's kernel where PyTorch and it are installed, all in
one run on one card. What pruning spares depends on the gates: here sigmoid(x + b) of normal x, the same for all heads, with b for a
mean of about 0.87 (`--bias 2`, the default) or as asked. `--run DIR` takes queries, keys and gates of a trained FoX instead: of each of
its layers on a held-out row, heads repeated up to `--heads`; the layer of the median time stands for it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch wants room

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.fla import Fla
from benchmarks.timing import alone, append_row, batch_milliseconds, provenance
from pallas_kernels.forgetting_attention import forgetting_attention
from pallas_kernels.forgetting_attention.bounds import Rows, find_bounds

SHAPES = ",".join(
    f"{batch}x{length}x{form}"
    for form in ("24x64", "16x128")
    for batch, length in ((8, 2048), (4, 4096), (2, 8192), (1, 16384), (1, 32768), (1, 65536))
)
_TILE, _BATCH_MS = 128, 60


def split_sums(gates: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Sums of log gates [B, T, H] along T as the kernel takes them, a high and a low part."""
    exact = np.cumsum(gates.astype(np.float64), axis=1)
    high = exact.astype(np.float32)
    return jnp.asarray(high), jnp.asarray(exact - high, jnp.float32)


def make_inputs(shape: str, bias: float) -> tuple[jax.Array, ...]:
    """q, k, v, the output's gradient, and the sums of log gates in two parts."""
    batch, length, heads, dim = map(int, shape.split("x"))
    rng = np.random.default_rng(0)
    gates = -np.logaddexp(0, -(rng.normal(size=(batch, length, heads)) + bias))
    keys = jax.random.split(jax.random.key(0), 4)
    normal = (jax.random.normal(key, (batch, length, heads, dim), jnp.bfloat16) for key in keys)
    return *normal, *split_sums(gates)


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
    """Forward, and forward and backward, of (q, k, v, the output's gradient, sums)."""
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


def compiled(cases: dict) -> dict:
    """All programs of all cases, side by side."""
    with concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        futures = {case: [pool.submit(p.compile) for p in pair] for case, pair in cases.items()}
        return {case: [future.result() for future in pair] for case, pair in futures.items()}


def calls_of(program, inputs) -> int:
    """20, or as many as take 60 ms."""
    jax.block_until_ready(program(*inputs))
    began = time.perf_counter()
    jax.block_until_ready(program(*inputs))
    return max(1, min(20, round(_BATCH_MS / (1e3 * (time.perf_counter() - began)))))


def measure(name: str, pair: list, inputs: tuple) -> list[float]:
    """Milliseconds of both programs of a call."""
    given = inputs[:4] if CALLS[name] is cudnn else inputs
    times = (batch_milliseconds(p, *given, calls=calls_of(p, given)) for p in pair)
    return [round(ms, 4) for ms in times]


def pruned_share(inputs: tuple) -> float:
    """The part of the causal tiles of queries and keys that is passed over."""
    q, k, _, _, *sums = inputs
    gates = tuple(jnp.swapaxes(x, 1, 2) for x in sums)
    options = dict(scale=q.shape[-1] ** -0.5, window=None, prune=True, tile_size=_TILE)
    first = jax.jit(lambda q, k, gates: find_bounds(q, k, Rows(gates, None), **options).first)
    found = np.asarray(first(q, k, gates))
    count = found.shape[-1]
    return float(found.mean() / ((count + 1) / 2))


def recorded(run_folder: Path, heads: int):
    """(layer, inputs, its log gates [T, H]) of each layer of a trained FoX on a held-out row."""
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
        more = -(-heads // gates.shape[2])
        q, k = (jnp.tile(inputs[n].astype(jnp.bfloat16), (1, 1, more, 1))[:, :, :heads] for n in "qk")  # fmt: skip
        v, do = jax.random.normal(jax.random.key(layer), (2, *q.shape), jnp.bfloat16)
        sums = split_sums(np.tile(gates, (1, 1, more))[:, :, :heads])
        yield layer, (q, k, v, do, *sums), gates[0]


def measure_run(run_folder: Path, heads: int, save: Path | None) -> dict:
    """A row of a trained model's gates."""
    layers, programs, kept, inputs, shape = [], {}, [], (), ""
    for layer, inputs, gates in recorded(run_folder, heads):
        if not programs:
            shape = "x".join(map(str, inputs[0].shape))
            programs = compiled({name: lower(call, shape) for name, call in CALLS.items()})
        kept.append(gates)
        found = dict(
            layer=layer,
            pruned_share=round(pruned_share(inputs), 4),
            mean_gate=round(float(np.exp(gates).mean()), 4),
            pruned=measure("pruned", programs["pruned"], inputs),
        )
        print(json.dumps(found), flush=True)
        layers.append(found)
    if save is not None:
        np.savez_compressed(save, log_forget=np.stack(kept).astype(np.float16))
    middle = sorted(layers, key=lambda found: found["pruned"][1])[len(layers) // 2]
    row = dict(op="forgetting attention", shape=shape, gates="recorded", median_layer=middle["layer"], layers=layers)  # fmt: skip
    row |= {n: measure(n, programs[n], inputs) for n in CALLS if n != "pruned"}
    return row | dict(pruned=middle["pruned"], pruned_share=middle["pruned_share"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--bias", type=float, default=2.0)
    parser.add_argument("--peers", default="", help="fla")
    parser.add_argument("--patience", type=float, default=200, help="seconds the peer may compile")
    parser.add_argument("--run", type=Path, help="a trained FoX, in place of shapes")
    parser.add_argument("--heads", type=int, default=24, help="with --run")
    parser.add_argument("--save_gates", type=Path, help="with --run: log gates [L, T, H], npz")
    parser.add_argument("--lock", type=Path, help="a file whose holder alone uses the card")
    parser.add_argument("--output", type=Path, help="append the rows as JSON lines")
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        sys.exit("benchmarks.attention: the kernel runs on an NVIDIA Hopper GPU; none is here")

    def write(row):
        print(json.dumps(row), flush=True)
        if args.output:
            append_row(args.output, row | provenance())

    if args.run is not None:
        write(measure_run(args.run, args.heads, args.save_gates))
        return
    shapes = args.shapes.split(",")
    cases = [("forgetting attention", shape) for shape in shapes]
    peer = Fla(cases, 2, args.bias) if "fla" in args.peers else None
    programs = compiled({(s, n): lower(call, s) for s in shapes for n, call in CALLS.items()})
    if peer is not None:
        peer.wait(args.patience)
    with alone(args.lock):
        for op, shape in cases:
            inputs = make_inputs(shape, args.bias)
            row = {"op": op, "shape": shape, "bias": args.bias}
            row |= {name: measure(name, programs[shape, name], inputs) for name in CALLS}
            row["pruned_share"] = round(pruned_share(inputs), 4)
            if peer is not None:
                row |= peer.times(op, shape)
            write(row)
    if peer is not None:
        peer.close()


if __name__ == "__main__":
    main()
