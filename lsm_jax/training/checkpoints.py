"""Save and restore checkpoints of parameters, optimizer and data iterator; after a kill at any moment the
newest complete checkpoint is usable."""

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
    """Save, list and restore the checkpoints of one training run: parameters, optimizer state and the
    position of the data.

    A save writes a temporary folder and renames it when it is complete. Then checksums of its files are
    written to another folder, and compared when the checkpoint is read. A checkpoint without checksums, as
    after a kill between the two, is read unchecked. Parameters are stored separately from the optimizer's
    state, so that evaluation reads only parameters.

    Args:
        directory: the folder of the run's checkpoints; created at the first save.
        keep_last: number of the newest checkpoints that are kept; older ones are removed.
        keep_every: checkpoints at multiples of this number of steps are kept, too; 0 keeps no others.
        clean: whether to remove the incomplete files of a save that was killed; set it only in the process that
            trains the run.
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
        """Return orbax's checkpointer of the run; it is made at the first use, since making it creates the
        checkpoints' folder."""
        if self._opened is None:
            policies = ocp.training.preservation_policies
            alternatives: list[Any] = [policies.LatestN(n=self._keep_last)]
            if self._keep_every:
                alternatives.append(policies.EveryNSteps(interval_steps=self._keep_every))
            policy: Any = policies.AnyPreservationPolicy(alternatives)
            self._opened = ocp.training.Checkpointer(
                str(self.directory), preservation_policy=policy, cleanup_tmp_directories=self._clean
            )
        return self._opened

    @property
    def steps(self) -> list[int]:
        """The numbers of the training steps whose checkpoints exist, in ascending order."""
        if self._opened is None and not self.directory.is_dir():
            return []
        return sorted(c.step for c in self._checkpointer.checkpoints)

    def save(self, step: int, state: TrainState, data: Any) -> None:
        """Save a checkpoint of training step `step`: the train state (parameters, optimizer, counters) and
        the position of the data iterator, as they are at the moment of the call; writing continues in the
        background."""
        rest = dataclasses.replace(state, params={})
        self._save(step, dict(params=state.params, training=rest, data=data))

    def save_params(self, step: int, params: dict[str, Any]) -> None:
        """Save a checkpoint that has parameters only: the run can be evaluated and another run can start
        from it, but it cannot be resumed."""
        self._save(step, dict(params=params))

    def _save(self, step: int, parts: dict[str, Any]) -> None:
        if step in self.steps:
            return
        first = jax.process_index() == 0  # one host writes for all
        if first:
            self._checksums(step).unlink(
                missing_ok=True
            )  # those of a broken checkpoint that this one replaces
        # Without `force`, orbax skips a save while the previous one is still running.
        response = self._checkpointer.save_checkpointables_async(step, parts, force=True)
        if first and response is not None:
            self._sealing = [thread for thread in self._sealing if thread.is_alive()]
            self._sealing.append(threading.Thread(target=self._seal, args=(step, response)))
            self._sealing[-1].start()

    def _checksums(self, step: int) -> Path:
        # Not in the checkpoint's folder, which orbax may be removing at the same time.
        return self.directory.with_name("checksums") / f"{step}.json"

    def _seal(self, step: int, response: Any) -> None:
        """Wait until the checkpoint of a step is written, then write the checksums of its files, and remove
        the checksums of checkpoints that no longer exist. It runs in a separate thread."""
        try:
            response.result()
        except Exception:  # `wait` raises the error of a failed save
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
        """Restore the train state of the newest checkpoint that can be read, in the shapes and shardings of
        `target`; the data iterator `data` is set to the position that was saved with it.

        Returns:
            The state, or None if there is no checkpoint.

        Raises:
            ValueError: there are checkpoints, but none can be read.
        """
        parts = dict(params=target.params, training=dataclasses.replace(target, params={}))
        broken: list[tuple[int, Exception]] = []
        steps = self.steps
        for step in reversed(steps):
            try:
                self._check(step)
                with _quiet():
                    loaded = self._checkpointer.load_checkpointables(step, {**parts, "data": data})
            except Exception as error:  # whatever the storage raises for a file cut short
                _say(f"checkpoint {step} in {self.directory} cannot be read: {_reason(error)}")
                broken.append((step, error))
                continue
            for broken_step, _ in broken:
                self._set_aside(broken_step)
            if broken:
                _say(f"continuing from checkpoint {step}, the one before")
                self._checkpointer.reload()
            return dataclasses.replace(loaded["training"], params=loaded["params"])
        if broken:
            raise ValueError(
                f"none of the checkpoints {', '.join(map(str, steps))} in {self.directory} can be read"
            ) from broken[0][1]
        return None

    def load_params(
        self, target: dict[str, Any], step: int | None = None
    ) -> tuple[dict[str, Any], int]:
        """Return (parameters, step) of one checkpoint, in the shapes and shardings of `target`; without
        `step`, of the newest checkpoint that can be read.

        Raises:
            ValueError: the checkpoint does not exist or cannot be read.
        """
        steps = self.steps
        if not steps:
            raise ValueError(f"{self.directory} has no checkpoint")
        if step is not None and step not in steps:
            raise ValueError(
                f"step={step}: {self.directory} has checkpoints of steps {', '.join(map(str, steps))}"
            )
        failure = None
        for candidate in reversed(steps) if step is None else [step]:
            try:
                self._check(candidate, lambda name: "/" not in name or name.startswith("params/"))
                with _quiet():
                    loaded = self._checkpointer.load_checkpointables(candidate, dict(params=target))
                return loaded["params"], candidate
            except Exception as error:  # whatever the storage raises for a file cut short
                _say(f"checkpoint {candidate} in {self.directory} cannot be read: {_reason(error)}")
                failure = error
        raise ValueError(f"no checkpoint in {self.directory} can be read: {failure}") from failure

    def wait(self) -> None:
        """Wait until the checkpoint that is being written in the background is complete, and its checksums
        are written."""
        if self._opened is not None:
            self._opened.wait()
        for thread in self._sealing:
            thread.join()

    def close(self) -> None:
        """Wait until all checkpoints are written, then release the threads and files of orbax's
        checkpointer."""
        self.wait()
        if self._opened is not None:
            self._opened.close()

    def _set_aside(self, step: int) -> None:
        """Move a checkpoint that cannot be read to the folder `broken_checkpoints`, so that a later save of
        the same training step can replace it."""
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
    """Suppress, inside a `with` block, the long messages that orbax's threads print about an unreadable
    checkpoint file; the error is still raised."""
    asyncio, root, null_handler = (
        logging.getLogger("asyncio"),
        logging.getLogger(),
        logging.NullHandler(),
    )
    was_disabled, asyncio.disabled = asyncio.disabled, True
    root.addHandler(
        null_handler
    )  # without a handler, the first message would install one on the redirected stderr
    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings(action="ignore"):
        try:
            yield
        except Exception:
            gc.collect()  # failed tasks print when they are garbage-collected, so collect them now
            raise
        finally:
            asyncio.disabled = was_disabled
            root.removeHandler(null_handler)


def abstract_like(shapes: Any, shardings: Any) -> Any:
    """Return a tree of abstract arrays as the target of restoring a checkpoint: their shapes and dtypes are those
    of the tree `shapes`, their shardings are the leaves of the tree `shardings`."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )
