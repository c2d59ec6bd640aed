"""Compare and time the versions of the delta rule's forward pass with a scalar decay or none: the solve of all chunks, the scan, and the op.

    python -m benchmarks delta_forward [--cases 8x4096x16x128,4x2048x16x128,8x1024x8x64] [--kinds whole_tiles,blocks_split,scored] [--repeats 10]

A row for each case, B x T x heads x K in bfloat16 with V = K and a scalar decay ("plain" for no decay, "documents" for several documents in a
row, which the solve and the scan alone do not have; "channel" for KDA's decay per key channel, and "low_rank" for RWKV7's memory, both without
the solve and the scan alone), and kind:
the ms of the solve (`solve`), of the scan (`scan`), of the op forward and forward and backward (`forward`, `both`), the errors of the output and
of the worst gradient, if there is a derivative, at 2 x 640 x 4 heads against float32 XLA, relative in RMS (`errors`), the largest difference from the results of the first
kind at the timed size (`difference`), and whether repeated calls return the same bits (`same`). `right` is false if an error is above the
kernels' tolerances.

Kinds: "whole_tiles" inverts whole tiles and computes outputs in the warpgroup of the memory, "blocks" inverts chunks by products of blocks of
single warps, "split" computes the outputs of the scan by another warpgroup, "blocks_split" does both, and "scored" also computes the scores in
the scan where there is no derivative (else it is "blocks_split", and is not timed).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import options
from benchmarks.registry import Benchmark
from benchmarks.run import log, require_gpu
from benchmarks.timing import alone, batch_milliseconds
from lsm_jax import ops
from pallas_kernels.delta_rule.cases import GRADIENT_TOLERANCE, OUTPUT_TOLERANCE
from pallas_kernels.delta_rule.hopper import chunk_forward, scan, split_scan
from pallas_kernels.hopper import unit_inverse

BENCHMARK = Benchmark(
    name="delta_forward",
    summary="the solve, the scan and the op of the delta rule by the versions of its forward pass",
    key=("case", "kind"),
    output="docs/delta_forward.jsonl",
)

# For each kind: how chunks are inverted, and how the scan computes outputs.
KINDS = {
    "whole_tiles": ("doubled", "joint"),
    "blocks": ("blocks", "joint"),
    "split": ("doubled", "split"),
    "blocks_split": ("blocks", "split"),
    "scored": ("blocks", "scored"),
}
MAIN = ("8x4096x16x128", "4x2048x16x128", "8x1024x8x64")
CASES = (
    *MAIN,
    "8x4096x16x128-documents",
    "8x4096x16x128-plain",
    "8x4096x16x128-channel",
    "8x4096x16x128-low_rank",
    "8x4096x32x64-low_rank",
    "4x2048x16x128-plain",
    "8x2048x32x64",
    "8x2048x32x256",
    "8x2048x32x256-plain",
)
_SMALL = 2, 640, 4
_COMPILERS = 14


def choose(kind: str) -> None:
    """Make all later traces compute by this kind."""
    unit_inverse.METHOD, scan.FORWARD = KINDS[kind]
    jax.clear_caches()  # of functions that were traced with another kind


def make(case: str, small: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of `delta_memory` (`dplr_memory` with "low_rank") for a case: random arrays in bfloat16 (decays in float32), and
    those that have no gradient. The `small` ones have fewer tokens.
    """
    sizes, *words = case.split("-")
    batch, length, heads, depth = map(int, sizes.split("x"))
    batch, length, heads = _SMALL if small else (batch, length, heads)
    keys = iter(jax.random.split(jax.random.key(0), 5))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), (batch, length, heads, *shape))

    q, k, v = (normal(depth) for _ in range(3))
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    arrays = dict(q=q, k=k, v=v, beta=jax.nn.sigmoid(normal()))
    arrays = {name: x.astype(jnp.bfloat16) for name, x in arrays.items()}
    if "low_rank" in words:
        arrays |= dict(a=-arrays["k"], b=arrays["k"] * arrays.pop("beta")[..., None])
    if "plain" not in words:
        channels = (depth,) if {"channel", "low_rank"} & set(words) else ()
        arrays["log_decay"] = jax.nn.log_sigmoid(normal(*channels) + 3)
    marks = {}
    if "documents" in words:
        ids = jnp.arange(length, dtype=jnp.int32) // 300 + 1
        marks["segment_ids"] = jnp.broadcast_to(ids, (batch, length))
    return arrays, marks


