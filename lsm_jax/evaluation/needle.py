"""Needle in a haystack: whether a model finds one fact in a long text, and how much the fact lowers the
answer's loss."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from lsm_jax import mixers
from lsm_jax.data.needle import NeedleTask
from lsm_jax.evaluation.generate import decode
from lsm_jax.evaluation.progress import EvaluationProgress
from lsm_jax.evaluation.reader import Answerer
from lsm_jax.models import Decoder


@dataclasses.dataclass(frozen=True)
class NeedleScores:
    """The scores of a needle-in-a-haystack test by length and depth, means over the samples.

    Attributes:
        lengths: the L lengths, tokens of prompt and answer together.
        depths: the D depths, in percent.
        found: share of greedy continuations that contain the answer, by mode, [L, D].
        nll: loss of the answer in nats per token, by mode, [L, D].
        below_one: share of samples in which that loss is below 1 nat, by mode, [L, D].
        place: tokens of text in front of the needle in the first sample, by mode, [L, D].
        found_without: the same as `found` for the text without the needle, [L].
        nll_without: the same as `nll` for the text without the needle, [L].
        continuations: the model's continuation of the first sample, by mode, a list [L][D].
        seconds: wall time, including compilation.
        num_tokens: number of prompt tokens read.
    """

    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    found: dict[str, Float[np.ndarray, "L D"]]
    nll: dict[str, Float[np.ndarray, "L D"]]
    below_one: dict[str, Float[np.ndarray, "L D"]]
    place: dict[str, Int[np.ndarray, "L D"]]
    found_without: Float[np.ndarray, " L"]
    nll_without: Float[np.ndarray, " L"]
    continuations: dict[str, list[list[str]]]
    seconds: float
    num_tokens: int

    def summary(self) -> dict[str, Any]:
        """Return the scores of the needle test as a dict of JSON values, the content of needle.json."""
        result: dict[str, Any] = {
            "lengths": list(self.lengths),
            "depths": list(self.depths),
            "without_needle": {
                "found": self.found_without.tolist(),
                "nll": self.nll_without.tolist(),
            },
        }
        for mode in self.found:
            result[mode] = {
                "found_mean": float(self.found[mode].mean()),
                "nll_mean": float(self.nll[mode].mean()),
                "found": self.found[mode].tolist(),
                "nll": self.nll[mode].tolist(),
                "below_one": self.below_one[mode].tolist(),
                "place": self.place[mode].tolist(),
                "continuations": self.continuations[mode],
            }
        return result


def contains(text: str, answer: str) -> bool:
    """Return whether a continuation contains the needle's answer; case and white space are ignored."""
    return " ".join(answer.split()).casefold() in " ".join(text.split()).casefold()


def find_needles(
    model: Decoder,
    task: NeedleTask,
    text: Int[np.ndarray, "S N"],
    lengths: Sequence[int],
    *,
    batch_size: int = 8,
    piece_length: int = 4096,
    progress: bool = True,
) -> NeedleScores:
    """Compute the scores of a needle-in-a-haystack test: insert the needle into a text at every depth, for
    prompts of every length, and measure whether the model's continuation contains the answer, and the
    answer's loss; also without the needle.

    Args:
        model: the decoder.
        task: the prompts of the needle-in-a-haystack test, as token ids.
        text: token ids of the texts in which needles are hidden, int32 [samples, N], one per sample; N is at
            least `task.text_length` of the longest length.
        lengths: lengths to evaluate, tokens of prompt and answer together, as from `task.lengths`.
        batch_size: prompts read at a time.
        piece_length: tokens of each prompt read at a time; the state is carried from piece to piece.
        progress: show a bar.

    Raises:
        ValueError: the text is too short, or has ids outside the model's vocabulary.
    """
    config = task.config
    size = task.text_length(max(lengths))
    if text.shape[0] != config.samples or text.shape[1] < size:
        raise ValueError(
            f"text has shape {text.shape}; accepted are {config.samples} rows of {size} tokens or more"
        )
    prompts = [prompt for length in lengths for prompt in task.prompts(text, length)]
    answerer = Answerer(
        model,
        max_length=max(prompt.tokens.size for prompt in prompts),
        num_tokens=task.new_tokens,
        piece_length=piece_length,
    )
    rows = len(prompts) // len(lengths)
    found, nll, continuations = np.zeros(len(prompts)), np.zeros(len(prompts)), []
    # Every length has the same number of prompts. A batch has prompts of one length; the last one is filled
    # up.
    batches = [
        range(first, min(first + batch_size, (i + 1) * rows))
        for i in range(len(lengths))
        for first in range(i * rows, (i + 1) * rows, batch_size)
    ]
    with EvaluationProgress("needle", len(batches), show=progress) as bar:
        for batch in batches:
            filled_batch = [batch[min(i, len(batch) - 1)] for i in range(min(batch_size, rows))]
            tokens = np.stack([prompts[i].tokens for i in filled_batch])
            costs, drawn = answerer(tokens, np.tile(task.answer, (len(filled_batch), 1)))
            for i, cost, ids in zip(batch, costs, drawn, strict=False):
                continuations.append(decode(task.tokenizer, ids))
                nll[i] = np.mean(cost, dtype=np.float64)
                found[i] = contains(continuations[i], config.answer)
            nll_so_far = nll[: len(continuations)]
            bar.advance(len(batch) * tokens.shape[1], float(nll_so_far.mean()))
        seconds = bar.seconds
    not_finite = np.flatnonzero(~np.isfinite(nll))
    if not_finite.size:
        raise ValueError(
            f"the answer's loss is not finite after {prompts[not_finite[0]].tokens.size} tokens"
        )
    return _gather(prompts, lengths, config, found, nll, continuations, seconds)


