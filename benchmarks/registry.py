"""The table of benchmarks, read from the modules in `benchmarks/cases/` without importing them.

A module describes one benchmark. It defines

    BENCHMARK = Benchmark(name="...", ...)   # literals only, since it is read from the source
    def add_arguments(parser)                # its options; shared ones come from `benchmarks.options`
    def cases(args) -> list[dict]            # the key fields of every row that the options select, in order
    def rows(args, cases) -> Iterator[dict]  # measure these cases; yield each row as soon as it is measured

and may define `line(row) -> str`, the text that is printed for a row in place of its JSON. `benchmarks.run`
does the rest.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CASES = Path(__file__).resolve().parent / "cases"


class UsageError(Exception):
    """Raised if a benchmark cannot run with the given options; the message names the option and what is
    accepted.
    """


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """The description of a benchmark: its name, the fields that identify its rows, and where they are
    stored.

    Attributes:
        name: the name on the command line, which is also the name of the module.
        summary: one line that says what the benchmark measures, for the list of benchmarks.
        key: fields of a row that identify its measurement and that every row has.
        optional_key: further such fields, and for each the value that is meant when a row omits it.
        output: the file that rows are appended to by default; "" if rows are only printed by default.
        more_files: other files in docs/ with rows of this benchmark.
        resume: whether a case that has a row in the output is skipped by default.
        requires_gpu: whether nothing of it can run without an NVIDIA Hopper GPU.
    """

    name: str
    summary: str
    key: tuple[str, ...]
    optional_key: dict[str, Any] = dataclasses.field(default_factory=dict)
    output: str = ""
    more_files: tuple[str, ...] = ()
    resume: bool = False
    requires_gpu: bool = False

    @property
    def files(self) -> tuple[str, ...]:
        """Return the paths of all files in docs/ that have rows of this benchmark."""
        return (self.output,) * bool(self.output) + self.more_files

    def identity(self, row: dict[str, Any]) -> tuple:
        """Return the values of the fields that identify a measurement, from a row of results or from a case
        to measure: a row is the result of a case if these values are equal.
        """
        optional = (row.get(field, default) for field, default in self.optional_key.items())
        return (*(row.get(field) for field in self.key), *optional)

    def label(self, row: dict[str, Any]) -> str:
        """Return the key fields of a row as text for progress messages, without those that have their
        defaults.
        """
        values = [row.get(field) for field in self.key]
        for field, default in self.optional_key.items():
            if row.get(field, default) != default:
                values.append(f"{field}={row[field]}")
        return " ".join(str(value) for value in values if value not in (None, "", {}))

    def load(self) -> ModuleType:
        """Import and return the module in `benchmarks/cases/` that defines this benchmark."""
        return importlib.import_module(f"benchmarks.cases.{self.name}")


def read_description(path: Path) -> Benchmark:
    """Return the `BENCHMARK` of a module without importing it.

    Raises:
        ValueError: the module assigns no `BENCHMARK`, an argument of `Benchmark(...)` is no literal, or its name differs from
        the file's.
    """
    for statement in ast.parse(path.read_text()).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="BENCHMARK")], value=ast.Call(keywords=keywords)):
                fields = {str(word.arg): ast.literal_eval(word.value) for word in keywords}
                if fields.get("name") != path.stem:
                    raise ValueError(
                        f"{path}: BENCHMARK has name={fields.get('name')!r}; it must be the file's name without .py"
                    )
                return Benchmark(**fields)
    raise ValueError(f"{path}: it assigns no BENCHMARK = Benchmark(...)")


@functools.cache
def benchmarks() -> dict[str, Benchmark]:
    """Return the descriptions of all benchmarks by name, in alphabetical order."""
    paths = sorted(path for path in CASES.glob("*.py") if path.stem != "__init__")
    return {path.stem: read_description(path) for path in paths}


def get(name: str) -> Benchmark:
    """Return the description of the benchmark called `name`.

    Raises:
        UsageError: no benchmark is called `name`; the message has the nearest names.
    """
    known = benchmarks()
    if name in known:
        return known[name]
    nearest = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = (
        f"the nearest are {', '.join(nearest)}" if nearest else "`python -m benchmarks` lists all"
    )
    raise UsageError(f"there is no benchmark {name!r}; {hint}")
