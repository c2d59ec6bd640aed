"""Check the fields of a pretrained model's config.json before anything is computed from them: their JSON types, and that
sizes are not larger than the stored tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

# Fields of our configs that say how a model is computed or drawn, of which no config.json has one.
COMPUTATION = frozenset(
    "dtype remat unroll_layers matmul head_matmul loss_chunk_size init_std implementation prune op".split()
)
LARGEST = 2**31 - 1  # of a size: token positions and indices are int32


def _is_number(value: Any) -> bool:
    """Return whether a JSON value is a number that a float can contain; true, NaN and Infinity are none."""
    return type(value) in (int, float) and -1.7e308 < value < 1.7e308


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "size": (lambda v: type(v) is int and 1 <= v <= LARGEST, f"a whole number from 1 to {LARGEST}"),
    "count": (
        lambda v: type(v) is int and 0 <= v <= LARGEST,
        f"a whole number from 0 to {LARGEST}",
    ),
    "token": (
        lambda v: all(
            type(x) is int and 0 <= x <= LARGEST for x in (v if isinstance(v, list) else [v])
        ),
        f"a token id from 0 to {LARGEST}, or a list of them",
    ),
    "number": (_is_number, "a finite number"),
    "positive": (lambda v: _is_number(v) and v > 0, "a finite number above 0"),
    "flag": (lambda v: isinstance(v, bool), "true or false"),
    "text": (lambda v: isinstance(v, str), "a string"),
    "texts": (
        lambda v: isinstance(v, list) and all(isinstance(x, str) for x in v),
        "a list of strings",
    ),
    "object": (lambda v: isinstance(v, dict), "an object"),
}


def shown(value: object, length: int = 120) -> str:
    """Return a value of a file as one printable line of at most `length` characters, for error messages."""
    text = (
        repr(value) if isinstance(value, int | float | bool | str | None) else _clipped_repr(value)
    )
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _clipped_repr(value: object) -> str:
    """Return the repr of a JSON list or object, without computing that of thousands of entries."""
    if isinstance(value, list | tuple) and len(value) > 50:
        return repr(value[:50])
    if isinstance(value, dict) and len(value) > 50:
        return repr(dict(list(value.items())[:50]))
    return repr(value)


def listed(names: Iterable[object], count: int = 10) -> str:
    """Return the first names of a list for an error message, each in one printable line."""
    texts = [n if isinstance(n, str) and n.isprintable() else repr(n) for n in names]
    more = f" and {len(texts) - count} more" if len(texts) > count else ""
    return ", ".join(text[:200] for text in texts[:count]) + more


def check_fields(
    given: dict[str, Any],
    where: object,
    kinds: dict[str, str],
    label: Callable[[str], str] = str,
) -> None:
    """Raise ValueError unless each field that is present and not null has the kind that it must have.

    Args:
        given: the contents of a config.json, or of an object in it.
        where: the file, for the error message.
        kinds: the kind of each field: size, count, token, number, positive, flag, text, texts or object.
        label: returns the name of a field in the file.
    """
    for name, kind in kinds.items():
        value = given.get(name)
        fits, accepted = _KINDS[kind]
        if value is not None and not fits(value):
            raise ValueError(f"{where}: {label(name)}={shown(value)}; accepted is {accepted}")


def check_sizes(
    given: dict[str, Any],
    where: object,
    shapes: dict[str, tuple[int, ...]],
    sizes: Iterable[str | tuple[str, str]],
    *,
    layers: str = "num_hidden_layers",
    prefix: str = "model.layers.",
    label: Callable[[str], str] = str,
) -> None:
    """Raise ValueError if a size in config.json is larger than the stored tensors, before anything of that size is made.

    `Tensors.check` later compares every shape. Here each size must be at most the largest dimension of a stored tensor, and the
    number of layers at most that of the layers in the tensors' names.

    Args:
        given: the contents of config.json, whose fields have passed `check_fields`.
        where: the file, for the error message.
        shapes: the shapes of the stored tensors, by name.
        sizes: the fields, and pairs of fields whose product is a size. Fields that are absent are not checked.
        layers: the field with the number of layers.
        prefix: what the names of a layer's tensors begin with, before the layer's number.
        label: returns the name of a field in the file.
    """
    pattern = re.compile(re.escape(prefix) + r"(\d+)\.")
    numbers = {match[1] for name in shapes if (match := pattern.match(name))}
    if (given.get(layers) or 0) > len(numbers):
        raise ValueError(
            f"{where}: {label(layers)}={given[layers]}; the files have tensors of {len(numbers)} layers"
        )
    largest = max((d for shape in shapes.values() if math.prod(shape) for d in shape), default=0)
    for entry in sizes:
        names = (entry,) if isinstance(entry, str) else entry
        values: list[Any] = [given.get(name) for name in names]
        if None in values or math.prod(values) <= largest:
            continue
        fields = " times ".join(f"{label(n)}={shown(given[n])}" for n in names)
        raise ValueError(
            f"{where}: {fields} is larger than every dimension of the stored tensors, of which the largest is {largest}"
        )


_MODULE = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*--)?[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def check_auto_map(given: dict[str, Any], where: object) -> None:
    """Raise ValueError unless `auto_map`, which names the Python classes of a model, names modules inside the folder or a
    repository. This library runs no code of a model's folder, but an export copies the field."""
    classes = given.get("auto_map")
    if classes is None:
        return
    if not isinstance(classes, dict):
        raise ValueError(f"{where}: auto_map={shown(classes)}; accepted is an object")
    for name, value in classes.items():
        for path in value if isinstance(value, list) else [value]:
            if path is not None and not (isinstance(path, str) and _MODULE.fullmatch(path)):
                raise ValueError(
                    f"{where}: auto_map.{listed([name])}={shown(path)}; accepted is module.Class or owner/name--module.Class"
                )
