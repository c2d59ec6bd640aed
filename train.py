"""Train a model, or continue a run.

    python train.py --config=configs/lm.py:gla-nano --workdir=runs/x    # a minute on a laptop
    python train.py --config=configs/lm.py:gla-340m --workdir=runs/x --config.optimizer.peak_lr=1e-3
    python train.py --config=configs/demo.py --workdir=runs/x --config.data.path=my_texts --config.total_tokens=1e6
    python train.py --config=configs/lm.py:gla-nano --workdir=runs/x --seeds=0,1,2    # runs/x/seed-0, ...
    python train.py --config=configs/lm.py:gla-nano --workdir=runs/x --profile=5      # where the time of a step goes

Flags override the fields of the config by name; values are checked against the field's type. The same command resumes an
interrupted run.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

from lsm_jax import interrupts, programs

if __name__ == "__main__":
    interrupts.leave_on_signals(programs.shown_name("train.py"))  # before the slow imports

from absl import app, flags, logging
from ml_collections import config_flags

FLAGS = flags.FLAGS
config_flags.DEFINE_config_file(
    "config", None, "FILE.py:VARIANT, e.g. configs/lm.py:gla-340m.", lock_config=True
)
flags.DEFINE_string("workdir", None, "The run's directory.")
flags.DEFINE_string(
    "init_from", None, "The directory of another run, to start from its parameters."
)
flags.DEFINE_list(
    "seeds", [], "Seeds of runs to train one after another, in workdir/seed-SEED; then summarised."
)
flags.DEFINE_integer(
    "profile", 0, "Number of steps to profile, the same as --config.profile_steps; 0 profiles none."
)
flags.mark_flags_as_required(["config", "workdir"])


def main(argv: list[str]) -> None:
    """Train; exit with 128 + the signal's number if a signal ended training early."""
    from lsm_jax.commands import failure
    from lsm_jax.parallel import join_hosts
    from lsm_jax.training import SmallModelsConfig, TrainingStopped, train, train_recall
    from lsm_jax.training.seeds import summary_table, train_seeds

    if len(argv) > 1:
        sys.exit(f"train.py: unknown arguments: {' '.join(argv[1:])}")
    if not any("verbosity" in argument for argument in sys.argv):
        logging.set_verbosity(logging.WARNING)  # otherwise orbax logs every file
    if FLAGS.init_from == "":
        sys.exit("train.py: --init_from is empty; give the directory of a run, or leave it out")
    if isinstance(FLAGS.config, SmallModelsConfig):
        _recall(train_recall)
        return
    if FLAGS.init_from is not None:
        FLAGS.config.init_from = FLAGS.init_from
    if FLAGS.profile:
        FLAGS.config.profile_steps = FLAGS.profile
    seeds, found = _seeds(), None
    try:
        join_hosts()
        if seeds:
            results, found = train_seeds(FLAGS.config, FLAGS.workdir, seeds, on_end=_plot)
            result = results[-1]
        else:
            result = train(FLAGS.config, FLAGS.workdir)
    except Exception as error:
        message = str(error) if isinstance(error, TrainingStopped) else failure(error)
        if message is None or logging.level_debug():
            raise
        sys.exit(f"train.py: {message}")
    if result.interrupted is not None:
        sys.exit(128 + result.interrupted)
    if found is not None:
        print(f"{summary_table(found)}\nin {FLAGS.workdir}/seeds.json")
        return
    _plot(FLAGS.workdir)
    loss = "no steps were left" if math.isnan(result.loss) else f"loss {result.loss:.4f}"
    print(f"finished {result.step} steps, {loss}, in {FLAGS.workdir}")


def _seeds() -> list[int]:
    """Return the seeds of the flag `--seeds`; none if it is not given."""
    if FLAGS["seeds"].present and not FLAGS.seeds:
        sys.exit("train.py: --seeds is empty; accepted are 0 to 2^63 - 1, with commas between")
    for seed in FLAGS.seeds:
        if not seed.strip().isdecimal():
            sys.exit(
                f"train.py: --seeds={','.join(FLAGS.seeds)}: {seed!r} is no seed; accepted are 0 to 2^63 - 1, with commas between"
            )
    return [int(seed) for seed in FLAGS.seeds]


def _plot(workdir: str | Path) -> None:
    """Draw what the run has recorded, such as its training curves; a picture that cannot be drawn does not fail the run."""
    import jax

    from lsm_jax.evaluation import plot_run

    if jax.process_index() == 0:
        try:
            plot_run(workdir, FLAGS.config.name)
        except Exception as error:  # such as a damaged file of an earlier start
            name = programs.shown_name("train.py")
            print(f"{name}: no picture was drawn: {error}", file=sys.stderr)


def _recall(train_recall) -> None:
    """Train a sweep of associative recall or of state tracking, on the first device."""
    from lsm_jax.commands import failure

    for flag in ("init_from", "seeds", "profile"):
        if getattr(FLAGS, flag):
            sys.exit(
                f"train.py: --{flag} is not accepted by a sweep of small models, whose config has its seeds"
            )
    try:
        result = train_recall(FLAGS.config, FLAGS.workdir)
    except (ValueError, OSError) as error:
        sys.exit(f"train.py: {failure(error)}")
    scores = ", ".join(f"{task} {score:.4f}" for task, score in result["accuracy"].items())
    print(
        f"finished {result['steps']} steps in {result['seconds']} s: best learning rate {result['learning_rate']:.1e}, "
        f"accuracy {scores}; in {FLAGS.workdir}"
    )


def parse(argv: list[str]) -> list[str]:
    """Parse the flags; a wrong field, variant or value exits with one line that says what is accepted."""
    from lsm_jax.training.command import parse_config

    return parse_config(FLAGS, argv, "train.py", workdir=True)


if __name__ == "__main__":
    app.run(main, flags_parser=parse)
