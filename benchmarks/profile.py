"""Measure the device time of each instruction of a compiled program, by XLA's name and by the place in the
model.
"""

from __future__ import annotations

import gzip
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (\(?[a-z]\w*\[[\d,]*\])")
_SOURCE = re.compile(r'op_name="([^"]*)"')


def by_kernel(call: Callable[[], Any], text: str, calls: int = 2) -> list[dict[str, Any]]:
    """Measure the device time of each instruction of a compiled program.

    Args:
        call: runs the program once; it has run before.
        text: the text of the compiled program, its `as_text()`.
        calls: number of calls of the program that are profiled.

    Returns:
        A row for each kernel of an instruction, the longest first: `milliseconds` and `launches` per call,
        the `instruction`, the `kernel`, the first array of its `result`, and its place in the model
        (`source`). In a command buffer all kernels have the instruction of the buffer;
        XLA_FLAGS=--xla_gpu_enable_command_buffer= turns command buffers off.

    Raises:
        RuntimeError: the recorded profile has no instruction of the compiled program.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            result = None
            for _ in range(calls):
                result = call()
            jax.block_until_ready(result)
        events = [
            event
            for path in Path(folder).rglob("*.trace.json.gz")
            for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
            if "hlo_op" in event.get("args", {}) and event.get("ph") == "X"
        ]
    if not events:
        raise RuntimeError("the profile has none of the program's instructions")
    known = {}
    for line in text.splitlines():
        if match := _INSTRUCTION.match(line):
            source, kernel = _SOURCE.search(line), re.sub(r"\W", "_", match[1])
            known[match[1]] = match[2].lstrip("("), source[1] if source else ""
            known.setdefault(kernel, known[match[1]])
    time: dict[tuple[str, str], float] = defaultdict(float)
    launches: dict[tuple[str, str], int] = defaultdict(int)
    for event in events:
        key = event["args"]["hlo_op"], event["name"]
        time[key] += event["dur"] / 1e3 / calls
        launches[key] += 1
    rows = []
    for (instruction, kernel), spent in sorted(time.items(), key=lambda item: -item[1]):
        result, source = known.get(instruction) or known.get(kernel) or ("", "")
        count = launches[instruction, kernel] / calls
        rows.append(
            dict(
                milliseconds=round(spent, 4),
                launches=count,
                instruction=instruction,
                kernel=kernel,
                result=result,
                source=source,
            )
        )
    return rows
