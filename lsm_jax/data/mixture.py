"""Mixtures of several sources with weights: their text form, and the source of every row of training.

The rows of all batches are numbered in the order of training. Each period of 10,000 rows has the same number of rows of each
source, in an order that a seed determines, so that the source of a row, and the row's number in its source, follow from the
row's number alone.
"""

from __future__ import annotations

import functools
import math
import shlex
from collections.abc import Iterable, Sequence

import numpy as np

from lsm_jax.data.order import permutation

PERIOD = 10_000
_ACCEPTED = 'accepted are weights and paths in turn, such as "0.7 stores/web 0.3 stores/code"'


def parse_mixture(text: str) -> list[tuple[float, str]]:
    """Return the (weight, path) of each source of `DataConfig.mixture`.

    Raises:
        ValueError: the text has another form, a weight is no positive number or too small, or a path occurs twice.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"data.mixture={text!r}: {error}; {_ACCEPTED}") from error
    if len(words) % 2 or not words:
        raise ValueError(f"data.mixture={text!r} has {len(words)} words; {_ACCEPTED}")
    sources = []
    for word, path in zip(words[::2], words[1::2], strict=True):
        try:
            weight = float(word)
        except ValueError:
            weight = math.nan
        if not 0 < weight < math.inf or not path:
            raise ValueError(
                f"data.mixture={text!r}: {word!r} is no weight above 0, or its path is empty; {_ACCEPTED}"
            )
        sources.append((weight, path))
    paths = [path for _, path in sources]
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise ValueError(
            f"data.mixture={text!r} has {twice!r} twice; accepted is each path once, with the sum of its weights"
        )
    shares([weight for weight, _ in sources])
    return sources


def format_mixture(sources: Iterable[tuple[float, str]]) -> str:
    """Return the text of which `parse_mixture` returns these weights and paths."""
    return " ".join(f"{weight!r} {shlex.quote(path)}" for weight, path in sources)


def shares(weights: Sequence[float]) -> np.ndarray:
    """Return the number of rows of each source in a period, int64 [sources]; they add up to the period.

    Raises:
        ValueError: a source's share is less than one row.
    """
    exact = np.array(weights) / sum(weights) * PERIOD
    counts = np.floor(exact).astype(np.int64)
    largest = np.argsort(counts - exact, kind="stable")[: PERIOD - counts.sum()]
    counts[largest] += 1
    if (counts < 1).any():
        i = int(np.argmin(counts))
        raise ValueError(
            f"data.mixture: the weight {weights[i]} is less than 1/{PERIOD} of the sum {sum(weights)}; accepted are larger weights"
        )
    return counts


class Schedule:
    """The source of each row of training, and the row's number in that source."""

    def __init__(self, weights: Sequence[float], seed: int):
        """Define the schedule of a mixture.

        Args:
            weights: the weight of each source.
            seed: the same seed gives the same schedule on every host.
        """
        self._counts, self._seed = shares(weights), seed
        self._period = functools.lru_cache(maxsize=4)(self._make_period)

    def _make_period(self, period: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (source, number among the period's rows of that source) of each row of a period, int64 [rows]."""
        source = np.repeat(np.arange(len(self._counts)), self._counts)
        number = np.concatenate([np.arange(n) for n in self._counts])
        # The rows of a source are spread evenly, each at a random place of its own part of the period.
        random = permutation(PERIOD, self._seed, period, PERIOD) / PERIOD
        source = source[np.argsort((number + random) / self._counts[source], kind="stable")]
        ranks = np.empty_like(source)
        for i, count in enumerate(self._counts):
            ranks[source == i] = np.arange(count)
        return source, ranks

    def __call__(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (sources, numbers in them), int64 [n] each, of the rows with the given numbers."""
        sources, numbers = np.empty_like(rows), np.empty_like(rows)
        period, place = np.divmod(rows, PERIOD)
        for p in np.unique(period):
            here = period == p
            source, rank = self._period(int(p))
            sources[here] = source[place[here]]
            numbers[here] = p * self._counts[sources[here]] + rank[place[here]]
        return sources, numbers

    def seen(self, rows: int) -> np.ndarray:
        """Return how many of the first `rows` rows are of each source, int64 [sources]."""
        period, place = divmod(rows, PERIOD)
        begun = np.bincount(self._period(period)[0][:place], minlength=len(self._counts))
        return period * self._counts + begun
