"""The judge of the published needle results: a model that rates each continuation from 1 to 10.

`eval.py --tasks=needle --needle.prompt=published --needle.judge=requests` writes needle_judge.jsonl, one request
per continuation in the form of OpenAI's batch files. Send it with any client, then

    python -m lsm_jax.evaluation.judge --folder=runs/x/eval/1000 --answers=answers.jsonl

reads the ratings and writes needle_judged.json. The messages and the model are those of the Forgetting
Transformer's evaluation (its repository, eval/niah/eval.py, Apache-2.0, after LongAlign).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lsm_jax.evaluation.files import write_json
from lsm_jax.evaluation.suites.local import read_rows

MODEL = "gpt-4o-2024-08-06"
_SYSTEM = "You are a helpful assistant."
_CRITERIA = """For this evaluation, you should primarily consider the following criteria:
accuracy: 
    Score 1: The answer is completely unrelated to the reference.
    Score 3: The answer has minor relevance but does not align with the reference.
    Score 5: The answer has moderate relevance but contains inaccuracies.
    Score 7: The answer aligns with the reference but has minor omissions.
    Score 10: The answer is completely accurate and aligns perfectly with the reference.
    Only respond with a numberical score
    
"""  # noqa: W291, W293
_USER = """[Instruction]
Please act as an impartial judge and evaluate the quality of the response provided by small language model to a question displayed below. {criteria}[Ground truth]
{reference}
Remember that the model is small and not instruction-tuned so it may output additional garbage content and have strange formatting. These should absolutely not affect your rating as long as the ground truth is included in the model's response. Only give your rating based on the relevant (if any) part of the response. Begin your evaluation by providing a short explanation. Be as objective as possible. After providing your explanation, you must rate the response on a scale of 1 to 10 by strictly following this format: "[[rating]]", for example: "Rating: [[5]]". Some bad models might give empty response in which case you should give the lowest score.

[Question]
{input}

[The Start of the Model's Answer]
{prediction}
[The End of the Model's Answer]"""


def _cells(results: Mapping[str, Any]) -> list[tuple[str, str, int, int]]:
    """(request's name, mode, index of the length, index of the depth) of every continuation."""
    return [
        (f"{mode}-{length}-{depth:g}", mode, i, j)
        for mode in ("easy", "standard")
        if mode in results
        for i, length in enumerate(results["lengths"])
        for j, depth in enumerate(results["depths"])
    ]


def judge_requests(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Requests to the judge, one per continuation, from the content of needle.json."""
    requests = []
    for name, mode, i, j in _cells(results):
        message = _USER.format(
            criteria=_CRITERIA,
            reference=f"\n{results['cue']} {results['answer']}.\n",
            input=results["question"].removesuffix(" Answer:"),
            prediction=results[mode]["continuations"][i][j].strip(),
        )
        messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": message}]
        body = {"model": MODEL, "messages": messages, "temperature": 0.0}
        requests.append(
            {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}
        )
    return requests


def read_ratings(
    results: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Ratings [lengths, depths] by mode, and their means.

    Args:
        results: the content of needle.json.
        answers: rows of OpenAI's batch output, or rows with `custom_id` and `content`.

    Raises:
        ValueError: an answer is missing or has no [[rating]] from 1 to 10; names the request.
    """
    texts: dict[str, str] = {}
    for row in answers:
        content = row.get("content")
        if content is None:
            try:
                content = row["response"]["body"]["choices"][0]["message"]["content"]
            except (KeyError, IndexError, TypeError) as error:
                raise ValueError(
                    f"answer {row.get('custom_id')!r} has no content; accepted are rows of a batch's output"
                ) from error
        texts[row["custom_id"]] = content
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
    """Read the judge's answers, write the ratings, and print their means by length."""
    parser = argparse.ArgumentParser("judge", description=__doc__)
    parser.add_argument("--folder", required=True, type=Path, help="the folder of needle.json")
    parser.add_argument("--answers", required=True, type=Path, help="the judge's answers, .jsonl")
    options = parser.parse_args(argv)
    results = json.loads((options.folder / "needle.json").read_text(encoding="utf-8"))
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
