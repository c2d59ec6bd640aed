"""Evaluate the finished runs of the benchmark `evidence`: held-out loss, long documents, needles, recall, the harness."""

from __future__ import annotations

import importlib.util
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from benchmarks import evidence_recall
from benchmarks.registry import UsageError
from benchmarks.run import log
from lsm_jax import evaluation, models
from lsm_jax.data import DataConfig, NeedleConfig
from lsm_jax.data.arguments import bos_id_of
from lsm_jax.data.needle import NeedleTask
from lsm_jax.data.sources import tokenizer_of
from lsm_jax.data.store import TokenStore
from lsm_jax.evaluation import HarnessConfig, Request, check_harness
from lsm_jax.evaluation.harness import check_names

if TYPE_CHECKING:
    from benchmarks.evidence import Setting

TASKS = ("heldout", "long", "needle", "recall", "harness")
_BLOCK = 512  # tokens of which L(i) has one mean in a row


def state_bytes(config: models.ModelConfig, context: int) -> int:
    """Return the bytes of a model's decode state for one sequence with a context of so many tokens."""
    model = models.abstract(config)
    shapes = jax.eval_shape(lambda m: m.init_state(1, context), model)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def request_of(task: str, setting: Setting) -> tuple[str, Request]:
    """Return the evaluation's task of `eval.py` and its request, for one of `TASKS`."""
    long = dict(data=str(setting.corpus / "long.zarr"), sequence_length=setting.long_length)
    if task == "heldout":
        return "perplexity", Request(batch_size=8)
    if task == "long":
        tokens = setting.long_documents * setting.long_length
        return "perplexity", Request(**long, batch_size=1, max_tokens=tokens)
    if task == "needle":
        # One text for all rows, whose scores can be compared only then.
        needle = NeedleConfig(lengths=setting.needle_lengths, depths=(0, 25, 50, 75, 100))
        return "needle", Request(data=long["data"], needle=needle, batch_size=11)
    if task == "recall":
        return "recall", Request()
    harness = HarnessConfig(
        tasks=setting.harness, data=str(setting.corpus), max_length=setting.length, limit=setting.limit
    )  # fmt: skip
    return "lm_eval", Request(lm_eval=harness, batch_size=8)


def check_inputs(setting: Setting, *, given_documents: int | None) -> None:
    """Raise UsageError or ValueError, whose message names the option, if an evaluation's input is missing or wrong.

    Args:
        setting: the setting, whose corpus has a training and a held-out store.
        given_documents: the number of long documents that the user asked for, which must be there; None takes those that are.
    """
    corpus, tasks = setting.corpus, set(setting.tasks)
    if {"long", "needle"} & tasks and not (corpus / "long.zarr" / ".zarray").is_file():
        raise UsageError(f"--corpus={corpus}: it has no long.zarr; --tasks=heldout requires none")
    if "long" in tasks:
        store = TokenStore(corpus / "long.zarr")
        if setting.long_length > store.length:
            raise UsageError(
                f"--long_length={setting.long_length}: the rows of long.zarr have {store.length} tokens"
            )
        if given_documents is not None and given_documents > store.num_documents:
            raise UsageError(
                f"--long_documents={given_documents}: {corpus} has {store.num_documents} long documents; accepted are 1 to {store.num_documents}"
            )
    requests = {task: request_of(task, setting)[1] for task in setting.tasks}
    for request in requests.values():
        request.validate()
    if "needle" in tasks:
        data = DataConfig(path=str(corpus))
        tokenizer = tokenizer_of(data)
        task = NeedleTask(requests["needle"].needle, tokenizer, bos_id=bos_id_of(data, tokenizer))
        if (least := min(setting.needle_lengths)) < task.shortest:
            raise UsageError(
                f"--needle_lengths={least}: with this tokenizer needle and question require at least {task.shortest} tokens"
            )
        room = TokenStore(corpus / "long.zarr").length
        if task.text_length(most := max(setting.needle_lengths)) > room:
            raise UsageError(
                f"--needle_lengths={most}: it requires {task.text_length(most)} tokens of one text, and the rows of long.zarr in "
                f"{corpus} have {room}; accepted are lengths up to {room + most - task.text_length(most)}"
            )
    if "harness" in tasks:
        if importlib.util.find_spec("lm_eval") is None:
            raise UsageError("--tasks=harness requires the extra [lm-eval]; accepted are other tasks")  # fmt: skip
        try:
            check_harness(requests["harness"].lm_eval)
            check_names(requests["harness"].lm_eval)
        except ValueError as error:
            raise UsageError(f"--harness={setting.harness}: {error}") from error
    if "recall" in tasks:
        for name in evidence_recall.TASKS:
            if not (corpus / "recall" / f"{name}.jsonl").is_file():
                raise UsageError(
                    f"--corpus={corpus}: it has no recall/{name}.jsonl; make it with python -m "
                    f"lsm_jax.evaluation.recall_corpus --task={name} --out={corpus}"
                )
            evidence_recall.questions(corpus / "recall" / f"{name}.jsonl", setting.limit)


