"""Format conversations with the Jinja chat template of a tokenizer."""

from __future__ import annotations

import datetime
import json
from typing import Any


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
    `strftime_now`, `tojson`, loop controls, and blocks that add no blank lines.

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

    environment = _environment()
    try:
        return environment.from_string(template).render(
            raise_exception=refuse,
            strftime_now=lambda form: datetime.datetime.now().strftime(form),
            messages=messages,
            bos_token=bos_token or "",
            eos_token=eos_token or "",
            add_generation_prompt=add_generation_prompt,
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


def _environment() -> Any:
    """Return the sandbox in which templates run."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def to_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    return environment


def _one_line(error: Exception) -> str:
    """Return an error of a template as one line, with the template's line if the error has it."""
    text = " ".join(str(error).split()) or type(error).__name__
    line = getattr(error, "lineno", None)
    return text if line is None or f"line {line}" in text else f"{text} (line {line})"
