"""Queries, keys and forget gates of real text, for benchmarks of attention whose speed depends on the gates.

Pruning skips the keys that the forget gates make negligible. The gates of an untrained model are near one half at
every token, and made-up ones are those that their author chose. Here a small FoX is therefore trained on the text of
`benchmarks.text`, and its layers read held-out text.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks import text
from benchmarks.training import last_value, train_to_end
from lsm_jax import load_run, models
from lsm_jax.data import DataConfig, load_tokenizer, make_eval_iterator
from lsm_jax.evaluation.maps import run_layers
from lsm_jax.training import OptimizerConfig, TrainConfig
from lsm_jax.training.metrics import read_rows

HELDOUT = 0.05  # share of the files that the model does not train on: 180,000 tokens of 12 MB


@dataclasses.dataclass(frozen=True)
class Training:
    """How a FoX (Pro) is trained whose gates are timed.

    Attributes:
        width: width of the model.
        layers: number of layers.
        length: tokens of a training row.
        batch_size: rows of a step.
        steps: number of steps.
        vocab_size: tokens of the vocabulary.
        peak_lr: the highest learning rate.
        max_bytes: largest size of the text in bytes.
        folder: where the text is stored; None is `runs/text`.
    """

    width: int = 512
    layers: int = 8
    length: int = 4096
    batch_size: int = 32
    steps: int = 128
    vocab_size: int = 8192
    peak_lr: float = 1e-3
    max_bytes: int = 12_000_000
    folder: Path | None = None

    def data(self, length: int) -> DataConfig:
        """Return the data config of the text in rows of `length` tokens."""
        config = text.data_config(
            length, self.vocab_size, folder=self.folder, max_bytes=self.max_bytes
        )
        return dataclasses.replace(config, heldout_fraction=HELDOUT)

    def config(self, dim: int) -> TrainConfig:
        """Return the training config of a FoX with heads of `dim` channels.

        Raises:
            ValueError: `dim` does not divide the width.
        """
        if self.width % dim:
            raise ValueError(f"heads of {dim} channels: accepted are divisors of the width {self.width}")  # fmt: skip
        model = models.fox("pro", "125m", vocab_size=self.vocab_size)
        model.layers["L"].mixer.num_heads = self.width // dim
        model.hidden_size, model.num_layers, model.remat = self.width, self.layers, "dots"
        tokens = self.batch_size * self.length
        return TrainConfig(
            name="forget_gates",
            model=model,
            data=self.data(self.length),
            optimizer=OptimizerConfig(
                peak_lr=self.peak_lr, warmup_tokens=self.steps // 10 * tokens, weight_decay=0.1
            ),
            batch_size=self.batch_size,
            total_tokens=self.steps * tokens,
            log_every=min(16, self.steps),
            eval_every=self.steps,
            eval_batches=1,
        )


def train_fox(dim: int, training: Training) -> tuple[Any, dict[str, Any]]:
    """Train a FoX with heads of `dim` channels on the text; return the model and the fields of rows that say how it was
    trained, with its held-out loss in nats per token.
    """
    config = training.config(dim)
    with tempfile.TemporaryDirectory() as folder:
        train_to_end(config, Path(folder))
        model = load_run(Path(folder)).model
        loss = last_value(read_rows(Path(folder) / "metrics.jsonl"), "val/loss")
    about = dict(
        model="FoX (Pro)", width=training.width, layers=training.layers, length=training.length,
        tokens=config.total_tokens, heldout_loss=round(loss, 4),
    )  # fmt: skip
    return model, about


def heldout_rows(rows: int, length: int, training: Training) -> np.ndarray:
    """Return int32 [rows, length]: consecutive held-out tokens of the text.

    Raises:
        ValueError: the held-out text has fewer tokens.
    """
    config = dataclasses.replace(training.data(length), num_threads=0, prefetch=0)
    batches = make_eval_iterator(
        config, load_tokenizer(config.tokenizer), global_batch_size=1, vocab_size=training.vocab_size
    )  # fmt: skip
    whole = (batch["tokens"] for batch in batches if np.all(batch["loss_mask"]))
    found = [row for row, _ in zip(whole, range(rows), strict=False)]
    if len(found) < rows:
        raise ValueError(
            f"{rows} rows of {length} held-out tokens: the text has {len(found)}; accepted are fewer or shorter rows"
        )
    return np.concatenate(found)


def attention_inputs(model: Any, tokens: np.ndarray, heads: int) -> tuple[Any, Any, np.ndarray]:
    """Return queries and keys, bfloat16 [B, T, heads, D], and log forget gates, float32 [B, T, heads], of a FoX on `tokens`
    int [B, T], each row of which is read as one document.

    The heads are those of all layers, at even distances in the order of layers and heads; a model with fewer heads has
    some of them several times.
    """
    parts = [_heads_of_row(model, row, heads) for row in tokens]
    q, k, gates = (np.concatenate(part) for part in zip(*parts, strict=True))
    return jnp.asarray(q), jnp.asarray(k), gates


def _heads_of_row(model: Any, row: np.ndarray, heads: int) -> tuple[np.ndarray, ...]:
    """Return the arrays of `attention_inputs` for one row, each with a first axis of 1."""
    layers = range(model.num_periods * len(model.periods.blocks))
    inputs = [arrays for _, arrays, _ in run_layers(model, row, layers)]
    count = inputs[0]["log_forget"].shape[2]
    chosen = np.linspace(0, len(layers) * count - 1, heads).round().astype(int)

    def pick(name: str, dtype: Any) -> np.ndarray:
        of_heads = [inputs[head // count][name][:, :, head % count] for head in chosen]
        return np.asarray(jnp.stack(of_heads, axis=2).astype(dtype))

    return pick("q", jnp.bfloat16), pick("k", jnp.bfloat16), pick("log_forget", jnp.float32)
