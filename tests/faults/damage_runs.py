"""Damaged copies of a small run, and what resuming or loading each of them must do."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class RunDamage:
    """A damaged copy of a run.

    Attributes:
        name: the name of the damage.
        folder: the damaged copy.
        act: "resume" continues its training with the intact config; "load" loads it by `load_run`.
        refused: whether `act` must raise ValueError; otherwise it must succeed, with the intact run's metrics or parameters.
        message: regular expression of the error, or of a line on stderr; empty means that no line is required.
        outside: a folder beside the copy, to which links of the copy point; nothing in it may change.
    """

    name: str
    folder: Path
    act: str
    refused: bool
    message: str
    outside: Path


def damaged_runs(run: Path, into: Path, names: tuple[str, ...] = ()) -> Iterator[RunDamage]:
    """Yield damaged copies of a finished run with at least two checkpoints, each in a folder of `into`.

    Args:
        run: the run's directory; it is not changed. Resumed copies lack the newest checkpoint, so that they train.
        into: the folder of the copies.
        names: only the damages of these names; empty means all of `DAMAGES`.
    """
    for name in names or DAMAGES:
        act, refused, message, damage = DAMAGES[name]
        folder, outside = into / name / "run", into / name / "outside"
        shutil.copytree(run, folder)
        outside.mkdir()
        (outside / "file").write_text("must not change")
        if act == "resume":
            newest = max(int(path.name) for path in (folder / "checkpoints").iterdir())
            shutil.rmtree(folder / "checkpoints" / str(newest))
            (folder / "checksums" / f"{newest}.json").unlink()
        damage(folder, outside)
        yield RunDamage(name, folder, act, refused, message, outside)


def _insert(*lines: bytes) -> Callable[[Path, Path], None]:
    """Return a damage that inserts lines after the first row of metrics.jsonl."""

    def damage(folder: Path, outside: Path) -> None:
        path = folder / "metrics.jsonl"
        first, *rest = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join([first, *(line + b"\n" for line in lines), *rest]))

    return damage


def _repeat(folder: Path, outside: Path) -> None:
    path = folder / "metrics.jsonl"
    first, *rest = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([first, first, *rest]))


def _append(data: bytes) -> Callable[[Path, Path], None]:
    def damage(folder: Path, outside: Path) -> None:
        with open(folder / "metrics.jsonl", "ab") as file:
            file.write(data)

    return damage


def _write(name: str, data: bytes) -> Callable[[Path, Path], None]:
    return lambda folder, outside: (folder / name).write_bytes(data) and None


def _cut(name: str) -> Callable[[Path, Path], None]:
    return lambda folder, outside: os.truncate(folder / name, (folder / name).stat().st_size // 2)


def _field(value: Any, *path: str) -> Callable[[Path, Path], None]:
    """Return a damage that sets a field of config.json."""

    def damage(folder: Path, outside: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        inner = config
        for name in path[:-1]:
            inner = inner[name]
        inner[path[-1]] = value
        (folder / "config.json").write_text(json.dumps(config))

    return damage


def _newest(folder: Path) -> Path:
    return max((folder / "checkpoints").iterdir(), key=lambda path: int(path.name))


def _largest(folder: Path) -> Path:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def _cut_params(folder: Path, outside: Path) -> None:
    largest = _largest(_newest(folder) / "params")
    os.truncate(largest, largest.stat().st_size // 2)


def _flip_params(folder: Path, outside: Path) -> None:
    largest = _largest(_newest(folder) / "params")
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)


def _cut_checksums(folder: Path, outside: Path) -> None:
    _cut(f"checksums/{_newest(folder).name}.json")(folder, outside)


def _link(name: str, target: str = "") -> Callable[[Path, Path], None]:
    """Return a damage that puts a link to `outside`, or a file in it, in the place of a file or folder of the run."""

    def damage(folder: Path, outside: Path) -> None:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.parent.mkdir(exist_ok=True)
        path.symlink_to(outside / target if target else outside)

    return damage


def _move_out(name: str) -> Callable[[Path, Path], None]:
    """Return a damage that moves a folder of the run outside and links to it."""

    def damage(folder: Path, outside: Path) -> None:
        shutil.move(folder / name, outside / name)
        (folder / name).symlink_to(outside / name)

    return damage


def _link_step(folder: Path, outside: Path) -> None:
    step = _newest(folder)
    shutil.move(step, outside / "step")
    step.symlink_to(outside / "step")


def _link_broken(folder: Path, outside: Path) -> None:
    """The newest checkpoint is broken, and a link lies where it is moved to."""
    _cut_params(folder, outside)
    (folder / "broken_checkpoints").mkdir()
    (folder / "broken_checkpoints" / _newest(folder).name).symlink_to(outside)


def _link_config(folder: Path, outside: Path) -> None:
    shutil.move(folder / "config.json", outside / "config.json")
    (folder / "config.json").symlink_to(outside / "config.json")


def _pipe(name: str) -> Callable[[Path, Path], None]:
    """Return a damage that puts a pipe, which nobody writes, in the place of a file of the run or of its newest checkpoint."""

    def damage(folder: Path, outside: Path) -> None:
        path = folder / name if (folder / name).exists() else _newest(folder) / name
        path.unlink()
        os.mkfifo(path)

    return damage


def _pipe_unsealed(folder: Path, outside: Path) -> None:
    """The newest checkpoint has no checksums, as after a kill, and a pipe in the place of a file."""
    shutil.rmtree(folder / "checksums")
    _pipe("_CHECKPOINT_METADATA")(folder, outside)


def _frozen_pipe(folder: Path, outside: Path) -> None:
    os.mkfifo(folder / "frozen.json")


def _device(folder: Path, outside: Path) -> None:
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").symlink_to("/dev/zero")


def _folder(folder: Path, outside: Path) -> None:
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").mkdir()


def _other_width(folder: Path, outside: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["model"]["hidden_size"] *= 2
    (folder / "config.json").write_text(json.dumps(config))


_COPIED = r"metrics\.jsonl: \d+ damaged: line \d+ .*; the rows that can be read remain, and the damaged file is metrics\.damaged-1"
_LINK = "is a link to"
_BROKEN = r"checkpoint \d+ was moved to"

# name -> (act, whether it is refused, message, damage)
DAMAGES: dict[str, tuple[str, bool, str, Callable[[Path, Path], None]]] = {
    "metrics-no-json": ("resume", False, _COPIED, _insert(b'{"step": 2, "train/lo')),
    "metrics-no-utf8": ("resume", False, _COPIED, _insert(b'{"step": 2, "\xff": 1}')),
    "metrics-no-object": ("resume", False, _COPIED, _insert(b"[1, 2]", b"3", b"null")),
    "metrics-no-step": ("resume", False, _COPIED, _insert(b'{"train/loss": 1.0}')),
    "metrics-step-text": ("resume", False, _COPIED, _insert(b'{"step": "2"}', b'{"step": 2.5}')),
    "metrics-step-true": ("resume", False, _COPIED, _insert(b'{"step": true}', b'{"step": -1}')),
    "metrics-nested": ("resume", False, _COPIED, _insert(b"[" * 100_000)),
    "metrics-zeros": ("resume", False, _COPIED, _append(b"\0" * 4096 + b"\n")),
    "metrics-repeated": ("resume", False, _COPIED, _repeat),
    "metrics-cut-row": ("resume", False, "", _append(b'{"step": 99, "train/lo')),
    "metrics-link": ("resume", False, "", _link("metrics.jsonl.other", "file")),
    "metrics-draft-link": ("resume", False, "", _link("metrics.draft", "file")),
    "metrics-pipe": ("resume", True, "is no regular file", _pipe("metrics.jsonl")),
    "metrics-device": ("resume", True, "is no regular file", _device),
    "metrics-folder": ("resume", True, "is no regular file", _folder),
    "config-link": ("resume", False, "", _link_config),
    "checkpoint-cut": ("load", False, r"checkpoint \d+ .* cannot be read", _cut_params),
    "checkpoint-flipped": ("load", False, "is not what was saved", _flip_params),
    "checkpoint-pipe": ("load", False, "_CHECKPOINT_METADATA is no regular file", _pipe_unsealed),
    "checksums-cut": ("load", False, "its checksums are damaged", _cut_checksums),
    "broken-link": ("resume", False, _BROKEN, _link_broken),
    "broken-folder-link": ("resume", True, _LINK, _link("broken_checkpoints")),
    "checkpoints-link": ("resume", True, _LINK, _move_out("checkpoints")),
    "checksums-link": ("resume", True, _LINK, _move_out("checksums")),
    "step-link": ("resume", True, _LINK, _link_step),
    "tensorboard-link": ("resume", True, _LINK, _link("tensorboard")),
    "plots-link": ("resume", True, _LINK, _link("plots")),
    "lock-link": ("resume", True, _LINK, _link("run.lock", "file")),
    "data-list": ("resume", True, r"data\.json contains a list", _write("data.json", b"[]")),
    "data-cut": ("resume", True, r"data\.json", _cut("data.json")),
    "frozen-cut": ("resume", True, r"frozen\.json cannot be read", _write("frozen.json", b'{"a": 1')),
    "frozen-list": ("resume", True, r"frozen\.json contains a list", _write("frozen.json", b"[1]")),
    "frozen-pipe": ("resume", True, r"frozen\.json is no regular file", _frozen_pipe),
    "data-link": ("resume", True, r"data\.json cannot be read: no such file", _link("data.json", "nothing")),
    "frozen-text": ("resume", True, "accepted is an integer", _write("frozen.json", b'{"a": "b"}')),
    "buffers-nested": (
        "resume", True, r"expert_buffers\.json", _write("expert_buffers.json", b'{"growths":' + b"[" * 100_000),
    ),
    "config-nested": ("load", True, r"config\.json", _write("config.json", b'{"a":' * 100_000)),
    "config-no-utf8": ("load", True, r"config\.json", _write("config.json", b'{"a": "\xff"}')),
    "trainable-number": ("load", True, "trainable=5: accepted is", _field(5, "trainable")),
    "batch-size-text": ("load", True, "batch_size='8': accepted is int", _field("8", "batch_size")),
    "data-null": ("load", True, "data=None: accepted is DataConfig", _field(None, "data")),
    "many-layers": ("load", True, "num_layers=1000000000: accepted are at most", _field(10**9, "model", "num_layers")),
    "other-width": ("load", True, r"embedding is \(.*\) in the checkpoint and \(.*\) in the config", _other_width),
}  # fmt: skip
