"""Save and restore checkpoints of parameters, optimizer and data iterator; after a kill at any moment the
newest complete checkpoint is usable."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from lsm_jax.training.best import BestSteps
from lsm_jax.training.checksums import check_files, write_checksums
from lsm_jax.training.failures import WriteError
from lsm_jax.training.orbax_errors import (
    hide_coroutines,
    hide_errors_of_threads,
    quiet,
    reason_of,
)
from lsm_jax.training.partition import leaves_of
from lsm_jax.training.step import TrainState

_MOST_DELETED = 20  # checkpoints that may be deleted one after another while they are read


class Checkpoints:
    """Save, list and restore the checkpoints of one training run: parameters, optimizer state and the
    position of the data.

    A save writes a temporary folder and renames it when it is complete. Then checksums of its files are
    written to another folder, and compared when the checkpoint is read. A checkpoint without checksums, as
    after a kill between the two, is read unchecked. Parameters are stored separately from the optimizer's
    state, so that evaluation reads only parameters.

    One process may save while others read: a checkpoint that is deleted while it is read is not returned, and the next
    one is read instead. Reading creates nothing in the run's directory.

    Args:
        directory: the folder of the run's checkpoints; created at the first save.
        keep_last: number of the newest checkpoints that are kept; older ones are removed.
        keep_every: checkpoints at multiples of this number of steps are kept, too; 0 keeps no others.
        best: the steps whose checkpoints are kept because of a metric, too; None keeps none for that.
        clean: whether to remove the incomplete files of a save that was killed; set it only in the process that
            trains the run.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep_last: int = 1,
        keep_every: int = 0,
        best: BestSteps | None = None,
        clean: bool = False,
    ):
        self.directory = directory.absolute()
        self._keep_last, self._keep_every, self._clean = keep_last, keep_every, clean
        self.best = best
        self._opened: ocp.training.Checkpointer | None = None
        self._sealing: list[threading.Thread] = []
        self._failure: WriteError | None = None  # of a save in the background
        self._failed_step, self._raised = 0, False
        self._latest = 0  # the step of the latest save

    @property
    def _checkpointer(self) -> ocp.training.Checkpointer:
        """Return orbax's checkpointer of the run; it is made at the first use, since making it creates the
        checkpoints' folder."""
        if self._opened is None:
            hide_errors_of_threads()
            policies = ocp.training.preservation_policies
            alternatives: list[Any] = [policies.LatestN(n=self._keep_last)]
            if self._keep_every:
                alternatives.append(policies.EveryNSteps(interval_steps=self._keep_every))
            if self.best is not None:
                alternatives.append(self.best)
            policy: Any = policies.AnyPreservationPolicy(alternatives)
            self._opened = ocp.training.Checkpointer(
                str(self.directory), preservation_policy=policy, cleanup_tmp_directories=self._clean
            )
        return self._opened

    @property
    def steps(self) -> list[int]:
        """The numbers of the training steps whose checkpoints exist, in ascending order; in the process that
        saves, also that of the checkpoint that is being saved."""
        if self._opened is not None:
            return sorted(c.step for c in self._opened.checkpoints)
        return self._complete_steps()

    def _complete_steps(self) -> list[int]:
        """Return the numbers of the steps whose complete checkpoints are on the disk, in ascending order. The folder
        of a save that is not complete has another kind of name."""
        try:
            with os.scandir(self.directory) as entries:
                return sorted(
                    int(entry.name)
                    for entry in entries
                    if entry.name.isascii() and entry.name.isdecimal() and entry.is_dir()
                )
        except FileNotFoundError:
            return []

    def save(self, step: int, state: TrainState, data: Any) -> None:
        """Save a checkpoint of training step `step`: the train state (parameters, optimizer, counters) and
        the position of the data iterator, as they are at the moment of the call; writing continues in the
        background."""
        parts = dict(params=state.params, training=_without_params(state), data=data)
        self._save(step, parts | (dict(ema=state.ema) if state.ema else {}))

    def save_params(self, step: int, params: dict[str, Any]) -> None:
        """Save a checkpoint that has parameters only: the run can be evaluated and another run can start
        from it, but it cannot be resumed."""
        self._save(step, dict(params=params))

    def _save(self, step: int, parts: dict[str, Any]) -> None:
        self.raise_failure()
        if step in self.steps:
            return
        first = jax.process_index() == 0  # one host writes for all
        self._latest = step
        try:
            if first:  # those of a broken checkpoint that this one replaces
                self._checksums(step).unlink(missing_ok=True)
            # Without `force`, orbax skips a save while the previous one is still running.
            response = self._checkpointer.save_checkpointables_async(step, parts, force=True)
        except Exception as error:  # orbax raises errors of the disk as several types
            for thread in self._sealing:  # it may be the error of the save before
                thread.join()
            self._fail(step, error)
            self.raise_failure()
            return
        if first and response is not None:
            self._sealing = [thread for thread in self._sealing if thread.is_alive()]
            self._sealing.append(threading.Thread(target=self._seal, args=(step, response)))
            self._sealing[-1].start()

    def _fail(self, step: int, error: Exception) -> None:
        """Record that the checkpoint of a step could not be saved, and delete what was written of it."""
        path = self.directory / str(step)
        if self._failure is None:
            self._failure, self._failed_step = WriteError(path, error, exact=True), step
            self._failure.__cause__ = error
        hide_coroutines()
        self._delete_parts(step)

    def _delete_parts(self, step: int) -> None:
        """Delete the unfinished save of a step, if there is one."""
        for part in self.directory.glob(f"{step}.orbax-checkpoint-tmp*"):
            if not part.is_symlink():
                shutil.rmtree(part, ignore_errors=True)

    def raise_failure(self) -> None:
        """Raise the error of a save that failed in the background, if there was one.

        Raises:
            WriteError: the checkpoint could not be written.
        """
        if self._failure is not None:
            self._raised = True
            raise self._failure

    def _checksums(self, step: int) -> Path:
        # Not in the checkpoint's folder, which orbax may be removing at the same time.
        return self.directory.with_name("checksums") / f"{step}.json"

    def _seal(self, step: int, response: Any) -> None:
        """Wait until the checkpoint of a step is written, then write the checksums of its files, and remove
        the checksums of checkpoints that no longer exist. It runs in a separate thread."""
        try:
            response.result()
        except Exception as error:  # `raise_failure` raises it in the main thread
            self._fail(step, error)
            return
        try:
            write_checksums(self._checksums(step), self.directory / str(step))
            for path in self._checksums(step).parent.glob("*.json"):
                if not (self.directory / path.stem).is_dir():
                    path.unlink(missing_ok=True)
        except OSError as error:
            if (self.directory / str(step)).is_dir():
                _say(f"checkpoint {step}: its checksums could not be written: {error}")

    def _read(self, step: int, parts: dict[str, Any]) -> dict[str, Any]:
        """Read some parts of a checkpoint (name -> the shapes and shardings to read it to), after comparing their files
        with the checksums.

        Raises:
            ValueError: a file is not what was saved, or the parts have other parameters or shapes.
            _DeletedError: the checkpoint was deleted in the meantime.
            Exception: what orbax raises for files that are cut short.
        """
        folder = self.directory / str(step)

        def wanted(name: str) -> bool:
            return "/" not in name or name.partition("/")[0] in parts

        def files() -> set[str]:
            paths = (p for p in folder.rglob("*") if p.is_file())
            return set(filter(wanted, (p.relative_to(folder).as_posix() for p in paths)))

        _refuse_other_files(folder)
        before = files()
        check_files(self._checksums(step), folder, wanted)
        try:
            with quiet():
                loaded = ocp.load_checkpointables(str(folder), parts)
        except Exception as error:
            hide_errors_of_threads()
            hide_coroutines()
            if problem := _different_shapes(folder, parts):
                raise ValueError(problem) from error
            raise
        if not before <= files():
            raise _DeletedError(step)
        return loaded

    def restore(self, target: TrainState, data: Any) -> TrainState | None:
        """Restore the train state of the newest checkpoint that can be read, in the shapes and shardings of
        `target`; the data iterator `data` is set to the position that was saved with it.

        Returns:
            The state, or None if there is no checkpoint.

        Raises:
            ValueError: there are checkpoints, but none can be read.
        """
        parts = dict(params=target.params, training=_without_params(target))
        if target.ema:
            parts["ema"] = target.ema
        broken: list[tuple[int, Exception]] = []
        steps = self._complete_steps()
        for step in reversed(steps):
            try:
                loaded = self._read(step, {**parts, "data": data})
            except Exception as error:  # whatever the storage raises for a file cut short
                _say(f"checkpoint {step} in {self.directory} cannot be read: {reason_of(error)}")
                broken.append((step, error))
                continue
            for broken_step, _ in broken:
                self._set_aside(broken_step)
            if broken:
                _say(f"continuing from checkpoint {step}, the one before")
            saved = dict(params=loaded["params"], ema=loaded.get("ema", {}))
            return TrainState(**loaded["training"] | saved)
        if broken:
            raise ValueError(
                f"none of the checkpoints {', '.join(map(str, steps))} in {self.directory} can be read: "
                f"{reason_of(broken[0][1])}"
            ) from broken[0][1]
        return None

    def load_params(
        self, target: dict[str, Any], step: int | None = None, part: str = "params"
    ) -> tuple[dict[str, Any], int]:
        """Return (parameters, step) of one checkpoint, in the shapes and shardings of `target`; without
        `step`, of the newest checkpoint that can be read. `part` is "params" for the trained parameters, or "ema"
        for their moving average.

        Raises:
            ValueError: the checkpoint does not exist or cannot be read, or `_MOST_DELETED` checkpoints were deleted while
                they were read.
        """
        for _ in range(_MOST_DELETED):
            steps = self._complete_steps()
            if not steps:
                raise ValueError(f"{self.directory} has no checkpoint")
            if step is not None and step not in steps:
                raise ValueError(
                    f"step={step}: {self.directory} has checkpoints of steps {', '.join(map(str, steps))}"
                )
            failure: Exception | None = None
            for candidate in reversed(steps) if step is None else [step]:
                try:
                    return self._read(candidate, {part: target})[part], candidate
                except Exception as error:  # whatever the storage raises for a file cut short
                    if self._changed_since(steps, candidate):
                        failure = None
                        break
                    _say(
                        f"checkpoint {candidate} in {self.directory} cannot be read: {reason_of(error)}"
                    )
                    failure = error
            if failure is not None:
                raise ValueError(
                    f"no checkpoint in {self.directory} can be read: {reason_of(failure)}"
                ) from failure
        raise ValueError(
            f"{self.directory}: {_MOST_DELETED} checkpoints were deleted, one after another, while they were read: a process "
            "trains this run and saves more often than a checkpoint can be read. Read it later, or raise keep_last or "
            "checkpoint_every"
        )

    def _changed_since(self, steps: list[int], step: int) -> bool:
        """Return whether the checkpoint of `step` was deleted, or a newer one completed, since `steps` were listed; a
        newer one is completed before an older one is deleted."""
        now = self._complete_steps()
        return step not in now or now[-1] > steps[-1]

    def wait(self) -> None:
        """Wait until the checkpoint that is being written in the background is complete, and its checksums
        are written.

        Raises:
            WriteError: a checkpoint could not be written.
        """
        if self._opened is not None and self._failure is None:
            try:
                self._opened.wait()
            except Exception as error:
                self._fail(self._latest, error)
        for thread in self._sealing:
            thread.join()
        self.raise_failure()

    def close(self) -> None:
        """Wait until all checkpoints are written, then release the threads and files of orbax's checkpointer.

        Raises:
            WriteError: a checkpoint could not be written, and no other method has raised that error.
        """
        raised = self._raised
        try:
            self.wait()
        except WriteError:
            if not raised:
                raise
        finally:
            self._release()

    def _release(self) -> None:
        if self._opened is not None:
            try:
                self._opened.close()
            except Exception:
                if self._failure is None:
                    raise
        if self._failure is not None:
            for _ in range(10):  # orbax's threads may still make folders after the failure
                self._delete_parts(self._failed_step)
                time.sleep(0.05)

    def _set_aside(self, step: int) -> None:
        """Move a checkpoint that cannot be read to the folder `broken_checkpoints`, so that a later save of
        the same training step can replace it."""
        aside = self.directory.parent / "broken_checkpoints" / str(step)
        try:
            aside.parent.mkdir(exist_ok=True)
            if aside.is_symlink() or aside.is_file():
                aside.unlink()
            elif aside.exists():
                shutil.rmtree(aside)
            os.rename(self.directory / str(step), aside)
            self._checksums(step).unlink(missing_ok=True)
        except OSError as error:
            raise WriteError(aside, error) from error
        _say(f"checkpoint {step} was moved to {aside}")


