"""Checkpoints of parameters, optimizer and data iterator, of which a kill at any moment leaves a usable one."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import logging
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from lsm_jax.training.checksums import check_files, write_checksums
from lsm_jax.training.step import TrainState


class Checkpoints:
    """The checkpoints of one run.

    A save writes a temporary folder and renames it when it is whole; then checksums of its files are written beside it, and
    compared when it is read. A checkpoint without them, as a kill in between leaves it, is read unchecked. Parameters stand apart from the optimizer's state, so
    that evaluation reads no more than it needs.

    Args:
        directory: where they are, or will be.
        keep_last: newest ones kept.
        keep_every: those at multiples of so many steps are kept too; 0 keeps none more.
        clean: remove what a killed save left; only the run itself may.
    """

    def __init__(
        self, directory: Path, *, keep_last: int = 1, keep_every: int = 0, clean: bool = False
    ):
        self.directory = directory.absolute()
        self._keep_last, self._keep_every, self._clean = keep_last, keep_every, clean
        self._opened: ocp.training.Checkpointer | None = None
        self._sealing: list[threading.Thread] = []

    @property
    def _checkpointer(self) -> ocp.training.Checkpointer:
        """Orbax's, opened at its first use, since that makes the directory."""
        if self._opened is None:
            policies = ocp.training.preservation_policies
            kept: list[Any] = [policies.LatestN(n=self._keep_last)]
            if self._keep_every:
                kept.append(policies.EveryNSteps(interval_steps=self._keep_every))
            either: Any = policies.AnyPreservationPolicy(kept)
            self._opened = ocp.training.Checkpointer(
                str(self.directory), preservation_policy=either, cleanup_tmp_directories=self._clean
            )
        return self._opened

    @property
    def steps(self) -> list[int]:
        """Steps there are checkpoints of, oldest first."""
        if self._opened is None and not self.directory.is_dir():
            return []
        return sorted(c.step for c in self._checkpointer.checkpoints)

    def save(self, step: int, state: TrainState, data: Any) -> None:
        """Save in the background; what is saved is the state at the moment of the call."""
        rest = dataclasses.replace(state, params={})
        self._save(step, dict(params=state.params, training=rest, data=data))

    def save_params(self, step: int, params: dict[str, Any]) -> None:
        """Save parameters alone: a run of them can be evaluated and started from, not resumed."""
        self._save(step, dict(params=params))

    def _save(self, step: int, parts: dict[str, Any]) -> None:
        if step in self.steps:
            return
        first = jax.process_index() == 0  # one host writes for all
        if first:
            self._checksums(step).unlink(missing_ok=True)  # of a broken one that this replaces
        # Unforced, orbax leaves a save out while the one before is under way.
        response = self._checkpointer.save_checkpointables_async(step, parts, force=True)
        if first and response is not None:
            self._sealing = [thread for thread in self._sealing if thread.is_alive()]
            self._sealing.append(threading.Thread(target=self._seal, args=(step, response)))
            self._sealing[-1].start()

    def _checksums(self, step: int) -> Path:
        # Not among a checkpoint's own files, which orbax may be removing meanwhile.
        return self.directory.with_name("checksums") / f"{step}.json"

    def _seal(self, step: int, response: Any) -> None:
        """Once a save is whole, write its checksums; remove those of checkpoints that are gone."""
        try:
            response.result()
        except Exception:  # `wait` tells of a save that failed
            return
        try:
            write_checksums(self._checksums(step), self.directory / str(step))
            for path in self._checksums(step).parent.glob("*.json"):
                if not (self.directory / path.stem).is_dir():
                    path.unlink(missing_ok=True)
        except OSError as error:
            if (self.directory / str(step)).is_dir():
                _say(f"checkpoint {step}: its checksums could not be written: {error}")

    def _check(self, step: int, wanted: Callable[[str], bool] = lambda name: True) -> None:
        check_files(self._checksums(step), self.directory / str(step), wanted)

    def restore(self, target: TrainState, data: Any) -> TrainState | None:
        """The newest state that can be read, into the shapes and shardings of `target`; `data` goes to its place.

        Returns:
            None if there is no checkpoint.

        Raises:
            ValueError: there are checkpoints, and none can be read.
        """
        parts = dict(params=target.params, training=dataclasses.replace(target, params={}))
        broken: list[tuple[int, Exception]] = []
        steps = self.steps
        for step in reversed(steps):
            try:
                self._check(step)
                with _quiet():
                    found = self._checkpointer.load_checkpointables(step, {**parts, "data": data})
            except Exception as error:  # whatever the storage raises for a file cut short
                _say(f"checkpoint {step} in {self.directory} cannot be read: {_reason(error)}")
                broken.append((step, error))
                continue
            for bad, _ in broken:
                self._set_aside(bad)
            if broken:
                _say(f"going on from checkpoint {step}, the one before")
                self._checkpointer.reload()
            return dataclasses.replace(found["training"], params=found["params"])
        if broken:
            raise ValueError(
                f"none of the checkpoints {', '.join(map(str, steps))} in {self.directory} can be read"
            ) from broken[0][1]
        return None

    def load_params(
        self, target: dict[str, Any], step: int | None = None
    ) -> tuple[dict[str, Any], int]:
        """Parameters of one step (None: the newest that can be read), into the shapes and shardings of `target`.

        Raises:
            ValueError: there is no such checkpoint, or it cannot be read.
        """
        steps = self.steps
        if not steps:
            raise ValueError(f"{self.directory} holds no checkpoint")
        if step is not None and step not in steps:
            raise ValueError(
                f"step={step}: {self.directory} holds checkpoints of steps {', '.join(map(str, steps))}"
            )
        failure = None
        for candidate in reversed(steps) if step is None else [step]:
            try:
                self._check(candidate, lambda name: "/" not in name or name.startswith("params/"))
                with _quiet():
                    found = self._checkpointer.load_checkpointables(candidate, dict(params=target))
                return found["params"], candidate
            except Exception as error:  # whatever the storage raises for a file cut short
                _say(f"checkpoint {candidate} in {self.directory} cannot be read: {_reason(error)}")
                failure = error
        raise ValueError(f"no checkpoint in {self.directory} can be read: {failure}") from failure

    def wait(self) -> None:
        """Until the save under way is whole and its checksums are written."""
        if self._opened is not None:
            self._opened.wait()
        for thread in self._sealing:
            thread.join()

    def close(self) -> None:
        """Wait, then let go."""
        self.wait()
        if self._opened is not None:
            self._opened.close()

    def _set_aside(self, step: int) -> None:
        """Move a broken checkpoint out of the way of the save that will replace it."""
        aside = self.directory.parent / "broken_checkpoints" / str(step)
        shutil.rmtree(aside, ignore_errors=True)
        aside.parent.mkdir(exist_ok=True)
        shutil.move(self.directory / str(step), aside)
        self._checksums(step).unlink(missing_ok=True)
        _say(f"checkpoint {step} was moved to {aside}")


def _reason(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else repr(error)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leave out the pages that orbax's threads print about a file they cannot read; the error itself is raised."""
    asyncio, root, guard = logging.getLogger("asyncio"), logging.getLogger(), logging.NullHandler()
    before, asyncio.disabled = asyncio.disabled, True
    root.addHandler(guard)  # with none, a first message would set one up, on this moment's stderr
    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings(action="ignore"):
        try:
            yield
        except Exception:
            gc.collect()  # tasks that failed complain when they are collected
            raise
        finally:
            asyncio.disabled = before
            root.removeHandler(guard)


def abstract_like(shapes: Any, shardings: Any) -> Any:
    """What to restore into: shapes and dtypes of one tree, shardings of another."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )
