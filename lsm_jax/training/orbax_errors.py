"""Hide the messages that orbax's threads print about errors which are raised in the main thread, too."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import os
import re
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

_ORBAX = f"{os.sep}orbax{os.sep}"  # in the paths of orbax's files
_STATUS = re.compile(
    r"[A-Z]+(_[A-Z]+)*: "
)  # the beginning of tensorstore's errors, such as "DATA_LOSS: "


def hide_errors_of_threads() -> None:
    """Hide the errors of orbax's threads from now on, of which each is printed several times with its traceback, also
    after a save or a read has ended. The first one is raised in the main thread (`Checkpoints.raise_failure`)."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_no_error_of_orbax)
    if not _hooks:
        _hooks.update(uncaught=sys.excepthook, unraisable=sys.unraisablehook)
        sys.excepthook, sys.unraisablehook = _show_uncaught, _show_unraisable


def _is_no_error_of_orbax(record: logging.LogRecord) -> bool:
    if record.levelno < logging.ERROR:
        return True
    error = record.exc_info[1] if record.exc_info else None
    if record.name == "asyncio" and _STATUS.match(str(error)):
        return False  # of a read that tensorstore had begun, without a traceback
    frames = traceback.walk_tb(record.exc_info[2]) if record.exc_info else ()
    files = [record.pathname, *(frame.f_code.co_filename for frame, _ in frames)]
    return not any(_ORBAX in file for file in files)


def hide_coroutines() -> None:
    """Hide Python's warnings about reads and writes that did not begin because an earlier one failed."""
    warnings.filterwarnings("ignore", r"coroutine '.*' was never awaited", RuntimeWarning)


_hooks: dict[str, Callable[..., Any]] = {}  # Python's, which the two functions below call


def _show_uncaught(
    kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
) -> None:
    """Show an uncaught exception as before, unless tensorstore raised it in one of its threads because a save ended,
    with an error, before all of its writes."""
    if not _is_closed_loop(error):
        _hooks["uncaught"](kind, error, trace)


def _show_unraisable(event: Any) -> None:
    """Show an exception that Python could not raise as before, unless it is of a read or write that orbax gave up."""
    code = getattr(event.object, "cr_code", None)
    if not _is_closed_loop(event.exc_value) and not (code and _ORBAX in code.co_filename):
        _hooks["unraisable"](event)


def _is_closed_loop(error: BaseException | None) -> bool:
    return isinstance(error, RuntimeError) and str(error) == "Event loop is closed"


def reason_of(error: Exception) -> str:
    """Return an error's text on one line of at most 400 characters."""
    text = " ".join(str(error).split())
    if (
        "incompatible handler" in text
    ):  # orbax's words for every error of a part, with the whole tree
        cause = error.__cause__ or error.__context__
        text = " ".join(str(cause).split()) if cause is not None else ""
        text = f"a part of it is damaged ({text[:300]})" if text else "a part of it is damaged"
    return text[:400] if text else repr(error)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress, inside a `with` block, the long messages that orbax's threads print about an unreadable
    checkpoint file; the error is still raised."""
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    root, null_handler = logging.getLogger(), logging.NullHandler()
    were_disabled = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    root.addHandler(
        null_handler
    )  # without a handler, the first message would install one on the redirected stderr
    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings(action="ignore"):
        try:
            yield
        except Exception:
            gc.collect()  # failed tasks print when they are garbage-collected, so collect them now
            raise
        finally:
            for logger, was_disabled in zip(loggers, were_disabled, strict=True):
                logger.disabled = was_disabled
            root.removeHandler(null_handler)
