"""Count the bytes that the devices of a compiled program send to each other, from the program's own text."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\) -> .* \{$")
_CALL = re.compile(rf"^ .*? = (.*?) ({'|'.join(_KINDS)})(-start)?\(")
_OTHER = re.compile(r" (ragged-all-to-all|collective-broadcast|send|recv)(?:-start)?\(")
_SHAPE = re.compile(r"\b(pred|[a-z]+(\d+)[a-z0-9]*)\[([\d,]*)\]")
_CALLED = re.compile(
    r"\b(?:body|to_apply|calls|true_computation|false_computation|branch_computations)="
    r"(?:\{([^}]*)\}|%?([\w.-]+))"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


class Transfer(NamedTuple):
    """One collective of a compiled program.

    Attributes:
        kind: the collective: "all-gather", "all-reduce", "reduce-scatter", "all-to-all" or "collective-permute".
        devices: the number of devices that exchange data with each other.
        times: how often a run of the program executes it; more than once in a loop.
        bytes: the bytes that one device sends in one run of the program, all times together.
    """

    kind: str
    devices: int
    times: int
    bytes: int


def transfers(compiled: Any) -> list[Transfer]:
    """Return the collectives of a compiled program with the bytes that each device sends.

    Among n devices, a gather, a scatter and an exchange of all with all are counted as a ring: each device sends
    (n - 1) / n of the complete array. A sum over devices is a scatter and a gather. A permutation sends the array
    once. Collectives of one device are left out. Of a condition, all branches are counted.

        compiled = jax.jit(function).lower(*arguments).compile()
        sent = sum(transfer.bytes for transfer in parallel.transfers(compiled))

    Args:
        compiled: the result of `lower(...).compile()` of a function of `jax.jit`, or its text, `compiled.as_text()`.

    Raises:
        ValueError: the text is not that of a compiled program, or a loop with collectives runs a number of times that is
            not known before it runs, or the bytes of a collective are not known.
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    if not text.startswith("HloModule"):
        raise ValueError(
            f"compiled begins with {text[:40]!r}; accepted is a compiled program (`.lower(...).compile()`) or its text"
        )
    partitions = re.search(r"num_partitions=(\d+)", text)
    everyone = int(partitions[1]) if partitions else 1
    computations, entry = _computations(text)
    return _run(entry, computations, everyone)


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Return the lines of each computation of a program's text by name, and the name of the first to run."""
    computations: dict[str, list[str]] = {}
    lines: list[str] = []
    entry = ""
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            lines = computations.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        else:
            lines.append(line)
    return computations, entry


def _run(name: str, computations: dict[str, list[str]], everyone: int) -> list[Transfer]:
    """Return the transfers of one run of a computation and of those that it calls; `everyone` is the number of devices."""
    found = []
    for line in computations.get(name, ()):
        if call := _CALL.match(line):
            transfer = _transfer(call[1], call[2], bool(call[3]), line, everyone)
            found += [transfer] if transfer.devices > 1 else []
            continue
        if other := _OTHER.search(line):
            raise ValueError(
                f"the program has a {other[1]}, whose bytes are not known; accepted are programs with {', '.join(_KINDS)}"
            )
        called = [
            inner.strip().lstrip("%")
            for several, one in _CALLED.findall(line)
            for inner in (several or one).split(",")
        ]
        inside = [t for inner in called for t in _run(inner, computations, everyone)]
        if inside and " while(" in line:
            trips = _TRIPS.search(line)
            if trips is None:
                raise ValueError(
                    f"a loop of the program ({name}) has collectives, and the number of its rounds is not known before it runs"
                )
            n = int(trips[1])
            inside = [t._replace(times=n * t.times, bytes=n * t.bytes) for t in inside]
        found += inside
    return found


def _transfer(result: str, kind: str, start: bool, line: str, everyone: int) -> Transfer:
    """Return the transfer of one instruction: `result` is the type of its result, and `start` whether it is the first half
    of an asynchronous one, whose result then also has the operands."""
    sizes = [
        math.prod(map(int, filter(None, dims.split(",")))) * (int(bits or 8) / 8)
        for _, bits, dims in _SHAPE.findall(result)
    ]
    if start and kind == "collective-permute":
        sizes = sizes[1:2]  # operand, result, two counters
    elif start and kind == "all-gather":
        sizes = sizes[len(sizes) // 2 :]
    size = sum(sizes)
    if kind == "collective-permute":
        pairs = re.search(r"source_target_pairs=\{(.*?)\}\}?(?:,|$)", line)
        moved = [p for p in re.findall(r"(\d+),(\d+)", pairs[1] if pairs else "") if p[0] != p[1]]
        return Transfer(kind, 2 if moved else 1, 1, round(size) if moved else 0)
    devices = _group(line, everyone)
    whole = size * devices if kind == "reduce-scatter" else size
    rounds = 2 if kind == "all-reduce" else 1
    return Transfer(kind, devices, 1, round(rounds * whole * (devices - 1) / devices))


def _group(line: str, everyone: int) -> int:
    """Return the number of devices in one group of an instruction's `replica_groups`, which are written as axes of a mesh,
    as the shape of an array of devices, or as lists of devices; an empty list is one group of all."""
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        axes = re.fullmatch(r"(?:'\w+'(?:, ?)?)*", named[2])
        if axes:
            return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", named[2]))
    elif shape := re.search(r"replica_groups=\[(\d+),(\d+)\]", line):
        return int(shape[2])
    elif listed := re.search(r"replica_groups=\{(?:\{([\d,]*)\}|\})", line):
        return len(listed[1].split(",")) if listed[1] else everyone
    raise ValueError(
        f"the groups of devices of this collective cannot be read: {line.strip()[:300]}"
    )
