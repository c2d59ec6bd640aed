"""Needle in a haystack: a fact hidden in a long text, and a question about it at the end.

The protocol is that of the Forgetting Transformer's evaluation (arXiv 2503.02130), on any text or store. The default
sentences are not the published ones; all of them are fields of the config.
"""

# No `from __future__ import annotations`: config flags read the fields' types as objects.
import dataclasses
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lsm_jax.data.arguments import bos_id_of
from lsm_jax.data.config import DataConfig
from lsm_jax.data.sources import open_documents, open_store
from lsm_jax.data.tokenizers import Tokenizer
from lsm_jax.files import MEGABYTE, bounded_json

MODES = ("easy", "standard")
_TEXTS = ("question", "cue", "answer", "instruction")
_PUBLISHED_LENGTHS = tuple(range(1000, 32001, 3100))
JUDGES = ("containment", "requests")
_BLOCK = 1 << 16  # tokens of a store to read at a time


def read_texts(path: str | Path) -> dict[str, Any]:
    """Read the texts of a needle-in-a-haystack prompt from a file: a JSON object with "question", "cue",
    "answer" and "instruction", and perhaps "judge".

    "judge" is an object with "model", "system" and "user"; "user" contains {reference}, {input} and {prediction}.

    Raises:
        ValueError: the file cannot be read, or something in it is missing or no text.
    """
    try:
        texts = bounded_json(Path(path).expanduser(), max_bytes=MEGABYTE, accepted=object)
    except ValueError as error:
        raise ValueError(
            f"needle.prompt={str(path)!r} cannot be read: {error}; accepted are 'own' and a JSON file of texts"
        ) from error
    parts: list[tuple[Any, str, tuple[str, ...]]] = [(texts, "", _TEXTS)]
    if isinstance(texts, dict) and "judge" in texts:
        parts.append((texts["judge"], "judge.", ("model", "system", "user")))
    for part, prefix, names in parts:
        wrong = [n for n in names if not isinstance(part, dict) or not isinstance(part.get(n), str)]
        if wrong:
            raise ValueError(
                f"needle.prompt={str(path)!r} has no text under {', '.join(prefix + n for n in wrong)}"
            )
    for field in ("{reference}", "{input}", "{prediction}"):
        if "judge" in texts and field not in texts["judge"]["user"]:
            raise ValueError(f"needle.prompt={str(path)!r}: judge.user has no {field}")
    return texts


