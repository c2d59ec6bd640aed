"""What `implementation=None` picked for each op and why nothing better: logged once, and kept for the run directory."""

from __future__ import annotations

from absl import logging

_CHOICES: dict[str, str] = {}


def note(op: str, choice: str) -> None:
    """Record a choice at trace time; a new one is logged."""
    known = _CHOICES.get(op, "")
    if choice not in known.split("; "):
        _CHOICES[op] = f"{known}; {choice}" if known else choice
        logging.info("%s runs as %s", op, choice)


def choices() -> dict[str, str]:
    """What each op traced so far in this process runs as."""
    return dict(_CHOICES)