def _small(case: str) -> str:
    """Return what the small arrays of a case depend on: its key channels and words."""
    return case.rpartition("x")[2]


def by_op(implementation: str, arrays: dict[str, Any], marks: dict[str, Any]) -> jax.Array:
    """Return the output of the op."""
    op = ops.dplr_memory if "a" in arrays else ops.delta_memory
    return op(**arrays, **marks, implementation=implementation)[0]


def both(implementation: str, arrays: dict[str, Any], marks: dict[str, Any]):
    """Return the output of the op and the gradients of all arrays, with the values as gradient of the output."""
    output, pull = jax.vjp(lambda x: by_op(implementation, x, marks), arrays)
    return output, pull(arrays["v"])[0]


def solve(interpret: Any, arrays: dict[str, Any]) -> chunk_forward.SolvedChunks:
    """Solve all chunks of a case: the first kernel of the forward pass."""
    q = None if scan.FORWARD == "scored" else arrays["q"]
    return chunk_forward.chunk_forward(
        q, arrays["k"], arrays["beta"].astype(jnp.float32), arrays.get("log_decay"), None,
        heads=arrays["q"].shape[2], scale=_scale(arrays), erase="decayed", interpret=interpret,
    )  # fmt: skip


def scanned(interpret: Any, arrays: dict[str, Any], solved: chunk_forward.SolvedChunks):
    """Scan the solved chunks of a case: the second kernel of the forward pass."""
    scored = scan.FORWARD == "scored"
    run = split_scan.split_scan_forward if scored else scan.scan_forward
    q, k, v = (arrays[name] for name in "qkv")
    heads, scale = q.shape[2], _scale(arrays)
    return run(q, k, v, solved, None, heads=heads, scale=scale, interpret=interpret)


def _scale(arrays: dict[str, Any]) -> float:
    return arrays["k"].shape[-1] ** -0.5


def difference(got: Any, wanted: Any) -> list[jax.Array]:
    """Return the difference of each array from the one that is wanted, in RMS relative to the latter's RMS."""

    def relative(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.sqrt(jnp.mean((a - b) ** 2) / jnp.mean(b**2))

    return jax.tree.map(relative, jax.tree.leaves(got), jax.tree.leaves(wanted))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cases", type=options.names(CASES), default=",".join(MAIN), help=f"of {', '.join(CASES)}"
    )
    options.add_kinds(parser, KINDS, "whole_tiles,blocks_split,scored")
    parser.add_argument(
        "--repeats", type=int, default=10, help="calls whose results are compared bit by bit"
    )
    options.add_lock(parser)


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [dict(case=name, kind=kind) for name in args.cases for kind in args.kinds]


def rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    require_gpu("delta_forward")
    programs = compile_all([tuple(row.values()) for row in cases], "mosaic_gpu", None)
    first: dict[str, Any] = {}
    with alone(args.lock):
        for row in cases:
            yield row | measure(row["case"], row["kind"], programs, args.repeats, first)