def _without_params(state: TrainState) -> dict[str, Any]:
    """Return the fields of a train state that are saved together: all but the parameters and their moving average."""
    fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    del fields["ema"]
    return fields | dict(params={})  # as earlier releases stored it


def _refuse_other_files(folder: Path) -> None:
    """Raise ValueError if a checkpoint has a file that is neither a regular file nor a folder, such as a pipe, which orbax
    would read without end."""
    for path in folder.rglob("*"):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ValueError(f"its file {path.relative_to(folder).as_posix()} is no regular file")


class _DeletedError(Exception):
    """Raised if a checkpoint was deleted while it was read."""


def _different_shapes(folder: Path, parts: dict[str, Any]) -> str:
    """Return by how the parameters in a checkpoint's folder differ from those in `parts`, with their shapes; an empty
    text if they do not, or if the checkpoint does not say."""
    if "params" not in parts:
        return ""
    try:
        with quiet():
            stored = _shapes(ocp.metadata(str(folder), checkpointable_name="params").metadata)
    except Exception:  # damaged metadata, of which the caller has an error
        return ""
    expected = _shapes(parts["params"])
    lines = [
        f"{name} is {stored.get(name, 'absent')} in the checkpoint and {expected.get(name, 'absent')} in the config"
        for name in dict.fromkeys([*expected, *stored])
        if stored.get(name) != expected.get(name)
    ]
    more = f", and {len(lines) - 5} more" if len(lines) > 5 else ""
    return f"the config has another model: {'; '.join(lines[:5])}{more}" if lines else ""


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Return the shape of each array in a tree of arrays or of orbax's descriptions, by its dotted path."""
    return {name: tuple(x.shape) for name, x in leaves_of(tree).items() if hasattr(x, "shape")}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def abstract_like(shapes: Any, shardings: Any) -> Any:
    """Return a tree of abstract arrays as the target of restoring a checkpoint: their shapes and dtypes are those
    of the tree `shapes`, their shardings are the leaves of the tree `shardings`."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )
