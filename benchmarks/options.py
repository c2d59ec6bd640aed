"""Options that several benchmarks have, and types of options: each is defined once, here."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from benchmarks.registry import Benchmark, UsageError


def words(text: str) -> list[str]:
    """Split the text of a command-line option at its commas, and return the words."""
    return [word for word in text.split(",") if word]


def shapes(sizes: Iterable[Iterable[int]]) -> str:
    """Return a list of shapes as the default text of a command-line option: "8x4096x16x128,2x16384x16x128"
    for (8, 4096, 16, 128) and (2, 16384, 16, 128).
    """
    return ",".join("x".join(map(str, shape)) for shape in sizes)


def integers(text: str) -> list[int]:
    """Parse the text of an option that is a list of integers with commas between them."""
    return [int(word) for word in words(text)]


def floats(text: str) -> list[float]:
    """Parse the text of an option that is a list of numbers with commas between them."""
    return [float(word) for word in words(text)]


def names(accepted: Collection[str]) -> Callable[[str], list[str]]:
    """Return an argparse type: the parser of an option that is a list of names, all of which must be
    `accepted`.
    """

    def parse(text: str) -> list[str]:
        if wrong := [name for name in words(text) if name not in accepted]:
            raise argparse.ArgumentTypeError(
                f"unknown name {wrong[0]!r}; accepted are {', '.join(accepted)}"
            )
        return words(text)

    return parse


def add_rows(parser: argparse.ArgumentParser, benchmark: Benchmark) -> None:
    """Add to a benchmark's parser the options that every benchmark has: --output, the file for its rows,
    and --resume, which skips measured cases.
    """
    group = parser.add_argument_group("rows")
    group.add_argument(
        "--output", type=output_file, default=benchmark.output or "-", metavar="FILE",
        help=f"append the rows to this file as JSON lines; - prints them only; default: {benchmark.output or '-'}",
    )  # fmt: skip
    group.add_argument(
        "--resume", action=argparse.BooleanOptionalAction, default=benchmark.resume,
        help=f"skip the cases that have a row in --output; default: {'yes' if benchmark.resume else 'no'}",
    )  # fmt: skip


def output_file(text: str) -> Path | None:
    """Return the path of the file that rows are appended to, from the text of the option --output; None for
    "-".
    """
    return None if text == "-" else Path(text)


def add_lock(parser: argparse.ArgumentParser) -> None:
    """Add the option --lock to a benchmark's parser: a file that lets processes on one device take turns at
    timing.
    """
    parser.add_argument(
        "--lock", type=Path, metavar="FILE",
        help="a file that processes on one device lock: they compile side by side and time one after another",
    )  # fmt: skip


def add_peers(
    parser: argparse.ArgumentParser,
    accepted: tuple[str, ...] = ("fla",),
    *,
    workers: int = 12,
    patience: float = 300,
) -> None:
    """Add the options about peers to a benchmark's parser: --peers (which libraries are timed), --peer_path and
    --peer_patience (where flash-linear-attention is, and how long it may take), and --workers and --patience for compiling their kernels.

    Args:
        parser: the benchmark's command-line parser.
        accepted: the peers that the benchmark can time.
        workers: the default number of processes that compile the peer's kernels.
        patience: the default number of seconds that they may take.
    """
    group = parser.add_argument_group("peers")
    group.add_argument(
        "--peers", type=names(accepted), default=[], metavar="NAMES",
        help=f"time these libraries in the same run: {', '.join(accepted)}",
    )  # fmt: skip
    group.add_argument(
        "--peer_path", type=folders, metavar="FOLDERS",
        help=f"with --peers fla: PYTHONPATH of flash-linear-attention's processes, folders with {os.pathsep!r} between them, or an empty "
        "text for none; by default that of this process, whose Triton may be another than the peer's PyTorch requires",
    )  # fmt: skip
    group.add_argument(
        "--peer_patience", type=seconds, metavar="SECONDS",
        help="with --peers fla: seconds that flash-linear-attention may take for the search and the times of one case; "
        "default: 100, of a model 300",
    )  # fmt: skip
    add_workers(group, workers, patience)


def seconds(text: str) -> float:
    """Return the seconds that the text of an option says, a number above 0."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: accepted are seconds above 0")
    return number


def folders(text: str) -> str:
    """Return the text of an option that is a list of folders, with `os.pathsep` between them, as absolute paths."""
    return os.pathsep.join(str(Path(name).resolve()) for name in text.split(os.pathsep) if name)


def check_peers(args: argparse.Namespace) -> None:
    """Raise UsageError if an option about the peer's processes is given and no peer has such processes, or a folder of the peer does not
    exist.
    """
    for name in ("peer_path", "peer_patience"):
        if getattr(args, name, None) is not None and "fla" not in args.peers:
            raise UsageError(f"--{name}: accepted with --peers fla")
    paths = (getattr(args, "peer_path", None) or "").split(os.pathsep)
    if missing := [path for path in paths if path and not Path(path).is_dir()]:
        raise UsageError(
            f"--peer_path: {missing[0]!r} is no folder; accepted are folders that exist"
        )


def of_fla(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `benchmarks.peers.fla.Fla` that the options of `add_peers` give."""
    return dict(workers=args.workers, path=args.peer_path, patience=args.peer_patience)


def add_workers(group: argparse._ActionsContainer, workers: int, patience: float) -> None:
    """Add the options --workers, the number of processes that compile, and --patience, the seconds that
    they may take, with these defaults.
    """
    group.add_argument(
        "--workers", type=int, default=workers, help=f"processes that compile; default: {workers}"
    )
    group.add_argument(
        "--patience", type=float, default=patience, metavar="SECONDS",
        help=f"seconds that compiling may take; default: {patience:g}",
    )  # fmt: skip


def add_kinds(parser: argparse.ArgumentParser, accepted: Collection[str], default: str) -> None:
    """Add the option --kinds, which of the `accepted` implementations (such as "kernel" and "xla") a
    benchmark times.
    """
    parser.add_argument(
        "--kinds", type=names(accepted), default=default,
        help=f"of {', '.join(accepted)}; kernel requires an NVIDIA Hopper GPU; default: {default}",
    )  # fmt: skip


def add_seconds(parser: argparse.ArgumentParser, default: float, what: str) -> None:
    """Add the option --seconds to a benchmark's parser: a time limit, whose help text is `what`."""
    parser.add_argument(
        "--seconds", type=float, default=default, help=f"{what}; default: {default:g}"
    )


def add_shard(parser: argparse.ArgumentParser) -> None:
    """Add the option --shard I/N to a benchmark's parser, so that N processes can divide the cases among
    several devices.
    """
    parser.add_argument(
        "--shard", type=shard, default="0/1", metavar="I/N",
        help="measure every Nth case, beginning with case I (0 is the first); for N processes",
    )  # fmt: skip


def shard(text: str) -> slice:
    """Return the slice of a benchmark's cases that the text "I/N" of --shard selects: case I and every N-th
    after it.
    """
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise argparse.ArgumentTypeError(
            f"shard {text!r}: accepted is I/N with I less than N, such as 0/4"
        )
    return slice(int(index), None, int(count))


def add_minutes(parser: argparse.ArgumentParser) -> None:
    """Add the option --minutes to a benchmark's parser: a time limit for all its cases together."""
    parser.add_argument(
        "--minutes", type=float, default=math.inf,
        help="begin no case that would end later, judged by the longest case so far",
    )  # fmt: skip
