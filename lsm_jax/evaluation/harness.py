"""The task `lm_eval`: EleutherAI's lm-evaluation-harness on a run; requires the optional extra [lm-eval].

The harness's tasks download their data, or read it from the folder `data`. The papers' suites are task files
of `lsm_jax.evaluation.suites`. Other tasks can be added as files in `include_path`. Task files can run code:
`lsm_jax.evaluation.task_files` says how, and requires `trust` for those in `include_path`.
"""

# No `from __future__ import annotations`: config flags read the fields' types as objects.
import contextlib
import dataclasses
import difflib
import importlib.util
import logging
import re
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from rich.console import Group, RenderableType
from rich.table import Table

from lsm_jax.data import Tokenizer
from lsm_jax.evaluation import suites
from lsm_jax.evaluation.files import write_json, write_rows
from lsm_jax.evaluation.gen_kwargs import parse_flag
from lsm_jax.evaluation.suites.local import local_datasets
from lsm_jax.evaluation.task_files import check_task_files

if TYPE_CHECKING:
    from lsm_jax.training.runs import Run


@dataclasses.dataclass(kw_only=True)
class HarnessConfig:
    """The config of the task `lm_eval`: which of lm-evaluation-harness's tasks to run, and how.

    Attributes:
        tasks: names of tasks or groups, separated by commas.
        include_path: a folder of task files, which need no network.
        trust: let the task files of include_path run code: `!function`, and Jinja templates, which the harness renders
            without a sandbox.
        num_fewshot: number of examples in front of each question; None uses the number that each task sets.
        limit: number of documents of each task; None is all.
        max_length: tokens of the model's window; None is the length the run was trained at.
        max_gen_tokens: number of tokens of an answer at most, if a task does not set it.
        data: a folder with data sets, read instead of the hub's; docs/suites.md describes its layout.
        gen_kwargs: options of generation that replace the tasks', such as temperature=0.7,do_sample=true; or
            JSON.
        first_line: whether an answer is only the first line of the generated text, as in FoX's LongBench.
        lengths: lengths in tokens of RULER's prompts; empty is 1024 to 8192, up to max_length.
        num_samples: number of RULER's prompts per length.
        log_samples: write each document, its prompts, answers and scores to a file per task.
    """

    tasks: str = ""
    include_path: str | None = None
    trust: bool = False
    num_fewshot: int | None = None
    limit: int | None = None
    max_length: int | None = None
    max_gen_tokens: int = 256
    data: str | None = None
    gen_kwargs: str = ""
    first_line: bool = False
    lengths: tuple[int, ...] = ()
    num_samples: int = 500
    log_samples: bool = False

    def names(self) -> list[str]:
        """Return the names of the harness's tasks or groups to run, as a list."""
        return [name for name in self.tasks.split(",") if name]

    def validate(self) -> None:
        """Raise ValueError if a number of the harness's options is out of range or a folder that they name
        does not exist."""
        for name, least in (
            ("limit", 1),
            ("max_length", 2),
            ("max_gen_tokens", 1),
            ("num_samples", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"lm_eval.{name}={value}: it must be at least {least}")
        if any(length < 1 for length in self.lengths):
            raise ValueError(f"lm_eval.lengths={self.lengths}: accepted are integers from 1")
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise ValueError(f"lm_eval.num_fewshot={self.num_fewshot}: it must be at least 0")
        if self.include_path is not None and not Path(self.include_path).expanduser().is_dir():
            raise ValueError(
                f"lm_eval.include_path={self.include_path!r} is not a folder; accepted is a folder of task files (.yaml)"
            )
        if self.data is not None and not Path(self.data).expanduser().is_dir():
            raise ValueError(
                f"lm_eval.data={self.data!r} is no folder; accepted is a folder of data sets"
            )
        parse_flag(self.gen_kwargs)


def check_harness(config: HarnessConfig) -> None:
    """Raise ValueError unless lm-evaluation-harness is installed, the config names a task, and the task files of
    include_path can be read and run no code that was not allowed; called before a run is loaded."""
    if not config.names():
        raise ValueError(
            "lm_eval.tasks is empty; give names, such as --lm_eval.tasks=piqa,wikitext"
        )
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError(
            "the task lm_eval needs the optional extra: pip install 'lsm_jax[lm-eval]'"
        )
    if config.include_path is not None:
        check_task_files(config.include_path, trust=config.trust)
    missing = suites.missing_packages(config.names())
    if missing:
        raise ValueError(
            f"lm_eval.tasks={config.tasks} needs {', '.join(missing)}: pip install '{suites.LONG_EXTRA}'"
        )


def check_names(config: HarnessConfig) -> None:
    """Raise ValueError unless all tasks of the config exist. Requires lm-evaluation-harness; takes some seconds."""
    with _quiet_harness():
        _task_manager(config, None)


def run_harness(
    run: "Run", tokenizer: Tokenizer, config: HarnessConfig, *, bos_id: int | None, batch_size: int
) -> dict[str, Any]:
    """Run tasks of lm-evaluation-harness on a trained model.

    Args:
        run: the run whose model is evaluated.
        tokenizer: the tokenizer with which the run was trained.
        config: which tasks of the harness to run, and how.
        bos_id: the token that the run put in front of documents, and is put in front of every window; None
            for no token.
        batch_size: windows computed at a time.

    Returns:
        Metrics by task and name, the tasks' versions and numbers of documents and examples, and notes.

    Raises:
        ValueError: the harness is not installed, a task does not exist, or its data is not available.
    """
    check_harness(config)
    from lsm_jax.evaluation.harness_model import HarnessModel

    length = config.max_length or run.config.data.sequence_length
    model = HarnessModel(
        run.model,
        tokenizer,
        max_length=length,
        max_gen_tokens=config.max_gen_tokens,
        bos_id=bos_id,
        batch_size=batch_size,
        first_line=config.first_line,
        gen_kwargs=parse_flag(config.gen_kwargs),
    )
    folder = None if config.data is None else Path(config.data).expanduser().absolute()
    settings = suites.SuiteSettings(
        tokenizer,
        bos_id=bos_id,
        max_length=length,
        data=folder,
        lengths=config.lengths,
        num_samples=config.num_samples,
    )
    output = _evaluate(config, model, settings)
    if output is None:
        raise ValueError("lm_eval gave no result")
    results = {
        task: {
            key: value
            for key, value in metrics.items()
            # RULER's score at a length that no prompt has is -1.
            if (not isinstance(value, str) or key == "alias")
            and not (value == -1 and key.partition(",")[0].isdecimal())
        }
        for task, metrics in output["results"].items()
    }
    content = {
        "results": results,
        "averages": suites.averages(results, config.names()),
        "versions": dict(output["versions"]),
        "num_fewshot": dict(output["n-shot"]),
        "num_documents": {task: n["effective"] for task, n in output["n-samples"].items()},
        "limit": config.limit,
        "max_length": length,
        "gen_kwargs": config.gen_kwargs,
        "first_line": config.first_line,
        "notes": model.notes(),
        "tokenizer": tokenizer.name,
        "device": jax.devices()[0].device_kind,
    }
    if config.log_samples:
        content["samples"] = output["samples"]
    return content


def _evaluate(config: HarnessConfig, model: Any, settings: suites.SuiteSettings) -> Any:
    """Run the config's tasks of lm-evaluation-harness on `model`, and return the harness's results, a dict;
    raises ValueError if a package or a task's data is missing."""
    from datasets.exceptions import DatasetsError
    from lm_eval import simple_evaluate

    with local_datasets(settings.data) as downloaded, _quiet_harness():
        try:
            task_manager = _task_manager(config, settings)
            return simple_evaluate(
                model,
                tasks=config.names(),
                task_manager=task_manager,
                num_fewshot=config.num_fewshot,
                limit=config.limit,
                bootstrap_iters=0,  # otherwise it forks, which jax's threads do not survive
                log_samples=config.log_samples,
            )
        except ImportError as error:
            name = error.name or str(error)
            raise ValueError(
                f"lm_eval.tasks={config.tasks} needs the package {name}: pip install '{suites.LONG_EXTRA}' installs "
                "those of the suites, and the harness's own extras those of its other tasks"
            ) from error
        except (ConnectionError, FileNotFoundError) as error:
            where = f"; lm_eval.data={config.data!r} does not have it" if config.data else ""
            raise ValueError(
                f"lm_eval: the data of {', '.join(downloaded[-1:])} is not available{where}: {error}"
            ) from error
        except (DatasetsError, StopIteration) as error:
            why = "it has no row" if isinstance(error, StopIteration) else error.__cause__ or error
            raise ValueError(
                f"lm_eval.tasks={config.tasks}: the data of a task cannot be read: {' '.join(str(why).split())}"
            ) from error
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            packages = {"lm_eval", "datasets"} & set(Path(frame.filename).parts)
            if config.include_path is None or not packages:
                raise
            raise ValueError(
                f"lm_eval.include_path={config.include_path!r}: lm-evaluation-harness cannot use a field of a task file of "
                f"{config.tasks}: {type(error).__name__}: {' '.join(str(error).split())} ({Path(frame.filename).name}, {frame.name})"
            ) from error


@contextlib.contextmanager
def _quiet_harness() -> Iterator[None]:
    """Suppress, inside a `with` block, what lm-evaluation-harness prints and is no problem: two warnings about the
    task files of this library's evaluation suites, and the error of git where the working directory is no checkout."""
    from lm_eval import evaluator

    def is_wanted(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return not (
            "Custom kwargs can be passed" in text
            or ("overrides existing task" in text and str(suites.FOLDER) in text)
        )

    loggers = [logging.getLogger(f"lm_eval.{name}") for name in ("api.task", "tasks._index")]
    for logger in loggers:
        logger.addFilter(is_wanted)
    describe = evaluator.get_git_commit_hash  # its result is not written anywhere
    evaluator.get_git_commit_hash = lambda: None
    try:
        yield
    finally:
        evaluator.get_git_commit_hash = describe
        for logger in loggers:
            logger.removeFilter(is_wanted)


def _task_manager(config: HarnessConfig, settings: suites.SuiteSettings | None) -> Any:
    """Return the harness's index of task files: those of the evaluation suites, of the folder
    `include_path` and of lm-evaluation-harness, which makes tasks by `settings`; raises ValueError if one
    of the config's tasks does not exist."""
    import lm_eval.tasks

    names = config.names()
    include = [] if config.include_path is None else [Path(config.include_path).expanduser()]
    stock = Path(lm_eval.tasks.__file__).parent
    folders = [stock / folder for folder in suites.stock_folders(names)]
    folders += [suites.FOLDER, *include]

    metadata: Any = {"lsm_jax": settings}

    def index(folders: Sequence[Path], *, defaults: bool) -> Any:
        return lm_eval.tasks.TaskManager(
            include_path=[str(folder) for folder in folders],
            include_defaults=defaults,
            metadata=metadata,
        )

    task_manager = index(folders, defaults=False)
    # Loading all of the harness's tasks takes many seconds, so they are loaded only if their files have the names.
    absent = set(names) - set(task_manager.all_tasks)
    if absent and not (unknown := _without_mention(absent, stock)):
        task_manager = index([suites.FOLDER, *include], defaults=True)
        absent -= set(task_manager.all_tasks)
    elif absent:
        absent = unknown
    for name in names:
        if name in absent:
            stems = {path.stem for path in stock.rglob("*.yaml")}
            similar = difflib.get_close_matches(name, {*task_manager.all_tasks, *stems})
            raise ValueError(
                f"lm_eval.tasks: {name!r} does not exist"
                + (f"; near it are {', '.join(similar)}" if similar else "")
                + (
                    f"; no .yaml file in lm_eval.include_path={str(config.include_path)!r} has a task of this name"
                    if config.include_path
                    else "; tasks that are not the harness's require --lm_eval.include_path"
                )
            )
    return task_manager


def _without_mention(names: set[str], folder: Path) -> set[str]:
    """Return those names of tasks that no YAML file below `folder` contains as a word."""
    left = set(names)
    for path in folder.rglob("*.yaml"):
        text = path.read_text(encoding="utf-8", errors="replace")
        left = {
            name for name in left if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text)
        }
        if not left:
            break
    return left


def write_results(folder: Path, content: dict[str, Any]) -> Path:
    """Write the results of one evaluation by the harness to the first of lm_eval-1.json, lm_eval-2.json,
    ... that does not exist.

    The samples are written to one file per task in a folder of the same name, and left out of the results.

    Args:
        folder: an existing folder.
        content: the result of `run_harness`; its samples are replaced by the names of their files.

    Returns:
        The path of the results.
    """
    number = 1
    while True:
        path = folder / f"lm_eval-{number}.json"
        try:
            path.touch(exist_ok=False)
            break
        except FileExistsError:
            number += 1
    samples = content.pop("samples", None)
    try:
        if samples is not None:
            path.with_suffix("").mkdir()
            content["samples"] = {}
            for task, rows in samples.items():
                name = f"{path.stem}/{task.replace('/', '_')}.jsonl"
                write_rows(folder / name, rows)
                content["samples"][task] = name
        write_json(path, content)
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()  # the empty file that reserved the name
        raise
    return path


def harness_table(results: dict[str, Any]) -> RenderableType:
    """Return a table for a terminal of the harness's metrics by task, with the suites' averages, from the
    content of lm_eval-1.json."""
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
    for suite, values in results.get("averages", {}).items():
        for label, value in values.items():
            table.add_row(suite, "", "", label, f"{value:.4f}", style="bold")
    return Group(table, *(f"Note: {note}." for note in results["notes"]))
