"""Speed and, on the device itself, correctness of every op: `python -m benchmarks.ops [--output ops.json]`.

Speed at B8 T4096 H16 D128 in bfloat16 (float32 and a small shape on a CPU), forward and forward + backward, median of 20.
The error is that of the output and of all gradients in bfloat16 at T = 512, relative in RMS, against the recurrent form in
float32 at full precision.
"""

from __future__ import annotations

import argparse
import json

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import milliseconds, provenance
from lsm_jax import ops


def make_inputs(name: str, batch: int, length: int, heads: int, dim: int, dtype) -> dict:
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def normal(*shape):
        return jax.random.normal(next(keys), shape, jnp.float32)

    q, k, v = (normal(batch, length, heads, dim) for _ in range(3))
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    inputs = {"q": q, "k": k, "v": v}
    if "delta" in name:
        inputs["beta"] = jax.nn.sigmoid(normal(batch, length, heads))
    if name in ("retention",):
        inputs["log_decay"] = jnp.log1p(-(2.0 ** (-5 - jnp.arange(heads))))
    if name in ("scalar decay", "gated delta"):
        inputs["log_decay"] = jax.nn.log_sigmoid(normal(batch, length, heads) + 3)
    if name in ("key decay", "key-gated delta"):
        inputs["log_decay"] = jax.nn.log_sigmoid(normal(batch, length, heads, dim) + 3)
    if name == "value decay":
        inputs["value_log_decay"] = jax.nn.log_sigmoid(normal(batch, length, heads, dim) + 3)
    decay = {n: x for n, x in inputs.items() if "decay" in n}
    return {n: x.astype(dtype) for n, x in inputs.items()} | decay


NAMES = (
    "no decay",
    "retention",
    "scalar decay",
    "key decay",
    "value decay",
    "delta",
    "gated delta",
    "key-gated delta",
    "attention",
    "attention, window 512",
)


def function(name: str, **options):
    if name.startswith("attention"):
        window = 512 if "window" in name else None
        return lambda inputs: ops.attention(**inputs, window=window)[0]
    op = ops.delta_memory if "delta" in name else ops.linear_memory
    return lambda inputs: op(**inputs, **options)[0]


def with_gradients(f):
    def loss(inputs):
        output = f(inputs).astype(jnp.float32)
        return jnp.sum(output * jnp.cos(jnp.arange(output.size).reshape(output.shape))), output

    def both(inputs):
        (_, output), grads = jax.value_and_grad(loss, has_aux=True)(inputs)
        return output, grads

    return both


def error(name: str) -> float:
    """The largest relative RMS error of output and gradients."""
    narrow = make_inputs(name, 2, 512, 4, 64, jnp.bfloat16)
    wide = {n: x.astype(jnp.float32) for n, x in narrow.items()}
    if name.startswith("attention"):
        reference = with_gradients(
            lambda i: ops.attention(
                **i, window=512 if "window" in name else None, implementation="xla"
            )[0]
        )
    else:
        reference = with_gradients(function(name, form="recurrent"))
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(reference)(wide)
    got = jax.jit(with_gradients(function(name)))(narrow)
    errors = []
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        errors.append(np.sqrt(np.mean((a - b) ** 2)) / np.sqrt(np.mean(b**2)))
    return float(np.max(errors))  # NaN stays NaN


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", help="write the table as JSON")
    parser.add_argument("--forms", default="chunk", help="comma-separated: chunk, associative")
    args = parser.parse_args()
    gpu = jax.default_backend() != "cpu"
    shape, dtype = ((8, 4096, 16, 128), jnp.bfloat16) if gpu else ((1, 512, 4, 64), jnp.float32)
    rows = []
    print(f"{jax.devices()[0].device_kind}, B T H D = {shape}, {dtype.__name__}")
    print(f"{'op':24s} {'form':12s} {'forward ms':>11s} {'+ backward ms':>14s} {'bf16 error':>11s}")
    for name in NAMES:
        for form in args.forms.split(","):
            options = {} if name.startswith("attention") else {"form": form}
            inputs = make_inputs(name, *shape, dtype)
            forward = milliseconds(jax.jit(function(name, **options)), inputs)
            backward = milliseconds(jax.jit(with_gradients(function(name, **options))), inputs)
            rows.append(
                {"op": name, "form": form, "forward_ms": forward, "forward_backward_ms": backward,
                 "bf16_error": error(name)}
            )  # fmt: skip
            print(
                f"{name:24s} {form:12s} {forward:11.3f} {backward:14.3f} {rows[-1]['bf16_error']:11.1e}",
                flush=True,
            )
    if args.output:
        with open(args.output, "w") as file:
            json.dump({**provenance(), "shape": shape, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