def evaluate(task: str, run: Any, workdir: Path, setting: Setting) -> dict[str, Any]:
    """Evaluate a run that was loaded from `workdir`, and return the fields of its row; `seconds` include compiling."""
    name, request = request_of(task, setting)
    request.validate()
    folder = workdir / "eval" / f"evidence-{task}"
    began = time.perf_counter()
    if name == "recall":
        found = evidence_recall.measure(run, setting.corpus, max_length=setting.length, limit=setting.limit)  # fmt: skip
        return found | dict(seconds=round(time.perf_counter() - began, 1))
    results = evaluation.TASKS[name](run, request, folder)
    if name == "perplexity":
        with np.load(folder / "results.npz") as arrays:
            loss = arrays["val/loss_per_token"]
        whole = len(loss) // _BLOCK * _BLOCK
        curve = loss[:whole].reshape(-1, _BLOCK).mean(1)
        prefix = "val/perplexity_len_"
        return dict(
            loss=results["val/loss"],
            perplexity={k.removeprefix(prefix): v for k, v in results.items() if k.startswith(prefix)},
            loss_by_block=dict(block=_BLOCK, loss=[round(float(x), 4) for x in curve]),
            sequences=results["num_sequences"],
            seconds=round(time.perf_counter() - began, 1),
        )  # fmt: skip
    if name == "needle":
        kept = "found", "nll", "below_one", "place"
        return dict(
            **{key: results[key] for key in ("lengths", "depths", "without_needle")},
            **{mode: {key: results[mode][key] for key in kept} for mode in ("easy", "standard")},
            seconds=round(time.perf_counter() - began, 1),
        )
    keep = ("averages", "results", "num_documents")
    return {key: results[key] for key in keep if key in results}


def side_by_side(
    tasks: list[str], evaluate_one: Callable[[str], dict[str, Any]]
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Evaluate a run by several tasks at the same time, each in a thread, so that their programs are compiled at the same time.

    Returns:
        The results of the tasks, and the error of each task that failed, as one line.

    Raises:
        UsageError: a task was given wrong options, which another try would not change.
    """

    def run_one(task: str) -> dict[str, Any]:
        log(f"evaluation {task}: begins")
        result = evaluate_one(task)
        log(f"evaluation {task}: done")
        return result

    results, failed = {}, {}
    with ThreadPoolExecutor(max(1, len(tasks))) as threads:
        futures = {task: threads.submit(run_one, task) for task in tasks}
    for task, future in futures.items():
        if (error := future.exception()) is None:
            results[task] = future.result()
        elif isinstance(error, UsageError):
            raise error
        else:
            failed[task] = f"{type(error).__name__}: {str(error)[:500]}"
            trace = "".join(traceback.format_exception(error))
            log(f"evaluation {task}: FAILED\n{trace}")
    return results, failed
