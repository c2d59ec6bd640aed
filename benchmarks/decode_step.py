"""One token through a memory, fused and through XLA: `python -m benchmarks.decode_step [--ops gla] [--batches 1,256] [--output FILE]`.

A row an op and batch, 16 heads of 128, bfloat16: microseconds of a step that writes its memory in place, of a memory of its
own and of one in a stack of four layers' (as the decoder keeps them), and of the step's bytes at 4.3 TB/s. `--models
gla,gated_deltanet` generates with 340M parameters in bfloat16 in its place: tokens/s. An NVIDIA Hopper GPU runs the kernel;
elsewhere `--kinds xla` times XLA.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.timing import alone, append_row, milliseconds, provenance
from lsm_jax import models, ops
from lsm_jax.models import sampling
from lsm_jax.ops.core.states import Layer

KINDS: dict[str, dict[str, str]] = {
    "kernel": dict(implementation="mosaic_gpu"),
    "xla": dict(implementation="xla", form="recurrent"),
}
OPS = {
    "retnet": (ops.linear_memory, "constant"),
    "gla": (ops.linear_memory, "key"),
    "rwkv6": (ops.linear_memory, "key bonus"),
    "gated delta": (ops.delta_memory, "token beta"),
    "kda": (ops.delta_memory, "key beta"),
    "rwkv7": (ops.dplr_memory, "key a b"),
}
RATE = 4.3e12  # bytes a second that an H200 copies at
STEPS, LAYERS = 100, 4


def inputs(given: str, batch: int, heads: int, dim: int) -> dict[str, Any]:
    """A step's arrays by name."""
    draws = np.random.default_rng(0)

    def draw(*shape, dtype=jnp.float32):
        return jnp.asarray(draws.normal(size=shape), dtype)

    unit = draw(batch, 1, heads, dim)
    unit = (unit / jnp.linalg.norm(unit, axis=-1, keepdims=True)).astype(jnp.bfloat16)
    wide = functools.partial(draw, batch, 1, heads, dim, dtype=jnp.bfloat16)
    arrays = dict(q=wide(), k=unit, v=wide())
    shapes = dict(constant=(heads,), token=(batch, 1, heads), key=(batch, 1, heads, dim))
    made = dict(
        beta=lambda: jax.nn.sigmoid(draw(batch, 1, heads)),
        a=lambda: -unit,
        b=lambda: unit,
        bonus=lambda: draw(heads, dim),
    )
    for name in given.split():
        if name in shapes:
            arrays["log_decay"] = jax.nn.log_sigmoid(draw(*shapes[name]) + 3)
        else:
            arrays[name] = made[name]()
    return arrays


def steps(op: Any, stacked: bool, options: dict[str, str]) -> Any:
    """(memory, arrays) -> memory and the last output, after `STEPS` steps."""

    def run(memory, arrays):
        rows = arrays["q"].shape[0]
        empty = ops.LinearState if op is ops.linear_memory else ops.DeltaState
        blank: Any = dict(normalizer=None, stabilizer=None) if empty is ops.LinearState else {}

        def step(index, carry):
            own: Any = Layer(carry[0], index % LAYERS) if stacked else carry[0]
            state = empty(memory=own, segment_id=jnp.zeros(rows, jnp.int32), **blank)
            output, state = op(**arrays, initial_state=state, **options)
            return state.memory.stack if stacked else state.memory, output

        return jax.lax.fori_loop(0, STEPS, step, (memory, jnp.zeros_like(arrays["v"])))

    return jax.jit(run, donate_argnums=0)


def microseconds(program: Any, memory: jax.Array, arrays: dict[str, Any]) -> float:
    """The median time of a step."""
    times = []
    for _ in range(8):
        began = time.perf_counter()
        memory, _ = jax.block_until_ready(program(memory, arrays))
        times.append(time.perf_counter() - began)
    return round(1e6 * float(np.median(times[1:])) / STEPS, 2)


