"""Conversations as the text a model was tuned on, by the Jinja template that comes with its tokenizer."""

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
) -> str:
    """The text of a conversation.

    The template runs in Jinja's sandbox, with what Hugging Face's transformers gives templates: `raise_exception`,
    `strftime_now`, `tojson`, loop controls, and blocks that leave no blank lines.

    Args:
        template: of the tokenizer.
        messages: each with "role" ("system", "user", "assistant") and "content".
        bos_token: what the template sets where it names it.
        eos_token: the same.
        add_generation_prompt: end with what precedes an answer.

    Raises:
        ValueError: the template is wrong, or refuses the conversation.
    """
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(reason: str) -> None:
        raise TemplateError(reason)

    def to_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    try:
        return environment.from_string(template).render(
            raise_exception=refuse,
            strftime_now=lambda form: datetime.datetime.now().strftime(form),
            messages=messages,
            bos_token=bos_token or "",
            eos_token=eos_token or "",
            add_generation_prompt=add_generation_prompt,
        )
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise ValueError(f"the tokenizer's chat template refuses this: {error}") from error
