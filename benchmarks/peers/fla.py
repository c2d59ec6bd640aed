"""flash-linear-attention under PyTorch, timed by a separate process in the same run as the library.

Triton's search for an operation's best blocks compiles every configuration of every kernel that its authors
list, which takes minutes for one operation. Here niced processes (`benchmarks.peers.fla_worker warm`) compile
the configurations into Triton's cache, each configuration in one of them, on rows of 1,024 tokens. Another
process (`benchmarks.peers.fla_worker time`) then makes the search itself at the true size: it searches the
complete list again for each case, and times each configuration for 20 ms in place of 100. The reported time
is the lower of two medians: Triton's `do_bench`, and 7 batches of 20 calls.

Models are timed by the same processes: the operation "model gla-340m" at the shape "16x2048" is a forward and
backward pass of the peer's language model in our proportions of that size, in bfloat16, and its result is tokens/s.
One layer on all tokens compiles what all layers run. Its Mamba-3 requires the Triton kernels of Mamba-3 in mamba_ssm; it has a
layer of Gated DeltaNet-2 but no model, for which its model of Gated DeltaNet has these layers. The operation "mom" at "8x2048" is a layer of its
Mixture-of-Memories in the proportions of `configs/mom.py:340m`. Its Mamba2 requires the Triton kernels of
mamba_ssm, but not the CUDA extensions: `MAMBA_SKIP_CUDA_BUILD=TRUE pip install --no-deps --no-build-isolation
mamba_ssm`.

The processes import it, PyTorch and their Triton from the folders of PYTHONPATH, as this process does, or with the option `--peer_path` from
other folders: jax-triton requires a newer Triton than an installed PyTorch may. Before anything is compiled, a process
(`benchmarks.peers.fla_worker check`) imports it; if it cannot, the benchmark ends with a message.
"""

from __future__ import annotations

import functools
import json
import os
import queue
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.registry import ROOT, UsageError

NAME = "flash-linear-attention"
UNKNOWN, MISSING = "it has no such operation", "ModuleNotFoundError"
"""The error for an operation that the peer lacks, and the beginning of that for a missing package."""

CAPABILITY = "FLA_CAPABILITY"
"""The environment variable with the compute capability of the card that the processes show to the peer, if it is not that of this machine's
card."""
SHARED_MEMORY = {"8.0": 166912, "8.6": 101376, "8.9": 101376, "9.0": 232448, "10.0": 232448, "12.0": 101376}  # fmt: skip
"""The bytes of shared memory that a program may use, by compute capability."""

MODELS = {
    "340m": ("gla", "gated_deltanet", "mamba2", "mamba3", "comba", "gated_deltaproduct", "gated_deltanet2"),
    "1.3b": ("gla", "gated_deltanet", "kda", "mamba2", "rwkv7", "softmax"),
}  # fmt: skip
"""The methods of whose language models there is a size. Its softmax attention requires flash_attn, which is compiled for each PyTorch:
`benchmarks.peers.fla_models` gives it cuDNN's where that is missing."""

PATIENCE, MODEL_PATIENCE = 100, 300
"""The seconds that the peer may take for the search and the times of an operation, and of a model, whose search at 1.3B takes longer."""

_COMMAND = [sys.executable, "-m", "benchmarks.peers.fla_worker"]


