"""Time the fused kernels, their XLA forms (--xla) and their peers in one run on one card.

    python -m benchmarks kernels [--ops kda] [--shapes 8x4096x16x128] [--segments 8] [--xla] [--peers jla,fla]
    python -m benchmarks kernels --ops "scalar decay" --roles --errors --device_times --output -

A row for each op and shape (B x T x H x D, or x K x V for a delta rule or mLSTM, bfloat16): [ms forward, ms forward and backward] of the kernel, of
the XLA form and of the peers, measured one after the other. The peers are jax-linear-attention ("jla") and
flash-linear-attention under PyTorch ("fla", see `benchmarks.peers.fla`). Times are medians of 7 batches of 20
calls. The gradient of the decay is computed, since it comes from a projection in the peers too. All programs
are compiled before any is timed. `--roles` also times linear attention with a scalar decay or none by the scan whose warpgroups carry
columns, as "columns", by the scan by roles (`pallas_kernels.linear_attention.hopper.scalar_roles`), as "roles", by that with the sums of
its decays by a kernel, as "sums", and with few launches (`scalar_decay.FEW_LAUNCHES`), as "short" where rows are short and as "few" also
elsewhere, and as "chunks" where rows are short with the gradients of all chunks at once; `--roles sums,short` is some of them. With `--errors` it says whether their results have the bits of "columns".
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory too

import jax
import jax.numpy as jnp

from benchmarks import options
from benchmarks.peers.fla import Fla
from benchmarks.peers.jla import jla
from benchmarks.profile import by_kernel
from benchmarks.registry import Benchmark
from benchmarks.timing import alone, batch_milliseconds
from lsm_jax import ops
from pallas_kernels.hopper import parts as hopper_parts
from pallas_kernels.linear_attention.cases import GRADIENT_TOLERANCE, OUTPUT_TOLERANCE
from pallas_kernels.linear_attention.hopper import scalar_decay, scalar_scan
from pallas_kernels.memory_cases import TIMED

BENCHMARK = Benchmark(
    name="kernels",
    summary="fused kernels of the linear memories, beside XLA and peers",
    key=("op", "shape"),
    optional_key={"parts": None, "segments": 0, "stronger": 1.0},
    output="docs/kernels.jsonl",
    requires_gpu=True,
)

# Whether the scan of linear attention with a scalar decay is by roles, whether the sums of its decays are by a kernel, and where launches are
# few, for the kinds of --roles.
SCANS = {
    "columns": (False, False, "never"),
    "roles": (True, False, "never"),
    "sums": (True, True, "never"),
    "short": (True, True, "short"),
    "few": (True, True, "always"),
    "chunks": (True, True, "chunks"),
}
KINDS = {"kernel": "mosaic_gpu", **dict.fromkeys(SCANS, "mosaic_gpu"), "xla": "xla"}
OPS = (
    "no decay",
    "constant decay",
    "scalar decay",
    "key decay",
    "key decay and bonus",
    "value decay",
    "delta rule",
    "gated delta rule",
    "undecayed delta rule",
    "kda",
    "rwkv7",
    "slot memory",
    "mlstm",
)


def make_inputs(op: str, shape: str, stronger: float = 1.0) -> tuple[jax.Array, ...]:
    """Return the random inputs of an op for timing: q, k, v, the gradient of the output, and the gates;
    `stronger` multiplies the log decays.
    """
    batch, length, heads, dim, *values = map(int, shape.split("x"))
    keys = jax.random.split(jax.random.key(0), 6)
    widths = (dim, dim, *(values or [dim]) * 2)
    q, k, v, do = (
        jax.random.normal(key, (batch, length, heads, width), jnp.bfloat16)
        for key, width in zip(keys[:4], widths, strict=True)
    )
    unit = (k / jnp.linalg.norm(k.astype(jnp.float32), axis=-1, keepdims=True)).astype(k.dtype)
    if op == "kda":
        beta = jax.nn.sigmoid(jax.random.normal(keys[4], q.shape[:3]))
        decay = jax.nn.log_sigmoid(jax.random.normal(keys[5], q.shape) + 3)
        return q, unit, v, do, beta, decay * stronger
    if op == "rwkv7":
        strength, decay = jax.random.uniform(keys[4], (2, *q.shape))
        return q, k, v, do, -unit, unit * strength.astype(k.dtype), -0.6 * decay * stronger
    if op == "slot memory":  # 64 slots
        decay = jax.nn.log_sigmoid(jax.random.normal(keys[4], (*q.shape[:3], 64))) / 8
        return q, k, v, do, -jnp.expm1(decay).astype(k.dtype), decay * stronger
    if op == "mlstm":  # gates as in its layer, with the soft cap of 15
        gate, decay = 15 * jnp.tanh(jax.random.normal(keys[4], (2, *q.shape[:3])) / 15)
        return q, k, v, do, jax.nn.log_sigmoid(decay + 4) * stronger, gate
    if "delta" in op:
        beta, decay = jax.nn.sigmoid(jax.random.normal(keys[4], (2, batch, length, heads)))
        gated = op != "delta rule"
        return q, unit, v, do, beta, *[jnp.log(0.9 + 0.1 * decay) * stronger] * gated
    if any(kind in op for kind in ("scalar", "key", "value")):
        size = (batch, length, heads) if "scalar" in op else q.shape
        decay = jax.nn.log_sigmoid(jax.random.normal(keys[4], size) + 3)
        bonus = [jax.random.normal(keys[5], (heads, dim))] if "bonus" in op else []
        return q, k, v, do, decay * stronger, *bonus
    return q, k, v, do


def library_call(op: str, implementation: str, segments: int = 0):
    """Return this library's op with an `implementation` as a function of the inputs that returns the output.

    With `segments` = n, each row consists of n documents, and the op has one initial and one final state for
    each.
    """

    def options_for(empty, q) -> dict[str, Any]:
        if not segments:
            return dict(implementation=implementation)
        batch, length, heads, dim = q.shape
        ids = jnp.broadcast_to(1 + jnp.arange(length) * segments // length, (batch, length))
        state = empty(batch, heads, dim, dim, num_segments=segments)
        return dict(implementation=implementation, segment_ids=ids, initial_state=state)

    if op == "slot memory":
        empty: Any = lambda *sizes, **more: ops.slot_state(*sizes[:2], 64, *sizes[2:], **more)  # noqa: E731
        return lambda q, *x: ops.slot_memory(q, *x, **options_for(empty, q))[0]
    if op == "rwkv7":
        return lambda q, *x: ops.dplr_memory(q, *x, **options_for(ops.delta_state, q))[0]
    if "delta" in op or op == "kda":
        erase = "undecayed" if "undecayed" in op else "decayed"
        return lambda q, *x: ops.delta_memory(
            q, *x, erase=erase, **options_for(ops.delta_state, q)
        )[0]

    if op == "mlstm":
        empty = functools.partial(ops.linear_state, normalize=True, stabilize=True)
        return lambda q, k, v, decay, gate: ops.linear_memory(
            q, k, v, decay, log_input_gate=gate, normalize=1e-6, **options_for(empty, q)
        )[0]

    def call(q, k, v, *decay):
        if op == "constant decay":
            decay = (jnp.log1p(-(2.0 ** (-5 - jnp.arange(q.shape[2])))),)
        decay, bonus = (*decay, None, None)[:2]
        name = "value_log_decay" if op == "value decay" else "log_decay"
        arguments: dict[str, Any] = {name: decay, **options_for(ops.linear_state, q)}
        return ops.linear_memory(q, k, v, bonus=bonus, **arguments)[0]

    return call


def programs_of(call, inputs: tuple[jax.ShapeDtypeStruct, ...]) -> list:
    """Return two lowered programs: forward, and forward and backward with the gradients of all inputs.

    The programs' arguments are the gradient of the op's output, then q, k, v and the gates.
    """

    def forward(do, *inputs):
        return call(*inputs)

    def both(do, *inputs):
        output, pull = jax.vjp(call, *inputs)
        return output, pull(do)

    q, k, v, do, *gates = inputs
    return [jax.jit(f).lower(do, q, k, v, *gates) for f in (forward, both)]


@contextlib.contextmanager
def scan_of(kind: str):
    """Let programs that are traced in this context compute as `SCANS` says for their kinds, and others by default. Their traces are forgotten
    after it.
    """
    if kind not in SCANS:
        yield
        return

    def switch(roles: bool | None, sums: bool, launches: str) -> None:
        scalar_scan.ROLES, scalar_decay.SUMS_BY_PRODUCTS = roles, sums
        scalar_decay.FEW_LAUNCHES = launches

    before = scalar_scan.ROLES, scalar_decay.SUMS_BY_PRODUCTS, scalar_decay.FEW_LAUNCHES
    try:
        jax.clear_caches()
        switch(*SCANS[kind])
        yield
    finally:
        switch(*before)
        jax.clear_caches()


def first_row(inputs) -> list[jax.Array]:
    """Return the inputs (or their shapes) of an op for the first row of the batch, in float32."""

    def row(x):
        shape = (1, *x.shape[1:]) if x.ndim > 2 else x.shape
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(shape, jnp.float32)
        return x[: shape[0]].astype(jnp.float32)

    return [row(x) for x in inputs]


def results(pair, inputs) -> list[jax.Array]:
    """Return the output of an op and the gradients of q, k, v and those of its gates that have a row for each row of the batch."""
    q, k, v, do, *gates = inputs
    output, gradients = pair[1](do, q, k, v, *gates)
    return [output, *(g for g in gradients if g.ndim > 2)]


@jax.jit
def error(found: jax.Array, wanted: jax.Array) -> jax.Array:
    """Return the error of an array's first row, in RMS relative to the RMS of the row that is wanted."""
    found, wanted = found[:1].astype(jnp.float32), wanted.astype(jnp.float32)
    return jnp.sqrt(jnp.mean((found - wanted) ** 2) / jnp.mean(wanted**2))


