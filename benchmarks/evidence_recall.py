"""Ask a trained model the recall questions of a corpus, without lm-evaluation-harness.

The prompts and scores are those of the suite `recall_corpus` (lsm_jax.evaluation.suites.recall): a greedy continuation of up to
48 tokens, up to the end of its line, contains the answer. The questions `multikey` are asked about their whole text; those that do not
fit the length are not asked, and counted as `too_long`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from lsm_jax.data.decoding import decode
from lsm_jax.evaluation.reader import Answerer
from lsm_jax.evaluation.request import run_bos_id, run_tokenizer
from lsm_jax.evaluation.suites import SuiteSettings
from lsm_jax.evaluation.suites.local import read_rows
from lsm_jax.evaluation.suites.recall import (
    ANSWER_TOKENS,
    check_types,
    cut_context,
    find_answer,
)

TASKS = ("fields", "names", "multikey")
_FIELDS = ("context", "question", "answers")
_BATCH = 32
_PIECE = 1024


def questions(path: Path, limit: int | None) -> list[dict[str, Any]]:
    """Return the rows of the first `limit` questions of a file, each with `context`, `question` and `answers`.

    Raises:
        ValueError: the file is no such file, a row lacks a field or has another type, or a context has none of the answers.
    """
    rows = read_rows(path)[:limit]
    for number, row in enumerate(rows, 1):
        try:
            if missing := [name for name in _FIELDS if name not in row]:
                raise ValueError(f"it lacks {', '.join(missing)}")
            check_types(row, _FIELDS)
            if find_answer(row["context"], row["answers"]) is None:
                raise ValueError(
                    f"answers={row['answers']!r:.80}; accepted are answers of which the context has one"
                )
        except ValueError as error:
            raise ValueError(f"{path}, row {number}: {error}") from error
    return rows


def prompts(
    path: Path, settings: SuiteSettings, limit: int | None
) -> tuple[list[tuple[np.ndarray, list[str]]], int]:
    """Return (token ids of the prompt, accepted answers) of the first `limit` questions of a file that fit
    `settings.max_length`, and the number of those that do not fit.

    Raises:
        ValueError: the rows are not those of `questions`, or no question fits.
    """
    found, too_long = [], 0
    for row in questions(path, limit):
        context = row["context"]
        if path.stem != "multikey":
            context = cut_context(context, row["answers"], row["question"], settings)
        ids = settings.tokenizer.encode(context + row["question"])
        if settings.bos_id is not None:
            ids = [settings.bos_id, *ids]
        if len(ids) + ANSWER_TOKENS > settings.max_length:
            too_long += 1
        else:
            found.append((np.asarray(ids, np.int32), row["answers"]))
    if not found:
        raise ValueError(
            f"{path}: none of {too_long} questions fits {settings.max_length} tokens with {ANSWER_TOKENS} of the answer"
        )
    return found, too_long


def measure(run: Any, corpus: Path, *, max_length: int, limit: int | None) -> dict[str, Any]:
    """Return for each of `TASKS` the share of questions that a run's model answers, their number, and the number of those that
    were too long."""
    tokenizer = run_tokenizer(run)
    settings = SuiteSettings(tokenizer, bos_id=run_bos_id(run, tokenizer), max_length=max_length)
    asked = {task: prompts(corpus / "recall" / f"{task}.jsonl", settings, limit) for task in TASKS}
    answerer = Answerer(
        run.model, max_length=max_length - ANSWER_TOKENS, num_tokens=ANSWER_TOKENS, piece_length=_PIECE
    )  # fmt: skip
    result: dict[str, Any] = {}
    for task, (questions, too_long) in asked.items():
        questions = sorted(questions, key=lambda pair: len(pair[0]))
        right = 0
        for first in range(0, len(questions), _BATCH):
            batch = questions[first : first + _BATCH]
            texts = _continuations(answerer, tokenizer, [ids for ids, _ in batch])
            right += sum(
                any(find_answer(text, [answer]) for answer in answers)
                for text, (_, answers) in zip(texts, batch, strict=True)
            )
        result[task] = dict(contains=right / len(questions), questions=len(questions), too_long=too_long)  # fmt: skip
    return result


def _continuations(answerer: Answerer, tokenizer: Any, ids: list[np.ndarray]) -> list[str]:
    """Return the greedy continuations of a batch of prompts, each up to the end of its line."""
    lengths = np.array([len(prompt) for prompt in ids] + [1] * (_BATCH - len(ids)))
    rows = np.zeros((_BATCH, lengths.max()), np.int32)
    for row, prompt in zip(rows, ids, strict=False):
        row[len(row) - len(prompt) :] = prompt
    _, drawn = answerer(rows, np.zeros((_BATCH, 1), np.int32), lengths)
    return [decode(tokenizer, row).partition("\n")[0] for row in drawn[: len(ids)]]
