"""The six recall tasks of MoM's Table 2, and two of one's own documents: prompts with the answer, scored by containment.

The prompts and the scores are those of the authors' code (HazyResearch/prefix-linear-attention, which MoM's
evaluation builds on). The rows are made by `python -m lsm_jax.evaluation.recall_data` and `recall_corpus`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from lsm_jax.evaluation.suites import SuiteSettings
from lsm_jax.evaluation.suites.local import read_rows

WINDOW = 2000  # tokens of context: the authors' 2048 without the answer's
ANSWER_TOKENS = 48


def check_types(row: dict[str, Any], columns: Sequence[str]) -> None:
    """Raise ValueError unless the columns of a recall question's row are texts, and `answers` a list of texts.

    A text in place of the list would count as a list of its characters.
    """
    for name in columns:
        value, accepted = row[name], "a text"
        right = isinstance(value, str)
        if name == "answers":
            accepted = "a list of texts"
            right = isinstance(value, list) and all(isinstance(text, str) for text in value)
        if not right:
            raise ValueError(f"{name}={value!r:.80}; accepted is {accepted}")


def find_answer(context: str, answers: Sequence[str]) -> tuple[int, str] | None:
    """Return (position in characters, text) of the first of a recall question's answers, in the order of
    `answers`, that the context contains, ignoring case; None if it contains none."""
    for answer in answers:
        match = re.search(re.escape(answer), context, re.IGNORECASE)
        if match:
            return match.start(), match[0]
    return None


def cut_context(
    context: str, answers: Sequence[str], question: str, settings: SuiteSettings
) -> str:
    """Return the part of a recall task's text to put into the prompt: a window of tokens around the answer.

    The answer is in the middle, unless the window would begin before the text's start or end after its end.
    Its size is `WINDOW` tokens, or fewer if the question and the answer's tokens would otherwise not fit
    `settings.max_length`, so that the model never cuts the prompt.

    Raises:
        ValueError: the context does not contain an answer, or the window is too small for it.
    """
    found = find_answer(context, answers)
    if found is None:
        raise ValueError(f"none of the answers {list(answers)} is in the context")
    start, answer = found
    ids = settings.tokenizer.encode(context)
    before = len(settings.tokenizer.encode(context[:start]))
    budget = settings.max_length - ANSWER_TOKENS - settings.count(question)
    size = min(WINDOW, budget)
    while size > 0:
        window = context
        if len(ids) > size:
            first = max(0, before - size // 2)
            # A character may be cut at the ends of the window.
            window = settings.tokenizer.decode(ids[first : first + size]).strip("\ufffd")
        window = window.strip().strip(".")  # the question begins with a full stop
        if find_answer(window, [answer.strip(".")]) is None:
            break
        # Tokens at the cut may be others in the window's text, and more.
        excess = settings.count(window + question) - (settings.max_length - ANSWER_TOKENS)
        if excess <= 0:
            return window
        size = min(size, len(ids)) - excess
    raise ValueError(
        f"a window of {max(size, 0)} tokens does not contain the answer {answer!r}; lm_eval.max_length="
        f"{settings.max_length} is too small for it and the question"
    )


def load(name: str, lsm_jax: SuiteSettings, **_: Any) -> dict[str, Any]:
    """Return the prompts of a recall task, from the file recall/NAME.jsonl of the folder `lm_eval.data`.

    Raises:
        ValueError: the file is missing, or none of a row's answers is in its context; the message names the
            file and row.
    """
    from datasets import Dataset

    path = lsm_jax.data and lsm_jax.data / "recall" / f"{name}.jsonl"
    if path is None or not path.is_file():
        maker = "recall_corpus" if name in ("fields", "names") else "recall_data"
        raise ValueError(
            f"lm_eval.data={str(lsm_jax.data or '')!r} has no file recall/{name}.jsonl; make it with "
            f"python -m lsm_jax.evaluation.{maker} --task={name}"
        )
    docs = []
    for number, row in enumerate(read_rows(path), 1):
        try:
            check_types(row, ("context", "question", "answers"))
            context = cut_context(row["context"], row["answers"], row["question"], lsm_jax)
        except KeyError as error:
            raise ValueError(f"{path}, row {number}: no field {error}") from error
        except ValueError as error:
            raise ValueError(f"{path}, row {number} ({row.get('id')}): {error}") from error
        docs.append(
            {"id": row.get("id"), "prompt": context + row["question"], "answers": row["answers"]}
        )
    return {"test": Dataset.from_list(docs)}


def score(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Return the score of a recall question: 1 if the generated text contains one of the answers, ignoring
    case; otherwise 0."""
    return {"contains": float(any(find_answer(results[0], [answer]) for answer in doc["answers"]))}
