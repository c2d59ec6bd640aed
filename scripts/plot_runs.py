"""Compare runs in two plots, training curves and held-out loss by position. The plots in docs/ were made with it.

    python scripts/plot_runs.py --runs=gated_deltanet=runs/gdn,softmax=runs/softmax --output=docs/h200

writes docs/h200-training.png and, from each run's newest evaluation, docs/h200-loss-by-position.png.
"""

from __future__ import annotations

import sys
from pathlib import Path

from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_list("runs", None, "name=workdir of each run.", required=True)
flags.DEFINE_string("output", None, "The beginning of the plots' file names.", required=True)
flags.DEFINE_string("title", "", "Text before the title of both plots.")


def newest_results(workdir: Path) -> Path | None:
    """Return the path of the results.npz of a run's newest evaluation, or None if the run has not been
    evaluated.
    """
    files = sorted(workdir.glob("eval/*/results.npz"), key=lambda path: path.stat().st_mtime)
    return files[-1] if files else None


def main(argv: list[str]) -> None:
    """Draw the training curves and the held-out loss by position of the runs that the command line names,
    and print the paths of the two plots.
    """
    from lsm_jax.evaluation import LossCurve, plot_loss_by_position, plot_training
    from lsm_jax.training import read_config

    pairs = [run.partition("=") for run in FLAGS.runs]
    if len(argv) > 1 or not all(name and workdir for name, _, workdir in pairs):
        sys.exit(
            f"plot_runs.py: --runs={','.join(FLAGS.runs)}; accepted is name=workdir,name=workdir,..."
        )
    runs = {name: Path(workdir) for name, _, workdir in pairs}
    start = f"{FLAGS.title}: " if FLAGS.title else ""
    print(plot_training(runs, f"{FLAGS.output}-training.png", title=f"{start}training"))
    results = {name: file for name, w in runs.items() if (file := newest_results(w))}
    if not results:
        sys.exit(
            "plot_runs.py: no run has been evaluated, so there is no second plot; run eval.py first"
        )
    lengths = {read_config(runs[name]).data.sequence_length for name in results}
    path = plot_loss_by_position(
        {name: LossCurve.load(file) for name, file in results.items()},
        f"{FLAGS.output}-loss-by-position.png",
        train_length=lengths.pop() if len(lengths) == 1 else None,
        title=f"{start}held-out loss by position",
    )
    print(path)


if __name__ == "__main__":
    app.run(main)
