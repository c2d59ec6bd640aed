"""How the repository's scripts run: mistakes are told in one line, and libraries log warnings only."""

from __future__ import annotations

import sys
from collections.abc import Callable

from absl import app, flags, logging


def run(program: str, main: Callable[[list[str]], None]) -> None:
    """Parse the process's flags and run `main` on what is left of its arguments.

    A flag that is wrong, or a ValueError or OSError of `main`, ends the process with one line; --verbosity=1 shows where.

    Args:
        program: begins the line.
        main: the script's.
    """

    def guarded(argv: list[str]) -> None:
        try:
            main(argv)
        except (ValueError, OSError) as error:
            if logging.level_debug():
                raise
            sys.exit(f"{program}: {error}  (--verbosity=1 shows where)")

    def parse(argv: list[str]) -> list[str]:
        try:
            rest = flags.FLAGS(argv)
        except (flags.Error, TypeError) as error:
            sys.exit(f"{program}: {error}")
        if flags.FLAGS["verbosity"].using_default_value:
            flags.FLAGS.verbosity = logging.WARNING
        return rest

    app.run(guarded, flags_parser=parse)
