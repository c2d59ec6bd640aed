"""Compile the training steps of a benchmark's next runs in other threads, while one of its runs trains."""

from __future__ import annotations

import collections
import os
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from benchmarks.run import log
from benchmarks.training import compiled_program
from lsm_jax.training import Program, TrainConfig


class Ahead:
    """Compile the programs of runs in the order in which they will train, a few runs ahead.

    A program that is compiled while the device computes may be compiled with slower products: XLA times some of them on the
    device to choose among them. The tokens/s of a run show it.

    Args:
        runs: programs that are compiled, or wait for their run, at the same time; 0 compiles nothing ahead.
        threads: threads that compile; None is one for each, but at most half of the cores.
    """

    def __init__(self, runs: int, threads: int | None = None):
        self._runs = runs
        self._threads = ThreadPoolExecutor(
            threads or max(1, min(runs, (os.cpu_count() or 2) // 2)), thread_name_prefix="ahead"
        )
        self._waiting: collections.deque[TrainConfig] = collections.deque()
        self._begun: dict[str, Future[Program]] = {}

    def plan(self, configs: Iterable[TrainConfig]) -> None:
        """Add runs after those that are planned already; a run that is planned is not added again."""
        known = {*self._begun, *map(repr, self._waiting)}
        self._waiting.extend(config for config in configs if repr(config) not in known)
        self._fill()

    def take(self, config: TrainConfig) -> Program | None:
        """Return the compiled program of a run, after waiting for it if its compilation has begun; None if it was not planned or
        its compilation failed, which training says by itself. Runs that were planned before this one are dropped: they were left out.
        """
        key = repr(config)
        if key in self._begun or key in map(repr, self._waiting):
            while self._begun and next(iter(self._begun)) != key:
                self._begun.pop(next(iter(self._begun))).cancel()
            while key not in self._begun and repr(self._waiting.popleft()) != key:
                pass
        future = self._begun.pop(key, None)
        self._fill()
        if future is None or future.cancel():
            return None
        began = time.perf_counter()
        try:
            return future.result()
        except Exception as error:
            log(f"{config.name}: compiling ahead failed: {type(error).__name__}: {str(error)[:200]}")  # fmt: skip
            return None
        finally:
            if (waited := time.perf_counter() - began) > 1:
                log(f"{config.name}: waited {waited:.0f} s for its compiled step")

    @property
    def idle(self) -> bool:
        """Whether no program is compiled or waits for its run, so that JAX's caches may be cleared."""
        return not self._begun

    def close(self) -> None:
        """Begin no further compilation; those that run end by themselves."""
        self._waiting.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _fill(self) -> None:
        while self._waiting and len(self._begun) < self._runs:
            config = self._waiting.popleft()
            self._begun[repr(config)] = self._threads.submit(compiled_program, config)
