"""Speed of forgetting attention: `python -m benchmarks.attention [--shapes 1x16384x16x128] [--output FILE.jsonl]`.

A row a shape (B x T x H x D, bfloat16): milliseconds forward / forward and backward of the fused kernel without pruning and with it,
and of causal softmax attention without gates in cuDNN. What pruning spares depends on the gates: here sigmoid(x + b) of normal x,
the same for all heads, with b for a mean of about 0.87 (`--bias 2`, the default) or as asked.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels import measure
from benchmarks.timing import provenance
from pallas_kernels.forgetting_attention import forgetting_attention

SHAPES = ("1x16384x24x64", "1x16384x16x128")


def make_inputs(shape: str, bias: float) -> tuple[jax.Array, ...]:
    """q, k, v, the output's gradient, and the sums of log gates in two parts."""
    batch, length, heads, dim = map(int, shape.split("x"))
    rng = np.random.default_rng(0)
    gates = -np.logaddexp(0, -(rng.normal(size=(batch, length, heads)) + bias))
    exact = np.cumsum(gates, axis=1)
    high = exact.astype(np.float32)
    normal = lambda: jnp.asarray(rng.normal(size=(batch, length, heads, dim)), jnp.bfloat16)  # noqa: E731
    return *(normal() for _ in range(4)), jnp.asarray(high), jnp.asarray(exact - high, jnp.float32)


def fused(q, k, v, high, low, *, prune: bool) -> jax.Array:
    return forgetting_attention(q, k, v, (high, low), scale=q.shape[-1] ** -0.5, prune=prune)


def cudnn(q, k, v) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--bias", type=float, default=2.0)
    parser.add_argument("--output", type=Path, help="append the rows as JSON lines")
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        sys.exit("benchmarks.attention: the kernel runs on an NVIDIA Hopper GPU; none is here")
    for shape in args.shapes.split(","):
        inputs = make_inputs(shape, args.bias)
        row = {"op": "forgetting attention", "shape": shape, "bias": args.bias}
        row["kernel"] = measure(functools.partial(fused, prune=False), inputs)
        row["pruned"] = measure(functools.partial(fused, prune=True), inputs)
        row["cudnn, no gates"] = measure(cudnn, inputs[:4])
        print(json.dumps(row), flush=True)
        if args.output:
            with args.output.open("a") as file:
                file.write(json.dumps(row | provenance()) + "\n")


if __name__ == "__main__":
    main()
