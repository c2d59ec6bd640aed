"""Tests of the helpers for files that others made: paths, JSON, replaced files and messages."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lsm_jax.commands import failure
from lsm_jax.files import (
    bounded_json,
    check_folder,
    disk_error,
    inside,
    parse_json,
    replacing,
    write_atomically,
)


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/../../x", "..", "", ".", "a\0b", None, 5, ["a"], "x" * 5000]
)
def test_inside_refuses_names_outside_the_folder(tmp_path, name):
    for follow_links in (False, True):
        with pytest.raises(ValueError, match=r"index\.json: weight_map"):
            inside(tmp_path, name, what="index.json: weight_map", follow_links=follow_links)


def test_inside_refuses_links(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "other").write_text("secret")
    (folder / "file").write_text("file")
    (folder / "out").symlink_to(tmp_path / "other")
    (folder / "up").symlink_to(tmp_path)
    (folder / "near").symlink_to("file")
    (folder / "loop").symlink_to("loop")
    assert inside(folder, "file", what="field") == folder / "file"
    assert inside(folder, "new/file", what="field") == folder / "new" / "file"
    assert inside(folder, "near", what="field", follow_links=True) == folder / "file"
    for name in ("out", "up/other", "near", "loop"):
        with pytest.raises(ValueError, match="field names .*link"):
            inside(folder, name, what="field")
    for name in ("out", "up/other"):
        with pytest.raises(ValueError, match="replace the link by a copy"):
            inside(folder, name, what="field", follow_links=True)
    (tmp_path / "given").symlink_to(folder)
    assert inside(tmp_path / "given", "file", what="field") == folder / "file"


def test_inside_follows_the_links_of_hugging_faces_cache(tmp_path):
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot = tmp_path / "models--a--b" / "snapshots" / "1234"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / "hash").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/hash")
    (snapshot / "bad.json").symlink_to("../../../other")
    assert inside(snapshot, "config.json", what="x", follow_links=True) == blobs / "hash"
    with pytest.raises(ValueError, match="link"):
        inside(snapshot, "bad.json", what="x", follow_links=True)
    with pytest.raises(ValueError, match="link"):
        inside(snapshot, "config.json", what="x")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "line 1 column 1"),
        (b'{"a": 1', "line 1"),
        (b'{"a": "\xff"}', "byte 7 is no UTF-8"),
        (b"[" * 100_000, "nested more than 64 deep"),
        (b'{"a":' * 70 + b"1" + b"}" * 70, "nested more than 64 deep"),
        (b"[1]", "contains a list; accepted is an object"),
        (b"null", "contains null"),
        (b"5", "contains the value 5"),
        (b'{"a": "\\ud800"}', "half of a surrogate pair"),
        (b'{"a": ' + b"1" * 5000 + b"}", "digits"),
        (b'{"a": 1, "b": 2, "a": 3}', "the key 'a' occurs twice in one object"),
        (b'{"a": [{"b": {}, "b": {}}]}', "the key 'b' occurs twice in one object"),
        (b" " * 2000, "2000 bytes; accepted are at most 1000"),
    ],
)
def test_bounded_json_names_file_and_reason(tmp_path, content, message):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    limit = 1000 if content[:1] == b" " else 10**6
    with pytest.raises(ValueError, match=rf"config\.json.*{message}") as error:
        bounded_json(path, max_bytes=limit)
    assert "\n" not in str(error.value)


def test_bounded_json_reads_regular_files_alone(tmp_path):
    (tmp_path / "file").write_text('{"a": [{"b": "\\ud83d\\ude00", "c": Infinity}]}')
    assert bounded_json(tmp_path / "file") == {"a": [{"b": "\U0001f600", "c": float("inf")}]}
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path, tmp_path / "absent"):
        with pytest.raises(ValueError, match=str(path)):
            bounded_json(path)
    assert parse_json("[1]", "x", accepted=list) == [1]


def test_a_folder_is_checked_without_a_trace(tmp_path):
    check_folder(tmp_path)
    check_folder(tmp_path / "new" / "run")
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    for path, message in (
        (tmp_path / "file" / "run", "file is a file"),
        (tmp_path / "link", "link is a link to nowhere, which does not exist"),
        (tmp_path / ("x" * 300), "the name is too long"),
        (Path("/proc/x/run"), "no folder can be made in /proc"),
        (Path("/dev/null/x"), "/dev/null is a file"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            check_folder(path)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="null"):
        check_folder(tmp_path / "a\0b")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "link"]


def test_a_replaced_file_is_the_old_or_the_new_one(tmp_path):
    other, link = tmp_path / "other", tmp_path / "link"
    other.write_text("other")
    link.symlink_to(other)
    write_atomically(link, "new")
    assert not link.is_symlink() and link.read_text() == "new" and other.read_text() == "other"
    with pytest.raises(RuntimeError), replacing(link) as draft:
        draft.write_text("half")
        raise RuntimeError
    assert link.read_text() == "new"
    write_atomically(link, [b"a", b"b"])
    assert link.read_bytes() == b"ab"
    with pytest.raises(OSError, match="directory"):
        (tmp_path / "folder").mkdir()
        write_atomically(tmp_path / "folder", b"x")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "link", "other"]


def test_a_full_disk_leaves_the_old_file_and_no_draft(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    code = (
        "import resource, signal, sys\n"
        "from lsm_jax.files import disk_error, write_atomically\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try: write_atomically(sys.argv[1], b'x' * 5000)\n"
        "except OSError as error: print(disk_error(error, sys.argv[1], kept='the old file is unchanged'))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    assert done.stdout.startswith(f"{path}: the file is larger than") and not done.stderr
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_messages_of_disk_errors():
    full = OSError(errno.ENOSPC, "No space left on device", "a/b")
    assert disk_error(full, kept="step 3 is saved") == "a/b: the disk is full; step 3 is saved"
    wrapped = ValueError("some\nlines of a library")
    wrapped.__cause__ = full
    assert disk_error(wrapped, "c", kept="x") == "c: the disk is full; x"
    assert disk_error(ValueError("some\nlines"), "c", kept="x") == "c: some lines; x"
    assert disk_error(OSError("odd"), kept="x") == "odd; x"


def test_messages_of_errors_that_end_a_program():
    assert failure(OSError(errno.EACCES, "Permission denied", "a/b")) == "a/b: permission denied"
    assert failure(OSError(errno.EACCES, "Permission denied", b"a")) == "a: permission denied"
    assert failure(OSError("odd")) == "odd" and failure(ValueError("x")) == "x"
    full = RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")
    assert failure(full).startswith("the device has too little memory (Out of memory alloc")
    assert failure(RuntimeError("INTERNAL: odd")) is None
    overflow = RuntimeError("INVALID_ARGUMENT: overflow in static extent product: [4, 9]")
    assert failure(overflow).startswith("an array of the model has more numbers")
    assert failure(MemoryError("Unable to allocate 9 GiB")).startswith(
        "this process has too little"
    )
    assert failure(ValueError("RESOURCE_EXHAUSTED: Failed to write")).endswith("Failed to write")


def test_deep_and_large_json_is_refused_within_a_second(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b"[" * 10**7)
    began = time.monotonic()
    with pytest.raises(ValueError, match="nested"):
        bounded_json(path)
    assert time.monotonic() - began < 2