class Fla:
    """Measures the peer's times one case after another, once its kernels are compiled.

    Args:
        cases: pairs (operation, shape "BxTxHxD") that will be measured; compiled in this order. A model's
        shape is "BxT".
        workers: number of processes that compile the peer's kernels.
        bias: mean of the gates of forgetting attention before the sigmoid; its kernels need no search, but
        are timed here too.
        capability: the compute capability whose code Triton makes, such as "8.0"; None is that of the card.
        patience: seconds that one answer of `times` may take, as of --peer_patience; None is `PATIENCE`, or of models `MODEL_PATIENCE`.
        path: the folders of PYTHONPATH for the peer's processes, as of --peer_path; None are those of this process.

    Raises:
        UsageError: a process with these folders cannot import the peer.
    """

    def __init__(
        self,
        cases: Sequence[tuple[str, str]],
        workers: int,
        bias: float = 2.0,
        capability: str | None = None,
        path: str | None = None,
        patience: float | None = None,
    ):
        triton = find(path)
        self._began = time.perf_counter()
        self._claims = tempfile.TemporaryDirectory()
        self._assembler = tempfile.TemporaryDirectory()
        self._environment = environment(path)
        if capability:
            packaged = triton.parent / "backends/nvidia/bin/ptxas"
            assembler = self._environment.get("TRITON_PTXAS_PATH", str(packaged))
            self._environment |= code_for(capability, Path(self._assembler.name), assembler)
        arguments = [json.dumps([list(case) for case in cases]), str(bias), self._claims.name]
        command = ["nice", "-n", "5", *_COMMAND, "warm", *arguments]
        self._workers = [
            subprocess.Popen([*command, str(i)], stdout=subprocess.DEVNULL, env=self._environment)
            for i in range(workers)
        ]
        self._bias, self._patience = bias, patience
        self._start()

    def _start(self) -> None:
        pipe = subprocess.PIPE
        self._process: Any = subprocess.Popen(
            [*_COMMAND, "time", str(self._bias)],
            text=True,
            stdin=pipe,
            stdout=pipe,
            env=self._environment,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._started = False
        reader = threading.Thread(
            target=_read_lines, args=(self._process, self._lines), daemon=True
        )
        reader.start()

    def wait(self, patience: float) -> bool:
        """Wait until the peer's kernels for all cases are compiled, or `patience` seconds since the start
        are over.

        What is not compiled by then is compiled during the calls of `times`.

        Returns:
            Whether everything is compiled.
        """
        for worker in self._workers:
            left = patience - (time.perf_counter() - self._began)
            try:
                worker.wait(max(0.0, left))
            except subprocess.TimeoutExpired:
                worker.kill()
        seconds = time.perf_counter() - self._began
        done = all(worker.wait() == 0 for worker in self._workers)
        print(f"the peer's kernels: {seconds:.0f} s, all compiled: {done}", file=sys.stderr)
        return done

    def times(self, op: str, shape: str, again: bool = False) -> dict[str, Any]:
        """Measure the peer's time of one case, an operation at a shape. With `again`, which says that the operation was timed before, the
        blocks that were found then are used.

        Returns:
            {"fla": [ms forward, ms forward and backward]}, of one token {"fla": [ms of a step]}, for a model its tokens/s, or
            {"fla_error": reason}.

        Raises:
            RuntimeError: the process that times the peer ended before it could time anything.
        """
        patience = self._patience
        if patience is None:
            patience = MODEL_PATIENCE if op.startswith("model ") else PATIENCE
        try:
            self._process.stdin.write(json.dumps([op, shape, again]) + "\n")
            self._process.stdin.flush()
            if not self._started and not self._lines.get(timeout=patience):
                raise BrokenPipeError
            self._started = True
            row = json.loads(self._lines.get(timeout=patience) or '{"fla_error": "it ended"}')
        except (queue.Empty, BrokenPipeError) as why:
            if not self._started and isinstance(why, BrokenPipeError):
                raise RuntimeError(
                    f"{NAME}'s process ended with status {self._process.wait()} before it could time anything; its own message is above"
                ) from why
            row = {"fla_error": f"{type(why).__name__} within {patience:g} s"}
        error = row.get("fla_error", UNKNOWN)
        if error != UNKNOWN and not error.startswith(MISSING):
            self._process.kill()  # the card may be in an error state, which ends with the process
            self._start()
        return row

    def close(self) -> None:
        """End the process that times the peer's operations, and those that still compile."""
        for process in (self._process, *self._workers):
            process.kill()


def environment(path: str | None) -> dict[str, str]:
    """Return the environment variables of the peer's processes: this process's, but if a `path` is given, with its folders and this
    repository as PYTHONPATH, and without the assembler TRITON_PTXAS_PATH, which is that of this process's Triton.
    """
    if path is None:
        return dict(os.environ)
    others = {name: text for name, text in os.environ.items() if name != "TRITON_PTXAS_PATH"}
    return others | {"PYTHONPATH": os.pathsep.join([*filter(None, [path]), str(ROOT)])}


@functools.cache
def find(path: str | None) -> Path:
    """Import the peer in a process with the folders `path` in its PYTHONPATH, as in `environment`; return the file of the Triton that
    the process imported.

    Raises:
        UsageError: the process cannot import it; the message names the option --peer_path and has the process's last line.
    """
    patience = 300
    try:
        done = subprocess.run(
            [*_COMMAND, "check"], capture_output=True, text=True, env=environment(path), timeout=patience
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UsageError(f"--peers fla: not imported within {patience} s") from None
    found = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not found:
        where = "this process's PYTHONPATH" if path is None else f"--peer_path {path!r}"
        last = (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]
        raise UsageError(
            f"--peers fla: a process with {where} cannot import {NAME}: {last[:300]}. --peer_path: accepted are "
            f"folders, with {os.pathsep!r} between them, with {NAME}, PyTorch and its Triton, where they are not installed"
        )
    return Path(json.loads(found[-1])["triton"])


def code_for(capability: str, folder: Path, assembler: str) -> dict[str, str]:
    """Return environment variables with which Triton makes code for a compute capability, such as "8.0", that this machine's card
    runs.

    Triton assembles for the capability of its code, and a card of another generation does not load the result. A script in `folder`
    therefore stands for Triton's `assembler`: it passes PTX code of the older capability to it, but asks for this card's
    instructions. The peer is shown a card of the older capability, too (`fla_worker._as_card`).
    """
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    card = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    suffix = "" if card.startswith("8") else "a"
    script = folder / "ptxas"
    target = f"--gpu-name=sm_{card.replace('.', '')}{suffix}"
    command = f'exec {shlex.quote(assembler)} "${{@/#--gpu-name=sm_*/{target}}}"'
    script.write_text(f"#!/bin/bash\n{command}\n")
    script.chmod(0o755)
    return {
        "TRITON_OVERRIDE_ARCH": f"sm{capability.replace('.', '')}",
        "TRITON_PTXAS_PATH": str(script),
        CAPABILITY: capability,
    }


def _read_lines(process: Any, lines: queue.Queue[str]) -> None:
    """Put each line of JSON that a measuring process prints into a queue, and an empty one once the process
    has ended.
    """
    for line in process.stdout:
        if line.startswith("{"):
            lines.put(line)
    lines.put("")
