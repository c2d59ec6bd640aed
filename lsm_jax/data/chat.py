"""Format conversations with the Jinja chat template of a tokenizer."""

from __future__ import annotations

import contextlib
import datetime
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from lsm_jax.data.instructions import short_text

_MOST_SECONDS = 5.0
_MOST_CHARACTERS = 1 << 24  # of a text or list that `+` or `*` makes in a template
_MOST_BITS = 1 << 12  # of an integer that `*` or `**` makes


def chat_text(
    template: str,
    messages: list[dict[str, Any]],
    *,
    bos_token: str | None = None,
    eos_token: str | None = None,
    add_generation_prompt: bool = True,
    source: str | None = None,
) -> str:
    """Return a conversation as one text, formatted by a Jinja chat template as the model was tuned on.

    The template runs in Jinja's sandbox with the same additions as in Hugging Face's transformers: `raise_exception`,
    `strftime_now`, `tojson`, loop controls, and blocks that add no blank lines. It is stopped after 5 seconds, and its
    operators `+`, `*` and `**` make no text or list of more than 2^24 elements and no integer of more than 4,096 bits.

    Args:
        template: the tokenizer's chat template.
        messages: dicts with "role" ("system", "user" or "assistant") and "content".
        bos_token: the template's variable `bos_token`; None is the empty string.
        eos_token: the template's variable `eos_token`; None is the empty string.
        add_generation_prompt: end the text with the marker after which the model's answer begins.
        source: the file of the template, for error messages.

    Raises:
        ValueError: the template has an error or raised one for this conversation.
    """
    from jinja2 import TemplateError

    def refuse(reason: str) -> None:
        raise TemplateError(reason)

    try:
        with _time_limit(_MOST_SECONDS):
            return (
                _environment()
                .from_string(template)
                .render(
                    raise_exception=refuse,
                    strftime_now=lambda form: datetime.datetime.now().strftime(form),
                    messages=messages,
                    bos_token=bos_token or "",
                    eos_token=eos_token or "",
                    add_generation_prompt=add_generation_prompt,
                )
            )
    except Exception as error:  # a template can raise anything, such as by dividing by zero
        whose = (
            "the tokenizer's chat template" if source is None else f"{source}: its chat template"
        )
        raise ValueError(f"{whose} refuses this conversation: {_one_line(error)}") from error


def template_error(template: str) -> str | None:
    """Return why a chat template cannot be parsed, in one line; None if it can."""
    try:
        _environment().from_string(template)
    except Exception as error:  # as above; for example, the parser's recursion can be too deep
        return _one_line(error)
    return None


def _one_line(error: Exception) -> str:
    """Return an error of a template as one line, with the template's line if the error has it."""
    text = short_text(error, 300) or type(error).__name__
    line = getattr(error, "lineno", None)
    return text if line is None or f"line {line}" in text else f"{text} (line {line})"


def _environment() -> Any:
    """Return the environment in which chat templates run: Jinja's sandbox for immutable values, whose operators
    refuse to make huge values.
    """
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(["+", "*", "**"])

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if _result_is_huge(operator, left, right):
                raise TemplateError(f"the result of {operator!r} is too large")
            return super().call_binop(context, operator, left, right)

    def to_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    return environment


def _result_is_huge(operator: str, left: Any, right: Any) -> bool:
    """Return whether `left operator right` is a very long text or list, or a very large integer."""
    if isinstance(left, int) and isinstance(right, int):
        if operator == "**":
            return left.bit_length() * max(right, 0) > _MOST_BITS
        return left.bit_length() + right.bit_length() > _MOST_BITS
    size = (
        left * len(right)
        if isinstance(left, int) and hasattr(right, "__len__")
        else len(left) * right
        if isinstance(right, int) and hasattr(left, "__len__")
        else len(left) + len(right)
        if hasattr(left, "__len__") and hasattr(right, "__len__")
        else 0
    )
    return size > _MOST_CHARACTERS


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in a `with` block whose Python code runs longer than `seconds`. A debugger's or a
    coverage tool's trace function is left alone, and there is then no limit."""
    if sys.gettrace() is not None:
        yield
        return
    end = time.monotonic() + seconds

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if time.monotonic() > end:
            raise TimeoutError(f"it runs longer than {seconds:g} seconds")
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)
