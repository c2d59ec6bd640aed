"""Evaluate a run: loss by position, perplexity, a needle in a haystack, maps, sampling, lm-evaluation-harness.

    python eval.py --workdir=runs/x
    python eval.py --workdir=runs/x --data=longcrawl64/heldout.zarr --sequence_length=65536 --batch_size=1
    python eval.py --workdir=runs/x --tasks=needle --data=essays --needle.lengths=1000,4000,16000 --needle.depths=0,50,100
    python eval.py --workdir=runs/x --tasks=maps --maps.layers=0,3 --maps.heads=0,1
    python eval.py --workdir=runs/x --tasks=lm_eval --lm_eval.tasks=piqa,wikitext    # requires the extra [lm-eval]
    python eval.py --workdir=runs/x --tasks=lm_eval --lm_eval.tasks=recall --lm_eval.data=data    # see docs/suites.md
    python eval.py --workdir=runs/x --tasks=generate --prompt="def main(" --temperature=0

Results go to workdir/eval/<step>/; running it again replaces them, except those of
lm_eval, which are numbered.

Task files of lm-evaluation-harness are programs: a `!function` in them is imported and
called, and their Jinja templates are rendered without a sandbox. Files of your own
(--lm_eval.include_path) that contain either run only with --lm_eval.trust. The harness's
own tasks and the suites of docs/suites.md always run.
"""

from __future__ import annotations

import dataclasses
import json
import runpy
import sys
from pathlib import Path
from typing import Any

from lsm_jax import interrupts, programs

if __name__ == "__main__":
    interrupts.leave_on_signals(programs.shown_name("eval.py"))  # before the slow imports

from absl import flags
from ml_collections import config_flags

from lsm_jax import commands
from lsm_jax.data import NeedleConfig
from lsm_jax.evaluation import HarnessConfig, MapsConfig
from lsm_jax.files import disk_error

FLAGS = flags.FLAGS
GROUPS = {
    "needle": NeedleConfig(),
    "maps": MapsConfig(),
    "lm_eval": HarnessConfig(),
}  # each field is a flag, such as --needle.lengths=1000,2000
flags.DEFINE_string("workdir", None, "The run's directory.", required=True)
flags.DEFINE_string(
    "method_file", None, "A Python file of yours to run first: one that registers the run's method."
)
flags.DEFINE_list(
    "tasks",
    ["perplexity", "generate"],
    "Tasks to run: perplexity, needle, maps, routing, generate, lm_eval.",
)
flags.DEFINE_string("step", None, "The step of the checkpoint, or best; the newest one by default.")
flags.DEFINE_enum(
    "weights",
    None,
    ["trained", "ema"],
    "The trained parameters or their moving average (ema); by default the average if the run keeps one.",
)
flags.DEFINE_string(
    "output", None, "Name of the folder in workdir/eval; by default the step and the data."
)
flags.DEFINE_string(
    "data",
    None,
    "A token store, a file or folder with text, or a data set, as data.path; by default the run's held-out data.",
)
flags.DEFINE_bool(
    "data_as_trained",
    False,
    "--data has the format of the run's data, such as instructions; otherwise it is text.",
)
flags.DEFINE_integer("sequence_length", None, "Tokens of a row; by default the run's length.")
flags.DEFINE_integer("batch_size", 8, "Rows read at a time.")
flags.DEFINE_integer("piece_length", 4096, "Tokens of a row computed at a time; bounds the memory.")
flags.DEFINE_integer(
    "max_tokens",
    None,
    "Number of tokens after which no further batch of rows is read; by default all are.",
)
flags.DEFINE_string("prompt", "", "Text to continue, or to map.")
flags.DEFINE_bool(
    "chat", False, "Put the prompt into the tokenizer's chat template, as a user's message."
)
flags.DEFINE_integer("num_tokens", 256, "Number of tokens to generate at most.")
flags.DEFINE_float("temperature", None, "0 is greedy; by default 0.8, and 0 with --chat.")
flags.DEFINE_integer("top_k", None, "Sample from the k most likely tokens only.")
flags.DEFINE_float(
    "top_p", None, "Sample from the smallest set of tokens that has this probability."
)
flags.DEFINE_integer("seed", 0, "The seed of sampling.")
for group, fields in GROUPS.items():
    names = [f.name for f in dataclasses.fields(fields)]
    for field in (a.lstrip("-").partition("=")[0] for a in sys.argv[1:]):
        if field.startswith(f"{group}.") and field.partition(".")[2] not in names:
            sys.exit(
                f"eval.py: unknown flag --{field}; accepted after {group}. are {', '.join(names)}"
            )
    config_flags.DEFINE_config_dataclass(group, fields, f"Options of the task {group}, by field.")


