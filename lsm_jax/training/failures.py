"""Errors of the disk while a run is written, as one line that names the path."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from lsm_jax.files import reason


class WriteError(OSError):
    """Raised if a file of a run cannot be written; the message is one line with the path and the reason.

    Args:
        path: the file or folder.
        error: the error of the operating system, of orbax or of tensorstore.
        exact: name `path`, even if the error names another one, such as a file inside it.
    """

    def __init__(self, path: str | os.PathLike[str], error: BaseException, *, exact: bool = False):
        cause = _system_error(error)
        place = path if exact else getattr(cause, "filename", None) or path
        super().__init__(f"{place}: {reason(cause)}"[:1000])


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise every OSError inside the `with` block as a `WriteError` of `path`."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        raise WriteError(path, error, exact=True) from error


def _system_error(error: BaseException) -> BaseException:
    """Return the OSError that an error was caused by; `error` itself if there is none.

    tensorstore's errors are ValueErrors, whose text contains the path and the error's number.
    """
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        if isinstance(cause, OSError) and cause.errno is not None:
            return cause
        if number := re.search(r"os_error_code='(\d+)'", str(cause)):
            paths = re.findall(r'"(/[^"]*)"', str(cause))
            return OSError(int(number[1]), os.strerror(int(number[1])), *paths[-1:])
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__
    return error


def refuse_links(workdir: Path) -> None:
    """Check that no file or folder of a run, that training writes or deletes, is a link.

    Links would be written or deleted through. The run's directory itself may be a link.

    Raises:
        ValueError: one is a link; the message names it.
    """
    for name in (
        "checkpoints",
        "checksums",
        "broken_checkpoints",
        "tensorboard",
        "profile",
        "plots",
        "samples",
        "wandb",
        "run.lock",
    ):
        found = [workdir / name]
        if name == "checkpoints" and found[0].is_dir() and not found[0].is_symlink():
            found += sorted(found[0].iterdir())
        for path in found:
            if path.is_symlink():
                raise ValueError(
                    f"workdir={str(workdir)!r}: {path} is a link to {os.readlink(path)}; training does not write or delete "
                    "through links. Replace it by the folder, or let --workdir itself be a link to another disk"
                )
