"""Draw examples of multi-query associative recall (arXiv 2312.04927, as zoology generates them): key-value
pairs, then queries."""

# No `from __future__ import annotations`: config flags read the fields' types as objects.
import dataclasses
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

NOT_ASKED = -1


@dataclasses.dataclass(kw_only=True)
class RecallTask:
    """A task of multi-query associative recall: how many examples there are, and their length and number of
    pairs.

    Attributes:
        length: tokens in an example.
        num_pairs: pairs of a key and its value; each key is queried once.
        num_examples: number of examples.
    """

    length: int
    num_pairs: int
    num_examples: int

    @property
    def name(self) -> str:
        """The recall task's name in tables and metrics: tokens in an example x key-value pairs, such as
        "64x4"."""
        return f"{self.length}x{self.num_pairs}"

    @property
    def num_tokens(self) -> int:
        """The number of tokens in an example."""
        return self.length

    def validate(self, vocab_size: int) -> None:
        """Raise ValueError if the task's key-value pairs do not fit into an example's length, or into the
        vocabulary."""
        for name in ("length", "num_pairs", "num_examples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: it must be at least 1")
        if self.length % 2:
            raise ValueError(f"length={self.length}: it must be even")
        if 4 * self.num_pairs > self.length:
            raise ValueError(
                f"num_pairs={self.num_pairs}: pairs and queries require {4 * self.num_pairs} tokens, but "
                f"length={self.length}; at most {self.length // 4} pairs are accepted"
            )
        if vocab_size // 2 <= self.num_pairs:
            raise ValueError(
                f"vocab_size={vocab_size} has vocab_size // 2 - 1 keys, too few for num_pairs={self.num_pairs}, "
                f"which requires a vocabulary of at least {2 * self.num_pairs + 2}"
            )


class RecallExamples(NamedTuple):
    """The N examples of a multi-query associative recall task, of T tokens each.

    Attributes:
        tokens: the token ids, [N, T].
        targets: [N, T], the value to predict at a query, -1 (`NOT_ASKED`) elsewhere.
    """

    tokens: Int[np.ndarray, "N T"]
    targets: Int[np.ndarray, "N T"]

    def queries(self) -> tuple[Int[np.ndarray, "N P"], Int[np.ndarray, "N P"]]:
        """Return the positions in the row of each example's P queries, in ascending order, and the token
        ids to predict there: int32 [N, P] each, for N recall examples."""
        rows, places = np.nonzero(self.targets != NOT_ASKED)
        positions = places.reshape(len(self.tokens), -1).astype(np.int32)
        return positions, np.take_along_axis(self.targets, positions, axis=1)


def recall_examples(
    task: RecallTask,
    *,
    vocab_size: int = 8192,
    seed: int | tuple[int, ...] = 0,
    power: float = 0.01,
    random_fill: bool = True,
) -> RecallExamples:
    """Draw the examples of a multi-query associative recall task: key-value pairs, then the keys as
    queries.

    An example begins with the pairs, `k₁ v₁ k₂ v₂ ...`. Each key is repeated once, `2 g` tokens after the last pair; there its
    value is the target. The gaps g are drawn without replacement with weights `(g + 1)^(power - 1)`. Keys are from
    1..V/2-1 and values from V/2..V-1, both drawn without replacement in each example.

    Args:
        task: length, pairs and number of examples.
        vocab_size: V, the number of token ids.
        seed: the same seed gives the same examples.
        power: exponent of the distribution of gaps: 1 is uniform; the nearer to 0, the likelier short gaps are.
        random_fill: draw the remaining tokens uniformly from 0..V-1 (zoology's `random_non_queries`); otherwise they are 0.

    Raises:
        ValueError: the task does not fit into its length or the vocabulary, or `power` is not positive.
    """
    task.validate(vocab_size)
    if not power > 0:
        raise ValueError(f"power={power}: it must be greater than 0")
    rng = np.random.default_rng(seed)
    number, pairs, length = task.num_examples, task.num_pairs, task.length
    half, prefix = vocab_size // 2, 2 * task.num_pairs
    keys = 1 + _distinct(rng, number, pairs, half - 1)
    values = half + _distinct(rng, number, pairs, vocab_size - half)

    # The largest values of log p plus Gumbel noise are draws without replacement from p (arXiv 1903.06059).
    places = (length - prefix) // 2
    log_weight = (power - 1) * np.log(np.arange(1, places + 1))
    noisy = log_weight + rng.gumbel(size=(number, places))
    gaps = np.argsort(-noisy, axis=1)[:, :pairs]
    asked = prefix + 2 * gaps

    if random_fill:
        tokens = rng.integers(vocab_size, size=(number, length), dtype=np.int32)
    else:
        tokens = np.zeros((number, length), np.int32)
    tokens[:, 0:prefix:2] = keys
    tokens[:, 1:prefix:2] = values
    np.put_along_axis(tokens, asked, keys, axis=1)
    targets = np.full((number, length), NOT_ASKED, np.int32)
    np.put_along_axis(targets, asked, values, axis=1)
    return RecallExamples(tokens, targets)


def _distinct(rng: np.random.Generator, number: int, count: int, size: int) -> np.ndarray:
    """Draw random integers int32 [number, count] from 0..size-1, uniformly and without replacement within
    each row."""
    if 2 * count > size:
        return np.argsort(rng.random((number, size)), axis=1)[:, :count].astype(np.int32)
    drawn = rng.integers(size, size=(number, count), dtype=np.int32)
    rows = np.arange(number)
    while len(rows):  # draw again each value that repeats an earlier one of its row
        part = drawn[rows]
        order = np.argsort(part, axis=1, kind="stable")
        ordered = np.take_along_axis(part, order, axis=1)
        repeats = np.zeros(part.shape, bool)
        np.put_along_axis(repeats, order[:, 1:], ordered[:, 1:] == ordered[:, :-1], axis=1)
        part[repeats] = rng.integers(size, size=int(repeats.sum()), dtype=np.int32)
        drawn[rows] = part
        rows = rows[repeats.any(axis=1)]
    return drawn
