"""Checks that several mixer configs share; every message names the field, what was given and what is accepted."""

from __future__ import annotations

from typing import Any

FORMS = ("recurrent", "chunk", "associative")


def positive(owner: Any, **fields: float) -> None:
    """Raise ValueError unless every given field is greater than zero."""
    for name, value in fields.items():
        if not value > 0:
            raise ValueError(f"{type(owner).__name__}.{name}={value}: it must be greater than 0")


def one_of(owner: Any, name: str, value: object, accepted: tuple) -> None:
    """Raise ValueError unless `value` is one of `accepted`."""
    if value not in accepted:
        listed = ", ".join(repr(a) for a in accepted)
        raise ValueError(f"{type(owner).__name__}.{name}={value!r}: accepted are {listed}")


def divides(owner: Any, name: str, value: int, what: str, total: int) -> None:
    """Raise ValueError unless the field `name` (= `value`) divides `total`, described by `what`."""
    positive(owner, **{name: value})
    if total % value:
        raise ValueError(
            f"{type(owner).__name__}.{name}={value} does not divide {what}={total}; "
            f"accepted are the divisors of {total}"
        )


def expanded(owner: Any, name: str, factor: float, hidden_size: int, num_heads: int) -> int:
    """Head size of `factor * hidden_size` channels cut into `num_heads` heads.

    Raises:
        ValueError: the product is no whole number, or `num_heads` does not divide it.
    """
    positive(owner, **{name: factor})
    width = factor * hidden_size
    if width != int(width):
        raise ValueError(
            f"{type(owner).__name__}.{name}={factor} times hidden_size={hidden_size} is {width}; "
            "it must be a whole number"
        )
    divides(owner, "num_heads", num_heads, f"{name} * hidden_size", int(width))
    return int(width) // num_heads


def op_fields(owner: Any, forms: tuple[str, ...] = FORMS) -> None:
    """Check `form` and `chunk_size`; the op itself checks `implementation`, which only it can know."""
    one_of(owner, "form", owner.form, forms)
    size = owner.chunk_size
    if size is not None and (size < 1 or size & (size - 1)):
        raise ValueError(
            f"{type(owner).__name__}.chunk_size={size}: accepted are None and powers of two"
        )


def convolution_width(owner: Any) -> None:
    """Check `conv_size`."""
    if owner.conv_size < 2:
        raise ValueError(
            f"{type(owner).__name__}.conv_size={owner.conv_size}: it must be at least 2"
        )
