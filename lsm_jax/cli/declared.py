"""Read the flags of programs and the fields of configs from their source, so that help needs no slow import."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Declared:
    """A flag of a program, a positional argument, or a field of a config.

    Attributes:
        name: "--workdir" for a flag, "NAME" for a positional argument, "lengths" for a field.
        text: its help text.
        default: its default as source text; empty if it is None, False or absent.
        switch: whether a flag has no value.
    """

    name: str
    text: str
    default: str = ""
    switch: bool = False


def flags_of(path: Path) -> list[Declared]:
    """Return the flags that a program defines by absl (`flags.DEFINE_...`) or argparse (`add_argument`), in order."""
    tree = ast.parse(path.read_text())
    nodes = sorted(
        (node for node in ast.walk(tree) if isinstance(node, ast.Call)),
        key=lambda node: (node.lineno, node.col_offset),
    )
    constants = {
        node.targets[0].id: _value(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    return [flag for node in nodes if (flag := _flag(node, constants)) is not None]


def _flag(node: ast.Call, constants: dict[str, object]) -> Declared | None:
    """Return the flag that a call defines; None for other calls. `constants` are the values of the file's names."""
    function = getattr(node.func, "attr", getattr(node.func, "id", ""))
    values = [_value(argument) for argument in node.args]
    if not values or not isinstance(values[0], str):
        return None
    keywords = {k.arg: k.value for k in node.keywords if k.arg}
    if function.startswith("DEFINE_"):
        place = 3 if function.startswith(("DEFINE_enum", "DEFINE_multi_enum")) else 2  # of the text
        if len(values) <= place:
            return None
        switch = function in ("DEFINE_bool", "DEFINE_boolean")
        return Declared(
            f"--{values[0]}", _text(node.args[place], constants), _default(node.args[1]), switch
        )
    if function in ("add", "add_argument"):
        name = values[0] if values[0].startswith("-") else values[0].upper()
        text = _text(keywords["help"], constants) if "help" in keywords else ""
        switch = "action" in keywords
        default = _default(keywords["default"]) if "default" in keywords else ""
        text = text.replace("%(default)s", default)
        default = "" if "(default" in text else default
        return Declared(name, text, default, switch)
    return None


def fields_of(path: Path, name: str) -> list[Declared]:
    """Return the fields of the dataclass called `name` in a source file, with their texts from its docstring's "Attributes:"."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef) and node.name == name:
            texts = attributes(ast.get_docstring(node) or "")
            return [
                Declared(f.target.id, texts.get(f.target.id, ""), _default(f.value))
                for f in node.body
                if isinstance(f, ast.AnnAssign) and isinstance(f.target, ast.Name)
            ]
    raise ValueError(f"{path} has no class {name}")


def attributes(docstring: str) -> dict[str, str]:
    """Return the descriptions in the part "Attributes:" of a docstring, by name."""
    _, _, part = docstring.partition("Attributes:\n")
    part = re.split(r"\n\S", part)[0]
    found: dict[str, str] = {}
    name = ""
    for line in part.splitlines():
        if match := re.match(r"    (\w[\w, ]*): (.*)", line):
            name = match[1]
            found[name] = match[2]
        elif name and line.startswith("     "):
            found[name] += f" {line.strip()}"
    return {one: text for names, text in found.items() for one in re.split(r",\s*", names)}


def _value(node: ast.expr | None) -> object:
    """Return the constant that an expression is, or None."""
    try:
        return ast.literal_eval(node) if node is not None else None
    except ValueError:
        return None


def _text(node: ast.expr, constants: dict[str, object]) -> str:
    """Return the text of a string in the source; expressions inside an f-string are replaced by their source, and
    `", ".join(NAME)` by the values of that name in `constants`."""
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "join":
        values = constants.get(getattr(node.args[0], "id", ""))
        if isinstance(values, tuple | list | dict):
            return ", ".join(values)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else ast.unparse(part).strip("f'{}")
            for part in node.values
        )
    value = _value(node)
    return value if isinstance(value, str) else ast.unparse(node)


def _default(node: ast.expr | None) -> str:
    """Return a default as it is written on a command line; empty if it is None, False, empty or computed."""
    value = _value(node)
    if value in (None, False, "", (), []):
        return ""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
