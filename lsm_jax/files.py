"""Read and write files whose contents or names were made by others: paths that stay inside a folder, JSON of
bounded size, files that are replaced at once, and one-line messages for the errors of a disk."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

MEGABYTE = 1 << 20


def inside(
    folder: str | os.PathLike[str], name: object, *, what: str, follow_links: bool = False
) -> Path:
    """Return the resolved path of a file, named by the contents of another file, that must lie inside a folder.

    The file need not exist. The folder itself may be a link: it is what the user gave.

    Args:
        folder: the folder.
        name: the path relative to the folder, such as a value read from JSON.
        what: the file and field that contain the name, for the error message, such as
            "model.safetensors.index.json: weight_map".
        follow_links: whether links below the folder are followed, if their target lies inside the folder too. Set it only
            for reading. Links from a snapshot of Hugging Face's cache (models--x/snapshots/y) to its blobs
            (models--x/blobs) are followed then as well.

    Raises:
        ValueError: the name is no string, is empty, absolute or contains "..", or the path lies outside the folder or goes
            through a link.
    """
    if not isinstance(name, str | os.PathLike):
        raise ValueError(f"{what} is {name!r}; accepted is the name of a file in {folder}")
    text = os.fspath(name)
    parts = Path(text).parts
    if not parts or "\0" in text or Path(text).is_absolute() or ".." in parts:
        raise ValueError(f"{what} names {text!r}, which is not inside {folder}")
    try:
        base = Path(folder).expanduser().resolve()
        path = base.joinpath(*parts)
        with contextlib.suppress(FileNotFoundError):
            path.lstat()  # reports names that are too long
        if follow_links:
            target = path.resolve()
            if not (target.is_relative_to(base) or target.is_relative_to(_blobs(base))):
                raise ValueError(
                    f"{what} names {text!r}, a link to {target}, which is not inside {base}; "
                    "replace the link by a copy of the file"
                )
            return target
        for depth in range(1, len(parts) + 1):
            part = base.joinpath(*parts[:depth])
            if part.is_symlink():
                raise ValueError(
                    f"{what} names {text!r}, but {part} is a link; accepted is a file or folder"
                )
    except (OSError, RuntimeError) as error:  # a loop of links, or a name that is too long
        raise ValueError(f"{what} names {text[:200]!r}: {reason(error)}") from error
    return path


def _blobs(folder: Path) -> Path:
    """Return the folder of the files to which a snapshot in Hugging Face's cache links; `folder` itself if it
    is no such snapshot."""
    cached = folder.parent.name == "snapshots" and folder.parent.parent.name.startswith(
        ("models--", "datasets--")
    )
    return folder.parent.parent / "blobs" if cached else folder


def read_bytes(path: str | os.PathLike[str], *, max_bytes: int) -> bytes:
    """Return the contents of a regular file of at most `max_bytes`.

    Raises:
        ValueError: the path is no regular file (such as a pipe or a device), the file is larger, or it cannot be read.
    """
    path = Path(path)
    try:
        # Opening a pipe would wait for its writer; O_NONBLOCK has no effect on a regular file.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{path} is no regular file")
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {reason(error)}") from error
    if len(data) > max_bytes:
        raise ValueError(
            f"{path} has {max(status.st_size, len(data))} bytes; accepted are at most {max_bytes}"
        )
    return data


def parse_json(
    data: bytes | str,
    path: str | os.PathLike[str],
    *,
    max_depth: int = 64,
    accepted: type = dict,
) -> Any:
    """Return the value of a JSON text.

    Args:
        data: the text, in UTF-8 if it is bytes.
        path: the file that contains it, for error messages.
        max_depth: how many objects and lists may be nested in each other.
        accepted: the Python type of the value: dict, list, or object for any.

    Raises:
        ValueError: the text is no UTF-8, no JSON, nested more deeply, or a value of another type, or an object has a key
            twice. The message names the file and the position or the key.
    """
    try:
        text = data.decode("utf-8") if isinstance(data, bytes) else data
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} cannot be read: byte {error.start} is no UTF-8 ({error.reason})"
        ) from error
    too_deep = f"{path} cannot be read: objects and lists are nested more than {max_depth} deep"
    try:
        value = json.loads(text, object_pairs_hook=unique_keys)
    except RecursionError:
        raise ValueError(too_deep) from None
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if text.count("[") + text.count("{") > max_depth and _is_deeper(value, max_depth):
        raise ValueError(too_deep)
    if "\\ud" in text or "\\uD" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{path} cannot be read: a string has half of a surrogate pair, {error.object[error.start]!r}"
            ) from error
    if not isinstance(value, accepted):
        kinds = {dict: "an object", list: "a list", str: "a string", type(None): "null"}
        actual = kinds.get(type(value), f"the value {value!r}"[:100])
        raise ValueError(f"{path} contains {actual}; accepted is {kinds.get(accepted, accepted)}")
    return value


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the dict of a JSON object's keys and values; it is the `object_pairs_hook` of `json.loads`, which by itself
    returns the last value of a key that occurs twice.

    Raises:
        ValueError: a key occurs twice; the message has the key.
    """
    fields = dict(pairs)
    if len(fields) < len(pairs):
        seen: set[str] = set()
        key = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {key[:100]!r} occurs twice in one object")
    return fields


