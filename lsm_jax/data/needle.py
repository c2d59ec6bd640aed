"""Needle in a haystack: one fact hidden in long text, and a question about it at the end.

The protocol is that of the Forgetting Transformer's evaluation (arXiv 2503.02130), on any text or store; the sentences here
are our own and every one can be replaced.
"""

# No `from __future__ import annotations`: config flags read the fields' types as objects.
import dataclasses
import math
from typing import NamedTuple

import numpy as np

from lsm_jax.data.config import DataConfig
from lsm_jax.data.entrance import bos_id_of
from lsm_jax.data.sources import open_documents, open_store
from lsm_jax.data.tokenizers import Tokenizer

MODES = ("easy", "standard")
PROMPTS = ("own", "published")
JUDGES = ("containment", "requests")
_TEXTS = ("question", "cue", "answer", "instruction")
# The prompt of the Forgetting Transformer's evaluation (its repository, eval/niah: config-prompt-*.yaml and prompt.py, Apache-2.0).
_PUBLISHED_TEXTS = {
    "question": "What is the best thing to do in San Francisco? Answer:",
    "cue": "The best thing to do in San Francisco is",
    "answer": "eat a sandwich and sit in Dolores Park on a sunny day",
    "instruction": "There is an important piece of information hidden inside the above document. Now that you've read the "
    "document, I will quiz you about it. Answer the following question:",
}
_PUBLISHED_LENGTHS = tuple(range(1000, 32001, 3100))
_READ = 1 << 16  # tokens read of a store at a time


