"""Compare and time the versions of the delta rule's forward pass with a scalar decay or none: the solve of all chunks, the scan, and the op.

    python -m benchmarks delta_forward [--cases 8x4096x16x128,4x2048x16x128,8x1024x8x64] [--kinds now,blocks_split] [--repeats 10]

A row for each case, B x T x heads x K in bfloat16 with V = K and a scalar decay ("plain" for no decay, "documents" for several documents in a
row): for each kind the ms of the solve (`solve`), of the scan (`scan`), of the op forward and forward and backward (`forward`, `both`), the
largest errors of the output and of the gradients at 2 x 640 x 4 heads against float32 XLA, relative in RMS (`errors`), the difference of the
output at the timed size from that of the first kind (`difference`), and whether repeated calls return the same bits (`same`). `right` is false if
an error is above the kernels' tolerances.

Kinds: "now" is the default, "blocks" inverts chunks by products of blocks of single warps, "split" computes the outputs of the scan by another
warpgroup, "blocks_split" does both, and "truncated" divides the writes of today's scan by truncation.
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
from pallas_kernels.delta_rule.hopper import chunk_forward, scan
from pallas_kernels.hopper import unit_inverse

BENCHMARK = Benchmark(
    name="delta_forward",
    summary="the solve, the scan and the op of the delta rule by the versions of its forward pass",
    key=("case",),
)

# For each kind: how chunks are inverted, how the scan computes outputs, and how it divides writes.
KINDS = {
    "now": ("doubled", "joint", "rounded"),
    "blocks": ("blocks", "joint", "rounded"),
    "split": ("doubled", "split", "rounded"),
    "blocks_split": ("blocks", "split", "rounded"),
    "truncated": ("doubled", "joint", "truncated"),
}
MAIN = ("8x4096x16x128", "4x2048x16x128", "8x1024x8x64")
CASES = (*MAIN, "8x4096x16x128-documents", "8x4096x16x128-plain", "4x2048x16x128-plain", "8x2048x32x64")  # fmt: skip
_SMALL = 2, 640, 4
_COMPILERS = 14


def choose(kind: str) -> None:
    """Make all later traces compute by this kind."""
    unit_inverse.METHOD, scan.FORWARD, scan.HALF = KINDS[kind]
    jax.clear_caches()  # of functions that were traced with another kind


def make(case: str, small: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of `delta_memory` for a case: random arrays in bfloat16 (decays in float32), and those that have no gradient. The
    `small` ones have fewer tokens.
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
    if "plain" not in words:
        arrays["log_decay"] = jax.nn.log_sigmoid(normal() + 3)
    marks = {}
    if "documents" in words:
        ids = jnp.arange(length, dtype=jnp.int32) // 300 + 1
        marks["segment_ids"] = jnp.broadcast_to(ids, (batch, length))
    return arrays, marks


def by_op(implementation: str, arrays: dict[str, Any], marks: dict[str, Any]) -> jax.Array:
    """Return the output of the op."""
    return ops.delta_memory(**arrays, **marks, implementation=implementation)[0]


def both(implementation: str, arrays: dict[str, Any], marks: dict[str, Any]):
    """Return the output of the op and the gradients of all arrays, with the values as gradient of the output."""
    output, pull = jax.vjp(lambda x: by_op(implementation, x, marks), arrays)
    return output, pull(arrays["v"])[0]


def solve(interpret: Any, arrays: dict[str, Any]) -> chunk_forward.SolvedChunks:
    """Solve all chunks of a case: the first kernel of the forward pass."""
    beta, decay, heads = arrays["beta"].astype(jnp.float32), arrays.get("log_decay"), arrays["q"].shape[2]  # fmt: skip
    return chunk_forward.chunk_forward(
        arrays["q"], arrays["k"], beta, decay, None, heads=heads, scale=arrays["k"].shape[-1] ** -0.5, erase="decayed",
        interpret=interpret,
    )  # fmt: skip


def scanned(interpret: Any, arrays: dict[str, Any], solved: chunk_forward.SolvedChunks):
    """Scan the solved chunks of a case: the second kernel of the forward pass."""
    q, k, v = (arrays[name] for name in "qkv")
    return scan.scan_forward(
        q, k, v, solved, None, heads=q.shape[2], scale=k.shape[-1] ** -0.5, interpret=interpret
    )  # fmt: skip


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
    options.add_kinds(parser, KINDS, "now,blocks_split")
    parser.add_argument(
        "--repeats", type=int, default=10, help="calls whose results are compared bit by bit"
    )
    options.add_lock(parser)


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [dict(case=name) for name in args.cases]


def rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    require_gpu("delta_forward")
    names = [row["case"] for row in cases]
    programs = compile_all(names, args.kinds, "mosaic_gpu", None)
    with alone(args.lock):
        for name in names:
            yield dict(case=name) | measure(name, args.kinds, programs, args.repeats)


def compile_all(
    names: list[str], kinds: list[str], implementation: str, interpret: Any
) -> dict[tuple[str, str, str], Callable]:
    """Return the programs of all cases and kinds by case, kind and name: of the solve, the scan and the op, and the op at the small size, of
    which that of the kind "" is float32 XLA's. They are traced one after another and compiled at the same time.

    With parameters to `interpret` kernels they are functions that compile nothing.
    """
    lowered, programs = {}, {}
    for kind in kinds:
        choose(kind)
        for name in names:
            given, few = (jax.eval_shape(functools.partial(make, name, small)) for small in (False, True))  # fmt: skip
            arrays = given[0]
            wanted = {
                "solve": (functools.partial(solve, interpret), (arrays,)),
                "forward": (functools.partial(by_op, implementation), given),
                "both": (functools.partial(both, implementation), given),
                "small": (functools.partial(both, implementation), few),
            }
            solved = jax.eval_shape(functools.partial(solve, interpret), arrays)
            wanted["scan"] = functools.partial(scanned, interpret), (arrays, solved)
            for part, (function, shapes) in wanted.items():
                key = name, kind, part
                if interpret:
                    programs[key] = function
                else:
                    lowered[key] = jax.jit(function).lower(*shapes)
    for name in names:
        shapes = jax.eval_shape(functools.partial(make, name, True))
        wide = {n: jax.ShapeDtypeStruct(x.shape, jnp.float32) for n, x in shapes[0].items()}
        with jax.default_matmul_precision("highest"):
            reference = jax.jit(functools.partial(both, "xla")).lower(wide, shapes[1])
        lowered[name, "", "small"] = reference
    log(f"{len(lowered)} programs traced")
    with concurrent.futures.ThreadPoolExecutor(_COMPILERS) as pool:
        compiled = pool.map(lambda program: program.compile(), lowered.values())
        return programs | dict(zip(lowered, compiled, strict=True))


def measure(
    name: str, kinds: list[str], programs: dict[tuple[str, str, str], Callable], repeats: int
) -> dict[str, Any]:
    """Return the fields of a case's row, for each of `kinds`, by the programs of `compile_all`."""
    arrays, marks = jax.jit(functools.partial(make, name))()
    few, few_marks = jax.jit(functools.partial(make, name, True))()
    wide = {n: x.astype(jnp.float32) for n, x in few.items()}
    wanted = programs[name, "", "small"](wide, few_marks)
    equal = jax.jit(
        lambda a, b: jnp.all(
            jnp.stack([jnp.all(x == y) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True)])
        )
    )
    compare = jax.jit(difference)
    first, measured, right = None, {}, True
    for kind in kinds:
        program = {part: programs[name, kind, part] for part in ("solve", "scan", "forward", "both", "small")}  # fmt: skip
        output, *gradients = map(float, compare(program["small"](few, few_marks), wanted))
        # A NaN is not less than a tolerance.
        right = right and output < OUTPUT_TOLERANCE and all(x < GRADIENT_TOLERANCE for x in gradients)  # fmt: skip
        found = program["both"](arrays, marks)
        same = all(bool(equal(program["both"](arrays, marks), found)) for _ in range(repeats))
        first = found if first is None else first
        apart = [float(x) for x in compare(found, first)]
        right = right and all(math.isfinite(x) and x < GRADIENT_TOLERANCE for x in apart)
        solved = program["solve"](arrays)
        times = {
            "solve": batch_milliseconds(program["solve"], arrays),
            "scan": batch_milliseconds(program["scan"], arrays, solved),
            "forward": batch_milliseconds(program["forward"], arrays, marks),
            "both": batch_milliseconds(program["both"], arrays, marks),
        }
        measured[kind] = {part: round(x, 4) for part, x in times.items()} | dict(
            errors=[round(output, 6), round(max(gradients), 6)], difference=round(max(apart), 6), same=same,
        )  # fmt: skip
    return measured | dict(right=right)