def compile_all(
    keys: list[tuple[str, ...]], implementation: str, interpret: Any
) -> dict[tuple[str, str, str], Callable]:
    """Return the programs of these cases and kinds by case, kind and name: of the solve, the scan and the op, and of cases by `_small`, at the
    small size, of which that of the kind "" is float32 XLA's. They are traced one after another and compiled at the same time.

    With parameters to `interpret` kernels they are functions that compile nothing.
    """
    traced: dict[tuple[str, str, str], Any] = {}
    programs: dict[tuple[str, str, str], Callable] = {}
    for name, kind in keys:
        choose(kind)
        given, few = (jax.eval_shape(functools.partial(make, name, small)) for small in (False, True))  # fmt: skip
        forward, solved = functools.partial(by_op, implementation), functools.partial(solve, interpret)  # fmt: skip
        # With a derivative "scored" is "blocks_split".
        every = forward if kind == "scored" else functools.partial(both, implementation)
        wanted: dict[str, Any] = {"forward": (forward, given), "small": (every, few)}
        if kind != "scored":
            wanted["both"] = every, given
        if not {"channel", "low_rank"} & set(name.split("-")):
            shapes = given[0], jax.eval_shape(solved, given[0])
            wanted |= {"solve": (solved, shapes[:1]), "scan": (functools.partial(scanned, interpret), shapes)}  # fmt: skip
        for part, (function, shapes) in wanted.items():
            key = _small(name) if part == "small" else name, kind, part
            if interpret:
                programs[key] = function
            elif key not in traced:
                traced[key] = jax.jit(function).lower(*shapes)
    for name in {_small(name): name for name, _ in keys}.values():
        shapes = jax.eval_shape(functools.partial(make, name, True))
        wide = {n: jax.ShapeDtypeStruct(x.shape, jnp.float32) for n, x in shapes[0].items()}
        with jax.default_matmul_precision("highest"):
            traced[_small(name), "", "small"] = jax.jit(functools.partial(both, "xla")).lower(wide, shapes[1])  # fmt: skip
    log(f"{len(traced)} programs traced")
    with concurrent.futures.ThreadPoolExecutor(_COMPILERS) as pool:
        compiled = pool.map(lambda program: program.compile(), traced.values())
        programs |= dict(zip(traced, compiled, strict=True))
    log("compiled")
    return programs


def measure(
    name: str, kind: str, programs: dict[tuple[str, str, str], Callable], repeats: int, first: dict[str, Any]
) -> dict[str, Any]:  # fmt: skip
    """Return the fields of the row of a case and kind, by the programs of `compile_all`. `first` has the results of the case's first kind, and
    receives them.
    """
    program = {part: x for (*key, part), x in programs.items() if key == [name, kind]}
    small = _small(name)
    arrays, marks = jax.jit(functools.partial(make, name))()
    few, few_marks = jax.jit(functools.partial(make, name, True))()
    wide = {n: x.astype(jnp.float32) for n, x in few.items()}
    reference = jax.tree.leaves(programs[small, "", "small"](wide, few_marks))
    got = jax.tree.leaves(programs[small, kind, "small"](few, few_marks))
    compare = jax.jit(difference)
    output, *gradients = map(float, compare(got, reference[: len(got)]))
    # A NaN is not less than a tolerance.
    right = output < OUTPUT_TOLERANCE and all(x < GRADIENT_TOLERANCE for x in gradients)
    worst = [output, *([max(gradients)] if gradients else [])]
    row: dict[str, Any] = dict(errors=[round(x, 6) for x in worst])
    log(f"{name} {kind} {row}")
    solved = program["solve"](arrays) if "solve" in program else None
    calls = {"solve": (arrays,), "scan": (arrays, solved), "forward": (arrays, marks), "both": (arrays, marks)}  # fmt: skip
    equal = jax.jit(lambda a, b: jnp.stack([jnp.all(x == y) for x, y in zip(a, b, strict=True)]))
    apart, same = [], True
    for part, given in calls.items():
        if part not in program:
            continue
        row[part] = round(batch_milliseconds(program[part], *given), 4)
        log(f"{name} {kind} {part}: {row[part]}")
        if part in ("forward", "both"):
            found = jax.tree.leaves(program[part](*given))
            again = (jax.tree.leaves(program[part](*given)) for _ in range(repeats))
            same = same and all(bool(jnp.all(equal(found, x))) for x in again)
            wanted = first.setdefault(f"{name} {part}", found)
            apart += [float(x) for x in compare(found, wanted)]
    right = right and all(math.isfinite(x) and x < GRADIENT_TOLERANCE for x in apart)
    return row | dict(difference=round(max(apart), 6), same=same, right=right)
