"""Checks that several mixer configs share; every message names the field, what was given and what is
accepted.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import types
import typing
from collections.abc import Callable
from typing import Any

FORMS = ("recurrent", "chunk", "associative")


_KINDS = {
    bool: (lambda v: isinstance(v, bool), "True or False"),
    int: (lambda v: isinstance(v, numbers.Integral) and not isinstance(v, bool), "an integer"),
    float: (
        lambda v: isinstance(v, numbers.Real) and not isinstance(v, bool) and math.isfinite(v),
        "a finite number",
    ),
    str: (lambda v: isinstance(v, str), "a string"),
}


def _is_a(kind: Any) -> Callable[[object], bool]:
    return lambda value: isinstance(value, kind)


def fields(owner: Any, name: str | None = None) -> None:
    """Raise ValueError unless every field has the type of its annotation and all numbers are finite; the
    first check of `validate`.

    Args:
        owner: a config.
        name: the config's name in messages; by default the name of its class.
    """
    for field, hint in typing.get_type_hints(type(owner)).items():
        value = getattr(owner, field)
        if typing.get_origin(hint) is tuple:  # the owner checks its entries' values
            if not isinstance(value, (tuple, list)):
                raise ValueError(
                    f"{name or type(owner).__name__}.{field}={value!r}: it must be a tuple"
                )
            continue
        kinds = typing.get_args(hint) or (hint,)
        if isinstance(value, tuple) and any(typing.get_origin(kind) is tuple for kind in kinds):
            continue
        if value is None and types.NoneType in kinds:
            continue
        parts = {k: (_is_a(k), f"a {k.__name__}") for k in kinds if dataclasses.is_dataclass(k)}
        for kind, (fits, words) in (_KINDS | parts).items():
            if kind in kinds and not fits(value):
                none = " or None" if types.NoneType in kinds else ""
                raise ValueError(
                    f"{name or type(owner).__name__}.{field}={value!r}: it must be {words}{none}"
                )


def positive(owner: Any, **values: float) -> None:
    """Raise ValueError unless each of the given fields of the config `owner`, as `name=value`, is greater than zero."""
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{type(owner).__name__}.{name}={value}: it must be greater than 0")


def one_of(owner: Any, name: str, value: object, accepted: tuple) -> None:
    """Raise ValueError unless the value of the field `name` is one of `accepted`; `owner` is the config with
    that field, or the config's name.
    """
    if value not in accepted:
        listed = ", ".join(repr(a) for a in accepted)
        holder = owner if isinstance(owner, str) else type(owner).__name__
        raise ValueError(f"{holder}.{name}={value!r}: accepted are {listed}")


def divides(owner: Any, name: str, value: int, what: str, total: int) -> None:
    """Raise ValueError unless the value of the field `name` of the config `owner` is positive and divides `total`,
    which the message calls `what`.
    """
    positive(owner, **{name: value})
    if total % value:
        raise ValueError(
            f"{type(owner).__name__}.{name}={value} does not divide {what}={total}; "
            f"accepted are the divisors of {total}"
        )


def expanded(owner: Any, name: str, factor: float, hidden_size: int, num_heads: int) -> int:
    """Return the number of channels of a head if `factor * hidden_size` channels are divided into `num_heads`
    heads.

    Raises:
        ValueError: the product is no whole number, or `num_heads` does not divide it.
    """
    positive(owner, **{name: factor})
    width = round(factor * hidden_size)
    if not math.isclose(factor * hidden_size, width, rel_tol=1e-9):  # 1.15 * 100 rounds down
        raise ValueError(
            f"{type(owner).__name__}.{name}={factor} times hidden_size={hidden_size} is {factor * hidden_size}; "
            "it must be a whole number"
        )
    divides(owner, "num_heads", num_heads, f"{name} * hidden_size", width)
    return width // num_heads


def value_heads(owner: Any) -> None:
    """Raise ValueError unless the config `owner` has a positive `num_heads`, and a `num_value_heads` that is a multiple
    of it or None.
    """
    positive(owner, num_heads=owner.num_heads)
    if owner.num_value_heads is not None:
        positive(owner, num_value_heads=owner.num_value_heads)
        divides(owner, "num_heads", owner.num_heads, "num_value_heads", owner.num_value_heads)


def convolution_width(owner: Any) -> None:
    """Raise ValueError unless `conv_size`, the width of the short convolutions in the config `owner`, is at least 1."""
    if owner.conv_size < 1:
        raise ValueError(
            f"{type(owner).__name__}.conv_size={owner.conv_size}: it must be at least 1 (1 is no convolution)"
        )


def convolution_taps(owner: Any) -> int:
    """Return the number of multiplications per channel and token of the short convolution in the config
    `owner`: `conv_size`, or 0 if that is 1, which means no convolution.
    """
    return owner.conv_size if owner.conv_size > 1 else 0
