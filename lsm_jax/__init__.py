"""Linear sequence models in JAX.

Its subpackages are imported when they are first used, so that `import lsm_jax` takes no time:

    from lsm_jax import mixers, models, ops
    run = lsm_jax.load_run("runs/demo")
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

__all__ = [
    "__version__",
    "convert",
    "data",
    "evaluation",
    "feedforward",
    "linearize",
    "load_run",
    "mixers",
    "models",
    "ops",
    "parallel",
    "training",
]

if TYPE_CHECKING:
    from lsm_jax import (
        convert,
        data,
        evaluation,
        feedforward,
        linearize,
        mixers,
        models,
        ops,
        parallel,
        training,
    )
    from lsm_jax.training import load_run


def _run_as_module() -> str | None:
    """Return the name of the module of this package that `python -m` is about to run; None for any other program."""
    if sys.argv[:1] != ["-m"] or "-m" not in sys.orig_argv[:-1]:
        return None
    name = sys.orig_argv[sys.orig_argv.index("-m") + 1]
    return name if name.startswith(f"{__name__}.") else None


if _program := _run_as_module():
    # Before the slow imports of the module's package.
    importlib.import_module(f"{__name__}.interrupts").leave_on_signals(
        _program, cleanup_seconds=5.0
    )


def __getattr__(name: str) -> Any:
    if name == "load_run":
        return importlib.import_module(f"{__name__}.training").load_run
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}"
    )


def __dir__() -> list[str]:
    return sorted(__all__)