def _gather(prompts, lengths, config, found, nll, texts, seconds) -> NeedleScores:
    """Average the results of the single prompts of a needle-in-a-haystack test over samples, and return
    them by length and depth.

    The prompts, and `found`, `nll` and `texts` (one entry per prompt: whether the continuation contains the
    answer, the answer's loss, the continuation) are ordered by length, and within a length as
    `NeedleTask.prompts` returns them.
    """
    shape = (len(lengths), -1, config.samples)
    found, nll = found.reshape(shape), nll.reshape(shape)
    first = np.arange(len(prompts)).reshape(shape)[:, :, 0]
    modes: dict[str, slice] = {}
    for i, mode in enumerate(config.modes):
        modes[mode] = slice(1 + i * len(config.depths), 1 + (i + 1) * len(config.depths))
    place = np.array([prompt.place for prompt in prompts])
    return NeedleScores(
        lengths=tuple(lengths),
        depths=tuple(config.depths),
        found={mode: found[:, cells].mean(-1) for mode, cells in modes.items()},
        nll={mode: nll[:, cells].mean(-1) for mode, cells in modes.items()},
        below_one={mode: (nll[:, cells] < 1).mean(-1) for mode, cells in modes.items()},
        place={mode: place[first[:, cells]] for mode, cells in modes.items()},
        found_without=found[:, 0].mean(-1),
        nll_without=nll[:, 0].mean(-1),
        continuations={
            mode: [[texts[i] for i in row] for row in first[:, cells].tolist()]
            for mode, cells in modes.items()
        },
        seconds=seconds,
        num_tokens=sum(prompt.tokens.size for prompt in prompts),
    )


def length_notes(config: Any, lengths: Sequence[int], train_length: int) -> list[str]:
    """Return notes for readers on lengths of a needle test above the training length, or above the number
    of tokens over which the layers' windows can pass a fact on.

    Args:
        config: a `ModelConfig`.
        lengths: lengths in tokens.
        train_length: tokens of a row in training.
    """
    notes = []
    beyond = [length for length in lengths if length > train_length]
    if beyond:
        notes.append(
            f"lengths {', '.join(map(str, beyond))} are over the training length {train_length}: "
            "they include positions that the model was not trained on"
        )
    # A layer that sees only the last w tokens passes a fact on by w - 1 tokens.
    layers = [config.layers[letter].mixer for letter in config.letters()]
    windows = [m.window if mixers.method_of(m).op == "attention" else None for m in layers]
    visible = 1 + sum(math.inf if window is None else window - 1 for window in windows)
    beyond = [length for length in lengths if length > visible]
    if beyond:
        notes.append(
            f"lengths {', '.join(map(str, beyond))} are over the {visible:.0f} tokens that the layers' windows can see together: an earlier "
            "needle cannot be found"
        )
    return notes
