"""Convert the public data of the six recall tasks to the files that the suite `recall` reads.

    python -m lsm_jax.evaluation.recall_data --task=fda --source=based-fda/validation.parquet --out=data

writes data/recall/fda.jsonl, for `--lm_eval.tasks=recall --lm_eval.data=data`. The sources are the rows of
HazyResearch's data sets (huggingface.co/hazyresearch), as .parquet, .jsonl or .json files:

| task | data set | columns |
|---|---|---|
| fda | based-fda | key, value, text |
| swde | based-swde-v2 | key, value, text |
| squad | based-squad | value, text |
| nq | based_nq_2048 | question, answers, context |
| triviaqa | based_triviaqa | question, answers, context |
| drop | based_drop | question, answers, context |

SQuAD's, DROP's, NQ's and TriviaQA's first releases have questions instead of texts to continue, so they are
refused: the column that is missing is named. A row of the result has

    id: the row's `doc_id`, `id`, `new_id` or `file_name`, otherwise its number
    context: the text to cut a window from
    question: what follows the window, from the full stop that ends it
    answers: list of texts, one of which the continuation must contain

Rows whose first answer has fewer than two characters are left out, as the authors do. A row without an answer
in its context is an error, unless --absent=drop.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lsm_jax.evaluation.files import write_rows
from lsm_jax.evaluation.suites.local import read_rows
from lsm_jax.evaluation.suites.recall import check_types, find_answer

_SUMMARY = "Summary of information above..."  # SWDE's text repeats the question from here
_MARKERS = re.compile(r"\[PAR\]|\[DOC\]|\[TLE\]")  # TriviaQA's
_IDS = ("doc_id", "id", "new_id", "file_name")


class _Parts(NamedTuple):
    context: str
    question: str
    answers: list[str]


def _without_end(text: str, end: str) -> str:
    """Remove all repetitions of the string `end` at the end of a text, in upper or lower case, and return
    what remains."""
    while end and text.lower().endswith(end.lower()):
        text = text[: -len(end)]
    return text


def _key_value(row: dict[str, Any]) -> _Parts:
    key = row["key"]
    context = _without_end(row["text"].split(_SUMMARY)[0], f"{key}:")
    return _Parts(context.strip(), f". {key[:1].upper()}{key[1:]}:", [row["value"]])


def _last_sentence(row: dict[str, Any]) -> _Parts:
    text = row["text"].strip()
    ends = [match.start() for match in re.finditer(r"[.!?]\s+(?=\S)|\n(?=\S)", text)]
    if not ends:
        raise ValueError(
            "its text has one sentence only; accepted is a context and a text to continue"
        )
    return _Parts(text[: ends[-1]], text[ends[-1] :], [row["value"]])


def _question(row: dict[str, Any]) -> _Parts:
    question = row["question"].strip()
    context = _without_end(_MARKERS.sub("", row["context"]).strip(), question)
    return _Parts(context.strip(), f". {question}", list(row["answers"]))


_KEY_VALUE = ("key", "value", "text"), _key_value
_QUESTION = ("question", "answers", "context"), _question
TASKS: dict[str, tuple[tuple[str, ...], Callable[[dict[str, Any]], _Parts]]] = {
    "fda": _KEY_VALUE,
    "swde": _KEY_VALUE,
    "squad": (("value", "text"), _last_sentence),
    "nq": _QUESTION,
    "triviaqa": _QUESTION,
    "drop": _QUESTION,
}


def convert_rows(
    task: str, rows: Sequence[dict[str, Any]], *, drop_absent: bool = False
) -> tuple[list[dict[str, Any]], int, int]:
    """Convert the rows of a public recall data set to those that the evaluation suite `recall` reads.
    Return the converted rows, and how many were left out because the first answer has fewer than two
    characters, and how many because no answer is in the context.

    Args:
        task: a key of `TASKS`.
        rows: rows of the task's data set.
        drop_absent: leave out rows without an answer in their context; otherwise they are an error.

    Raises:
        ValueError: a row lacks a column, a column is no text (`answers`: no list of texts), or none of the answers is in
            the row's context; the message names the row.
    """
    columns, parts_of = TASKS[task]
    converted, short, absent = [], 0, 0
    for number, row in enumerate(rows, 1):
        name = next((row[key] for key in _IDS if row.get(key) not in (None, "")), number)
        where = f"{task}, row {number} ({name})"
        missing = [column for column in columns if row.get(column) is None]
        if missing:
            raise ValueError(
                f"{where}: no column {', '.join(missing)}; it has {', '.join(row)}; accepted are rows with "
                f"{', '.join(columns)}"
            )
        try:
            check_types(row, columns)
            parts = parts_of(row)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        answers = [answer.strip() for answer in parts.answers]
        if not answers or len(answers[0]) <= 1:
            short += 1
            continue
        answers = [answer for answer in answers if answer]
        if find_answer(parts.context, answers) is None:
            if not drop_absent:
                raise ValueError(
                    f"{where}: none of the answers {answers} is in the context; --absent=drop leaves such rows out"
                )
            absent += 1
            continue
        converted.append({"id": str(name), **parts._replace(answers=answers)._asdict()})
    return converted, short, absent


def main(argv: Sequence[str] | None = None) -> None:
    """Convert the public data of one recall task (`--task`, files `--source`) to OUT/recall/TASK.jsonl, and
    print how many rows were written and left out."""
    parser = argparse.ArgumentParser(
        "recall_data", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", required=True, choices=list(TASKS))
    parser.add_argument("--source", required=True, nargs="+", type=Path)
    parser.add_argument("--out", required=True, type=Path, help="the folder for --lm_eval.data")
    parser.add_argument("--absent", choices=("error", "drop"), default="error")
    options = parser.parse_args(argv)
    rows = [row for path in options.source for row in read_rows(path)]
    converted, short, absent = convert_rows(
        options.task, rows, drop_absent=options.absent == "drop"
    )
    if not converted:
        raise ValueError(f"--source: no row of {len(rows)} can be used")
    path = options.out / "recall" / f"{options.task}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_rows(path, converted)
    print(
        f"{path}: {len(converted)} rows; left out are {short} with an answer of one character or none and "
        f"{absent} without an answer in the context"
    )


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"recall_data: {error}")
