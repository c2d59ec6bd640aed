"""Parse the variants of configs, `--config=FILE.py:HEAD[,option=value ...]`, by the options that each config declares."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from lsm_jax.names import did_you_mean


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """The values that one option of a config's variant accepts.

    Attributes:
        kind: str, int (a whole number), float (a finite number from 0) or bool (0 or 1).
        choices: the accepted values; empty accepts every value of the kind.
        least: the smallest number that the option accepts.
        positive: whether the number must be greater than `least`.
    """

    kind: type = str
    choices: Iterable[str] = ()
    least: int = 0
    positive: bool = False

    def accepted(self) -> str:
        """Return the values that this option of a variant accepts, in words such as "accepted are 0 and 1"."""
        if self.choices:
            return listed(filter(None, self.choices))
        if self.kind is bool:
            return "accepted are 0 and 1"
        if self.kind is int:
            return f"accepted is a whole number from {self.least}"
        if self.kind is float:
            return f"accepted is a number {'above' if self.positive else 'from'} {self.least}"
        return "accepted is text"

    def parse(self, text: str) -> Any:
        """Return the value of this option that `text` states, in the option's kind (str, int, float or
        bool).

        Raises:
            ValueError: the value is not accepted.
        """
        if self.choices and text not in tuple(self.choices):
            raise ValueError(text)
        if self.kind is bool:
            return bool(("0", "1").index(text))
        if self.kind is int:
            if not text.isdecimal() or int(text) < self.least:
                raise ValueError(text)
            return int(text)
        if self.kind is float:
            value = float(text)
            if not self.least <= value < math.inf or (self.positive and value == self.least):
                raise ValueError(text)
            return value
        return text


def listed(names: Iterable[str]) -> str:
    """Return the accepted names of an option or model in the wording of all error messages: "accepted are
    a, b".
    """
    names = tuple(names)
    return f"accepted {'is' if len(names) == 1 else 'are'} {', '.join(names)}"


def parse_variant(variant: str, options: Mapping[str, Option]) -> tuple[str, dict[str, Any]]:
    """Return the head (the part before the first comma) of a config's variant, and the values of its
    options by name.

    Args:
        variant: the text of the variant, "head[,option=value ...]".
        options: the options that this config accepts, by name.

    Raises:
        ValueError: an option does not exist, has no value or occurs twice, or a value is not accepted; the message says what is
            accepted.
    """
    head, *given = variant.split(",")
    values: dict[str, Any] = {}
    for item in given:
        name, equals, text = item.partition("=")
        if name not in options:
            near = did_you_mean(name, options)
            raise ValueError(f"variant {variant!r}: option {name!r}; {listed(options)}{near}")
        if not equals:
            raise ValueError(
                f"variant {variant!r}: option {name!r} has no value; accepted is {name}=VALUE"
            )
        if name in values:
            raise ValueError(f"variant {variant!r}: option {name} is given twice")
        values[name] = parse_value(variant, name, text, options[name])
    return head, values


def parse_value(variant: str, name: str, text: str, option: Option) -> Any:
    """Return the value of one option of a config's variant, parsed from its text: the number 64 from "64" in
    "width=64".

    Raises:
        ValueError: the value is not accepted; the message says what is.
    """
    try:
        return option.parse(text)
    except ValueError:
        near = did_you_mean(text, option.choices)
        message = f"variant {variant!r}: {name}={text!r}; {option.accepted()}{near}"
        raise ValueError(message) from None


def split_head(variant: str, head: str, first: str, example: str) -> tuple[str, str]:
    """Return the two parts of a head "<first>-<size>".

    Raises:
        ValueError: the head, such as "gla-340m", has no dash.
    """
    name, dash, size = head.rpartition("-")
    if not dash:
        raise ValueError(f"variant {variant!r}: accepted is <{first}>-<size>, such as {example}")
    return name, size


def check_head(variant: str, kind: str, head: str, accepted: Iterable[str]) -> None:
    """Raise ValueError unless `head`, the first part of a variant such as "340m" of "340m,hybrid=1", is one of `accepted`; `kind` says in
    the message what it is, such as "size".
    """
    accepted = tuple(accepted)
    if head not in accepted:
        near = did_you_mean(head, accepted)
        raise ValueError(f"variant {variant!r}: {kind} {head!r}; {listed(accepted)}{near}")
