"""A whole model's training step: `python -m benchmarks.model_step [--variants gla-340m,...] [--lengths 2048,16384,4096,8192] [--output FILE]`.

Tokens/s at equal tokens a step (`--tokens`), whatever the length of a row: forward, backward, optimizer and checks, bfloat16
activations over float32 parameters. Every program is traced and compiled in a process of its own, side by side (`--workers`); then
each in its turn is timed, with nothing compiling, and its row printed and appended at once: the median over 5 batches of 2 steps,
the seconds that tracing and compiling took beside the others', and their CPU seconds. `--profile DIR` writes what each of a step's
instructions takes, a file a row. `--peers fla` then times the forward and backward, without an optimizer, of
flash-linear-attention's models of the same proportions (see `benchmarks.fla`), at the size they are written for: 340m, a vocabulary
of 32,000.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the processes share a card
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")

import jax
import numpy as np

from benchmarks.fla import Fla
from benchmarks.profile import by_kernel
from benchmarks.timing import append_row, program_bytes, provenance
from configs import lm
from lsm_jax import ops
from lsm_jax.models.config import REMAT
from lsm_jax.parallel import make_mesh, token_sharding
from lsm_jax.training import make_program


class Measurement:
    """A program that a process of its own compiles and, when told to, times.

    Args:
        case: what `serve` reads.
    """

    def __init__(self, case: dict[str, Any]):
        self.case, self.ready, self._process = case, False, None
        self._ended = False

    def compile(self) -> None:
        """Start, and return once it has compiled or failed to."""
        if self._ended:
            return
        command = [
            sys.executable,
            "-m",
            "benchmarks.model_step",
            "--serve",
            json.dumps(self.case),
        ]
        pipe = subprocess.PIPE
        self._process: Any = subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe)
        self.ready = self._line() == "ready"

    def row(self) -> dict[str, Any]:
        """The row; waits for it."""
        if not self.ready:
            return self.case | {"error": "not compiled"}
        try:
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
            return json.loads(self._line() or "{}") or self.case | {"error": "it ended"}
        except BrokenPipeError:
            return self.case | {"error": "it ended"}

    def end(self) -> None:
        """End its process."""
        self._ended = True
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _line(self) -> str:
        for line in self._process.stdout:
            if line.startswith(("{", "ready")):
                return line.strip()
        return ""


def serve(case: dict[str, Any]) -> None:
    """Compile a case, say so, wait for a line, time it."""
    began, cpu = time.perf_counter(), time.process_time()
    config = lm.get_config(case["variant"])
    config.model.vocab_size, config.model.remat = case["vocab_size"], case["remat"]
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
        )
        print("ready", flush=True)
        if not sys.stdin.readline():
            return
        try:
            drawn = np.random.default_rng(0).integers(0, case["vocab_size"], shape, dtype=np.int32)
            batch = dict(tokens=drawn, labels=drawn, loss_mask=np.ones(shape, np.float32))
            batch = jax.device_put(batch, place)
            state, metrics, times = init(), {}, []
            for calls in (1, 2, 2, 2, 2, 2, 2):  # the first two warm up
                start = time.perf_counter()
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
                for found in by_kernel(once, step.as_text()):
                    append_row(path, found)
        except RuntimeError as error:
            row["error"] = str(error)[:200]
        row |= dict(implementations=ops.choices(), xla_flags=os.environ.get("XLA_FLAGS", ""))
        print(json.dumps(row | provenance()), flush=True)


def measure(args: argparse.Namespace) -> None:
    """All rows, in the order of lengths, then variants; the peer's after them."""
    policies = [(args.remat[0], n) for n in args.lengths]
    policies += [(remat, args.lengths[0]) for remat in args.remat[1:]]
    ours = [
        Measurement(
            dict(
                variant=v,
                rows=args.tokens // n,
                length=n,
                remat=r,
                vocab_size=args.vocab_size,
                profile=args.profile,
            )
        )
        for r, n in policies
        for v in args.variants
    ]
    theirs = [(v, n) for n in args.lengths for v in args.variants] if args.peers else []
    asked = [(f"model {v.rpartition('-')[0]}", f"{args.tokens // n}x{n}") for v, n in theirs]
    peer = Fla(asked, args.workers) if asked else None

    def write(row: dict) -> None:
        print(json.dumps(row), flush=True)
        if args.output:
            append_row(args.output, row)

    began, pool = (
        time.perf_counter(),
        concurrent.futures.ThreadPoolExecutor(args.workers),
    )
    try:
        concurrent.futures.wait([pool.submit(one.compile) for one in ours], timeout=args.patience)
        for one in ours:
            if not one.ready:
                one.end()
        if peer is not None:
            peer.wait(args.patience)
        compiled, seconds = sum(one.ready for one in ours), time.perf_counter() - began
        print(
            f"{compiled} of {len(ours)} compiled: {seconds:.0f} s",
            file=sys.stderr,
            flush=True,
        )
        for one in ours:
            write(one.row())
            one.end()
        for (variant, length), case in zip(theirs, asked, strict=True):
            row = dict(variant=variant, peer="fla", rows=args.tokens // length, length=length)
            if peer is not None:
                write(row | peer.times(*case) | provenance())
    finally:
        for one in ours:
            one.end()
        if peer is not None:
            peer.close()
        pool.shutdown(cancel_futures=True)


def main() -> None:
    def words(text):
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--variants", default="gla-340m,gated_deltanet-340m,mamba2-340m", type=words
    )
    parser.add_argument(
        "--lengths",
        default=[2048, 16384, 4096, 8192],
        type=lambda text: [int(length) for length in text.split(",")],
    )
    parser.add_argument("--tokens", type=int, default=32768, help="a step")
    parser.add_argument("--vocab_size", type=int, default=32000)
    parser.add_argument(
        "--remat", default=["dots"], type=words,
        help=f"{', '.join(REMAT)}; of several, those after the first at the first length alone",
    )  # fmt: skip
    parser.add_argument("--peers", default="", help="fla")
    parser.add_argument(
        "--workers",
        type=int,
        default=6,
        help="processes that compile, and as many of the peer's",
    )
    parser.add_argument("--patience", type=float, default=600, help="seconds that they may take")
    parser.add_argument("--profile", default="", help="a folder for rows of a step's instructions")
    parser.add_argument("--output", type=Path, help="append the rows as JSON lines")
    parser.add_argument("--serve", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
        return
    others = [v for v in args.variants if not v.endswith("-340m")]
    if args.peers and (others or args.vocab_size != 32000):
        parser.error(
            f"--peers has models of 340m and a vocabulary of 32000, not {others or args.vocab_size}"
        )
    if args.peers not in ("", "fla"):
        parser.error(f"--peers={args.peers}: accepted is fla")
    if args.profile:
        Path(args.profile).mkdir(parents=True, exist_ok=True)
    if wrong := [r for r in args.remat if r not in REMAT]:
        parser.error(f"--remat={wrong}: accepted are {', '.join(REMAT)}")
    if wrong := [n for n in args.lengths if n < 1 or args.tokens % n]:
        parser.error(f"--lengths={wrong}: accepted are divisors of --tokens={args.tokens}")
    measure(args)


if __name__ == "__main__":
    main()
