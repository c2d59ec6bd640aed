"""Check and time the Triton kernels on an NVIDIA card: their errors against the step-by-step form in float32, and their times.

    python -m benchmarks triton_kernels [--checks "scalar,..."] [--capabilities 8.0,9.0] [--ops ...] [--shapes ...]

First a row for each check and compute capability: the relative RMS errors of the output, the final memory and each gradient (at most
5e-3 and 1e-2), whether a second run had the same bits, and the number of outputs before a token that change with the token and
later ones. The checks are own ones, of which those of float32 have products in tf32, and the cases of the tests of Hopper's kernels.
`--shard` lets several processes share a card for them. Then a row for each op, shape and compute capability: [ms forward, ms forward and backward] of the Triton kernels, and,
measured once for each op and shape, of XLA and of the automatic backend. With `--peers fla` only flash-linear-attention is timed, as
code for the same capabilities. It may require another version of Triton than the extra [triton] does: its processes find theirs in the
folders of `--peer_path FOLDERS`, and our kernels that of the extra in PYTHONPATH. With `--beside` too, the Triton
kernels are timed in the same call: ours, the peer's, ours, the peer's, of which the row has the shorter times, and then once XLA. The peer has no selective
memory of Mamba in Triton (its layer calls a CUDA extension), and decays of value channels token by token only. A card runs the code of its own
capability and that of older ones: an H200 runs "9.0" and "8.0". Needs the extra [triton].
"""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax

from benchmarks import (
    options,
    profile,
    triton_attention,
    triton_hopper_cases,
    triton_memories,
    triton_token_ops,
)
from benchmarks.cases import kernels
from benchmarks.peers.fla import UNKNOWN, Fla
from benchmarks.registry import Benchmark, UsageError
from benchmarks.timing import alone
from pallas_kernels.delta_rule.triton import passes as delta_passes
from pallas_kernels.dplr.triton import channel_decay as dplr
from pallas_kernels.linear_attention.cases import GRADIENT_TOLERANCE, OUTPUT_TOLERANCE
from pallas_kernels.linear_attention.triton import tilings
from pallas_kernels.short_convolution import triton as convolution
from pallas_kernels.triton import launch

BENCHMARK = Benchmark(
    name="triton_kernels",
    summary="Triton kernels: errors against float32, and times beside XLA",
    key=("op", "shape", "capability"),
    optional_key={"check": "", "tilings": "", "kernels": False, "parts": None},
    output="docs/triton_kernels.jsonl",
    requires_gpu=False,
)

CHECKS: dict[str, Any] = {
    **triton_memories.CHECKS,
    **triton_attention.CHECKS,
    **triton_token_ops.CHECKS,
    **triton_hopper_cases.CHECKS,
}
PARTS = triton_memories, triton_attention, triton_token_ops, triton_hopper_cases
OPS = (
    *(op for op in kernels.OPS if "decay" in op or op in triton_memories.DELTA),
    triton_attention.SLOTS,
    triton_attention.ATTENTION,
    *triton_token_ops.OPS,
)
TILINGS: tuple[dict[str, Any], ...] = (tilings.TILINGS, delta_passes.TILINGS, dplr.TILINGS, convolution.TILINGS)  # fmt: skip
SHAPES = "8x4096x16x128,8x2048x32x64"
FLA = "fla"
"""Before the compute capability in the rows of flash-linear-attention, whose Triton makes code for it, too."""


def check(name: str) -> dict[str, Any]:
    """Return the errors of one of `CHECKS` against the step-by-step form in float32 (of attention and convolutions against XLA's form),
    with the Triton kernels compiled as `launch` says, and whether they are good.
    """
    part = next(p for p in PARTS if name in p.CHECKS)
    return judge(part.check(name))


