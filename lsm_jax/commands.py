"""Run a script of the repository such that an error is printed as one line and libraries log only warnings."""

from __future__ import annotations

import sys
from collections.abc import Callable

from absl import app, flags, logging

from lsm_jax.files import error_text


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
        except (ValueError, OSError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not out_of_memory(error):
                raise
            if logging.level_debug():
                raise
            sys.exit(
                f"{program}: {out_of_memory(error) or error_text(error)}  (--verbosity=1 shows the traceback)"
            )

    def parse(argv: list[str]) -> list[str]:
        try:
            rest = flags.FLAGS(argv)
        except (flags.Error, TypeError) as error:
            sys.exit(f"{program}: {error}")
        if flags.FLAGS["verbosity"].using_default_value:
            flags.FLAGS.verbosity = logging.WARNING
        return rest

    app.run(guarded, flags_parser=parse)


def out_of_memory(error: BaseException) -> str:
    """Return the message of JAX's error that a device has too little memory; "" for other errors."""
    # tensorstore's errors of a full disk are ValueErrors with the same word.
    if not isinstance(error, RuntimeError) or "RESOURCE_EXHAUSTED" not in str(error):
        return ""
    text = " ".join(str(error).partition("RESOURCE_EXHAUSTED:")[2].split())
    return (
        f"the device has too little memory ({text[:200]}); use smaller batches, shorter rows or a smaller model "
        "(`python -m lsm_jax.plan` computes the memory that training requires)"
    )