def check_keys(data: bytes, path: str | os.PathLike[str]) -> None:
    """Check that no object of a JSON text, which a library has already parsed, has a key twice.

    Raises:
        ValueError: a key occurs twice, or Python cannot parse the text; the message names the file and the key.
    """

    def check(pairs: list[tuple[str, Any]]) -> None:
        unique_keys(pairs)  # returns nothing, so that parsing requires little memory

    try:
        json.loads(data, object_pairs_hook=check)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def bounded_json(
    path: str | os.PathLike[str],
    *,
    max_bytes: int = 16 * MEGABYTE,
    max_depth: int = 64,
    accepted: type = dict,
) -> Any:
    """Return the value in a JSON file of at most `max_bytes`; raises ValueError as `read_bytes` and `parse_json` do.

    Parsed JSON can require some 20 times the memory of its text.
    """
    data = read_bytes(path, max_bytes=max_bytes)
    return parse_json(data, path, max_depth=max_depth, accepted=accepted)


def _is_deeper(value: Any, max_depth: int) -> bool:
    """Return whether objects and lists of a JSON value are nested more than `max_depth` deep."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(max_depth):
        level = [
            child
            for container in level
            for child in (container.values() if isinstance(container, dict) else container)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the path of a new empty file in the same folder, which replaces `path` when the block ends, or is
    deleted when the block raises.

    A reader of `path` sees the old contents or all of the new ones. If `path` is a link, the link is replaced, and the file
    it points to is not changed. The block may write the file through any library; its data reach the disk before the
    file is renamed.

    Raises:
        OSError: as the operating system reports it.
    """
    path = Path(path)
    draft = path.with_name(f".{path.name[:100]}.{secrets.token_hex(6)}.draft")
    os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        yield draft
        _synchronise(draft)
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    with contextlib.suppress(OSError):  # some filesystems cannot synchronise a folder
        _synchronise(path.parent)


def write_atomically(path: str | os.PathLike[str], data: bytes | str | Iterable[bytes]) -> None:
    """Write a file as `replacing` does: all of it or nothing, and never through a link.

    Args:
        path: the file. Its folder must exist.
        data: its contents; a str is written in UTF-8, and an iterable chunk by chunk.

    Raises:
        OSError: as the operating system reports it; the file is then unchanged.
    """
    chunks = (
        [data.encode()] if isinstance(data, str) else [data] if isinstance(data, bytes) else data
    )
    with replacing(path) as draft, draft.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)


def _synchronise(path: Path) -> None:
    """Wait until a file's or folder's data are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_folder(folder: Path) -> None:
    """Check that files can be written to a folder, or that it can be made if it does not exist: make a temporary folder in
    it, or in the nearest parent that exists, and delete it. The permissions that the operating system reports do not show
    that a filesystem is read-only, or has no files of this kind (/proc).

    Raises:
        ValueError: files cannot be written there; the message names the nearest folder or file that exists.
    """
    nearest = folder
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            folder.lstat()  # reports names that are too long or have a zero byte
        nearest = next(p for p in (folder, *folder.parents) if os.path.lexists(p))
        if not nearest.exists():
            raise ValueError(f"{nearest} is a link to {os.readlink(nearest)}, which does not exist")
        if not nearest.is_dir():
            raise ValueError(f"{nearest} is a file")
        os.rmdir(tempfile.mkdtemp(prefix=".probe-", dir=nearest))
    except (OSError, RuntimeError) as error:
        raise ValueError(f"no folder can be made in {nearest} ({reason(error)})") from error


_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file is larger than the limit of the process or the filesystem",
    errno.EROFS: "the filesystem is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "operation not permitted",
    errno.ENAMETOOLONG: "the name is too long",
    errno.ENOENT: "no such file or folder",
    errno.ENOTDIR: "a part of the path is no folder",
    errno.EISDIR: "it is a folder",
    errno.EIO: "the disk reports an input/output error",
    errno.EMFILE: "too many open files in this process",
    errno.ELOOP: "a loop of links",
}


def reason(error: BaseException) -> str:
    """Return the reason of an error of the operating system in a few words, without the path."""
    if isinstance(error, OSError) and error.errno is not None:
        return _REASONS.get(error.errno) or error.strerror or f"error {error.errno}"
    return " ".join(str(error).split()) or type(error).__name__


def disk_error(
    error: BaseException, path: str | os.PathLike[str] | None = None, *, kept: str
) -> str:
    """Return the one-line message for an error of the operating system.

    Args:
        error: the error. Errors of libraries that wrap an OSError (as their cause or context) are unwrapped.
        path: the file or folder that could not be read or written; None is the path in the error.
        kept: what is safe, such as "the checkpoints up to step 200 are complete".

    Returns:
        "PATH: REASON; KEPT", such as "runs/a/metrics.jsonl: the disk is full; the rows up to step 20 are saved".
    """
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError) and cause not in seen:
        seen.append(cause)
        cause = cause.__cause__ or cause.__context__
    cause = cause if isinstance(cause, OSError) else error
    place = path if path is not None else getattr(cause, "filename", None)
    message = f"{place}: {reason(cause)}" if place is not None else reason(cause)
    return " ".join(f"{message}; {kept}".split())
