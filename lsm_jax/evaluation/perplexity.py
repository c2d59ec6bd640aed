"""The loss of a model at every position of held-out documents, in memory that does not grow with their length."""

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
    """What one pass over held-out data gives.

    Attributes:
        curve: loss by position.
        num_sequences: rows in which a token was scored.
        num_byte_labels: scored labels that are bytes (below 256), the denominator of bits per byte.
        seconds: wall time, compilation included.
    """

    curve: LossCurve
    num_sequences: int
    num_byte_labels: int
    seconds: float

    @property
    def bits_per_byte(self) -> float:
        """Bits a byte, for a byte tokenizer: what separators cost is charged to the bytes."""
        return float(self.curve.total.sum() / np.log(2) / self.num_byte_labels)


class Scorer(Reader):
    """Per-token losses of batches, in pieces of the row with the model's state carried from piece to piece.

    The compiled program holds the activations of one piece, so memory is flat in T (softmax layers without a window keep
    their T keys and values). Rows no longer than a piece take the model's stateless path. All devices of this host share
    the rows of a batch, and where these are fewer, the tokens of each.

    Args:
        model: the decoder.
        piece_length: tokens of each row that are read at a time.
        rows: of a batch; None is at least one a device.
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
            )
            return nll, state

        self._score = jax.jit(score, donate_argnums=1, out_shardings=(self._rows, self._state_rows))
        self._score_whole = jax.jit(lambda params, piece: score(params, None, piece)[0])

    def __call__(self, batch: Mapping[str, np.ndarray]) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (first position, losses in nats float32 [B, piece]) for each piece of the batch, in order.

        Args:
            batch: tokens, labels [B, T], and loss_mask, segment_ids, positions where the data has them.

        Raises:
            ValueError: a token or label outside the model's vocabulary.
        """
        rows, length = batch["tokens"].shape
        fields = {name: np.asarray(batch[name]) for name in _ROW_FIELDS if name in batch}
        fields.setdefault("loss_mask", np.ones((rows, length), np.float32))
        self._check(fields)
        # Rows that only fill the devices are scored nowhere: their mask is 0.
        fields = {k: self._filled(v) for k, v in fields.items()}
        state = None
        if length > self.piece_length:
            with jax.set_mesh(self._mesh):
                state = self._init_state(self._params, len(fields["tokens"]), length)
        for start in range(0, length, self.piece_length):
            piece = {k: v[:, start : start + self.piece_length] for k, v in fields.items()}
            piece = jax.device_put(piece, self._rows)
            # Not across the yield: what the caller does between is no business of this mesh.
            with jax.set_mesh(self._mesh):
                if state is None:
                    nll = self._score_whole(self._params, piece)
                else:
                    nll, state = self._score(self._params, state, piece)
            yield start, np.asarray(nll)[:rows]

    def compiled(self, *, rows: int, length: int) -> Any:
        """The program of one whole piece of `rows` rows of `length` tokens, as jax compiled it: its memory, its operations.

        Args:
            rows: a multiple of the devices that share them.
            length: more than a piece.
        """
        with jax.set_mesh(self._mesh):
            state = jax.eval_shape(lambda: self._init_state(self._params, rows, length))
            kinds = dict(tokens=jnp.int32, labels=jnp.int32, loss_mask=jnp.float32)
            piece = {
                name: jax.ShapeDtypeStruct((rows, self.piece_length), kind, sharding=self._rows)
                for name, kind in kinds.items()
            }
            return self._score.lower(self._params, state, piece).compile()

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
    """Loss by position over all the batches.

    Args:
        model: the decoder.
        batches: as `lsm_jax.data` makes them; all rows of one length T, the last batch may have fewer. With
            `positions` a token counts at its position in its document, else at its place in the row.
        num_batches: for the progress bar; None where it is not known. It does not limit what is read.
        piece_length: tokens of each row that are read at a time.
        progress: show a bar.

    Returns:
        The curve, and what was read.

    Raises:
        ValueError: no batch, rows of different lengths, ids outside the vocabulary, or a loss that is not finite.
    """
    scorer: Any = None
    curve, sequences, byte_labels, size = None, 0, 0, 0
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
            for start, nll in scorer(batch):
                piece = slice(start, start + nll.shape[1])
                curve.add(
                    nll[:rows],
                    None if mask is None else mask[:, piece],
                    full["positions"][:, piece] if "positions" in full else None,
                    start=start,
                )
                bar.advance(rows * nll.shape[1], curve.mean if curve.num_tokens else float("nan"))
            scored = np.ones((rows, length), bool) if mask is None else np.asarray(mask) != 0
            sequences += int(scored.any(axis=1).sum())
            byte_labels += int(np.count_nonzero(np.asarray(full["labels"])[scored] < 256))
        seconds = bar.seconds
    if curve is None:
        raise ValueError("the data has no batch to evaluate")
    return Evaluation(curve, sequences, byte_labels, seconds)


def _fill(batch: Mapping[str, np.ndarray], rows: int) -> dict[str, Any]:
    """The batch with so many rows more, of mask 0, so that a last small batch needs no second compilation."""
    if not rows:
        return dict(batch)
    filled = {k: np.pad(np.asarray(v), ((0, rows), (0, 0))) for k, v in batch.items()}
    if "loss_mask" not in batch:
        shape = batch["tokens"].shape
        filled["loss_mask"] = np.pad(np.ones(shape, np.float32), ((0, rows), (0, 0)))
    return filled
