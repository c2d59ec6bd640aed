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
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from lsm_jax import interrupts

if __name__ == "__main__":
    interrupts.leave_on_signals("eval.py")  # before the slow imports

from absl import flags
from ml_collections import config_flags

from lsm_jax import commands
from lsm_jax.data import NeedleConfig
from lsm_jax.evaluation import HarnessConfig, MapsConfig
from lsm_jax.files import inside

FLAGS = flags.FLAGS
GROUPS = {
    "needle": NeedleConfig(),
    "maps": MapsConfig(),
    "lm_eval": HarnessConfig(),
}  # each field is a flag, such as --needle.lengths=1000,2000
flags.DEFINE_string("workdir", None, "The run's directory.", required=True)
flags.DEFINE_list(
    "tasks",
    ["perplexity", "generate"],
    "Tasks to run: perplexity, needle, maps, routing, generate, lm_eval.",
)
flags.DEFINE_integer("step", None, "The step of the checkpoint; the newest one by default.")
flags.DEFINE_string(
    "output", None, "Name of the folder in workdir/eval; by default the step and the data."
)
flags.DEFINE_string(
    "data",
    None,
    "A token store, or a text or JSONL file or folder; by default the run's held-out data.",
)
flags.DEFINE_bool(
    "data_as_trained",
    False,
    "--data has the format of the run's data, such as instructions; otherwise it is text.",
)
flags.DEFINE_integer("sequence_length", None, "Tokens of a row; by default the run's length.")
flags.DEFINE_integer("batch_size", 8, "Rows read at a time.")
flags.DEFINE_integer("piece_length", 4096, "Tokens of a row computed at a time; bounds the memory.")
flags.DEFINE_integer("max_tokens", None, "Number of tokens to read at most; by default all.")
flags.DEFINE_string("prompt", "", "Text to continue, or to map.")
flags.DEFINE_bool(
    "chat", False, "Put the prompt into the tokenizer's chat template, as a user's message."
)
flags.DEFINE_integer("num_tokens", 256, "Number of tokens to generate at most.")
flags.DEFINE_float("temperature", 0.8, "0 is greedy.")
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
    """Run the tasks and print their results."""
    if len(argv) > 1:
        raise ValueError(f"unknown arguments: {' '.join(argv[1:])}")
    from rich.console import Console

    import lsm_jax
    from lsm_jax.evaluation import REPORTS, TASKS, Request, check_harness, check_tasks

    names = check_tasks(FLAGS.tasks)
    request = Request(**{f.name: getattr(FLAGS, f.name) for f in dataclasses.fields(Request)})
    request.validate()
    if "lm_eval" in names:
        check_harness(request.lm_eval)
    if FLAGS.output is not None:
        inside(Path(FLAGS.workdir) / "eval", FLAGS.output, what="--output")
    lsm_jax.training.read_config(
        FLAGS.workdir
    )  # raises if the directory has no run, before anything is compiled
    print(f"eval.py: loading the run in {FLAGS.workdir}", file=sys.stderr, flush=True)
    run = lsm_jax.load_run(FLAGS.workdir, step=FLAGS.step)
    name = FLAGS.output or request.folder(run.step)
    folder = inside(Path(FLAGS.workdir) / "eval", name, what="--output")
    console = Console(highlight=False, markup=False)
    for name in names:
        print(f"eval.py: {name}: loading data and compiling", file=sys.stderr, flush=True)
        results = TASKS[name](run, request, folder)
        for part in REPORTS[name](results):
            console.print(part, soft_wrap=isinstance(part, str))
    console.print(f"results in {folder}", soft_wrap=True)


if __name__ == "__main__":
    commands.run("eval.py", main)
