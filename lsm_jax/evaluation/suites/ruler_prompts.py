"""Make the prompts of RULER's tasks besides the needles: variable tracking, common and frequent words,
questions.

Each class has `make(index, size)`, which returns the prompt of sample `index` with `size` units of text,
`smallest(index)`, the least size of that sample, and `largest`, the largest size, or None for no limit.
"""

from __future__ import annotations

import functools
import importlib
import math
import random
import string
from collections import Counter
from pathlib import Path
from typing import Any

from lsm_jax.evaluation.suites.harness_texts import read_constant
from lsm_jax.evaluation.suites.local import MAX_JSON_BYTES
from lsm_jax.files import bounded_json

SEED = 42
_HOPS = 4


def noise() -> str:
    """Return RULER's filler text: one line of sentences without meaning ("The grass is green. ..."), which
    is repeated to fill prompts."""
    return read_constant("vt_utils", "noise").rstrip("\n")


def _template(module: str) -> tuple[str, str]:
    """Return two templates from the installed lm-evaluation-harness: that of a RULER task's prompt, and
    that of the beginning of the answer, which ends the prompt."""
    config = read_constant(module, "CONFIG")
    config = config.get("variable_tracking", config)
    return config["template"], config["answer_prefix"].strip()


def read_words(*kinds: str) -> list[str]:
    """Return the English words of the kinds `kinds` ("noun", "adjective", "verb"), sorted, from the package
    wonderwords, as RULER's prompts list them."""
    lists = importlib.import_module("wonderwords").RandomWord()._categories
    return sorted({word for kind in kinds for word in lists[kind]})


class VariableTracking:
    """Make RULER's prompts of variable tracking: find the five variables that a chain of assignments gives
    one value. An example with shorter names precedes the question. The size of a prompt's text is counted
    in lines of filler text."""

    largest = None

    def smallest(self, index: int) -> int:
        """Return 1, the smallest size of a variable-tracking prompt, in lines of filler text. At five lines
        or fewer the filler is split into its sentences, so that there are enough places for the chain's
        assignments."""
        return 1

    def make(self, index: int, size: int) -> dict[str, Any]:
        """Return the variable-tracking prompt of sample `index` with `size` lines of noise; its answers are
        the names of the five variables."""
        rng = random.Random(SEED + index)
        example, prefix, names = self._part(rng, 2, letters=3)
        text, gen_prefix, outputs = self._part(rng, size, letters=5)
        shown = f"{example} {prefix} {' '.join(names)}\n\n\n\n"
        return {"input": shown + text, "gen_prefix": gen_prefix, "outputs": outputs}

    @staticmethod
    def _part(rng: random.Random, size: int, *, letters: int) -> tuple[str, str, list[str]]:
        names: list[str] = []
        while len(names) < _HOPS + 1:
            name = "".join(rng.choices(string.ascii_uppercase, k=letters))
            names += [name] if name not in names else []
        value = rng.randint(10000, 99998)
        chain = [f"VAR {names[0]} = {value}"]
        chain += [f"VAR {new} = VAR {old} " for old, new in zip(names, names[1:], strict=False)]
        lines = [noise() + "\n"] * size
        if size <= len(chain):
            sentences = (noise() * size).split(".")
            lines = [f"{text.strip()}." for text in sentences if text.strip()] * 2
        places = sorted(rng.sample(range(len(lines)), len(chain)))
        for offset, (place, line) in enumerate(zip(places, chain, strict=True)):
            lines.insert(place + offset, line)
        context = " ".join(lines)
        template, prefix = _template("vt_utils")
        prefix = prefix.format(num_v=len(names), query=value)
        return template.format(context=context, query=value), prefix, names


class CommonWords:
    """Make RULER's prompts of common words: ten words are listed more often than all others, and must be
    named. A short example precedes the list. The size of a prompt's list is counted in different words."""

    def __init__(self, length: int):
        """Prepare the common-words prompts of RULER for `length` tokens: read the English words that they
        list from the package wonderwords, and choose how often the answers and the other words are
        repeated, which is less often below 4,096 tokens.
        """
        self._words = read_words("noun", "adjective", "verb")
        self.largest = len(self._words)
        self._example, self._repeats = (
            ((20, 3, 1), (6, 1)) if length < 4096 else ((40, 10, 3), (30, 3))
        )

    def smallest(self, index: int) -> int:
        """Return the least number of different words in a prompt of RULER's common-words task: the ten frequent ones, which are the
        answer, and one other.
        """
        return 11

    def make(self, index: int, size: int) -> dict[str, Any]:
        """Return the common-words prompt of sample `index` with `size` different words; its answers are the
        ten that are listed most often."""
        rng = random.Random(SEED + index)
        shown, names = self._list(rng, *self._example)
        text, outputs = self._list(rng, size, *self._repeats)
        answer = " ".join(f"{i}. {name}" for i, name in enumerate(names, 1))
        template, prefix = _template("cwe_utils")
        example = f"{template.format(context=shown)} {prefix} {answer}\n"
        return {
            "input": example + template.format(context=text),
            "gen_prefix": prefix,
            "outputs": outputs,
        }

    def _list(
        self, rng: random.Random, size: int, often: int, seldom: int
    ) -> tuple[str, list[str]]:
        words = rng.sample(self._words, size)
        listed = words[:10] * often + words[10:] * seldom
        rng.shuffle(listed)
        return " ".join(f"{i}. {word}" for i, word in enumerate(listed, 1)), words[:10]


