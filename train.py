"""Train a model, or go on training it.

    python train.py --config=configs/lm.py:gla-340m --workdir=runs/x --config.optimizer.peak_lr=1e-3

Any field of the config is overridden by name, checked against its type. The same command resumes an interrupted run.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import re
import sys
import types
import typing
from typing import Any

from lsm_jax import interrupts

if __name__ == "__main__":
    interrupts.leave_on_signals("train.py")  # before what takes long to import

from absl import app, flags, logging
from ml_collections import config_flags

FLAGS = flags.FLAGS
config_flags.DEFINE_config_file(
    "config", None, "FILE.py:VARIANT, e.g. configs/lm.py:gla-340m.", lock_config=True
)
flags.DEFINE_string("workdir", None, "The run's directory.")
flags.DEFINE_string("init_from", None, "Another run's directory, whose parameters to start from.")
flags.mark_flags_as_required(["config", "workdir"])


def main(argv: list[str]) -> None:
    """Train; leave with 128 + the signal's number where one ended it early."""
    from lsm_jax.parallel import join_hosts
    from lsm_jax.training import RecallConfig, TrainingStopped, train, train_recall

    if len(argv) > 1:
        sys.exit(f"train.py: unknown arguments: {' '.join(argv[1:])}")
    if not any("verbosity" in argument for argument in sys.argv):
        logging.set_verbosity(logging.WARNING)  # orbax tells of every file otherwise
    if isinstance(FLAGS.config, RecallConfig):
        _recall(train_recall)
        return
    if FLAGS.init_from is not None:
        FLAGS.config.init_from = FLAGS.init_from
    try:
        join_hosts()
        result = train(FLAGS.config, FLAGS.workdir)
    except (ValueError, OSError, TrainingStopped) as error:
        if logging.level_debug():
            raise
        sys.exit(f"train.py: {error}")
    if result.interrupted is not None:
        sys.exit(128 + result.interrupted)
    loss = "nothing left to do" if math.isnan(result.loss) else f"loss {result.loss:.4f}"
    print(f"finished {result.step} steps, {loss}, in {FLAGS.workdir}")


def _recall(train_recall) -> None:
    """A sweep of associative recall; it runs on the first device."""
    if FLAGS.init_from is not None:
        sys.exit("train.py: --init_from: a recall sweep starts from its seeds")
    try:
        result = train_recall(FLAGS.config, FLAGS.workdir)
    except (ValueError, OSError) as error:
        sys.exit(f"train.py: {error}")
    scores = ", ".join(f"{task} {score:.4f}" for task, score in result["accuracy"].items())
    print(
        f"finished {result['steps']} steps in {result['seconds']} s: best learning rate {result['learning_rate']:.1e}, "
        f"accuracy {scores}; in {FLAGS.workdir}"
    )


def parse(argv: list[str]) -> list[str]:
    """Parse flags; tell a wrong field, variant or value in one line, with what exists."""
    unset = [a for a in argv[1:] if re.fullmatch(r"--?config\.[^=]+=None", a)]
    try:
        rest = FLAGS([a for a in argv if a not in unset])
        for (
            argument
        ) in unset:  # ml-collections would read None as a value of the type that stands there
            _unset(FLAGS.config, argument.partition("=")[0].partition("config.")[2])
    except (flags.Error, KeyError, AttributeError, ValueError, TypeError, OSError) as error:
        text = str(error).replace("Error: ", "")
        sys.exit(f"train.py: {_problem(argv) or text}")
    if not FLAGS.workdir or not dataclasses.is_dataclass(FLAGS.config):
        sys.exit(f"train.py: {_problem(argv)}")
    return rest


def _unset(config: Any, name: str) -> None:
    """Set a field to None. One that does not accept it raises ValueError, one that does not exist KeyError or AttributeError."""
    *holders, last = name.split(".")
    for part in holders:
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    kind = typing.get_type_hints(type(config))[last]
    if kind is not Any and types.NoneType not in typing.get_args(kind):
        raise ValueError(
            f"--config.{name}=None: accepted is {getattr(kind, '__name__', kind)}, as the field's {getattr(config, last)!r}"
        )
    setattr(config, last, None)


def _problem(argv: list[str]) -> str | None:
    """What is wrong with --config, --workdir or the first override that names no field, if anything is."""
    given = [a.lstrip("-") for a in argv[1:] if a.startswith("-")]
    values = {
        name.lstrip("-"): value if equals else following
        for (name, equals, value), following in zip(
            (a.partition("=") for a in argv[1:]), [*argv[2:], ""], strict=True
        )
        if name.startswith("-")
    }
    path, _, variant = values.get("config", "").partition(":")
    accepted = "accepted is FILE.py:VARIANT, e.g. configs/lm.py:gla-340m"
    if not path:
        return f"--config is missing; {accepted}"
    if not os.path.isfile(path):
        return f"--config={values['config']}: there is no file {path!r}; {accepted}"
    if not values.get("workdir"):
        return "--workdir is missing; give the run's directory"
    from lsm_jax.training.config import suggest

    try:
        spec = importlib.util.spec_from_file_location("config_file", path)
        assert spec is not None and spec.loader is not None
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        config = module.get_config(variant) if variant else module.get_config()
    except Exception as error:
        return str(error)
    for name in (a.partition("=")[0][len("config.") :] for a in given if a.startswith("config.")):
        holder = config
        for part in name.split("."):
            inner = (
                holder.get(part) if isinstance(holder, dict) else getattr(holder, part, _MISSING)
            )
            if inner is _MISSING or (isinstance(holder, dict) and part not in holder):
                return f"--config.{name}: {suggest(config, name)}"
            holder = inner
    return None


_MISSING = object()

if __name__ == "__main__":
    app.run(main, flags_parser=parse)
