"""Damaged copies of a token store, a folder of task files, a tokenizer and a folder of results.

Each function yields a `Damage` after another. The copy exists until the next is requested.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Damage:
    """A damaged copy of an input.

    Attributes:
        name: what was done.
        path: the copy.
        expected: "refused": reading it raises ValueError with a message that matches `message`; "accepted": it is read as
            the intact input; "outside unchanged": it may do either, but must write nothing outside.
        message: a regular expression; empty for an input that is accepted.
    """

    name: str
    path: Path
    expected: str
    message: str = ""


def damaged_stores(
    store: Path, folder: Path, *, seed: int = 0, flips: int = 20
) -> Iterator[Damage]:
    """Yield damaged copies of a token store that was written here (it has checksums.json), in new folders in `folder`.

    To read one: `TokenStore(path).check_files()`, or read all its rows.

    Args:
        store: the intact store, of at least one chunk.
        folder: an existing folder for the copies and for a file outside of them.
        seed: seed of the places that are damaged.
        flips: number of copies with one flipped bit.
    """
    rng = random.Random(seed)
    chunks = sorted(p.name for p in store.iterdir() if p.name[0].isdigit())
    for number in range(flips):
        name = rng.choice([*chunks, ".zarray", ".zattrs"])
        with _copy(store, folder, f"flip-{number}.zarr") as copy:
            data = bytearray((copy / name).read_bytes())
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            (copy / name).write_bytes(data)
            yield Damage(
                f"one bit of {name} flipped",
                copy,
                "refused",
                f"{name}|zarray|zattrs|token store|is empty",
            )
    first = chunks[0]
    for what, change in {
        "removed": Path.unlink,
        "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
        "empty": lambda path: path.write_bytes(b""),
        "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
        "a folder": lambda path: (path.unlink(), path.mkdir()),
        "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
        "a loop of links": lambda path: (path.unlink(), path.symlink_to(path)),
    }.items():
        with _copy(store, folder, "chunk.zarr") as copy:
            change(copy / first)
            yield Damage(
                f"chunk {first} {what}", copy, "refused", first.replace(".", r"\.") + "|is empty"
            )
    outside = folder / "outside"
    for name in (first, ".zarray", ".zattrs", "checksums.json"):
        with _copy(store, folder, "linked.zarr") as copy:
            shutil.copy(copy / name, outside)
            (copy / name).unlink()
            (copy / name).symlink_to(outside)
            yield Damage(f"{name} a link to a file outside", copy, "refused", f"{name}.*not inside")
            outside.unlink()
    fields = json.loads((store / ".zarray").read_text())
    rows, columns = fields["shape"]
    for field, value in (
        *(
            ("shape", v)
            for v in (
                [10**15, columns],
                [rows, 10**15],
                [10**30, 1],
                [0, 1],
                [-1, 1],
                [1.5, 2],
                [rows],
                "x",
                None,
            )
        ),
        *(
            ("chunks", v)
            for v in ([0, 1], [10**9, 10**9], [-1, 2], [1, 1], [rows, 10**12], None, {})
        ),
        *(("dtype", v) for v in ("<u8", "<f4", "|S9", "<u2" * 1000, None, 5, [["a", "<u2"]])),
        *(("fill_value", v) for v in ([1], {}, "x")),
        *(("compressor", v) for v in ("blosc", {"id": "x"}, {}, {"id": "zlib", "level": 1}, None)),
        *(("order", v) for v in ("X", 1)),
        *(("dimension_separator", v) for v in ("/", "..", 7)),
        *(("zarr_format", v) for v in (3, "2", None)),
        *(("filters", v) for v in ([{"id": "delta"}], 3)),
    ):
        # Without checksums, so that the value itself has to be refused.
        with _copy(store, folder, "fields.zarr") as copy:
            (copy / "checksums.json").unlink()
            (copy / ".zarray").write_text(json.dumps(fields | {field: value}))
            yield Damage(
                f".zarray: {field}={value!r}"[:100],
                copy,
                "refused",
                "zarray|shape|chunk|token store",
            )
    for name in (".zarray", ".zattrs", "checksums.json"):
        for what, text in _BAD_JSON.items():
            with _copy(store, folder, "json.zarr") as copy:
                (copy / name).write_bytes(text)
                yield Damage(f"{name} {what}", copy, "refused", name)
    content = json.loads((store / "checksums.json").read_text())
    for what, changed in {
        "without files": {**content, "files": None},
        "with another algorithm": {**content, "algorithm": "md5"},
        "without a chunk": {
            **content,
            "files": {k: v for k, v in content["files"].items() if k != first},
        },
        "with a wrong checksum": {**content, "files": content["files"] | {first: "00000000"}},
        "with a checksum of another type": {**content, "files": content["files"] | {first: 7}},
        "with a largest token id of another type": {**content, "largest_token_id": "x"},
    }.items():
        with _copy(store, folder, "sums.zarr") as copy:
            (copy / "checksums.json").write_text(json.dumps(changed))
            yield Damage(f"checksums.json {what}", copy, "refused", "checksums.json")
    with _copy(store, folder, "old.zarr") as copy:
        (copy / "checksums.json").unlink()
        yield Damage("without checksums.json", copy, "accepted")


def damaged_task_folders(tasks: Path, folder: Path) -> Iterator[Damage]:
    """Yield copies of a folder of task files to which one file `damaged.yaml` was added that is no YAML, leads out of the
    folder or runs code.

    To read one: `check_task_files(path, trust=False)`, or `check_harness` with it as `include_path`.

    Args:
        tasks: a folder of task files that run no code.
        folder: an existing folder for the copies and for files outside of them.
    """
    (folder / "outside.yaml").write_text("task: outside\n")
    for what, (text, message) in _BAD_YAML.items():
        with _copy(tasks, folder, "tasks") as copy:
            (copy / "damaged.yaml").write_bytes(text)
            yield Damage(what, copy, "refused", message)
    with _copy(tasks, folder, "tasks") as copy:
        (copy / "damaged.yaml").symlink_to(folder / "outside.yaml")
        yield Damage("a link to a file outside", copy, "refused", r"damaged\.yaml is a link")
    with _copy(tasks, folder, "tasks") as copy:
        os.mkfifo(copy / "damaged.yaml")
        yield Damage("a pipe", copy, "refused", r"damaged\.yaml is no regular file")
    with _copy(tasks, folder, "tasks") as copy:
        yield Damage("nothing changed", copy, "accepted")


def damaged_tokenizers(tokenizer: Path, folder: Path) -> Iterator[Damage]:
    """Yield copies of a folder with tokenizer.json (and perhaps tokenizer_config.json) that cannot be used.

    To read one: `load_tokenizer(str(path))`.
    """
    fields = json.loads((tokenizer / "tokenizer.json").read_text())

    def with_vocabulary(vocabulary: Any) -> dict[str, Any]:
        return fields | {"model": fields["model"] | {"vocab": vocabulary}}

    changed = {
        "an id of 4,000,000,000": with_vocabulary(fields["model"]["vocab"] | {"zz": 4_000_000_000}),
        "an id of 10^30": with_vocabulary(fields["model"]["vocab"] | {"zz": 10**30}),
        "a negative id": with_vocabulary(fields["model"]["vocab"] | {"zz": -1}),
        "a vocabulary that is a number": with_vocabulary(5),
        "no model": {k: v for k, v in fields.items() if k != "model"},
        "a pattern that is no regular expression": fields
        | {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": "("},
                "behavior": "Isolated",
                "invert": False,
            }
        },
    }
    contents = {what: json.dumps(value).encode() for what, value in changed.items()} | _BAD_JSON
    for what, text in contents.items():
        with _copy(tokenizer, folder, "tokenizer") as copy:
            (copy / "tokenizer.json").write_bytes(text)
            yield Damage(f"tokenizer.json: {what}", copy, "refused", r"tokenizer\.json")
    for what, text in _BAD_JSON.items():
        with _copy(tokenizer, folder, "tokenizer") as copy:
            (copy / "tokenizer_config.json").write_bytes(text)
            yield Damage(
                f"tokenizer_config.json {what}", copy, "refused", r"tokenizer_config\.json"
            )
    for template in (
        "{{ 1 / 0 }}",
        "{% for %}",
        "{{ 'a' * 10**12 }}",
        "{{ 10 ** (10**10) }}",
        "{{ messages.x.y }}",
    ):
        with _copy(tokenizer, folder, "tokenizer") as copy:
            (copy / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
            # Only `chat_text` runs the template.
            yield Damage(f"chat template {template}", copy, "accepted", "chat template refuses")


def damaged_result_folders(workdir: Path, folder: Path) -> Iterator[Damage]:
    """Yield copies of a run in whose eval folder the results of `--output=x` would be written through a link or over a
    folder. Nothing in `folder / "outside"` may change.

    To read one: `eval.py --workdir=PATH --output=x`, or `output_folder(path, "x")` and a task with it.
    """
    outside = folder / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")

    def eval_link(copy: Path) -> None:
        shutil.rmtree(copy / "eval", ignore_errors=True)
        (copy / "eval").symlink_to(outside)

    def folder_link(copy: Path) -> None:
        (copy / "eval").mkdir(exist_ok=True)
        (copy / "eval" / "x").symlink_to(outside)

    def file_in_place(copy: Path) -> None:
        (copy / "eval").mkdir(exist_ok=True)
        (copy / "eval" / "x").write_text("")

    def result_links(copy: Path) -> None:
        (copy / "eval" / "x").mkdir(parents=True)
        for name in (
            "sample.txt",
            "sample.json",
            "results.json",
            "results.npz",
            "loss_by_position.png",
        ):
            (copy / "eval" / "x" / name).symlink_to(outside / "kept")

    changes: dict[str, tuple[Callable[[Path], None], str, str]] = {
        "eval is a link to a folder outside": (eval_link, "refused", "is a link"),
        "eval/x is a link to a folder outside": (folder_link, "refused", "is a link"),
        "eval/x is a file": (file_in_place, "refused", "is a file; accepted is a folder"),
        "the result files are links": (result_links, "outside unchanged", ""),
    }
    for what, (change, expected, message) in changes.items():
        with _copy(workdir, folder, "run") as copy:
            change(copy)
            yield Damage(what, copy, expected, message)


class _copy:
    """Copy a folder to a new one for a `with` block, and delete it after."""

    def __init__(self, source: Path, folder: Path, name: str):
        self.source, self.path = source, folder / name

    def __enter__(self) -> Path:
        shutil.copytree(self.source, self.path, symlinks=True)
        return self.path

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self.path)


_BAD_JSON = {
    "empty": b"",
    "cut": b'{"a": [1, 2',
    "a list": b"[]",
    "a number of 10,000 digits": b"1" * 10_000,
    "nested 100,000 deep": b'{"a": ' * 100_000,
    "closed and nested 5,000 deep": b'{"a": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
    "no UTF-8": b'{"a": "\xff"}',
    "half of a surrogate pair": b'{"a": "\\ud800"}',
}
_BAD_YAML = {
    "empty": (b"", r"damaged\.yaml"),
    "a list": (b"- task: a\n", r"damaged\.yaml"),
    "cut": (b"task: a\ndoc_to_text: [1, 2\nx: 1\n", r"damaged\.yaml, line 3: not YAML"),
    "a tab": (b"task: a\n\tb: 1\n", r"damaged\.yaml, line 2: not YAML"),
    "no UTF-8": (b"task: \xff\n", r"damaged\.yaml: not YAML"),
    "lists nested 100,000 deep": (b"a: " + b"[" * 100_000, r"damaged\.yaml, line 1: nested"),
    "mappings nested 100,000 deep": (b"a: " + b"{a: " * 100_000, r"damaged\.yaml, line 1: nested"),
    "an alias of itself": (b"x: &x [*x]\n", r"damaged\.yaml, line 1: an alias"),
    "aliases of 2^60 values": (
        b"a0: &a0 [1, 2]\n"
        + b"".join(b"a%d: &a%d [*a%d, *a%d]\n" % (i, i, i - 1, i - 1) for i in range(1, 60)),
        r"damaged\.yaml: its aliases",
    ),
    "5 MB": (b"x: " + b"a" * (5 << 20), r"damaged\.yaml has .* bytes"),
    "!function": (
        b"task: a\nprocess_docs: !function utils.f\n",
        r"damaged\.yaml, line 2: .*--lm_eval\.trust",
    ),
    "an object of Python": (
        b"x: !!python/object/apply:os.system [ls]\n",
        r"damaged\.yaml, line 1: the tag",
    ),
    "a class": (b"task: a\nclass: a.B\n", r"damaged\.yaml, line 2: .*--lm_eval\.trust"),
    "Jinja": (b"task: a\ndoc_to_text: '{{a}}'\n", r"damaged\.yaml, line 2: .*--lm_eval\.trust"),
    "a metric of the hub": (
        b"task: a\nmetric_list: [{metric: a/b}]\n",
        r"damaged\.yaml, line 2: .*--lm_eval\.trust",
    ),
    "include outside": (b"include: ../outside.yaml\ntask: a\n", r"damaged\.yaml, line 1: include"),
    "include of nothing": (b"include: nowhere\ntask: a\n", r"damaged\.yaml, line 1: include"),
}
