"""The judge of the published needle results: a model that rates each continuation from 1 to 10.

`eval.py --tasks=needle --needle.prompt=FILE --needle.judge=requests` writes needle_judge.jsonl, one request per
continuation in the form of OpenAI's batch files, with the judge's messages of FILE. Send it with any client, then

    python -m lsm_jax.evaluation.judge --folder=runs/x/eval/1000 --answers=answers.jsonl

reads the ratings and writes needle_judged.json. The Forgetting Transformer's evaluation has such a judge (eval/niah/eval.py
in its repository); its messages are not part of this library.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lsm_jax.evaluation.files import write_json
from lsm_jax.evaluation.suites.local import read_rows
from lsm_jax.files import bounded_json


def _cells(results: Mapping[str, Any]) -> list[tuple[str, str, int, int]]:
    """Return (request's name, mode, index of the length, index of the depth) of every continuation in the
    results of a needle-in-a-haystack test."""
    return [
        (f"{mode}-{length}-{depth:g}", mode, i, j)
        for mode in ("easy", "standard")
        if mode in results
        for i, length in enumerate(results["lengths"])
        for j, depth in enumerate(results["depths"])
    ]


def judge_requests(results: Mapping[str, Any], judge: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the requests to the model that judges a needle-in-a-haystack test, one per continuation.

    Args:
        results: the content of needle.json.
        judge: "model", and the messages "system" and "user"; {reference}, {input} and {prediction} in the latter are
            replaced by the needle, the question and the continuation.
    """
    requests = []
    for name, mode, i, j in _cells(results):
        message = judge["user"]
        for field, text in (
            ("{reference}", f"\n{results['cue']} {results['answer']}.\n"),
            ("{input}", results["question"].removesuffix(" Answer:")),
            ("{prediction}", results[mode]["continuations"][i][j].strip()),
        ):
            message = message.replace(field, text)
        messages = [
            {"role": "system", "content": judge["system"]},
            {"role": "user", "content": message},
        ]
        body = {"model": judge["model"], "messages": messages, "temperature": 0.0}
        requests.append(
            {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}
        )
    return requests


def read_ratings(
    results: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Read the judging model's ratings of a needle-in-a-haystack test, [lengths, depths] by mode, and their
    means.

    Args:
        results: the content of needle.json.
        answers: rows of OpenAI's batch output, or rows with `custom_id` and `content`.

    Raises:
        ValueError: an answer is missing or has no [[rating]] from 1 to 10; the message names the request.
    """
    texts: dict[str, str] = {}
    for number, row in enumerate(answers, 1):
        if not isinstance(row.get("custom_id"), str):
            raise ValueError(
                f"answer {number} has custom_id={row.get('custom_id')!r}; accepted is the name of a request"[
                    :200
                ]
            )
        content = row.get("content")
        if content is None:
            try:
                content = row["response"]["body"]["choices"][0]["message"]["content"]
            except (KeyError, IndexError, TypeError) as error:
                raise ValueError(
                    f"answer {row.get('custom_id')!r} has no content; accepted are rows of a batch's output"
                ) from error
        if not isinstance(content, str):
            raise ValueError(
                f"answer {row['custom_id']!r} has the content {content!r}; accepted is a text"[:200]
            )
        if texts.setdefault(row["custom_id"], content) != content:
            raise ValueError(f"there are two unequal answers to {row['custom_id']!r}")
    rated: dict[str, Any] = {}
    for name, mode, i, j in _cells(results):
        match = re.search(r"\[\[(\d+)\]\]", texts.get(name, ""))
        if match is None or not 1 <= int(match[1]) <= 10:
            raise ValueError(f"request {name!r} has no answer with [[rating]], 1 to 10")
        grid = rated.setdefault(mode, [[0] * len(results["depths"]) for _ in results["lengths"]])
        grid[i][j] = int(match[1])
    means = {mode: sum(map(sum, grid)) / sum(map(len, grid)) for mode, grid in rated.items()}
    axes = {name: results[name] for name in ("lengths", "depths")}
    return {**axes, "ratings": rated, "means": means}


def main(argv: Sequence[str] | None = None) -> None:
    """Read a judging model's answers to a needle-in-a-haystack test from the file `--answers`, write the
    ratings to needle_judged.json in `--folder`, and print their means by prompt length."""
    parser = argparse.ArgumentParser("judge", description=__doc__)
    parser.add_argument("--folder", required=True, type=Path, help="the folder of needle.json")
    parser.add_argument("--answers", required=True, type=Path, help="the judge's answers, .jsonl")
    options = parser.parse_args(argv)
    path = options.folder / "needle.json"
    results = bounded_json(path, max_bytes=1 << 30)
    for name in ("lengths", "depths"):
        values = results.get(name)
        if not isinstance(values, list) or not all(isinstance(v, int | float) for v in values):
            raise ValueError(f"{path}: {name}={values!r}; accepted is a list of numbers"[:300])
    ratings = read_ratings(results, read_rows(options.answers))
    write_json(options.folder / "needle_judged.json", ratings)
    table = Table("length", *ratings["ratings"], title="Mean rating, 1 to 10")
    for i, length in enumerate(ratings["lengths"]):
        rows = (grid[i] for grid in ratings["ratings"].values())
        table.add_row(str(length), *(f"{sum(row) / len(row):.2f}" for row in rows))
    table.add_row("all", *(f"{mean:.2f}" for mean in ratings["means"].values()))
    Console().print(table)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"judge: {error}")
