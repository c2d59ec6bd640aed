"""Time a complete model's training step.

    python -m benchmarks model_step [--variants gla-340m,...] [--lengths 2048,16384,4096,8192] [--peers fla]

A row for each variant and length: tokens/s at equal tokens per step (`--tokens`), whatever the length of a row, of forward, backward, optimizer and checks,
with bfloat16 activations and float32 parameters. Each program is traced and compiled in a process of its own, side by side (`--workers`). Then they are timed
one after another, while nothing compiles: the median over 5 batches of 2 steps, or fewer of slow steps. The rows also have the seconds and CPU seconds of
tracing and compiling beside the others. `--profile DIR` writes the device times of a step's instructions, one file for each row, and gives the row their sums by
category (`categories`, in milliseconds), without command buffers. `--implementations` names
backends of the mixers' ops, `--unit_length xla` leaves the unit length of heads after short convolutions to XLA, `--norms xla` the gradients of blocks' norms
and of the products behind mixers' norms (`stream` and `product` compute one of the two by a kernel, `backward` both gradients, and sums with their norms by
XLA), `--rwkv7 before` computes what RWKV7 and squared ReLUs do between products as before it was fused (other words leave out one part), `--pairs apart`
computes Mamba2's gradients of q and k head by head (`roles`: all scans with a scalar decay by roles), `--stacks concatenated` joins the
gradients of layers' matrices at the end, `--swiglu apart` multiplies
by SwiGLU's gate and up matrices one after the other, `--delta_chunks kept` computes the gradients of all chunks of a delta rule by the kernel that keeps q
and k, `--loss_chunk_sizes` are of `model.loss_chunk_size`, and `--losses N` first trains for N steps on successive text (warm-up of N / 5 steps) and stores
their losses. With `--lock FILE` processes on one card compile side by side and time one after another. `--peers fla` then times the forward and backward,
without an optimizer, of flash-linear-attention's models in the same proportions with a vocabulary of 32,000 (`benchmarks.peers.fla.MODELS`), which its
processes import from the folders of `--peer_path`, if these are not in PYTHONPATH; other
variants of their sizes have a row that says that the peer has none. `--peers jla` times whole steps of jax-linear-attention's trainer at 1.3B (`benchmarks.peers.jla_trainer`), in `--matmul default` or `fp8`,
with each of its policies `--jla_remat`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the processes share a card
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")

import jax
import numpy as np

from benchmarks import options, text
from benchmarks import step_choices as choices
from benchmarks.peers import jla_trainer
from benchmarks.peers.fla import MODELS as FLA_MODELS
from benchmarks.peers.fla import Fla
from benchmarks.profile import by_kernel
from benchmarks.registry import Benchmark, UsageError
from benchmarks.run import log
from benchmarks.timing import alone, append_row, program_bytes, provenance
from configs import lm
from lsm_jax import ops
from lsm_jax.models.config import REMAT
from lsm_jax.models.counts import flops_per_token
from lsm_jax.parallel import make_mesh, token_sharding
from lsm_jax.training import make_program
from lsm_jax.training.device_times import CATEGORIES

BENCHMARK = Benchmark(
    name="model_step",
    summary="a complete model's training step, beside a peer's",
    key=("variant", "rows", "length"),
    optional_key={
        "remat": None,
        "vocab_size": None,
        "peer": None,
        "unrolled": None,
        "matmul": None,
        "implementation": None,
        "unit_length": None,
        "norms": None,
        "rwkv7": None,
        "pairs": None,
        "stacks": None,
        "swiglu": None,
        "delta_chunks": None,
        "loss_chunk_size": None,
        "batch_steps": 2,  # of rows that do not say it
        "mixer": None,
    },
    output="docs/model_step.jsonl",
)

UNROLLED = {
    "auto": None,
    "no": False,
    "yes": True,
}  # model.unroll_layers, by the words of --unrolled

SECONDS = 20  # after which no further batch of steps is timed, if one was


class Measurement:
    """A process that compiles a model's training step for one case of the benchmark, and times it on
    request.

    Args:
        case: the fields that identify the row (variant, length and so on) and `profile`, the folder for profiles or "".
    """

    def __init__(self, case: dict[str, Any]):
        self.case, self.ready, self._process = case, False, None
        self._ended = False

    def compile(self) -> None:
        """Start the process that compiles the training step, and return once it has compiled or failed to."""
        if self._ended:
            return
        command = [sys.executable, "-m", "benchmarks.cases.model_step", json.dumps(self.case)]
        pipe = subprocess.PIPE
        flags = os.environ.get("XLA_FLAGS", "")
        if self.case["profile"]:  # in a command buffer all kernels have its name
            flags = f"{flags} --xla_gpu_enable_command_buffer=".strip()
        self._process: Any = subprocess.Popen(
            command, text=True, stdin=pipe, stdout=pipe, env=os.environ | {"XLA_FLAGS": flags}
        )
        self.ready = self._line() == "ready"

    def row(self) -> dict[str, Any]:
        """Let the process time its compiled training step, and return the row that it prints."""
        if not self.ready:
            return self._failed("not compiled")
        try:
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
            return json.loads(self._line() or "{}") or self._failed("it ended")
        except BrokenPipeError:
            return self._failed("it ended")

    def _failed(self, error: str) -> dict[str, Any]:
        """Return the benchmark's row of a case that failed, with the error. It names no device, since this
        process has not opened one.
        """
        case = {key: value for key, value in self.case.items() if key != "profile"}
        return case | {"error": error} | provenance(device=False)

    def end(self) -> None:
        """End the process that compiled and timed the training step."""
        self._ended = True
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _line(self) -> str:
        """Return the next line that the measuring process prints, if it is "ready" or a row of results as
        JSON, and skip all other lines; "" once the output has ended.
        """
        for line in self._process.stdout:
            if line.startswith(("{", "ready")):
                return line.strip()
        return ""


def time_steps(
    case: dict[str, Any],
    row: dict[str, Any],
    init: Callable,
    step: Any,
    placement: jax.sharding.Sharding,
) -> None:
    """Time the compiled training step of a case, add the times to its row, and profile the step if the case
    asks for it; call it inside the mesh.
    """
    shape = case["rows"], case["length"]
    state, metrics, times = init(), {}, []
    if count := case.get("losses", 0):
        joined = text.stream(count * shape[0], shape[1], case["vocab_size"])
        parts = {name: np.split(x, count) for name, x in joined.items()}
        row["losses"] = []
        for index in range(count):
            batch = {name: x[index] for name, x in parts.items()}
            state, metrics = step(state, jax.device_put(batch, placement))
            row["losses"].append(round(float(metrics["train/loss"]), 4))
    batch = jax.device_put(text.stream(*shape, case["vocab_size"]), placement)
    began = time.perf_counter()
    for calls in (1, 2, *[case["batch_steps"]] * 5):  # the first two are a warm-up
        start = time.perf_counter()
        if len(times) > 2 and start - began > SECONDS:
            break
        for _ in range(calls):
            state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        times.append((time.perf_counter() - start) / calls)
    seconds = float(np.median(times[2:]))
    row["loss"] = round(float(metrics["train/loss"]), 4)
    row["milliseconds"] = round(1e3 * seconds, 2)
    row["tokens_per_second"] = round(shape[0] * shape[1] / seconds)
    if case["profile"]:

        def once():
            nonlocal state
            state, metrics = step(state, batch)
            return state, metrics

        path = Path(case["profile"])
        path /= f"{case['variant']}-{shape[1]}-{case['remat']}.jsonl"
        path.unlink(missing_ok=True)
        instructions = by_kernel(once, step.as_text())
        for instruction in instructions:
            append_row(path, instruction)
        row["categories"] = {
            name: round(sum(i["milliseconds"] for i in instructions if i["category"] == name), 2)
            for name in CATEGORIES
        }


def serve(case: dict[str, Any]) -> None:
    """Be the process that measures one training step: compile it, print "ready", wait for a line on stdin,
    time it and print its row.

    Args:
        case: the fields of the row that identify it, and `profile`, the folder for profiles or "".
    """
    began, cpu = time.perf_counter(), time.process_time()
    config = lm.get_config(case["variant"])
    choices.apply(case, config)
    if count := case.get("losses", 0):
        config.optimizer.warmup_tokens = count * case["rows"] * case["length"] // 5
    shape = case["rows"], case["length"]
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    place = token_sharding(mesh)
    with jax.set_mesh(mesh):
        program = make_program(config, mesh)
        tokens, mask = (
            jax.ShapeDtypeStruct(shape, kind, sharding=place) for kind in (np.int32, np.float32)
        )
        batch: dict[str, Any] = dict(tokens=tokens, labels=tokens, loss_mask=mask)
        init = program.init.lower().compile()
        start = time.perf_counter()
        lowered = program.train_step.lower(jax.eval_shape(program.init), batch)
        traced = time.perf_counter()
        step = lowered.compile()
        row = {k: v for k, v in case.items() if k != "profile"} | dict(
            trace_seconds=round(traced - start, 1),
            compile_seconds=round(time.perf_counter() - traced, 1),
            all_seconds=round(time.perf_counter() - began, 1),
            cpu_seconds=round(time.process_time() - cpu, 1),
            gib=round(program_bytes(step) / 2**30, 1),
            flops_per_token=3 * flops_per_token(config.model, case["length"]),
        )
        print("ready", flush=True)
        if not sys.stdin.readline():
            return
        try:
            time_steps(case, row, init, step, place)
        except RuntimeError as error:
            row["error"] = str(error)[:200]
        row |= dict(implementations=ops.choices(), xla_flags=os.environ.get("XLA_FLAGS", ""))
        print(json.dumps(row | provenance()), flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = "gla-340m,gated_deltanet-340m,mamba2-340m"
    parser.add_argument("--variants", type=options.words, default=default, help="of configs/lm.py")
    parser.add_argument("--lengths", type=options.integers, default="2048,16384,4096,8192")
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of a step")
    parser.add_argument("--vocab_size", type=int, default=32000)
    parser.add_argument(
        "--remat", type=options.names(REMAT), default="dots",
        help=f"{', '.join(REMAT)}; of several, those after the first only at the first length",
    )  # fmt: skip
    parser.add_argument(
        "--unrolled", type=options.names(tuple(UNROLLED)), default="auto",
        help="yes: layers compiled one after the other; no: a loop over layers; auto: as training does by default; no,yes: both",
    )  # fmt: skip
    parser.add_argument(
        "--matmul", type=options.names(choices.MATMUL), default="default",
        help="how dense layers multiply; fp8_head: the head in FP8, too, which no peer has; default,fp8: both",
    )  # fmt: skip
    parser.add_argument(
        "--implementations", type=options.words, default="automatic",
        help="backends of the mixers' ops, such as automatic,triton; each its own row",
    )  # fmt: skip
    parser.add_argument(
        "--unit_length", type=options.names(("automatic", "xla")), default="automatic",
        help="heads after a short convolution scaled to unit length by its kernel where it can, or by XLA; automatic,xla: both",
    )  # fmt: skip
    parser.add_argument(
        "--norms", type=options.names(("automatic", "xla", "stream", "product", "backward")), default="automatic",
        help="kernels for blocks' norms with the residual stream (stream), for mixers' norms with their products (product), for both (automatic), "
        "for both without the values of blocks' sums and norms (backward), or for none (xla); automatic,xla: with and without",
    )  # fmt: skip
    parser.add_argument(
        "--rwkv7", type=options.names(("automatic", *choices.RWKV7_PARTS)), default="automatic",
        help="a part of RWKV7's elementwise work as before it was fused: forward, rows, squares, values, or before, which is all of them; "
        "automatic,before: with and without",
    )  # fmt: skip
    parser.add_argument(
        "--pairs", type=options.names(("automatic", "apart", "roles")), default="automatic",
        help="gradients of two heads that share q and k in one thread block of Hopper's scans, as by default, or of each head; automatic,apart: both; "
        "roles: as by default, with the scan by roles of a scalar decay",
    )  # fmt: skip
    parser.add_argument(
        "--stacks", type=options.names(("automatic", "concatenated")), default="automatic",
        help="gradients of layers' matrices written into those of the stacks when each is known, as by default, or concatenated when all are; "
        "automatic,concatenated: both",
    )  # fmt: skip
    parser.add_argument(
        "--swiglu", type=options.names(("automatic", "apart")), default="automatic",
        help="SwiGLU's products with its gate and up matrices as one where that is automatic, or always two; automatic,apart: both",
    )  # fmt: skip
    parser.add_argument(
        "--delta_chunks", type=options.names(("automatic", "kept")), default="automatic",
        help="gradients of the chunks of wide heads of a delta rule by Hopper's streamed kernel, as by default, or by the one that keeps q and k; "
        "automatic,kept: both",
    )  # fmt: skip
    parser.add_argument(
        "--loss_chunk_sizes", type=options.integers, default="0",
        help="model.loss_chunk_size, such as 0,8192, each its own row; 0 is the config's",
    )  # fmt: skip
    parser.add_argument(
        "--mixer", default="", metavar="FIELD=VALUE,...",
        help="fields of the mixers' configs, such as lower_bound=-5.0 of kda-340m",
    )  # fmt: skip
    parser.add_argument(
        "--losses", type=int, default=0, metavar="N", help="store the losses of N steps on text"
    )
    parser.add_argument(
        "--profile", default="", help="a folder for the times of a step's instructions"
    )
    parser.add_argument(
        "--batch_steps", type=int, default=8, help="steps that are dispatched before the last is awaited; default: 8"
    )  # fmt: skip
    parser.add_argument(
        "--jla_remat", type=options.words, default="dots",
        help="policies of jax-linear-attention's trainer, such as none+lean_vjp,dots_kernels,dots; a row each; a table has the fastest",
    )  # fmt: skip
    options.add_lock(parser)
    options.add_peers(parser, ("fla", "jla"), workers=6, patience=600)


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    others = [v for v in args.variants if v.rpartition("-")[2] not in FLA_MODELS]
    if "fla" in args.peers and (others or args.vocab_size != 32000):
        raise UsageError(
            f"--peers fla has models of {' and '.join(FLA_MODELS)} with a vocabulary of 32000, not {others or args.vocab_size}"
        )
    if args.batch_steps < 1:
        raise UsageError(f"--batch_steps {args.batch_steps}: accepted are integers from 1")
    if "jla" in args.peers and "fp8_head" in args.matmul:
        raise UsageError("--matmul fp8_head: the models of --peers jla have default or fp8")
    if "jla" in args.peers and not args.jla_remat:
        raise UsageError("--jla_remat: accepted are policies such as none,dots, at least one")
    named = {jla_trainer.name_of(dict(variant=v, mixer=args.mixer)) for v in args.variants}
    if "jla" in args.peers and (wrong := named - set(jla_trainer.PRESETS)):
        raise UsageError(
            f"--peers jla has models of {'; '.join(jla_trainer.PRESETS)}, not {'; '.join(sorted(wrong))}"
        )
    if "fla" in args.peers and args.mixer:
        raise UsageError(f"--mixer {args.mixer}: the models of --peers fla have no other fields")
    if wrong := [n for n in args.lengths if n < 1 or args.tokens % n]:
        raise UsageError(f"--lengths {wrong[0]}: accepted are divisors of --tokens={args.tokens}")
    for variant in args.variants:
        choices.set_fields(lm.get_config(variant), args.mixer)
    policies = [(args.remat[0], n) for n in args.lengths]
    policies += [(remat, args.lengths[0]) for remat in args.remat[1:]]
    own = [
        dict(
            variant=v,
            rows=args.tokens // n,
            length=n,
            remat=r,
            vocab_size=args.vocab_size,
            batch_steps=args.batch_steps,
        )
        | ({} if unrolled == "auto" else {"unrolled": UNROLLED[unrolled]})
        | ({"matmul": matmul} if matmul != "default" else {})
        | ({"implementation": name} if name != "automatic" else {})
        | ({"unit_length": unit_length} if unit_length != "automatic" else {})
        | ({"norms": norms} if norms != "automatic" else {})
        | ({"rwkv7": part} if part != "automatic" else {})
        | ({"pairs": pairs} if pairs != "automatic" else {})
        | ({"stacks": stacks} if stacks != "automatic" else {})
        | ({"swiglu": swiglu} if swiglu != "automatic" else {})
        | ({"delta_chunks": chunks} if chunks != "automatic" else {})
        | ({"loss_chunk_size": loss_chunk_size} if loss_chunk_size else {})
        | ({"losses": args.losses} if args.losses else {})
        | ({"mixer": args.mixer} if args.mixer else {})
        for r, n in policies
        for v in args.variants
        for unrolled in args.unrolled
        for matmul in args.matmul
        for name in args.implementations
        for unit_length in args.unit_length
        for norms in args.norms
        for part in args.rwkv7
        for pairs in args.pairs
        for stacks in args.stacks
        for swiglu in args.swiglu
        for chunks in args.delta_chunks
        for loss_chunk_size in args.loss_chunk_sizes
    ]
    policies_of = {"jla": args.jla_remat, "fla": [""]}
    return own + [
        dict(variant=v, peer=peer, rows=args.tokens // n, length=n)
        | ({"peer_remat": remat} if remat else {})
        | (dict(vocab_size=args.vocab_size) if peer == "jla" else {})
        | ({"mixer": args.mixer} if args.mixer else {})
        | ({"matmul": matmul} if matmul != "default" else {})
        for peer in args.peers
        for n in args.lengths
        for v in args.variants
        for matmul in (args.matmul if peer == "jla" else ["default"])
        for remat in policies_of[peer]
    ]


def rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    if args.profile:
        Path(args.profile).mkdir(parents=True, exist_ok=True)
    own = [Measurement(case | dict(profile=args.profile)) for case in cases if "peer" not in case]
    peers = [case for case in cases if "peer" in case]
    of_fla = [case for case in peers if case["peer"] == "fla"]
    asked = [(f"model {case['variant']}", f"{case['rows']}x{case['length']}") for case in of_fla]
    peer = Fla(asked, **options.of_fla(args)) if asked else None
    pool = concurrent.futures.ThreadPoolExecutor(args.workers)
    try:
        with alone(args.lock, shared=True):
            concurrent.futures.wait(
                [pool.submit(one.compile) for one in own], timeout=args.patience
            )
            for one in own:
                if not one.ready:
                    one.end()
            if peer is not None:
                peer.wait(args.patience)
        log(f"{sum(one.ready for one in own)} of {len(own)} programs compiled")
        with alone(args.lock):
            for one in own:
                yield one.row()
                one.end()
            for case, question in zip(of_fla, asked, strict=True):
                if peer is not None:
                    yield case | peer.times(*question)
            for case in peers:
                if case["peer"] == "jla":
                    yield case | jla_row(case, args)
    finally:
        for one in own:
            one.end()
        if peer is not None:
            peer.close()
        pool.shutdown(cancel_futures=True)


def jla_row(case: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of the row of jax-linear-attention's trainer with the case's policy."""
    log(f"jax-linear-attention, {jla_trainer.name_of(case)}, {case['peer_remat']}")
    fp8 = case.get("matmul") == "fp8"
    found = jla_trainer.train_speed(case, remat=case["peer_remat"], fp8=fp8, patience=args.patience)
    return found | provenance()


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
