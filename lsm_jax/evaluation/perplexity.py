"""Compute the loss of a model at every position of held-out documents, in memory that does not grow with
their length."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lsm_jax.evaluation.curve import LossCurve
from lsm_jax.evaluation.progress import EvaluationProgress
from lsm_jax.evaluation.reader import Reader
from lsm_jax.models import Decoder, next_token_loss

_ROW_FIELDS = ("tokens", "labels", "loss_mask", "segment_ids", "positions")


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The losses of a model on held-out data, and counts of what was read.

    Attributes:
        curve: loss by position.
        num_sequences: number of rows in which a token was scored.
        num_byte_labels: number of scored labels that are bytes (below 256), the denominator of bits per byte.
        seconds: wall time, including compilation.
        row_losses: float64 [num_sequences], the mean loss of the scored tokens of each such row, in nats.
    """

    curve: LossCurve
    num_sequences: int
    num_byte_labels: int
    seconds: float
    row_losses: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))

    @property
    def row_perplexity(self) -> float:
        """The mean over the held-out rows of exp(mean loss of the row's scored tokens).

        Liger's paper (arXiv 2503.01496) defines validation perplexity so, with rows of 1,024 tokens. It is at
        least the exponential of the mean loss if all rows have equally many scored tokens.
        """
        return float(np.mean(np.exp(self.row_losses)))

    @property
    def bits_per_byte(self) -> float:
        """The model's loss in bits per byte, for a byte tokenizer; the loss of separators is counted as
        part of the bytes' loss."""
        return float(self.curve.total.sum() / np.log(2) / self.num_byte_labels)


