"""Run a script of the repository such that an error is printed as one line and libraries log only warnings."""

from __future__ import annotations

import sys
from collections.abc import Callable

from absl import app, flags, logging


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
        except (ValueError, OSError) as error:
            if logging.level_debug():
                raise
            sys.exit(f"{program}: {error}  (--verbosity=1 shows the traceback)")

    def parse(argv: list[str]) -> list[str]:
        try:
            rest = flags.FLAGS(argv)
        except (flags.Error, TypeError) as error:
            sys.exit(f"{program}: {error}")
        if flags.FLAGS["verbosity"].using_default_value:
            flags.FLAGS.verbosity = logging.WARNING
        return rest

    app.run(guarded, flags_parser=parse)
