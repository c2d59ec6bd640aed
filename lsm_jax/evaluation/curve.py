"""Compute loss by position in a document: sums and counts per position, and the averages and perplexities
that follow from them."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
from jaxtyping import Float, Int

SHORTEST = 512  # the shortest length reported for a long document


def report_lengths(length: int) -> list[int]:
    """Return the lengths at which to report perplexity: `length`, its half, its quarter and so on, down to
    512 or, if that is less, to an eighth of `length`.

    65536 gives 65536, 32768, ..., 512; 1024 gives 1024, 512, 256, 128.
    """
    if length < 1:
        raise ValueError(f"length={length}: it must be at least 1")
    floor = min(SHORTEST, max(1, length // 8))
    lengths = []
    while length >= floor:
        lengths.append(length)
        length //= 2
    return lengths


class LossCurve:
    """The loss by position of a model: L(i), the mean loss at each position in nats per token, accumulated
    in float64 on the host.

    The protocol is that of the Forgetting Transformer (Lin et al. 2025): every document is read with all of
    its context, L(i) is the mean over documents of the loss at token i, and P(l) = exp(mean over i < l of
    L(i)).

    Attributes:
        total: float64 [T], sum of the losses at each position.
        count: int64 [T], tokens scored at each position.
    """

    def __init__(self, length: int):
        if length < 1:
            raise ValueError(f"length={length}: it must be at least 1")
        self.total = np.zeros(length, np.float64)
        self.count = np.zeros(length, np.int64)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LossCurve:
        """Load the loss by position from the file results.npz of an evaluation.

        Raises:
            ValueError: the file has no `val/loss_per_token` or no `val/tokens_per_position`.
        """
        with np.load(path) as arrays:
            missing = {"val/loss_per_token", "val/tokens_per_position"} - set(arrays.files)
            if missing:
                raise ValueError(f"{path} has no {' and no '.join(sorted(missing))}")
            loss, count = arrays["val/loss_per_token"], arrays["val/tokens_per_position"]
        curve = cls(loss.size)
        curve.count[:] = count
        curve.total[:] = np.where(count > 0, loss, 0.0) * count
        return curve

    @property
    def length(self) -> int:
        """The number T of positions for which the curve has a loss."""
        return self.total.size

    def add(
        self,
        nll: Float[np.ndarray, "B T"],
        loss_mask: Float[np.ndarray, "B T"] | None = None,
        positions: Int[np.ndarray, "B T"] | None = None,
        *,
        start: int = 0,
    ) -> None:
        """Add the losses of tokens to the sums and counts of their positions.

        Args:
            nll: losses of a batch's tokens in nats, [B, T]; values at which the mask is 0 are ignored.
            loss_mask: 0 for tokens that are not scored; None scores all tokens.
            positions: position of each token in its document; None counts positions along the row.
            start: position in the row of the piece's first token; used only without `positions`.

        Raises:
            ValueError: a scored loss is not finite, or a position is outside the curve.
        """
        if positions is None:
            positions = np.broadcast_to(start + np.arange(nll.shape[1]), nll.shape)
        scored = np.ones(nll.shape, bool) if loss_mask is None else np.asarray(loss_mask) != 0
        values, places = np.asarray(nll, np.float64)[scored], np.asarray(positions)[scored]
        if not values.size:
            return
        if places.min() < 0 or places.max() >= self.length:
            raise ValueError(
                f"positions {places.min()} to {places.max()}, accepted: 0 to {self.length - 1}"
            )
        if not np.isfinite(values).all():
            where = places[~np.isfinite(values)][0]
            raise ValueError(
                f"the loss at position {where} is not finite: {values.size} tokens scored"
            )
        self.total += np.bincount(places, weights=values, minlength=self.length)
        self.count += np.bincount(places, minlength=self.length)

    @property
    def loss(self) -> Float[np.ndarray, " T"]:
        """Return L(i) [T], the mean loss at each position in nats per token; NaN at positions at which no
        token was scored."""
        with np.errstate(invalid="ignore"):
            return self.total / np.where(self.count == 0, np.nan, self.count)

    @property
    def num_tokens(self) -> int:
        """The number of tokens scored, over all positions."""
        return int(self.count.sum())

    @property
    def mean(self) -> float:
        """The mean loss of all tokens scored, in nats; if documents differ in length, this is not the mean
        over positions."""
        if not self.num_tokens:
            raise ValueError(
                "no token was scored: the data is empty or its loss_mask is 0 everywhere"
            )
        return float(self.total.sum() / self.num_tokens)

    def average(self, length: int | None = None) -> float:
        """Return the mean over the first `length` positions of the mean loss at each position, nats per
        token. Positions at which no token was scored are left out; NaN if none was."""
        counted = self.count[:length] > 0
        if not counted.any():
            return math.nan
        return float(np.mean(self.total[:length][counted] / self.count[:length][counted]))

    def perplexity(self, length: int | None = None) -> float:
        """Return P(length), the perplexity of the first `length` positions: exp of the mean, over these
        positions, of the mean loss at each position in nats. None is all positions; NaN if no token was scored."""
        return float(np.exp(self.average(length)))

    def running_perplexity(self) -> Float[np.ndarray, " T"]:
        """Return the perplexity P(l) of the first l positions for l = 1 ... T, [T]; NaN before the first
        scored position."""
        counted = self.count > 0
        loss = np.where(counted, self.total / np.maximum(self.count, 1), 0.0)
        number = np.cumsum(counted)
        with np.errstate(invalid="ignore"):
            return np.exp(np.cumsum(loss) / np.where(number == 0, np.nan, number))

    def summary(self) -> dict[str, Any]:
        """Return the numbers to report, by name: for every reported length l its mean loss
        `val/loss_avg_len_{l}` and perplexity `val/perplexity_len_{l}`, and `val/loss` and `val/tokens` of
        all tokens."""
        result: dict[str, Any] = {"val/loss": self.mean, "val/tokens": self.num_tokens}
        for length in report_lengths(self.length):
            if self.count[:length].any():
                result[f"val/loss_avg_len_{length}"] = self.average(length)
                result[f"val/perplexity_len_{length}"] = self.perplexity(length)
        return result
