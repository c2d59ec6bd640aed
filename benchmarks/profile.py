"""Where a program's device time goes, by kernel: its profile read back, with the model's own names beside XLA's."""

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
    """What each instruction of a compiled program takes on the device.

    Args:
        call: runs the program once; already warm.
        text: the program's `as_text()`.
        calls: how often to run it.

    Returns:
        A row an instruction, the longest first: `milliseconds` and `launches` a call, the `instruction`, the `result`'s first
        array, where in the model it stands (`source`) and the `kernels` launched.
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
    known = {}
    for line in text.splitlines():
        if match := _INSTRUCTION.match(line):
            source = _SOURCE.search(line)
            known[match[1]] = match[2].lstrip("("), source[1] if source else ""
    time: dict[str, float] = defaultdict(float)
    launches: dict[str, int] = defaultdict(int)
    kernels: dict[str, set[str]] = defaultdict(set)
    for event in events:
        name = event["args"]["hlo_op"]
        time[name] += event["dur"] / 1e3 / calls
        launches[name] += 1
        kernels[name].add(event["name"])
    return [
        dict(
            milliseconds=round(spent, 4),
            launches=launches[name] / calls,
            instruction=name,
            result=known.get(name, ("", ""))[0],
            source=known.get(name, ("", ""))[1],
            kernels=sorted(kernels[name])[:4],
        )
        for name, spent in sorted(time.items(), key=lambda item: -item[1])
    ]