def judge(result: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a check with "good": whether every error is within its tolerance, and the other results are as they must be."""
    small = all(
        e < (GRADIENT_TOLERANCE if n.startswith("d_") else OUTPUT_TOLERANCE)
        for n, e in result["errors"].items()
    )
    return dict(good=small and result["same_bits"] and not result["not_causal"]) | result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checks", type=options.names(CHECKS), default=",".join(CHECKS), help=", ".join(CHECKS)
    )
    parser.add_argument(
        "--ops", type=options.names(OPS), default=",".join(OPS), help=", ".join(OPS)
    )
    parser.add_argument("--shapes", type=options.words, default=SHAPES, help="BxTxHxD,...")
    parser.add_argument(
        "--capabilities", type=options.names(launch.CAPABILITIES), default="8.0",
        help="compute capabilities whose code this card can run, such as 8.0,9.0 on an H200; default: 8.0",
    )  # fmt: skip
    parser.add_argument(
        "--tilings", type=options.words, default=[],
        help="tilings to try in place of the table's: kernel=keys:values:warps:stages,...; `TILINGS` "
        "has the names. A fifth number is the largest number of registers. For attention kernel/channels=queries:keys:warps:stages[:registers[:parts[:columns[:ahead]]]], for convolution_forward, "
        "convolution_backward and normalised_backward tokens:channels:warps:unroll",
    )  # fmt: skip
    parser.add_argument(
        "--kernels",
        action="store_true",
        help="by a profile, each kernel of Triton and of the automatic backend; of convolutions and selective memories the sums of theirs and of XLA's",
    )
    parser.add_argument(
        "--parts", type=int,
        help="number of parts of a long row in the scans of the delta rules and of RWKV7, in place of the automatic one; with --checks ''",
    )  # fmt: skip
    parser.add_argument(
        "--own", action="store_true", help="no rows of XLA and of the automatic backend"
    )
    options.add_peers(parser)
    parser.add_argument(
        "--beside", action="store_true", help="with --peers: time the Triton kernels in turn with the peer, and XLA after them"
    )  # fmt: skip
    options.add_shard(parser)
    options.add_lock(parser)


def set_tilings(words: list[str]) -> list[str]:
    """Change the tilings of bfloat16 kernels as the words of --tilings say, and return these words.

    Raises:
        UsageError: a word is not KERNEL=KEYS:VALUES:WARPS:STAGES, or that with :REGISTERS, with the name of a kernel in `TILINGS`, or KERNEL=TOKENS:CHANNELS:WARPS:UNROLL
            of a convolution.
    """
    names = [name for table in TILINGS for name in table]
    for word in words:
        name, _, sizes = word.partition("=")
        numbers = [int(n) for n in sizes.split(":") if n.isdecimal()]
        if "/" in name and 4 <= len(numbers) <= 8:
            if (accepted := triton_attention.set_tiling(word, name, numbers)) is not None:
                raise UsageError(f"--tilings {accepted}")
            continue
        fifth = len(numbers) == 5 and name not in convolution.TILINGS
        if name not in names or (len(numbers) != 4 and not fifth):
            raise UsageError(
                f"--tilings {word!r}: accepted is kernel=keys:values:warps:stages with a kernel of {', '.join(names)}"
            )
        table = next(table for table in TILINGS if name in table)
        if table is convolution.TILINGS and (problem := convolution.unaccepted_tiling(*numbers)):
            raise UsageError(f"--tilings {word!r}: {problem}")
        table[name] = type(table[name])(*numbers)
    return words


def set_parts(args: argparse.Namespace) -> int:
    """Divide all rows that the delta rules and RWKV7 scan into as many parts as --parts says, and return the number.

    Raises:
        UsageError: there are checks, an op has no such scan, or a shape's rows cannot be divided into that many parts of whole chunks.
    """
    parts = args.parts
    if args.checks:
        raise UsageError('--parts: accepted with --checks ""')
    if others := [op for op in args.ops if op not in triton_memories.DELTA]:
        raise UsageError(f"--parts: accepted with the ops {', '.join(triton_memories.DELTA)}, not {others[0]}")  # fmt: skip
    for shape in args.shapes:
        if parts < 1 or int(shape.split("x")[1]) % (parts * delta_passes.CHUNK):
            raise UsageError(f"--parts {parts}: accepted are numbers whose product with {delta_passes.CHUNK} divides the tokens of {shape}")  # fmt: skip
    delta_passes.count_parts = lambda *_, **__: parts
    return parts


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    if args.beside and not args.peers:
        raise UsageError("--beside: accepted with --peers fla")
    if args.parts is not None and args.peers:
        raise UsageError("--parts: accepted without --peers")
    if args.peers:
        names = [op for op in args.ops if op != "selective memory"]
        return [
            dict(op=op, shape=shape, capability=f"{FLA} {capability}")
            for capability in args.capabilities
            for shape in args.shapes
            for op in names
        ]
    checks = [
        dict(op=CHECKS[name].op, shape="", capability=capability, check=name)
        for capability in args.capabilities
        for name in args.checks
    ]
    more: dict[str, Any] = {}
    if args.tilings:
        more["tilings"] = ",".join(set_tilings(args.tilings))
    if args.kernels:
        more["kernels"] = True
    if args.parts is not None:
        more["parts"] = set_parts(args)
    timed = [
        dict(op=op, shape=shape, capability=capability, **more)
        for shape in args.shapes
        for op in args.ops
        for capability in (*args.capabilities, *["any"] * (args.parts is None and not args.own))
    ]
    return checks + timed


def rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the rows of the checks, then those of the times, all of whose programs are compiled before one is timed."""
    if args.peers:
        yield from peer_rows(args, cases)
        return
    timed = []
    with alone(args.lock, shared=True):
        for case in cases:
            if "check" in case:
                yield result(case, functools.partial(check, case["check"]))
            else:
                timed.append(result(case, functools.partial(timers, case)))
    with alone(args.lock):
        for row in timed:
            yield row if "error" in row else result(row, functools.partial(call_timers, row))


def peer_rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the rows of flash-linear-attention by compute capability, without those of ops that it lacks."""
    for capability in args.capabilities:
        own = [case for case in cases if case["capability"] == f"{FLA} {capability}"]
        pairs = [(case["op"], case["shape"]) for case in own]
        peer = Fla(pairs, capability=capability, **options.of_fla(args))
        try:
            with alone(args.lock, shared=True):
                ours = [compiled(capability, case) if args.beside else {} for case in own]
                peer.wait(args.patience)
            with alone(args.lock):
                for case, functions in zip(own, ours, strict=True):
                    row = case | in_turn(case, functions, peer)
                    if row.get("fla_error") != UNKNOWN:
                        yield row
        finally:
            peer.close()


def compiled(capability: str, case: dict[str, Any]) -> dict[str, Any]:
    """Return what `timers` returns for a case as code for a compute capability, and the same for XLA, or their errors."""
    own = result(case | dict(capability=capability), functools.partial(timers, case))
    xla = result(case | dict(capability="any"), lambda: dict(xla=timer(case, "xla")))
    return {n: x for n, x in own.items() if n not in case} | of_xla(xla)


def of_xla(row: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of XLA of a row: what is called "xla", or the error as "xla_error", so that those of the others remain."""
    return {"xla_error": row["error"]} if "error" in row else {"xla": row["xla"]}


def in_turn(case: dict[str, Any], functions: dict[str, Any], peer: Fla) -> dict[str, Any]:
    """Return the times that the functions of `compiled` return and the peer's; with functions ours and the peer's twice in turn, of which
    the shorter, and XLA's once.
    """
    ours = {name: x for name, x in functions.items() if name != "xla"}
    first = ours | call_timers(ours) | peer.times(case["op"], case["shape"])
    if not functions:
        return first
    again = call_timers(ours) | peer.times(case["op"], case["shape"], again=True)
    both = {n: x for n, x in again.items() if n in ("triton", FLA) and n in first}
    row = first | {n: list(map(min, first[n], x)) for n, x in both.items()}
    if "xla" not in functions:
        return row
    return row | of_xla(result(dict(capability="any"), lambda: dict(xla=functions["xla"]())))


def result(case: dict[str, Any], function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a case with the results of a function for its compute capability, or with the error that the function raised."""
    forced = case["capability"] != "any"
    try:
        with launch.code_for(case["capability"]) if forced else contextlib.nullcontext():
            return case | function()
    except Exception as exception:
        return case | dict(error=f"{type(exception).__name__}: {exception}"[:600])


def timers(case: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Compile a case's programs; return for each implementation a function that times them."""
    names = ("xla", "automatic") if case["capability"] == "any" else ("triton",)
    if case.get("kernels") and case["op"] in triton_token_ops.OPS:
        return {name: timer(case, name, by_kernel=True) for name in names}
    if case.get("kernels"):
        return {"times_of_kernels": timer(case, names[-1], by_kernel=True)}
    return {name: timer(case, name) for name in names}


def call_timers(row: dict[str, Any]) -> dict[str, Any]:
    """Return the times of a row in which `timers` stand for them."""
    return {name: function() for name, function in row.items() if callable(function)}


def timer(case: dict[str, Any], name: str, by_kernel: bool = False) -> Callable[[], Any]:
    """Compile one implementation ("triton", "xla" or "automatic") of an op at a shape, and return a function that returns [ms forward, ms
    forward and backward], or of one token [ms of a step]; with `by_kernel`, what `launches` returns, or of an op of tokens the times by a profile.
    """
    op, shape = case["op"], case["shape"]
    implementation: Any = None if name == "automatic" else name
    if name == "automatic" and op in kernels.OPS and op != triton_attention.ATTENTION:
        implementation = "mosaic_gpu", "xla"  # few memories would be computed by Triton
    if op in triton_token_ops.OPS:
        return triton_token_ops.timer(op, shape, implementation, on_device=by_kernel)
    source: Any = triton_attention if op == triton_attention.ATTENTION else kernels
    inputs = functools.partial(source.make_inputs, op, shape)
    lowered = kernels.programs_of(source.library_call(op, implementation), jax.eval_shape(inputs))
    pair = [program.compile() for program in lowered]
    calls = 4 if name == "xla" else 20  # its calls are long
    if by_kernel:
        return lambda: launches(pair[1], inputs())
    return lambda: kernels.measure(pair, inputs(), calls)


def launches(program: Any, inputs: tuple[jax.Array, ...]) -> dict[str, float]:
    """Return the device time in ms of each kernel of a compiled program of forward and backward pass, by name."""
    q, k, v, do, *gates = inputs
    jax.block_until_ready(program(do, q, k, v, *gates))
    times: dict[str, float] = {}
    for row in profile.by_kernel(lambda: program(do, q, k, v, *gates), program.as_text()):
        times[row["kernel"]] = round(times.get(row["kernel"], 0.0) + row["milliseconds"], 4)
    return times


def line(row: dict[str, Any]) -> str:
    name = f"{row['capability']:4s} {row.get('check') or row['op']:20s} {row['shape']:15s}"
    if "error" in row:
        return f"{name} {row['error']}"
    if "errors" in row:
        verdict = "good" if row["good"] else "WRONG"
        bits = "" if row["same_bits"] else ", other bits in a second run"
        causal = "" if not row["not_causal"] else f", {row['not_causal']} outputs not causal"
        return f"{name} {verdict} {row['errors']}{bits}{causal}"
    if "times_of_kernels" in row:
        return f"{name} {row['times_of_kernels']}"
    if "fla_error" in row:
        return f"{name} {row['fla_error']}"
    if "xla_error" in row:
        name += f" (xla: {row['xla_error'][:100]})"
    times = (f"{n} {' / '.join(f'{ms:.3f}' for ms in row[n])}" for n in ("triton", "xla", "automatic", FLA) if n in row)  # fmt: skip
    return f"{name} {'   '.join(times)} ms"
