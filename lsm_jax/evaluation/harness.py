"""The task `lm_eval`: EleutherAI's lm-evaluation-harness on a run; requires the optional extra [lm-eval].

The harness's tasks download their data. Other tasks can be added as files in `include_path`, and need no
network.
"""

# No `from __future__ import annotations`: config flags read the fields' types as objects.
import dataclasses
import difflib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from rich.console import Group, RenderableType
from rich.table import Table

from lsm_jax.data import Tokenizer

if TYPE_CHECKING:
    from lsm_jax.training.runs import Run


@dataclasses.dataclass(kw_only=True)
class HarnessConfig:
    """Which of the harness's tasks to run, and how.

    Attributes:
        tasks: names of tasks or groups, separated by commas.
        include_path: a folder of task files, which need no network.
        num_fewshot: number of examples in front of each question; None uses the number that each task sets.
        limit: number of documents of each task; None is all.
        max_length: tokens of the model's window; None is the length the run was trained at.
        max_gen_tokens: number of tokens of an answer at most, if a task does not set it.
    """

    tasks: str = ""
    include_path: str | None = None
    num_fewshot: int | None = None
    limit: int | None = None
    max_length: int | None = None
    max_gen_tokens: int = 256

    def names(self) -> list[str]:
        """The names of the tasks."""
        return [name for name in self.tasks.split(",") if name]

    def validate(self) -> None:
        """Raise ValueError if a number is out of range or the folder does not exist."""
        for name, least in (("limit", 1), ("max_length", 2), ("max_gen_tokens", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"lm_eval.{name}={value}: it must be at least {least}")
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise ValueError(f"lm_eval.num_fewshot={self.num_fewshot}: it must be at least 0")
        if self.include_path is not None and not Path(self.include_path).expanduser().is_dir():
            raise ValueError(
                f"lm_eval.include_path={self.include_path!r} is not a folder; accepted is a folder of task files (.yaml)"
            )


def check_harness(config: HarnessConfig) -> None:
    """Raise ValueError unless the harness is installed and a task is named; called before a run is loaded."""
    if not config.names():
        raise ValueError(
            "lm_eval.tasks is empty; give names, such as --lm_eval.tasks=piqa,wikitext"
        )
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError(
            "the task lm_eval needs the optional extra: pip install 'lsm_jax[lm-eval]'"
        )


def run_harness(
    run: "Run", tokenizer: Tokenizer, config: HarnessConfig, *, bos_id: int | None, batch_size: int
) -> dict[str, Any]:
    """Run the tasks.

    Args:
        run: the model.
        tokenizer: the one it was trained with.
        config: which tasks, and how.
        bos_id: the token that the run put in front of documents, and is put in front of every window; None
            for no token.
        batch_size: windows computed at a time.

    Returns:
        Metrics by task and name, the tasks' versions and numbers of documents and examples, and notes.

    Raises:
        ValueError: the harness is not installed, a task does not exist, or its data is not available.
    """
    check_harness(config)
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from lsm_jax.evaluation.harness_model import HarnessModel

    names, folder = config.names(), config.include_path
    task_manager = folder and TaskManager(
        include_path=str(Path(folder).expanduser()), include_defaults=False
    )
    # Loading all of the harness's tasks needs seconds, so they are loaded only if they are used.
    if not task_manager or not set(names) <= set(task_manager.all_tasks):
        task_manager = TaskManager(include_path=folder and str(Path(folder).expanduser()))
    for name in names:
        if name not in task_manager.all_tasks:
            similar = difflib.get_close_matches(name, task_manager.all_tasks)
            raise ValueError(
                f"lm_eval.tasks: {name!r} does not exist"
                + (f"; near it are {', '.join(similar)}" if similar else "")
                + "; tasks that are not the harness's require --lm_eval.include_path"
            )
    length = config.max_length or run.config.data.sequence_length
    model = HarnessModel(
        run.model,
        tokenizer,
        max_length=length,
        max_gen_tokens=config.max_gen_tokens,
        bos_id=bos_id,
        batch_size=batch_size,
    )
    try:
        output = simple_evaluate(
            model,
            tasks=names,
            task_manager=task_manager,
            num_fewshot=config.num_fewshot,
            limit=config.limit,
            bootstrap_iters=0,  # otherwise it forks, which jax's threads do not survive
            log_samples=False,
        )
    except (ConnectionError, FileNotFoundError) as error:
        raise ValueError(f"lm_eval: a task's data is not available: {error}") from error
    if output is None:
        raise ValueError("lm_eval gave no result")
    return {
        "results": {
            task: {k: v for k, v in metrics.items() if not isinstance(v, str) or k == "alias"}
            for task, metrics in output["results"].items()
        },
        "versions": dict(output["versions"]),
        "num_fewshot": dict(output["n-shot"]),
        "num_documents": {task: n["effective"] for task, n in output["n-samples"].items()},
        "limit": config.limit,
        "max_length": length,
        "notes": model.notes(),
        "tokenizer": tokenizer.name,
        "device": jax.devices()[0].device_kind,
    }


def harness_table(results: dict[str, Any]) -> RenderableType:
    """A table of metrics by task, from the content of lm_eval.json."""
    table = Table("task", "documents", "examples", "metric", "value", title="lm-evaluation-harness")
    for column in (1, 2, 4):
        table.columns[column].justify = "right"
    for task, metrics in results["results"].items():
        labels = [
            task,
            f"{results['num_documents'].get(task, '')}",
            f"{results['num_fewshot'].get(task, '')}",
        ]
        for key, value in metrics.items():
            name, _, kind = key.partition(",")
            if not isinstance(value, float) or name.endswith("_stderr"):
                continue
            error = metrics.get(f"{name}_stderr,{kind}")
            error_text = f" ± {error:.4f}" if isinstance(error, float) else ""
            table.add_row(
                *labels, name + (f" ({kind})" if kind != "none" else ""), f"{value:.4f}{error_text}"
            )
            labels = ["", "", ""]
    return Group(table, *(f"Note: {note}." for note in results["notes"]))
