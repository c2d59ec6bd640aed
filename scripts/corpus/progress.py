"""Print how far a long step of the corpus is, at most once in ten seconds."""

from __future__ import annotations

import sys
import time

_SECONDS = 10.0


class Progress:
    """Counts of one step, which are printed with the time that the rest takes at the speed so far."""

    def __init__(self, step: str, total: int):
        """Begin a step; `total` is its size in bytes, 0 if it is not known."""
        self._step, self._total = step, total
        self._began = self._printed = time.monotonic()
        self.bytes = self.documents = self.tokens = 0

    def add(self, size: int, documents: int = 0, tokens: int = 0) -> None:
        """Count bytes, documents and tokens that are done."""
        self.bytes, self.documents = self.bytes + size, self.documents + documents
        self.tokens += tokens
        if time.monotonic() - self._printed >= _SECONDS:
            self.show()

    def show(self) -> None:
        """Print the counts, the speed and the estimated time until the step ends."""
        self._printed = time.monotonic()
        seconds = self._printed - self._began
        parts = [f"{self.bytes / 1e6:.1f} MB"]
        if self._total:
            parts[0] += f" of {self._total / 1e6:.1f} MB"
        if self.documents:
            parts.append(f"{self.documents} documents")
        if self.tokens:
            parts.append(f"{self.tokens / 1e6:.2f} M tokens")
        if self._total and self.bytes:
            left = seconds * max(0, self._total - self.bytes) / self.bytes
            parts.append(f"about {left:.0f} s left")
        print(f"{self._step}: {', '.join(parts)}", file=sys.stderr, flush=True)
