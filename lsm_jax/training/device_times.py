"""Read the device time of each instruction of a compiled program from a trace of JAX's profiler, and sum it by category
and by part of the model."""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from lsm_jax.ops.backends.registry import names_of_ops

CATEGORIES = (
    "matrix products",
    "fused kernels",
    "elementwise and reductions",
    "copies and fills",
    "collectives",
)
# The scopes of `jax.named_scope` in a model and a training step, by which a row's part is named.
PARTS = ("mixer", "feedforward", "embedding", "loss", "optimizer")

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (\(?[a-z]\w*\[[\d,]*\]).*? ([a-z][\w-]*)\(")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_SOURCE = re.compile(r'op_name="([^"]*)"')
_CALLS = re.compile(r"calls=%?([\w.-]+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_NAMES_OF_PRODUCTS = re.compile(r"gemm|cutlass|nvjet|cublas|matmul|onednn|(?<![a-z])dot(?![a-z])")
_COLLECTIVE = re.compile(r"all-|reduce-scatter|collective-|ragged-all|nccl")
# The end of a kernel's own name: the pass, and the number that XLA adds.
_PASS = re.compile(r"(_forward|_backward|_gradients?)?([._]\d+)*$")
_CONTAINERS = ("while", "conditional", "call")  # their events span those of other instructions
# Opcodes that only move data; "convert" is not among them.
_MOVES = frozenset(
    "parameter constant bitcast tuple get-tuple-element copy copy-start copy-done transpose broadcast iota pad slice "
    "dynamic-slice dynamic-update-slice concatenate reshape reverse gather scatter memset memcpy".split()
)


class Instruction(NamedTuple):
    """One instruction of a compiled program: the first array of its result, such as "f32[8,8]", its opcode, its place in
    the model (`op_name`), the targets of the custom calls that it is or contains, and the opcodes of the computation that
    it calls, without those of scalars."""

    result: str
    opcode: str
    source: str
    targets: frozenset[str]
    inner: frozenset[str]


def instructions_of(text: str) -> dict[str, Instruction]:
    """Return the instructions of a compiled program by name, given its `as_text()`; also by the names that their kernels
    have, in which dots are underscores."""
    inner: dict[str, set[str]] = defaultdict(set)
    targets: dict[str, set[str]] = defaultdict(set)
    computation, parsed = "", []
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            computation = match[1]
        elif match := _INSTRUCTION.match(line):
            name, result, opcode = match[1], match[2].lstrip("("), match[3]
            if not result.endswith("[]"):
                inner[computation].add(opcode)
            parsed.append((name, result, opcode, line))
            targets[computation].update(_TARGET.findall(line))
    known: dict[str, Instruction] = {}
    for name, result, opcode, line in parsed:
        source, calls = _SOURCE.search(line), _CALLS.search(line)
        called = calls[1] if calls else ""
        known[name] = Instruction(
            result,
            opcode,
            source[1] if source else "",
            frozenset(targets.get(called, ())) | set(_TARGET.findall(line)),
            frozenset(inner.get(called, ())),
        )
        known.setdefault(re.sub(r"\W", "_", name), known[name])
    return known


def device_times(folder: Path, text: str, calls: int) -> list[dict[str, Any]]:
    """Return the device time of each kernel of a compiled program.

    Args:
        folder: the folder of a trace of JAX's profiler, during which the program ran.
        text: the text of the compiled program, its `as_text()`.
        calls: number of runs of the program in the trace.

    Returns:
        A row for each kernel of an instruction, the longest first: `milliseconds` and `launches` per run on a device (the
        mean of the devices), the `instruction`, the `kernel`, the first array of its `result`, its place in the model
        (`source`), its `category` (one of `CATEGORIES`), its `part` (one of `PARTS`, or "other"), and of a fused kernel its `op`
        (otherwise ""). In a command buffer
        all kernels have the instruction of the buffer; XLA_FLAGS=--xla_gpu_enable_command_buffer= turns command buffers
        off. Instructions that contain others, such as loops, have no row.

    Raises:
        RuntimeError: the trace has no instruction of the program.
    """
    events = list(_events(folder))
    if not events:
        raise RuntimeError("the profile has none of the program's instructions")
    known = instructions_of(text)
    devices = len({_device(event) for event in events})
    time: dict[tuple[str, str], float] = defaultdict(float)
    launches: dict[tuple[str, str], int] = defaultdict(int)
    for event in events:
        key = event["args"]["hlo_op"], event["name"]
        time[key] += event["dur"] / 1e3 / calls / devices
        launches[key] += 1
    rows = []
    unknown = Instruction("", "", "", frozenset(), frozenset())
    for (instruction, kernel), spent in sorted(time.items(), key=lambda item: -item[1]):
        # In a command buffer, only the kernel says which instruction this is.
        found = known.get(kernel) or known.get(instruction) or unknown
        if found.opcode in _CONTAINERS:
            continue
        kind = category(found, kernel)
        rows.append(
            dict(
                milliseconds=round(spent, 4),
                launches=launches[instruction, kernel] / calls / devices,
                instruction=instruction,
                kernel=kernel,
                result=found.result,
                source=found.source,
                category=kind,
                part=part(found.source),
                op=op(found.source, kernel) if kind == "fused kernels" else "",
            )
        )
    return rows


def busy_milliseconds(folder: Path, calls: int) -> float:
    """Return the time per run in which a device ran at least one instruction, the mean of the devices; arguments as for
    `device_times`."""
    spans: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for event in _events(folder):
        spans[_device(event)].append((event["ts"], event["ts"] + event["dur"]))
    total = 0.0
    for intervals in spans.values():
        end = float("-inf")
        for start, stop in sorted(intervals):
            total += max(0.0, stop - max(start, end))
            end = max(end, stop)
    return total / 1e3 / calls / max(1, len(spans))


def category(instruction: Instruction, kernel: str) -> str:
    """Return the category of an instruction, one of `CATEGORIES`, from its opcode, from those of the computation that it
    calls, and from the name of its kernel."""
    name, opcodes = kernel.lower(), instruction.inner | {instruction.opcode}
    if any(_COLLECTIVE.search(word) for word in (*opcodes, name)):
        return "collectives"
    names = " ".join((name, *instruction.targets)).lower()
    if opcodes & {"dot", "convolution", "ragged-dot"} or _NAMES_OF_PRODUCTS.search(names):
        return "matrix products"
    if instruction.targets:
        return "fused kernels"
    moved = opcodes - {"fusion"}
    if not instruction.opcode:
        return "copies and fills" if "mem" in name else "elementwise and reductions"
    return "copies and fills" if moved and moved <= _MOVES else "elementwise and reductions"


def part(source: str) -> str:
    """Return the part of the model to which an instruction belongs: the last of `PARTS` in its `op_name`, or "other"."""
    words = re.split(r"[/()]", source)
    return next((word for word in reversed(words) if word in PARTS), "other")


def op(source: str, kernel: str) -> str:
    """Return the op of a fused kernel, such as "linear_memory": the last op in its `op_name` (`source`), in which each op is a
    scope. Of a kernel that is called without an op, return the kernel's name without its pass, such as "gated_rms_norm"."""
    words, ops = re.split(r"[/()]", source), names_of_ops()
    found = next((word for word in reversed(words[:-2]) if word in ops), None)
    if found is not None:
        return _PASS.sub("", found)
    # The last two words are the kernel's name and that of JAX's primitive.
    inner = words[-2] if len(words) > 1 and words[-1] else ""
    generic = not inner or inner in PARTS or inner.startswith("branch_")
    return _PASS.sub("", (kernel if generic else inner).removeprefix("lsm_"))


def _events(folder: Path) -> Iterable[dict[str, Any]]:
    """Yield the events of a trace that are runs of an instruction."""
    for path in folder.rglob("*.trace.json.gz"):
        for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]:
            if "hlo_op" in event.get("args", {}) and event.get("ph") == "X":
                yield event


def _device(event: dict[str, Any]) -> Any:
    """Return what identifies the device of an event: its number on CPUs, otherwise its process in the trace."""
    return event["args"].get("device_ordinal", event.get("pid"))