def main(argv: list[str]) -> None:
    """Run the evaluation tasks that `--tasks` names on the run in `--workdir`, and print their results.
    `argv` is the program's name alone.
    """
    if len(argv) > 1:
        raise ValueError(f"unknown arguments: {' '.join(argv[1:])}; accepted are flags (--help)")
    from rich.console import Console

    import lsm_jax
    from lsm_jax import evaluation

    names = evaluation.check_tasks(FLAGS.tasks)
    request = evaluation.Request(
        **{f.name: getattr(FLAGS, f.name) for f in dataclasses.fields(evaluation.Request)}
    )
    request.validate()
    if "lm_eval" in names:
        evaluation.check_harness(request.lm_eval)
    if FLAGS.method_file is not None:
        runpy.run_path(FLAGS.method_file)
    lsm_jax.training.read_config(
        FLAGS.workdir
    )  # raises if the directory has no run, before anything is compiled
    _prepare_output(request.folder(0))
    program = programs.shown_name("eval.py")
    print(f"{program}: loading the run in {FLAGS.workdir}", file=sys.stderr, flush=True)
    run = lsm_jax.load_run(FLAGS.workdir, step=FLAGS.step, weights=FLAGS.weights)
    other = "-trained" if run.config.ema_decay and run.weights == "trained" else ""
    folder = _prepare_output(request.folder(run.step) + other)
    console = Console(highlight=False, markup=False)

    def show(name: str, results: Any) -> None:
        for part in evaluation.REPORTS[name](results):
            console.print(part, soft_wrap=isinstance(part, str))

    for number, name in enumerate(names):
        print(f"{program}: {name}: loading data and compiling", file=sys.stderr, flush=True)
        try:
            show(name, evaluation.TASKS[name](run, request, folder))
        except evaluation.UnwrittenResults as error:
            show(name, error.results)
            print(_as_json(error.results), flush=True)
            kept = f"the results of {name} could not be saved and are printed above"
            if number:
                kept += f"; those of {', '.join(names[:number])} are in {folder}"
            raise ValueError(disk_error(error, kept=kept)) from error
        except ValueError as error:
            raise ValueError(_with_flags(str(error))) from error
    console.print(f"results in {folder}", soft_wrap=True)


def _prepare_output(name: str) -> Path:
    """Return the folder of the results, `name` unless --output gives another, after checking that it can be written."""
    from lsm_jax import evaluation

    folder = evaluation.output_folder(FLAGS.workdir, name if FLAGS.output is None else FLAGS.output)
    try:
        evaluation.check_writable(folder)
    except OSError as error:
        kept = f"no result can be written to {folder}, and nothing was computed"
        raise ValueError(disk_error(error, kept=kept)) from error
    return folder


def _with_flags(message: str) -> str:
    """Return an error's message with this program's flags in place of the fields of a run's config that they set."""
    message = message.replace("data.sequence_length", "--sequence_length")
    return message if FLAGS.data is None else message.replace("data.heldout_path=", "--data=")


def _as_json(results: Any) -> str:
    """Return the results of a task as one line of JSON."""
    fields = dataclasses.asdict(results) if dataclasses.is_dataclass(results) else results
    return json.dumps(fields, default=str)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(
            f"eval.py: --workdir is missing\n\n{(__doc__ or '').strip()}\n\n--help lists all flags."
        )
    commands.run("eval.py", main)