class FrequentWords:
    """Make RULER's prompts of frequent words: a text of coded words whose frequencies follow a zeta
    distribution with exponent 2. The size of a prompt's text is counted in words."""

    largest = None

    def __init__(self, length: int):
        """Prepare frequent-words prompts of `length` tokens, which have `length` / 50 different words."""
        self._count = length // 50

    def smallest(self, index: int) -> int:
        """Return the least size of a frequent-words text: 200 words, so that the third answer is more
        frequent than the word after it."""
        return 200

    def make(self, index: int, size: int) -> dict[str, Any]:
        """Return the frequent-words prompt of sample `index` with `size` words; its answers are the second
        to fourth word by frequency, since the first is dots."""
        rng, words = random.Random(SEED + index), Counter()
        while len(words) < self._count:
            words["".join(rng.choices(string.ascii_lowercase, k=6))] += 1
        vocabulary = ["...", *list(words)[1:]]
        numbers = (int(size / (rank**2 * math.pi**2 / 6)) for rank in range(1, self._count + 1))
        text = [word for word, n in zip(vocabulary, numbers, strict=True) for _ in range(n)]
        rng.shuffle(text)
        template, prefix = _template("fwe_utils")
        return {
            "input": template.format(context=" ".join(text)),
            "gen_prefix": prefix,
            "outputs": vocabulary[1:4],
        }


class Questions:
    """Make RULER's question-answering prompts: a question about one of several documents. The size of a
    prompt's text is counted in documents.
    """

    def __init__(self, path: Path):
        """Read the questions and documents of SQuAD 2.0's dev-v2.0.json, or of HotpotQA's
        hotpot_dev_distractor_v1.json."""
        self._questions, self._documents = _read_questions(path)
        self.largest, self.count = len(self._documents), len(self._questions)

    def smallest(self, index: int) -> int:
        """Return the smallest number of documents that the prompt of RULER's question number `index` can
        have: the documents that contain the answer.
        """
        return len(self._questions[index][2])

    def make(self, index: int, size: int) -> dict[str, Any]:
        """Return the prompt of the question of sample `index` with `size` documents; any one of the answers
        counts."""
        rng = random.Random(SEED + index)
        query, outputs, gold, related = self._questions[index]
        extra = max(0, size - len(gold))
        if extra <= len(related):
            chosen = gold + rng.sample(related, extra)
        else:
            used = {*gold, *related}
            others = [i for i in range(len(self._documents)) if i not in used]
            chosen = gold + related + rng.sample(others, min(len(others), extra - len(related)))
        rng.shuffle(chosen)
        document = read_constant("qa_utils", "DOCUMENT_PROMPT")
        context = "\n\n".join(
            document.format(i=i, document=self._documents[d]) for i, d in enumerate(chosen, 1)
        )
        template, prefix = _template("qa_utils")
        text = template.format(context=context, query=query)
        return {"input": text, "gen_prefix": prefix, "outputs": outputs}


@functools.lru_cache(maxsize=2)
def _read_questions(
    path: Path,
) -> tuple[list[tuple[str, list[str], list[int], list[int]]], list[str]]:
    """Return the questions of SQuAD or HotpotQA, each as (question, answers, numbers of the documents with
    the answer, numbers of the other documents of its article), and the list of all documents."""
    content = bounded_json(path, max_bytes=MAX_JSON_BYTES, accepted=object)
    try:
        if isinstance(content, dict):
            articles = [
                [p["context"] for p in article["paragraphs"]] for article in content["data"]
            ]
        else:
            articles = [[f"{t}\n{''.join(p)}" for t, p in row["context"]] for row in content]
        documents = sorted({text for article in articles for text in article})
        numbers = {text: i for i, text in enumerate(documents)}
        questions = []
        if isinstance(content, dict):
            for article, texts in zip(content["data"], articles, strict=True):
                for paragraph in article["paragraphs"]:
                    gold = numbers[paragraph["context"]]
                    related = sorted({numbers[text] for text in texts} - {gold})
                    questions += [
                        (qa["question"], [a["text"] for a in qa["answers"]], [gold], related)
                        for qa in paragraph["qas"]
                        if not qa["is_impossible"]
                    ]
        else:
            for row, texts in zip(content, articles, strict=True):
                gold = [numbers[text] for text in texts]
                questions.append((row["question"], [row["answer"]], gold, []))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: no field {error}; accepted are SQuAD's dev-v2.0.json and HotpotQA's "
            "hotpot_dev_distractor_v1.json"
        ) from error
    return questions, documents