@dataclasses.dataclass(kw_only=True)
class NeedleConfig:
    """The config of a needle-in-a-haystack test: the fact (needle), its places in a long text, and the
    question about it.

    The needle is the line `<cue> <answer>.`; in mode "easy" the question precedes it in the same line. After the text follow
    `instruction`, `question` and `cue`. The model must continue with `answer`.

    Attributes:
        lengths: tokens of prompt and answer together. Empty: a quarter, half, one and two training lengths, if they are
            long enough for the question. Published: 1000, 4100, ..., 32000.
        depths: positions of the needle in percent of the text; it is inserted after the last full stop before that position.
        modes: "easy", "standard" or both.
        samples: number of excerpts of the text for each length, depth and mode.
        buffer: tokens of the length that are reserved for the question and answer; None is as many as they require.
            Published: 200.
        new_tokens: maximum number of tokens to generate; None is twice the answer's.
        question: follows the text.
        cue: the beginning of the answer, which is part of the prompt.
        answer: the text to find in the model's continuation.
        instruction: precedes the question.
        prompt: "own": the texts of the fields above. Or a JSON file with other texts under "question", "cue", "answer" and
            "instruction", such as those of the Forgetting Transformer's evaluation (its eval/niah folder), which are not part
            of this library. With a file the published protocol holds: its lengths, a buffer of 200 tokens for the question and
            1,024 new tokens where these fields are not given, and the needle after a "." token.
        judge: "containment": whether the continuation contains the answer. Or "requests": also write a request to a judging
            model for each continuation, with the messages under "judge" in the prompt's file
            (`python -m lsm_jax.evaluation.judge`).
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
        """Return the needle config with the texts of the prompt's file and the published numbers; the
        config itself if `prompt` is "own".

        Raises:
            ValueError: the file cannot be read or lacks a text.
        """
        if self.prompt == "own":
            return self
        texts = read_texts(self.prompt)
        return dataclasses.replace(
            self,
            **{name: texts[name] for name in _TEXTS},
            lengths=self.lengths or _PUBLISHED_LENGTHS,
            buffer=self.buffer or 200,
            new_tokens=self.new_tokens or 1024,
        )

    def validate(self) -> None:
        """Check the values of the needle-in-a-haystack config.

        Raises:
            ValueError: a value is not accepted; the message names the field, the value and what is accepted.
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
            raise ValueError(f"needle.depths={self.depths}; accepted are percentages from 0 to 100")
        if not set(self.modes) <= set(MODES):
            raise ValueError(f"needle.modes={self.modes}; accepted: {', '.join(MODES)}")
        if self.judge not in JUDGES:
            raise ValueError(f"needle.judge={self.judge!r}; accepted: {', '.join(JUDGES)}")
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        texts = {} if self.prompt == "own" else read_texts(self.prompt)
        for name in _TEXTS if texts else ():
            if getattr(self, name) not in (defaults[name], texts[name]):
                raise ValueError(
                    f"needle.{name}={getattr(self, name)!r} and needle.prompt={self.prompt}; accepted is one of them"
                )
        if self.judge == "requests" and "judge" not in texts:
            raise ValueError(
                f"needle.judge=requests and needle.prompt={self.prompt}; accepted is a file with the judge's messages under 'judge'"
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
                raise ValueError(
                    f"needle.{name}={getattr(self, name)!r}; accepted is a text that is not empty"
                )


class NeedlePrompt(NamedTuple):
    """One prompt of a needle-in-a-haystack test, a long text and a question, with or without the needle.

    Attributes:
        mode: "easy" or "standard"; "" without the needle.
        depth: the requested depth in percent; NaN without the needle.
        sample: number of the excerpt.
        place: number of tokens of text before the needle; -1 without it.
        tokens: int32 [P], the token ids of the prompt.
    """

    mode: str
    depth: float
    sample: int
    place: int
    tokens: np.ndarray


class NeedleTask:
    """The prompts of a needle-in-a-haystack test, as token ids of one tokenizer.

    Attributes:
        answer: int32 [A], the token ids of the answer that should follow a prompt.
        new_tokens: maximum number of tokens to generate.
    """

    def __init__(self, config: NeedleConfig, tokenizer: Tokenizer, *, bos_id: int | None):
        """Tokenise the needle, the question and the answer of a needle-in-a-haystack test, from which its
        prompts are made.

        Args:
            config: the needle-in-a-haystack config; it is validated.
            tokenizer: the model's tokenizer.
            bos_id: id in front of every prompt; None adds none.

        Raises:
            ValueError: the config is not accepted, or its buffer is too small for the question and answer.
        """
        config.validate()
        published, config = config.prompt != "own", config.with_texts()
        self.config, self.tokenizer = config, tokenizer
        fact = f"{config.cue} {config.answer}."
        texts = dict(easy=f"\n{config.question} {fact}\n", standard=f"\n{fact}\n")
        self._needles = {mode: _ids(tokenizer.encode(texts[mode])) for mode in config.modes}
        self._needles[""] = _ids([])
        self._bos = _ids([] if bos_id is None else [bos_id])
        space = " " if published else "\n"
        end = f"\n\n{config.instruction}{space}{config.question} {config.cue}"
        without_answer = tokenizer.encode(end)
        with_answer = tokenizer.encode(f"{end} {config.answer}")
        # A tokenizer may merge the end of the question with the answer: the answer begins at the first id that differs.
        pairs = enumerate(zip(without_answer, with_answer, strict=False))
        shorter = min(len(without_answer), len(with_answer))
        cut = next((i for i, (a, b) in pairs if a != b), shorter)
        self._end, self.answer = _ids(with_answer[:cut]), _ids(with_answer[cut:])
        self.new_tokens = config.new_tokens or 2 * len(self.answer)
        # The published lengths count the prompt only.
        answer_room = 0 if published else self.answer_room
        required = len(self._bos) + len(self._end) + answer_room
        self._buffer = config.buffer or required
        if self._buffer < required:
            raise ValueError(
                f"needle.buffer={config.buffer}; the question and answer require at least {required} tokens"
            )

    @property
    def answer_room(self) -> int:
        """The maximum number of tokens after a needle-in-a-haystack prompt: the larger of the answer's
        length and the number of tokens that the model generates."""
        return max(len(self.answer), self.new_tokens)

    @property
    def shortest(self) -> int:
        """The smallest length of prompt and answer, in tokens, that is enough for question, needle, answer
        and one token of text."""
        return self._buffer + max(map(len, self._needles.values())) + 1

    def lengths(self, train_length: int) -> list[int]:
        """Return the lengths to evaluate, in ascending order: tokens of prompt and answer together.

        Args:
            train_length: tokens of a row in the run's training, from which the default lengths are
                computed.

        Raises:
            ValueError: a length is too short for the needle and question, or all default lengths are.
        """
        if not self.config.lengths:
            given = [int(train_length * times) for times in (0.25, 0.5, 1, 2)]
            lengths = [length for length in given if length >= self.shortest]
        else:
            given = lengths = sorted(self.config.lengths)
        if not lengths or lengths[0] < self.shortest:
            raise ValueError(
                f"needle.lengths={','.join(map(str, given))}; with this tokenizer the needle and question require "
                f"at least {self.shortest} tokens"
            )
        return lengths

    def text_length(self, length: int) -> int:
        """Return how many tokens of text and needle a prompt has if prompt and answer together have
        `length` tokens."""
        return length - self._buffer

    def prompts(self, text: np.ndarray, length: int) -> list[NeedlePrompt]:
        """Return all needle-in-a-haystack prompts of one length; they have the same number of tokens.

        The first ones have no needle; the others are ordered by mode, depth and sample.

        Args:
            text: int32 [samples, at least `text_length` of the longest length], the excerpts.
            length: tokens of prompt and answer together, one of the values of `lengths`.
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
        """Return bool [T]: for each token of the long text, whether a needle may be inserted after it,
        because its text ends with a full stop; by the published protocol, because it is the token of a full
        stop."""
        if self.config.prompt != "own":
            return np.isin(text, self.tokenizer.encode("."))
        ids, where = np.unique(text, return_inverse=True)
        ends = [self.tokenizer.decode([i]).rstrip().endswith(".") for i in ids.tolist()]
        return np.array(ends, bool)[where]


def haystack_tokens(
    data: DataConfig, tokenizer: Tokenizer, number: int, *, vocab_size: int
) -> np.ndarray:
    """Return the first tokens of the held-out data: its documents concatenated, without BOS.

    Args:
        data: the data config of the held-out data, a store or text.
        tokenizer: the tokenizer of the model and the store.
        number: number of tokens to return.
        vocab_size: vocabulary of the model.

    Returns:
        int32 [number], or fewer if the data are shorter.

    Raises:
        ValueError: the data do not exist, have another tokenizer, or contain nothing but BOS.
    """
    data.validate()
    bos_id, source = bos_id_of(data, tokenizer), open_store(data, heldout=True)
    parts, total = [], 0
    if source is not None:
        store, first, count = source
        store.check_tokenizer(tokenizer)
        store.check_vocabulary(vocab_size)
        blocks = (
            store.read(row, start, min(_BLOCK, store.length - start), vocab_size=vocab_size)[0]
            for row in range(first, first + count)
            for start in range(0, store.length, _BLOCK)
        )
    else:
        documents = open_documents(data, heldout=True)
        pieces = (documents[i] for i in range(len(documents)))
        blocks = (
            _ids(tokenizer.encode(piece.text + ("\n\n" if piece.ends else ""))) for piece in pieces
        )
    for block in blocks:
        parts.append(block if bos_id is None else block[block != bos_id])
        total += parts[-1].size
        if total >= number:
            break
    text = np.concatenate(parts)[:number]
    if not text.size:
        raise ValueError(
            f"{data.heldout_path or data.path!r} has no text; the needle task requires some"
        )
    return text


def _ids(ids) -> np.ndarray:
    return np.asarray(ids, np.int32)
