"""Format conversations with the Jinja chat template of a tokenizer."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from lsm_jax.data import chat_process
from lsm_jax.data.instructions import short_text
from lsm_jax.files import reason

_MOST_SECONDS = 5.0
_START_SECONDS = 60.0  # in which a busy computer starts the process


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
    `strftime_now`, `tojson`, loop controls, the tag `generation`, the variables `tools` and `documents`, which are none, and blocks
    that add no blank lines. It runs in a process of its own, with at most
    5 seconds and 512 MiB of memory; its text has at most 2^24 characters.

    Args:
        template: the tokenizer's chat template.
        messages: dicts with "role" ("system", "user" or "assistant") and "content".
        bos_token: the template's variable `bos_token`; None is the empty string.
        eos_token: the template's variable `eos_token`; None is the empty string.
        add_generation_prompt: end the text with the marker after which the model's answer begins.
        source: the file of the template, for error messages.

    Raises:
        ValueError: the template has an error or raised one for this conversation, or it exceeds a limit.
    """
    variables = dict(
        messages=messages,
        bos_token=bos_token or "",
        eos_token=eos_token or "",
        add_generation_prompt=add_generation_prompt,
        tools=None,
        documents=None,
    )
    result = _run(template, variables)
    if "text" in result:
        return result["text"]
    whose = "the tokenizer's chat template" if source is None else f"{source}: its chat template"
    raise ValueError(f"{whose} refuses this conversation: {_one_line(result)}")


def template_error(template: str) -> str | None:
    """Return why a chat template cannot be parsed within the limits of `chat_text`, in one line; None if it can."""
    result = _run(template, None)
    return None if "text" in result else _one_line(result)


def _run(template: str, variables: dict[str, Any] | None) -> dict[str, str]:
    """Return the result of `chat_process.render` in a new process. A template can allocate and loop inside functions of C,
    such as `center`, `%` and `slice`, where nothing inside a process can stop it."""
    request = dict(template=template, variables=variables, seconds=_MOST_SECONDS, path=sys.path)
    command = [sys.executable or "python3", "-I", str(Path(chat_process.__file__))]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(request).encode(),
            capture_output=True,
            timeout=_MOST_SECONDS + _START_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"it runs longer than {_MOST_SECONDS:g} seconds"}
    except OSError as error:
        return {"error": f"{command[0]} cannot be started: {reason(error)}"}
    if done.returncode == -getattr(signal, "SIGALRM", 0):
        return {"error": f"it runs longer than {_MOST_SECONDS:g} seconds"}
    try:
        return json.loads(done.stdout)
    except ValueError:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return {"error": f"its process ended with exit code {done.returncode}: {last}"}


def _one_line(result: dict[str, str]) -> str:
    """Return the error of a result as one line, with the template's line if it is known."""
    text, line = short_text(ValueError(result["error"]), 300), result.get("line", "")
    return text if not line or f"line {line}" in text else f"{text} (line {line})"