class Scorer(Reader):
    """Compute the per-token losses of batches piece by piece (`piece_length` tokens of each row in a call);
    the model's state is carried from piece to piece of a row.

    The compiled program has the activations of one piece, so memory does not grow with T (except that
    softmax layers without a window have T keys and values). Rows no longer than a piece are computed without
    a state. The rows of a batch are distributed over all devices of this host, and if there are fewer rows
    than devices, the tokens of each row are, too.

    Args:
        model: the decoder.
        piece_length: tokens of each row read at a time.
        rows: number of rows in a batch; None means at least one row per device.
    """

    def __init__(self, model: Decoder, *, piece_length: int = 4096, rows: int | None = None):
        super().__init__(model, piece_length=piece_length, rows=rows)

        def score(params, state, piece):
            model = self._model(params)
            inputs = {k: piece[k] for k in ("segment_ids", "positions") if k in piece}
            hidden, state, _ = model.hidden(piece["tokens"], state=state, **inputs)
            nll = next_token_loss(
                hidden,
                model.head(),
                piece["labels"],
                piece["loss_mask"],
                chunk_size=model.loss_chunk_size,
                cap=model.logits_cap,
            )
            return nll, state

        self.score_piece = jax.jit(
            score, donate_argnums=1, out_shardings=(self._rows, self._state_rows)
        )
        self._score_whole = jax.jit(lambda params, piece: score(params, None, piece)[0])

    def __call__(self, batch: Mapping[str, np.ndarray]) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the losses of a batch's tokens in nats, one piece of its rows after another in order:
        (position of the piece's first token, losses float32 [B, piece]).

        Args:
            batch: tokens, labels [B, T], and loss_mask, segment_ids, positions if the data has them.

        Raises:
            ValueError: a token or label is outside the model's vocabulary.
        """
        rows, length = batch["tokens"].shape
        fields = {name: np.asarray(batch[name]) for name in _ROW_FIELDS if name in batch}
        fields.setdefault("loss_mask", np.ones((rows, length), np.float32))
        self._check(fields)
        # Rows that are added to fill the devices are not scored: their mask is 0.
        fields = {k: self._filled(v) for k, v in fields.items()}
        state = None
        if length > self.piece_length:
            with jax.set_mesh(self._mesh):
                state = self.init_state(len(fields["tokens"]), length)
        for start in range(0, length, self.piece_length):
            piece = {k: v[:, start : start + self.piece_length] for k, v in fields.items()}
            piece = jax.device_put(piece, self._rows)
            # The mesh is not set across the yield, so that it does not affect the caller.
            with jax.set_mesh(self._mesh):
                if state is None:
                    nll = self._score_whole(self._params, piece)
                else:
                    nll, state = self.score_piece(self._params, state, piece)
            yield start, np.asarray(nll)[:rows]

    def compiled(self, *, rows: int, length: int) -> Any:
        """Return the compiled program that computes the losses of one piece [rows, piece_length] of a
        batch, so that its memory and its operations can be inspected. Nothing is run.

        Args:
            rows: number of rows, a multiple of the devices they are distributed over.
            length: tokens of a row, more than a piece.
        """
        with jax.set_mesh(self._mesh):
            state = jax.eval_shape(lambda: self.init_state(rows, length))
            kinds = dict(tokens=jnp.int32, labels=jnp.int32, loss_mask=jnp.float32)
            piece = {
                name: jax.ShapeDtypeStruct((rows, self.piece_length), kind, sharding=self._rows)
                for name, kind in kinds.items()
            }
            return self.score_piece.lower(self._params, state, piece).compile()

    def _check(self, fields: Mapping[str, np.ndarray]) -> None:
        scored = fields["loss_mask"] != 0
        for name, ids in (("tokens", fields["tokens"]), ("labels", fields["labels"][scored])):
            if ids.size and not 0 <= ids.min() <= ids.max() < self.vocab_size:
                raise ValueError(
                    f"{name} has ids from {ids.min()} to {ids.max()}; the model's vocabulary has "
                    f"{self.vocab_size}: is this the tokenizer it was trained with?"
                )


def evaluate(
    model: Decoder,
    batches: Iterable[Mapping[str, np.ndarray]],
    *,
    num_batches: int | None = None,
    piece_length: int = 4096,
    progress: bool = True,
) -> Evaluation:
    """Compute a model's loss by position over batches of held-out data.

    Args:
        model: the decoder.
        batches: batches of `lsm_jax.data`, all of rows of one length T; the last batch may have fewer rows.
            With `positions` a token counts at its position in its document, otherwise at its position in the
            row.
        num_batches: number of batches for the progress bar; None if not known. It does not limit what is
            read.
        piece_length: tokens of each row read at a time.
        progress: show a bar.

    Returns:
        The curve, and counts of what was read.

    Raises:
        ValueError: there is no batch, rows differ in length, ids are outside the vocabulary, or a loss is
            not finite.
    """
    scorer: Any = None
    curve, byte_labels, size = None, 0, 0
    row_losses: list[np.ndarray] = []
    with EvaluationProgress("evaluating", None, unit="pieces", show=progress) as bar:
        for batch in batches:
            rows, length = batch["tokens"].shape
            if curve is None:
                curve, size = LossCurve(length), rows
                scorer = Scorer(model, piece_length=piece_length, rows=rows)
                pieces = -(-length // piece_length)
                bar.expect(None if num_batches is None else num_batches * pieces)
            if length != curve.length:
                raise ValueError(
                    f"a batch has rows of {length} tokens, earlier ones of {curve.length}"
                )
            batch, full = _fill(batch, max(size - rows, 0)), batch
            mask = full.get("loss_mask")
            scored = np.ones((rows, length), bool) if mask is None else np.asarray(mask) != 0
            sums = np.zeros(rows)
            for start, nll in scorer(batch):
                piece = slice(start, start + nll.shape[1])
                curve.add(
                    nll[:rows],
                    None if mask is None else mask[:, piece],
                    full["positions"][:, piece] if "positions" in full else None,
                    start=start,
                )
                sums += np.where(scored[:, piece], nll[:rows], 0).sum(axis=1, dtype=np.float64)
                bar.advance(rows * nll.shape[1], curve.mean if curve.num_tokens else float("nan"))
            counts = scored.sum(axis=1)
            row_losses.append(sums[counts > 0] / counts[counts > 0])
            byte_labels += int(np.count_nonzero(np.asarray(full["labels"])[scored] < 256))
        seconds = bar.seconds
    if curve is None:
        raise ValueError("the data has no batch to evaluate")
    losses = np.concatenate(row_losses)
    return Evaluation(curve, losses.size, byte_labels, seconds, losses)


def _fill(batch: Mapping[str, np.ndarray], rows: int) -> dict[str, Any]:
    """Return the batch with `rows` rows of zeros appended, whose loss mask is 0. A smaller last batch then
    has the shape of the others, and the program is not compiled again."""
    if not rows:
        return dict(batch)
    filled = {k: np.pad(np.asarray(v), ((0, rows), (0, 0))) for k, v in batch.items()}
    if "loss_mask" not in batch:
        shape = batch["tokens"].shape
        filled["loss_mask"] = np.pad(np.ones(shape, np.float32), ((0, rows), (0, 0)))
    return filled