def compile_all(cases: list[tuple[str, str]], kinds: list[str], segments: int = 0) -> dict:
    """Compile in parallel two programs for each (op, shape, kind of implementation): forward, and forward and
    backward. Return a dict from that triple to the two compiled programs, or to the error that prevented
    them.
    """
    built: dict = {}
    with concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for op, shape in cases:
            inputs = jax.eval_shape(functools.partial(make_inputs, op, shape))
            for kind in kinds:
                try:
                    if kind == "float32":
                        with jax.default_matmul_precision("highest"):
                            lowered = programs_of(
                                library_call(op, "xla", segments), tuple(first_row(inputs))
                            )
                    else:
                        call = jla(op) if kind == "jla" else library_call(op, KINDS[kind], segments)
                        if call is None:
                            continue
                        with scan_of(kind):
                            lowered = programs_of(call, inputs)
                    built[op, shape, kind] = [pool.submit(p.compile) for p in lowered]
                except Exception as error:  # the requirement of a kernel or a peer that is not met
                    built[op, shape, kind] = error
        for case, pair in built.items():
            try:
                built[case] = pair if isinstance(pair, Exception) else [p.result() for p in pair]
            except Exception as error:
                built[case] = error
    return built


def measure(pair, inputs, calls: int = 20) -> list[float]:
    """Return the times [ms forward, ms forward and backward] of one implementation of an op, given its two
    compiled programs as `pair`, their input arrays, and the number of calls of a batch.
    """
    q, k, v, do, *gates = inputs
    return [round(batch_milliseconds(p, do, q, k, v, *gates, calls=calls), 4) for p in pair]


