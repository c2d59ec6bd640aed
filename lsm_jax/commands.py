"""Run a script of the repository such that an error is printed as one line and libraries log only warnings."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from absl import app, flags, logging

from lsm_jax.files import reason
from lsm_jax.names import did_you_mean


def run(program: str, main: Callable[[list[str]], None]) -> None:
    """Run a script of the repository: parse the process's flags and call `main` with the arguments that are
    no flags.

    A wrong flag, or a ValueError or OSError in `main`, ends the process with an error of one line; --verbosity=1 shows the
    traceback.

    Args:
        program: name of the script, with which an error's line begins.
        main: function that runs the script; it is called with the list of arguments that are no flags.
    """

    def guarded(argv: list[str]) -> None:
        try:
            main(argv)
        except Exception as error:
            message = failure(error)
            if message is None or logging.level_debug():
                raise
            sys.exit(f"{program}: {message}  (--verbosity=1 shows the traceback)")

    def parse(argv: list[str]) -> list[str]:
        try:
            rest = flags.FLAGS(argv)
        except flags.UnrecognizedFlagError as error:
            near = did_you_mean(error.flagname, flags.FLAGS)
            sys.exit(
                f"{program}: unknown flag --{error.flagname}{near or '; --help lists all flags'}"
            )
        except (flags.Error, TypeError) as error:
            sys.exit(f"{program}: {error}")
        if flags.FLAGS["verbosity"].using_default_value:
            flags.FLAGS.verbosity = logging.WARNING
        return rest

    app.run(guarded, flags_parser=parse)


def failure(error: BaseException) -> str | None:
    """Return the line with which a program ends because of an error; None for an error that is a fault of the program,
    of which the traceback is needed."""
    # tensorstore's errors of a full disk are ValueErrors with the same word.
    if isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
        text = " ".join(str(error).partition("RESOURCE_EXHAUSTED:")[2].split())
        return (
            f"the device has too little memory ({text[:200]}); use smaller batches, shorter rows or a smaller model "
            "(`python -m lsm_jax.plan` computes the memory that training requires)"
        )
    if isinstance(error, RuntimeError) and "overflow in static extent" in str(error):
        return "an array of the model has more numbers than can be addressed; choose smaller sizes"
    if isinstance(error, MemoryError):
        text = " ".join(str(error).split())[:200] or "no more can be allocated"
        return f"this process has too little memory ({text}); use smaller batches or shorter rows"
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {reason(error)}"
    return str(error) if isinstance(error, ValueError | OSError) else None
