"""Print the table of methods, or one method's formula, forms, kernels and config fields: `lsm methods [NAME]`."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from lsm_jax.cli.declared import attributes
from lsm_jax.names import did_you_mean

_PLATFORMS = {"cuda": "NVIDIA", "rocm": "AMD", "tpu": "TPU", "cpu": "CPU"}


def main(arguments: Sequence[str]) -> int:
    """Print what the command line asks for, and return the exit status."""
    parser = argparse.ArgumentParser(prog="lsm methods")
    parser.add_argument("name", nargs="?", help="a method, such as gla; without it the table")
    name = parser.parse_args(arguments).name
    from lsm_jax import mixers

    console = Console(highlight=False, markup=False)
    if name is None:
        console.print(_table(mixers.METHODS))
        wrappers = ", ".join(mixers.WRAPPERS)
        print(f"Around the memory of another method: {wrappers}. `lsm methods NAME` describes one.")
        return 0
    known = mixers.METHODS | mixers.WRAPPERS
    if name not in known:
        hint = did_you_mean(name, known)
        print(f"lsm methods: there is no method {name!r}{hint}\naccepted are {', '.join(known)}", file=sys.stderr)  # fmt: skip
        return 2
    for part in _description(known[name], name in mixers.WRAPPERS):
        console.print(part, soft_wrap=isinstance(part, str))
    return 0


def _table(methods: Mapping[str, Any]) -> Table:
    """Return the table of methods: name, gate, write and publication of each."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("method", "gate Θ", "write f(k, v)", "published"):
        table.add_column(column, overflow="fold", no_wrap=column in ("method", "published"))
    for method in methods.values():
        table.add_row(method.name, method.gate, method.write, method.paper)
    return table


def _description(method: Any, wrapper: bool) -> list[str | Table]:
    """Return the parts of the description of a method, to be printed one after the other. `wrapper`: whether it is around the
    memory of another method."""
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    rows = dict(
        published=method.paper,
        update="M ← Θ ◇ M + f(k, v)",
        gate=method.gate,
        write=method.write,
        read=method.read,
        state=method.state,
        op=method.op if wrapper else f"lsm_jax.ops.{method.op}",
        forms=", ".join(method.forms) or "one",
        note=method.note,
        config=f"lsm_jax.mixers.{method.config.__name__}",
    )
    for name, text in rows.items():
        if text:
            facts.add_row(name, text)
    fields = Table(box=None, pad_edge=False, header_style="bold")
    fields.add_column("field", no_wrap=True)
    fields.add_column("default", overflow="fold")
    fields.add_column("meaning", overflow="fold")
    texts: dict[str, str] = {}
    for kind in reversed(method.config.__mro__):
        texts |= attributes(inspect.cleandoc(kind.__doc__ or ""))
    for field in dataclasses.fields(method.config):
        fields.add_row(field.name, _default_of(field), texts.get(field.name, ""))
    title = " ".join(inspect.cleandoc(method.module.__doc__ or "").split("\n\n")[0].split())
    title = title.partition(";")[0]
    config = f"{method.name}:340m" if wrapper else f"lm:{method.name}-tiny"
    example = f"Train it: lsm train --config={config} --workdir=runs/{method.name}"
    flags = "Fields of the config, --config.model.layers.L.mixer.FIELD on the command line:"
    kernels = ["Kernels (docs/kernels.md lists what each requires):", *backend_lines(method.op)]
    if wrapper:
        kernels = ["Kernels: those of the other method"]
    return [f"{method.name}: {title}", "", facts, "", *kernels, "", flags, fields, "", example]


def _default_of(field: dataclasses.Field) -> str:
    """Return the default of a dataclass's field as text."""
    if field.default is not dataclasses.MISSING:
        return str(field.default)
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
        return type(value).__name__ if dataclasses.is_dataclass(value) else str(value)
    return "required"


def backend_lines(op: str) -> list[str]:
    """Return a line for each backend of the op called `op`: its name, its platforms, and whether it is automatic."""
    from lsm_jax import ops  # noqa: F401  (registers the backends)
    from lsm_jax.ops.backends.registry import backends_of

    lines = []
    for backend in backends_of(op):
        where = ", ".join(_PLATFORMS[p] for p in backend.platforms) or "every platform"
        if backend.compute_capabilities:
            where += f" of compute capability {', '.join(backend.compute_capabilities)}"
        kind = "" if backend.automatic else ", by name only"
        lines.append(f"  {backend.label or backend.name}: {where}{kind}")
    return lines
