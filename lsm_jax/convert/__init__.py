"""Convert published checkpoints into runs of this library, and back."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lsm_jax.convert.checkpoint import Checkpoint
    from lsm_jax.convert.folder import export
    from lsm_jax.convert.fox import fox_params, import_fox
    from lsm_jax.convert.fox_export import export_fox
    from lsm_jax.convert.fox_json import fox_config
    from lsm_jax.convert.huggingface import import_huggingface, load_params, model_config
    from lsm_jax.convert.released_export import export_released
    from lsm_jax.convert.tokenizer import tokenizer_of

__all__ = [
    "Checkpoint",
    "export",
    "export_fox",
    "export_released",
    "fox_config",
    "fox_params",
    "import_fox",
    "import_huggingface",
    "load_params",
    "model_config",
    "tokenizer_of",
]
_MODULES = {
    "checkpoint": ("Checkpoint",),
    "folder": ("export",),
    "fox": ("fox_params", "import_fox"),
    "fox_export": ("export_fox",),
    "fox_json": ("fox_config",),
    "released_export": ("export_released",),
    "huggingface": ("import_huggingface", "load_params", "model_config"),
    "tokenizer": ("tokenizer_of",),
}


def __getattr__(name: str) -> Any:
    """Import the module of a public name at its first use, so that `python -m lsm_jax.convert.fox` does not
    load that module twice."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
