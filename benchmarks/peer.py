"""A peer under PyTorch, timed in a process of its own that warms up while the caller compiles."""

from __future__ import annotations

import concurrent.futures
import json
import subprocess
import sys
import time
from typing import Any


class Peer:
    """A script that prints "ready" once warm, waits for a line, and then prints rows of JSON lists.

    Args:
        code: the script; `json.loads(sys.argv[1])` is what it is given.
        given: anything JSON has a word for.
    """

    def __init__(self, code: str, given: Any):
        command = [sys.executable, "-c", code, json.dumps(given)]
        self._process: Any = subprocess.Popen(
            command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._began = time.perf_counter()

    def rows(self, patience: float) -> list[list[Any]]:
        """What it measures now, nothing if it is not warm `patience` seconds after its start; it has ended then."""
        print("waiting for the peer to be warm", file=sys.stderr, flush=True)
        left = max(1.0, patience - (time.perf_counter() - self._began))
        pool = concurrent.futures.ThreadPoolExecutor(1)
        try:
            if pool.submit(self._process.stdout.readline).result(timeout=left).strip() != "ready":
                return []
            lines = self._process.communicate("go\n")[0].splitlines()
            return [json.loads(line) for line in lines if line.startswith("[")]
        except TimeoutError:
            print("the peer was not warm in time", file=sys.stderr, flush=True)
            return []
        finally:
            self._process.kill()
            pool.shutdown()