def measure(
    names: list[str], batches: list[int], kinds: list[str], heads: int, dim: int, lock: Path | None
) -> Any:
    """The rows; every program is compiled before any is timed."""
    cases = [
        (n, b, s, kind) for n in names for b in batches for s in (False, True) for kind in kinds
    ]

    def memory_of(batch, stacked):
        return (LAYERS,) * stacked + (batch, heads, dim, dim)

    def compiled(case):
        name, batch, stacked, kind = case
        op, given = OPS[name]
        memory = jax.ShapeDtypeStruct(memory_of(batch, stacked), jnp.float32)
        arrays = jax.eval_shape(lambda: inputs(given, batch, heads, dim))
        return steps(op, stacked, KINDS[kind]).lower(memory, arrays).compile()

    with ThreadPoolExecutor() as pool:
        programs = dict(zip(cases, pool.map(compiled, cases), strict=True))
    for name in names:
        for batch in batches:
            arrays = inputs(OPS[name][1], batch, heads, dim)
            size = 2 * 4 * batch * heads * dim * dim
            size += sum(x.nbytes for x in arrays.values()) + arrays["v"].nbytes
            row: dict[str, Any] = dict(op=name, batch=batch, floor_us=round(1e6 * size / RATE, 2))
            for stacked in (False, True):
                for kind in kinds:
                    memory = jnp.zeros(memory_of(batch, stacked))
                    key = f"{kind}{'_stacked' if stacked else ''}_us"
                    program = programs[name, batch, stacked, kind]
                    with alone(lock):
                        row[key] = microseconds(program, memory, arrays)
            yield row


def generate(
    method: str, size: str, batches: list[int], kinds: list[str], tokens: int, lock: Path | None
) -> Any:
    """Rows of tokens/s, of prompts of 16 tokens and `tokens` more of each."""

    def build(kind):
        config = models.lm(method, size)
        if kind == "xla":
            config.layers["L"].mixer.op.form = "recurrent"
        return models.Decoder(config, rngs=nnx.Rngs(0))

    params = nnx.split(build("xla"))[1]
    narrow = lambda x: x.astype(jnp.bfloat16) if x.size >= 2**20 else x  # noqa: E731
    params = jax.tree.map(narrow, params)
    graphs = {kind: nnx.split(nnx.eval_shape(lambda k=kind: build(k)))[0] for kind in kinds}
    rest = (None, jax.random.key(0), jnp.float32(0), None)
    static = dict(num_tokens=tokens, greedy=True, top_k=None, stop_token=None, prefill_chunk=None)

    def compiled(case):
        batch, kind = case
        prompt = jnp.zeros((batch, 16), jnp.int32)
        return sampling._sample.lower(graphs[kind], params, prompt, *rest, **static).compile()

    cases = [(batch, kind) for batch in batches for kind in kinds]
    with ThreadPoolExecutor() as pool:
        programs = dict(zip(cases, pool.map(compiled, cases), strict=True))
    for batch in batches:
        row: dict[str, Any] = dict(model=f"{method}-{size}", batch=batch, tokens=tokens)
        arguments = params, jnp.zeros((batch, 16), jnp.int32), *rest
        for kind in kinds:
            with alone(lock):
                time_ms = milliseconds(programs[batch, kind], *arguments, repeats=3)
            row[f"{kind}_tokens_s"] = round(1e3 * batch * tokens / time_ms)
        yield row


def main() -> None:
    """Print a row an op and batch, or a model and batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--models", help="generate with these in place of timing ops")
    parser.add_argument("--size", default="340m", help="of the models")
    parser.add_argument("--tokens", type=int, default=128, help="that a model generates a row")
    parser.add_argument("--batches", default="1,16,64,256")
    parser.add_argument("--kinds", default="xla,kernel")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--lock", type=Path, help="file that others who share the card lock")
    parser.add_argument("--output", type=Path, help="append the rows as JSON lines")
    args = parser.parse_args()
    kinds, batches = args.kinds.split(","), [int(b) for b in args.batches.split(",")]
    for name, known in ((args.kinds, KINDS), (args.ops, OPS)):
        if wrong := [n for n in name.split(",") if n not in known]:
            parser.error(f"{wrong[0]}; accepted are {', '.join(known)}")
    if args.models:
        rows = (
            row
            for method in args.models.split(",")
            for row in generate(method, args.size, batches, kinds, args.tokens, args.lock)
        )
    else:
        rows = measure(args.ops.split(","), batches, kinds, args.heads, args.dim, args.lock)
    for row in rows:
        print(json.dumps(row), flush=True)
        if args.output is not None:
            append_row(args.output, row | provenance())


if __name__ == "__main__":
    main()
