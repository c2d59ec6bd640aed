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

    Raises:
        ValueError: the template has an error or raised one for this conversation.
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
        raise ValueError(
            f"the tokenizer's chat template refuses this conversation: {error}"
        ) from error
