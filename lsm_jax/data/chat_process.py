"""Render a chat template in a process of its own, with limits on its time and memory.

`lsm_jax.data.chat` runs this file and writes one JSON object to its standard input: the keyword arguments of `render`, and
`path`, the folders from which Python imports. The standard output is a JSON object with `text` or `error`. The file imports
only the standard library and Jinja, so that it starts within some 0.2 seconds.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import sys
from typing import Any

MOST_BYTES = 1 << 29  # of memory, Python itself included
MOST_CHARACTERS = (
    1 << 24
)  # of the result, and of a text or list that `+` or `*` makes in a template
_MOST_BITS = 1 << 12  # of an integer that `*` or `**` makes


def render(template: str, variables: dict[str, Any] | None, seconds: float) -> dict[str, str]:
    """Parse a chat template, and render it.

    Args:
        template: the template.
        variables: the template's variables; None only parses the template.
        seconds: the time after which the system ends the process by SIGALRM, also inside a function of C.

    Returns:
        {"text": the rendered text}, or {"error": why there is none, "line": the template's line if it is known}.
    """
    from jinja2 import TemplateError

    def refuse(reason: str) -> None:
        raise TemplateError(reason)

    try:
        _limit(seconds)
        parsed = _environment().from_string(template)
        if variables is None:
            return {"text": ""}
        text = parsed.render(
            raise_exception=refuse,
            strftime_now=lambda form: datetime.datetime.now().strftime(form),
            **variables,
        )
    except MemoryError:
        return {"error": f"it requires more than {MOST_BYTES >> 20} MiB of memory"}
    except Exception as error:  # a template can raise anything, such as by dividing by zero
        line = getattr(error, "lineno", None)
        return {
            "error": str(error) or type(error).__name__,
            "line": "" if line is None else str(line),
        }
    if len(text) > MOST_CHARACTERS:
        return {"error": f"its text has {len(text)} characters; accepted are {MOST_CHARACTERS}"}
    return {"text": text}


def _limit(seconds: float) -> None:
    """Limit the memory and the time of this process, as far as the system can."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    with contextlib.suppress(ImportError, AttributeError):
        import signal

        signal.setitimer(signal.ITIMER_REAL, seconds)


def _environment() -> Any:
    """Return the environment in which chat templates run: Jinja's sandbox for immutable values, whose operators
    refuse to make huge values."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Read the tags around what the model itself says, which change nothing of the text."""

        tags: set[str] = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(["+", "*", "**"])

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if _result_is_huge(operator, left, right):
                raise TemplateError(f"the result of {operator!r} is too large")
            return super().call_binop(context, operator, left, right)

    def to_json(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:  # fmt: skip
        given: dict[str, Any] = dict(indent=indent, separators=separators, sort_keys=sort_keys)
        return json.dumps(value, ensure_ascii=ensure_ascii, **given)

    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
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
    return size > MOST_CHARACTERS


def main() -> None:
    """Render the template on the standard input."""
    request = json.load(sys.stdin)
    sys.path[:] = request.pop("path")
    json.dump(render(**request), sys.stdout)


if __name__ == "__main__":
    main()