@dataclasses.dataclass(kw_only=True)
class NeedleConfig:
    """What is hidden, where, and what is asked.

    The needle is a line of its own, `cue answer.`; in mode "easy" the question stands in front of it. After the text come
    `instruction`, `question` and `cue`, and the model is to go on with `answer`.

    Attributes:
        lengths: tokens of prompt and answer together. Empty: a quarter, half, one and two training lengths, as far as they
            hold the question. Published: 1000, 4100, ..., 32000.
        depths: where the needle stands, in percent of the text; it moves back to the full stop before.
        modes: of "easy" and "standard".
        samples: stretches of text tried for each length, depth and mode.
        buffer: tokens that the text and needle leave of the length; None is what the rest needs. Published: 200.
        new_tokens: the most tokens to generate; None is twice the answer's.
        question: asked after the text.
        cue: how the answer begins, given to the model.
        answer: what is looked for.
        instruction: said ahead of the question.
        prompt: "own", the texts of the fields above; or "published", the Forgetting Transformer's texts, with its lengths,
            buffer of 200 tokens and 1024 new tokens unless those are given, and the needle after a "." token.
        judge: "containment", whether the continuation contains the answer; or "requests", which also writes the published
            requests to a judging model, for `python -m lsm_jax.evaluation.judge`.
    """

    lengths: tuple[int, ...] = ()
    depths: tuple[float, ...] = (0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100)
    modes: tuple[str, ...] = MODES
    samples: int = 1
    buffer: int | None = None
    new_tokens: int | None = None
    question: str = "Where does the lighthouse keeper of Carrow hide the spare key?"
    cue: str = "The lighthouse keeper of Carrow hides the spare key"
    answer: str = "under the blue teapot in the pantry"
    instruction: str = "One line of this text has nothing to do with the rest. Recall it to answer."
    prompt: str = "own"
    judge: str = "containment"

    def with_texts(self) -> "NeedleConfig":
        """The config with the published texts and numbers if `prompt` is "published"; otherwise the config itself."""
        if self.prompt != "published":
            return self
        return dataclasses.replace(
            self,
            **_PUBLISHED_TEXTS,
            lengths=self.lengths or _PUBLISHED_LENGTHS,
            buffer=self.buffer or 200,
            new_tokens=self.new_tokens or 1024,
        )

    def validate(self) -> None:
        """Checks the values.

        Raises:
            ValueError: names the field, what was given and what is accepted.
        """
        for name in ("lengths", "depths", "modes"):
            values = getattr(self, name)
            if len(set(values)) != len(values) or not (values or name == "lengths"):
                raise ValueError(
                    f"needle.{name}={values}; accepted are different values, at least one"
                )
        if any(not isinstance(n, int) or n < 1 for n in self.lengths):
            raise ValueError(f"needle.lengths={self.lengths}; accepted are integers from 1")
        if any(not isinstance(d, int | float) or not 0 <= d <= 100 for d in self.depths):
            raise ValueError(f"needle.depths={self.depths}; accepted are percents from 0 to 100")
        if not set(self.modes) <= set(MODES):
            raise ValueError(f"needle.modes={self.modes}; accepted: {', '.join(MODES)}")
        for name, accepted in (("prompt", PROMPTS), ("judge", JUDGES)):
            if getattr(self, name) not in accepted:
                raise ValueError(
                    f"needle.{name}={getattr(self, name)!r}; accepted: {', '.join(accepted)}"
                )
        fields = {field.name: field.default for field in dataclasses.fields(self)}
        for name in _TEXTS if self.prompt == "published" else ():
            if getattr(self, name) not in (fields[name], _PUBLISHED_TEXTS[name]):
                raise ValueError(
                    f"needle.{name}={getattr(self, name)!r} and needle.prompt=published; accepted is one of them"
                )
        if self.judge == "requests" and self.samples != 1:
            raise ValueError(
                f"needle.samples={self.samples}; with needle.judge=requests it must be 1"
            )
        for name in ("samples", "buffer", "new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"needle.{name}={value}; it must be at least 1")
        for name in ("question", "cue", "answer"):
            if not getattr(self, name).strip():
                raise ValueError(f"needle.{name}={getattr(self, name)!r}; accepted is some text")


class NeedlePrompt(NamedTuple):
    """One prompt.

    Attributes:
        mode: "easy" or "standard"; "" without the needle.
        depth: percent as asked for; NaN without the needle.
        sample: number of the stretch of text.
        place: tokens of text in front of the needle; -1 without.
        tokens: int32 [P].
    """

    mode: str
    depth: float
    sample: int
    place: int
    tokens: np.ndarray


class NeedleTask:
    """The prompts of a config in one tokenizer's ids.

    Attributes:
        answer: int32 [A], the ids to find after a prompt.
        new_tokens: how many to generate.
    """

    def __init__(self, config: NeedleConfig, tokenizer: Tokenizer, *, bos_id: int | None):
        """Tokenises the texts.

        Args:
            config: validated.
            tokenizer: of the model.
            bos_id: in front of every prompt; None for none.

        Raises:
            ValueError: a config that is not accepted, or a buffer that does not hold the question and answer.
        """
        config.validate()
        published, config = config.prompt == "published", config.with_texts()
        self.config, self.tokenizer = config, tokenizer
        fact = f"{config.cue} {config.answer}."
        texts = dict(easy=f"\n{config.question} {fact}\n", standard=f"\n{fact}\n")
        self._needles = {mode: _ids(tokenizer.encode(texts[mode])) for mode in config.modes}
        self._needles[""] = _ids([])
        self._bos = _ids([] if bos_id is None else [bos_id])
        space = " " if published else "\n"
        end = f"\n\n{config.instruction}{space}{config.question} {config.cue}"
        alone, whole = tokenizer.encode(end), tokenizer.encode(f"{end} {config.answer}")
        # The answer begins where its tokens do: a tokenizer may join its first ones to the question's last.
        pairs = enumerate(zip(alone, whole, strict=False))
        cut = next((i for i, (a, b) in pairs if a != b), min(len(alone), len(whole)))
        self._end, self.answer = _ids(whole[:cut]), _ids(whole[cut:])
        self.new_tokens = config.new_tokens or 2 * len(self.answer)
        # The published lengths count the prompt only.
        needed = len(self._bos) + len(self._end) + (0 if published else self.answer_room)
        self._buffer = config.buffer or needed
        if self._buffer < needed:
            raise ValueError(
                f"needle.buffer={config.buffer}; the question and answer need {needed} tokens"
            )

    @property
    def answer_room(self) -> int:
        """Tokens that follow a prompt at most."""
        return max(len(self.answer), self.new_tokens)

    @property
    def shortest(self) -> int:
        """The least length that holds the question, needle and answer, and a token of text."""
        return self._buffer + max(map(len, self._needles.values())) + 1

    def lengths(self, train_length: int) -> list[int]:
        """The lengths to try, ascending.

        Raises:
            ValueError: one that is too short, or a training length none can be made of.
        """
        if not self.config.lengths:
            given = [int(train_length * times) for times in (0.25, 0.5, 1, 2)]
            lengths = [length for length in given if length >= self.shortest]
        else:
            given = lengths = sorted(self.config.lengths)
        if not lengths or lengths[0] < self.shortest:
            raise ValueError(
                f"needle.lengths={','.join(map(str, given))}; with this tokenizer the needle and question take "
                f"{self.shortest} tokens at least"
            )
        return lengths

    def text_length(self, length: int) -> int:
        """Tokens of text, needle included, in a prompt of this length."""
        return length - self._buffer

    def prompts(self, text: np.ndarray, length: int) -> list[NeedlePrompt]:
        """Every prompt of one length, all of as many tokens: without the needle, then by mode, depth and sample.

        Args:
            text: int32 [samples, text_length of the longest length, or more].
            length: of `lengths`.
        """
        size = self.text_length(length)
        stops = np.array([self._stops(row[:size]) for row in text])
        made = [self._prompt("", math.nan, i, row[:size], None) for i, row in enumerate(text)]
        for mode in self.config.modes:
            rest = size - len(self._needles[mode])
            for depth in self.config.depths:
                made += [
                    self._prompt(mode, depth, i, row[:rest], stops[i, :rest])
                    for i, row in enumerate(text)
                ]
        return made

    def _prompt(self, mode, depth, sample, text, stops) -> NeedlePrompt:
        place = -1
        if mode:
            place = len(text)
            if depth < 100:
                before = np.flatnonzero(stops[: int(len(text) * depth / 100)])
                place = int(before[-1]) + 1 if before.size else 0
        cut = max(place, 0)
        parts = (self._bos, text[:cut], self._needles[mode], text[cut:], self._end)
        return NeedlePrompt(mode, depth, sample, place, np.concatenate(parts))

    def _stops(self, text: np.ndarray) -> np.ndarray:
        """Whether each token ends in a full stop; with the published prompt, whether it is one."""
        if self.config.prompt == "published":
            return np.isin(text, self.tokenizer.encode("."))
        ids, where = np.unique(text, return_inverse=True)
        ends = [self.tokenizer.decode([i]).rstrip().endswith(".") for i in ids.tolist()]
        return np.array(ends, bool)[where]


def haystack_tokens(
    data: DataConfig, tokenizer: Tokenizer, number: int, *, vocab_size: int
) -> np.ndarray:
    """The first tokens of the held-out data, documents end to end without their BOS.

    Args:
        data: where the text is; a store or text.
        tokenizer: the store's.
        number: tokens wanted.
        vocab_size: the model's.

    Returns:
        int32 [number], or fewer where there are no more.

    Raises:
        ValueError: no data, data of another tokenizer, or nothing in it but BOS.
    """
    data.validate()
    bos_id, source = bos_id_of(data, tokenizer), open_store(data, heldout=True)
    parts, found = [], 0
    if source is not None:
        store, first, count = source
        store.check_tokenizer(tokenizer)
        blocks = (
            store.read(row, start, min(_READ, store.length - start), vocab_size=vocab_size)[0]
            for row in range(first, first + count)
            for start in range(0, store.length, _READ)
        )
    else:
        documents = open_documents(data, heldout=True)
        pieces = (documents[i] for i in range(len(documents)))
        blocks = (
            _ids(tokenizer.encode(piece.text + ("\n\n" if piece.ends else ""))) for piece in pieces
        )
    for block in blocks:
        parts.append(block if bos_id is None else block[block != bos_id])
        found += parts[-1].size
        if found >= number:
            break
    text = np.concatenate(parts)[:number]
    if not text.size:
        raise ValueError(f"no text in {data.heldout_path or data.path!r} to hide a needle in")
    return text


def _ids(ids) -> np.ndarray:
    return np.asarray(ids, np.int32)