def device_times(pair, inputs) -> list[list[float]]:
    """Return, for each of an implementation's two programs, the ms that its kernels take on the device in one call, and their number."""
    q, k, v, do, *gates = inputs
    found = []
    for program in pair:
        kernels = by_kernel(lambda p=program: p(do, q, k, v, *gates), program.as_text(), calls=10)
        total = sum(row["milliseconds"] for row in kernels)
        found.append([round(total, 4), round(sum(row["launches"] for row in kernels), 1)])
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ops", type=options.names(OPS), default=",".join(OPS), help=", ".join(OPS)
    )
    parser.add_argument(
        "--shapes",
        type=options.words,
        default=options.shapes(TIMED),
        help="BxTxHxD or, for delta rules and mLSTM, BxTxHxKxV, ...",
    )
    parser.add_argument("--xla", action="store_true", help="time the XLA form too")
    parser.add_argument(
        "--roles",
        type=options.names(SCANS),
        nargs="?",
        const=",".join(SCANS),
        default="",
        help=f"also time scans of a scalar decay or none by these versions: {', '.join(SCANS)} (without names all)",
    )
    parser.add_argument(
        "--errors",
        action="store_true",
        help="compare the results and gradients of the first row with those of XLA in float32",
    )
    parser.add_argument(
        "--device_times", action="store_true",
        help="also the ms that a call's kernels take by JAX's profiler, and their number",
    )  # fmt: skip
    parser.add_argument(
        "--parts", type=int,
        help="number of parts of a long row in the delta rules' kernels, in place of the automatic one",
    )  # fmt: skip
    parser.add_argument(
        "--segments", type=int, default=0,
        help="documents in a row, each with a state in and out; 0: one document and no states",
    )  # fmt: skip
    parser.add_argument(
        "--stronger",
        type=float,
        default=1.0,
        help="factor of the log decays; FLA's stay as they are",
    )
    options.add_peers(parser, ("jla", "fla"))
    options.add_lock(parser)


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    more: dict[str, Any] = {}
    if args.parts is not None:
        more["parts"] = args.parts
    if args.segments:
        more["segments"] = args.segments
    if args.stronger != 1:
        more["stronger"] = args.stronger
    return [dict(op=op, shape=shape, **more) for shape in args.shapes for op in args.ops]


def rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    if args.parts is not None:
        hopper_parts.count_parts = lambda q, k, v: args.parts
    pairs = [(case["op"], case["shape"]) for case in cases]
    kinds = [
        "kernel",
        *args.roles,
        *["xla"] * args.xla,
        *["jla"] * ("jla" in args.peers),
    ]
    peer = Fla(pairs, **options.of_fla(args)) if "fla" in args.peers else None
    try:
        with alone(args.lock, shared=True):
            compiled = [*["float32"] * args.errors, *kinds]
            programs = compile_all(pairs, compiled, args.segments)
            if peer is not None:
                peer.wait(args.patience)
        with alone(args.lock):
            for case in cases:
                yield measure_row(case, kinds, programs, args.stronger, peer, args.device_times)
    finally:
        if peer is not None:
            peer.close()


def measure_row(
    case: dict[str, Any], kinds: list[str], programs: dict, stronger: float, peer: Fla | None,
    on_device: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Return the benchmark's row for one op and shape, with the times of each kind of implementation, and with their errors if there is a
    program in float32; a kind that fails has its error in the row in place of its times.
    """
    op, shape = case["op"], case["shape"]
    row, inputs = dict(case), make_inputs(op, shape, stronger)
    float32, wanted, kept = programs.pop((op, shape, "float32"), None), None, None
    pair: Any = None
    for kind in kinds:
        pair = programs.pop((op, shape, kind), None)
        try:
            if isinstance(pair, Exception):
                raise pair
            if pair is None:
                continue
            row[kind] = measure(pair, inputs)
            if on_device:
                row[f"{kind}_device"] = device_times(pair, inputs)
            if float32 is None:
                continue
            if isinstance(float32, Exception):
                raise float32
            if wanted is None:
                wanted = results(float32, first_row(inputs))
            found = results(pair, inputs)
            errors = [float(error(x, y)) for x, y in zip(found, wanted, strict=True)]
            row[f"{kind}_errors"] = [round(x, 5) for x in errors]
            limits = [OUTPUT_TOLERANCE, *[GRADIENT_TOLERANCE] * (len(errors) - 1)]
            row[f"{kind}_right"] = all(x < y for x, y in zip(errors, limits, strict=True))
            if kind == "columns":
                kept = found
            elif kind in SCANS and kept is not None:
                row[f"{kind}_same_bits"] = [
                    bool(jnp.array_equal(x, y)) for x, y in zip(found, kept, strict=True)
                ]
        except Exception as failure:
            row[f"{kind}_error"] = f"{type(failure).__name__}: {failure}"[:300]
    del inputs, pair
    if peer is not None:
        row |= peer.times(op, shape)
    return row


def line(row: dict[str, Any]) -> str:
    def text(name: str) -> str:
        device = "".join(f", {ms:.4f} in {count}" for ms, count in row.get(f"{name}_device", ()))
        worst = max(row.get(f"{name}_errors", ()), default=0)
        error = f", error {worst:.1e}" if worst else ""
        wrong = " WRONG" if not row.get(f"{name}_right", True) else ""
        return f"{name} {row[name][0]:.3f} / {row[name][1]:.3f}{device}{error}{wrong}"

    times = "   ".join(text(n) for n in ("kernel", *SCANS, "jla", "fla", "xla") if n in row)
    errors = "".join(f"   {k}: {v[:100]}" for k, v in row.items() if k.endswith("_error"))
    return f"{row['op']:16s} {row['shape']:16s} {times} ms{errors}"
