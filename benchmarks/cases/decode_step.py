"""Time one decoding step of a memory, fused and in XLA, or generate with models.

    python -m benchmarks decode_step [--ops gla] [--batches 1,256] [--kinds xla,kernel]

A row for each op and batch, with 16 heads of 128 in bfloat16: microseconds of a step that updates its memory
in place, where the memory is an array by itself (`kernel_us`) or one of a stack of four layers', as in the
decoder (`kernel_stacked_us`), and `floor_us`, the time of the step's bytes at 4.3 TB/s. `--models
gla,gated_deltanet` generates with models of 340M parameters in bfloat16 instead; their rows have tokens/s. With
`--unrolled` their layers have arrays of their own (`lsm_jax.models.sample`), with `--float32` the parameters are those that training
stores, and `--implementation mosaic_gpu` names the backend of the mixers' ops. Where `lsm_jax.models.token_step` serves the model, unrolled
layers are decoded by its kernels, unless `--by_layers` is given; `--group 4` then sets the number of tokens of which one writes the memories
of many rows, 1 means each.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import options
from benchmarks.registry import Benchmark, UsageError
from benchmarks.run import require_gpu
from benchmarks.timing import alone, milliseconds
from lsm_jax import models, ops
from lsm_jax.models import sampling, token_step
from lsm_jax.ops.core.states import Layer
from pallas_kernels.decode_step.cases import TIMED_BATCHES, TIMED_DIM, TIMED_HEADS

BENCHMARK = Benchmark(
    name="decode_step",
    summary="one token through a memory, fused and in XLA; or tokens/s of models",
    key=("batch",),
    optional_key={
        "op": None,
        "model": None,
        "tokens": None,
        "unrolled": None,
        "float32": None,
        "implementation": None,
        "by_kernels": None,
        "group": None,
    },
    output="docs/decode_step.jsonl",
)

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


def make_inputs(names: str, batch: int, heads: int, dim: int) -> dict[str, Any]:
    """Return random input arrays of one decoding step of a memory op, by the op's argument names. `names`
    lists, besides q, k and v, the kind of decay and further arrays that the op requires.
    """
    draws = np.random.default_rng(0)

    def draw(*shape, dtype=jnp.float32):
        return jnp.asarray(draws.normal(size=shape), dtype)

    unit = draw(batch, 1, heads, dim)
    unit = (unit / jnp.linalg.norm(unit, axis=-1, keepdims=True)).astype(jnp.bfloat16)
    wide = functools.partial(draw, batch, 1, heads, dim, dtype=jnp.bfloat16)
    arrays = dict(q=wide(), k=unit, v=wide())
    shapes = dict(constant=(heads,), token=(batch, 1, heads), key=(batch, 1, heads, dim))
    others = dict(
        beta=lambda: jax.nn.sigmoid(draw(batch, 1, heads)),
        a=lambda: -unit,
        b=lambda: unit,
        bonus=lambda: draw(heads, dim),
    )
    for name in names.split():
        if name in shapes:
            arrays["log_decay"] = jax.nn.log_sigmoid(draw(*shapes[name]) + 3)
        else:
            arrays[name] = others[name]()
    return arrays


def steps(op: Any, stacked: bool, options: dict[str, str], *, unrolled: int = 0) -> Any:
    """Return a jitted program that applies an op to one token `STEPS` times: (memory, arrays) -> the memory
    and the last output, or all. With `stacked` the memory is a stack of several layers' memories, one of which
    each step updates. With `unrolled` there are so many steps and no loop, so that XLA captures them as one graph of CUDA, and the
    host launches no single step; all outputs are returned, [steps, B, 1, H, V].
    """

    def run(memory, arrays):
        rows = arrays["q"].shape[0]
        empty = ops.LinearState if op is ops.linear_memory else ops.DeltaState
        blank: Any = dict(normalizer=None, stabilizer=None) if empty is ops.LinearState else {}

        def step(index, carry):
            memory: Any = Layer(carry[0], index % LAYERS) if stacked else carry[0]
            state = empty(memory=memory, segment_id=jnp.zeros(rows, jnp.int32), **blank)
            output, state = op(**arrays, initial_state=state, **options)
            return state.memory.stack if stacked else state.memory, output

        carry, outputs = (memory, jnp.zeros_like(arrays["v"])), []
        if not unrolled:
            return jax.lax.fori_loop(0, STEPS, step, carry)
        for index in range(unrolled):
            carry = step(index, carry)
            outputs.append(carry[1])  # all are returned, or XLA would read no memory but the last
        # One array, since the host is supposed to take microseconds for each that a call returns.
        return carry[0], jnp.stack(outputs)

    return jax.jit(run, donate_argnums=0)


def microseconds(
    program: Any, memory: jax.Array, arrays: dict[str, Any], count: int = STEPS, calls: int = 1
) -> float:
    """Return the median time in microseconds of one decoding step of a program that runs `count` steps, over seven batches of `calls` calls, of
    which a batch's last is awaited: with several, the host dispatches one while the device computes the one before.
    """
    times = []
    for _ in range(8):
        began = time.perf_counter()
        for _ in range(calls):
            memory, results = program(memory, arrays)
        jax.block_until_ready((memory, results))
        times.append((time.perf_counter() - began) / calls)
    return round(1e6 * float(np.median(times[1:])) / count, 2)


def measure(
    pairs: list[tuple[str, int]], kinds: list[str], heads: int, dim: int, lock: Path | None
) -> Iterator[dict[str, Any]]:
    """Time one decoding step for each pair (op, batch size) and yield its row of results. All programs are
    compiled before any is timed.
    """
    cases = [(name, b, s, kind) for name, b in pairs for s in (False, True) for kind in kinds]

    def memory_of(batch, stacked):
        return (LAYERS,) * stacked + (batch, heads, dim, dim)

    def compile_case(case):
        name, batch, stacked, kind = case
        op, arguments = OPS[name]
        memory = jax.ShapeDtypeStruct(memory_of(batch, stacked), jnp.float32)
        arrays = jax.eval_shape(lambda: make_inputs(arguments, batch, heads, dim))
        return steps(op, stacked, KINDS[kind]).lower(memory, arrays).compile()

    with ThreadPoolExecutor() as pool:
        programs = dict(zip(cases, pool.map(compile_case, cases), strict=True))
    for name, batch in pairs:
        arrays = make_inputs(OPS[name][1], batch, heads, dim)
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
    method: str, cases: list[dict[str, Any]], args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield, for the cases of a model of `method`, rows with the tokens/s at which it generates `args.tokens` tokens after prompts
    of 16, by each kind of backend.
    """
    kinds, tokens, unroll = args.kinds, args.tokens, args.unrolled
    if args.group is not None:
        # Before anything is traced. The kernels serve all these rows, whether each token writes or one of a group.
        token_step.GROUP, token_step.WRITING_ROWS = args.group, token_step.MANY_ROWS
        token_step.DEFERRED_ROWS = token_step.MOST_ROWS + 1

    def build(kind):
        config = models.lm(method, args.size)
        if args.implementation and kind == "kernel":
            config.layers["L"].mixer.op.implementation = args.implementation
        if kind == "xla":
            config.layers["L"].mixer.op.form = "recurrent"
        return models.Decoder(config, rngs=nnx.Rngs(0))

    params = nnx.split(build("xla"))[1]
    if not args.float32:
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.size >= 2**20 else x, params)
    graphs = {kind: nnx.split(nnx.eval_shape(lambda k=kind: build(k)))[0] for kind in kinds}
    read = dict(
        capacity=sampling.cache_capacity(16 + tokens), prefill_chunk=None, unroll_layers=unroll
    )
    draw = dict(num_tokens=tokens, greedy=True, top_k=None, stop_token=None)

    def served(batch):
        model = nnx.merge(graphs["kernel"], params)
        return token_step.serves(model, batch)

    row_of = {case["batch"]: dict(case) for case in cases}
    if unroll and "kernel" in kinds and not args.by_layers:
        for batch, row in row_of.items():
            if served(batch):
                group = token_step.group_of(nnx.merge(graphs["kernel"], params), batch)
                row |= {"by_kernels": True} | ({"group": group} if group > 1 else {})

    def decode_case(case):
        batch, kind = case
        given, prompt = (graphs[kind], params), jnp.zeros((batch, 16), jnp.int32)
        after = sampling.read_prompt(*given, prompt, None, **read)
        decode = sampling.program(batch, unroll)
        by_kernels = kind == "kernel" and "by_kernels" in row_of[batch]
        arguments = *given, *after, jax.random.key(0), jnp.float32(0), None
        return decode(*arguments, **draw, by_kernels=by_kernels)[0]

    # No process times while another compiles, which also runs the programs once.
    with alone(args.lock, shared=True), ThreadPoolExecutor() as pool:
        pairs = [(case["batch"], kind) for case in cases for kind in kinds]
        jax.block_until_ready(list(pool.map(decode_case, pairs)))
    for case in cases:
        row = row_of[case["batch"]]
        for kind in kinds:
            with alone(args.lock):
                time_ms = milliseconds(decode_case, (case["batch"], kind), repeats=3)
            row[f"{kind}_tokens_s"] = round(1e3 * case["batch"] * tokens / time_ms)
        yield row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ops", type=options.names(OPS), default=",".join(OPS), help=", ".join(OPS)
    )
    parser.add_argument(
        "--models", type=options.words, help="generate with these methods' models instead"
    )
    parser.add_argument("--size", default="340m", help="size of the models")
    parser.add_argument(
        "--unrolled", action="store_true", help="models' layers one after the other"
    )
    parser.add_argument(
        "--by_layers", action="store_true", help="no kernels for whole tokens of unrolled layers"
    )
    parser.add_argument(
        "--group", type=int, choices=(1, 4, 8), help="tokens of which one writes the memories"
    )
    parser.add_argument("--float32", action="store_true", help="models' parameters as trained")
    parser.add_argument(
        "--implementation", help="backend of models' ops with --kinds kernel; default: automatic"
    )
    parser.add_argument(
        "--tokens", type=int, default=128, help="tokens that a model generates per row"
    )
    parser.add_argument(
        "--batches", type=options.integers, default=",".join(map(str, TIMED_BATCHES))
    )
    options.add_kinds(parser, KINDS, "xla,kernel")
    parser.add_argument("--heads", type=int, default=TIMED_HEADS)
    parser.add_argument("--dim", type=int, default=TIMED_DIM, help="channels of a head")
    options.add_lock(parser)


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    if not args.models and (
        args.float32 or args.unrolled or args.implementation or args.by_layers or args.group
    ):
        raise UsageError(
            "--float32, --unrolled, --implementation, --by_layers and --group: accepted with --models"
        )
    if args.group and (args.by_layers or not args.unrolled):
        raise UsageError("--group: accepted with --unrolled and without --by_layers")
    if args.models:
        return [
            dict(model=f"{method}-{args.size}", batch=batch, tokens=args.tokens)
            | {name: True for name in ("unrolled", "float32") if getattr(args, name)}
            | ({"implementation": args.implementation} if args.implementation else {})
            for method in args.models
            for batch in args.batches
        ]
    return [dict(op=op, batch=batch) for op in args.ops for batch in args.batches]


def rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    if "kernel" in args.kinds:
        require_gpu("--kinds kernel")
    if not args.models:
        pairs = [(case["op"], case["batch"]) for case in cases]
        yield from measure(pairs, args.kinds, args.heads, args.dim, args.lock)
        return
    for method in args.models:
        own = [case for case in cases if case["model"] == f"{method}-{args.size}"]
        if own:
            yield from generate(method, own, args)
