"""Evaluation suites of the papers, as task files of lm-evaluation-harness; docs/suites.md describes each.

The task files (.yaml) are in this folder. They read their data from the folder `lm_eval.data`; tasks of the
harness that a suite refers to read it from there too, or download it if the folder does not have it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
LONG_EXTRA = "lsm_jax[lm-eval-long]"


@dataclasses.dataclass(frozen=True)
class Suite:
    """An evaluation suite of a paper: a task or group of the harness whose files are in this folder.

    Attributes:
        stock: folders of the harness's tasks that the suite refers to.
        packages: packages that the suite imports; the extra [lm-eval-long] installs them.
        averages: for each average its name, and the metric of each task that it is the mean of.
    """

    stock: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    averages: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)


_FIVE = {
    "piqa": "acc",
    "arc_easy": "acc",
    "arc_challenge": "acc_norm",
    "hellaswag": "acc_norm",
    "winogrande": "acc",
}
_MMLU = {"mmlu": "acc"}
_FOX = {
    "lambada_openai": "acc",
    "piqa": "acc",
    "hellaswag": "acc_norm",
    "winogrande": "acc",
    "arc_easy": "acc",
    "arc_challenge": "acc_norm",
    "copa": "acc",
    "openbookqa": "acc_norm",
    "sciq": "acc",
    "boolq": "acc",
}
_RECALL = {
    f"recall_{name}": "contains" for name in ("fda", "swde", "squad", "nq", "triviaqa", "drop")
}
_WITHOUT_FDA = {task: metric for task, metric in _RECALL.items() if task != "recall_fda"}
_RECALL_CORPUS = {"recall_fields": "contains", "recall_names": "contains"}
_FIVE_FOLDERS = ("piqa", "arc", "hellaswag", "winogrande")
_MMLU_FOLDERS = ("mmlu/default",)
_NIAH = ("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2")
_NIAH += ("niah_multikey_3", "niah_multivalue", "niah_multiquery")
_WORDS, _LONGBENCH = ("wonderwords",), ("jieba", "fuzzywuzzy", "rouge")

SUITES: dict[str, Suite] = {
    "recall": Suite(averages={"average": _RECALL, "average without FDA": _WITHOUT_FDA}),
    **{name: Suite() for name in _RECALL},
    "recall_corpus": Suite(averages={"average": _RECALL_CORPUS}),
    **{name: Suite() for name in _RECALL_CORPUS},
    "commonsense": Suite(_FIVE_FOLDERS, averages={"average": _FIVE}),
    "commonsense_mom": Suite(
        (*_FIVE_FOLDERS, "wikitext", "lambada"),
        averages={"average": {"lambada_standard": "acc", **_FIVE}},
    ),
    "commonsense_fox": Suite(
        (*_FIVE_FOLDERS, "wikitext", "lambada", "super_glue", "openbookqa", "sciq"),
        averages={"average": _FOX},
    ),
    "mmlu_5shot": Suite(_MMLU_FOLDERS, averages={"average": _MMLU}),
    "commonsense_mmlu": Suite(
        (*_FIVE_FOLDERS, *_MMLU_FOLDERS),
        averages={"average": {**_FIVE, **_MMLU}, "average without MMLU": _FIVE},
    ),
    "s_niah": Suite(packages=_WORDS),
    "ruler": Suite(packages=_WORDS),
    **{name: Suite(packages=_WORDS) for name in (*_NIAH, "ruler_cwe")},
    **{name: Suite() for name in ("ruler_vt", "ruler_fwe", "ruler_qa_squad", "ruler_qa_hotpot")},
    "longbench_english": Suite(("longbench",), packages=_LONGBENCH),
}


class SuiteSettings:
    """The settings of a run that the suites' task files receive from the harness in their metadata, under
    the key "lsm_jax".

    A deep copy is the object itself, since the harness copies metadata and a tokenizer may not be copied.

    Attributes:
        tokenizer: the run's tokenizer.
        bos_id: the token in front of every window, or None.
        max_length: tokens of the model's window.
        data: the folder of local data, or None.
        lengths: lengths in tokens of RULER's prompts.
        num_samples: number of RULER's prompts per length.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        bos_id: int | None,
        max_length: int,
        data: Path | None = None,
        lengths: Sequence[int] = (),
        num_samples: int = 500,
    ):
        self.tokenizer, self.bos_id, self.max_length = tokenizer, bos_id, max_length
        self.data, self.lengths, self.num_samples = data, tuple(lengths), num_samples

    def __deepcopy__(self, memo: dict) -> SuiteSettings:
        return self

    def count(self, text: str) -> int:
        """Return the number of tokens that a prompt has in the run's tokenizer, with BOS if the run has
        one."""
        return len(self.tokenizer.encode(text)) + (self.bos_id is not None)


def missing_packages(names: Sequence[str]) -> list[str]:
    """Return the names of the packages that the evaluation suites' tasks in `names` require and that are
    not installed."""
    packages = {package for name in names for package in _packages(name)}
    return sorted(package for package in packages if importlib.util.find_spec(package) is None)


def stock_folders(names: Sequence[str]) -> list[str]:
    """Return the names of the folders with lm-evaluation-harness's tasks to which the suites and tasks in
    `names` belong or refer. Tasks that no suite mentions are left out.
    """
    known = {folder for suite in SUITES.values() for folder in suite.stock}
    folders = {folder for name in names if name in SUITES for folder in SUITES[name].stock}
    folders |= {name for name in names if name in known}
    if any(name.startswith("longbench_") for name in names):
        folders.add("longbench")
    return sorted(folders)


def _packages(name: str) -> tuple[str, ...]:
    suite = SUITES.get(name)
    if suite is not None:
        return suite.packages
    return _LONGBENCH if name == "longbench" or name.startswith("longbench_") else ()


def averages(results: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> dict[str, dict]:
    """Return the averages that each evaluation suite in `names` defines over the metrics of its tasks, as
    {suite: {name of the average: value}}. An average is omitted if one of its tasks has no result.

    Args:
        results: metrics by task, with keys such as "acc,none".
        names: the tasks and groups that were run.
    """
    table: dict[str, dict[str, float]] = {}
    for name in names:
        for label, metrics in SUITES[name].averages.items() if name in SUITES else ():
            scores = [results.get(task, {}).get(f"{key},none") for task, key in metrics.items()]
            values = [float(score) for score in scores if isinstance(score, int | float)]
            if len(values) == len(scores):
                table.setdefault(name, {})[label] = sum(values) / len(values)
    return table
