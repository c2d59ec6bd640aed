"""The request of an evaluation of a run: which data, how much of it, and the options of each task."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lsm_jax.data import DataConfig, Tokenizer
from lsm_jax.data.datasets_source import data_set
from lsm_jax.data.mixed_streams import heldout_stores
from lsm_jax.data.needle import NeedleConfig
from lsm_jax.data.sources import tokenizer_of
from lsm_jax.data.store_streams import num_columns
from lsm_jax.evaluation.harness import HarnessConfig
from lsm_jax.evaluation.maps import MapsConfig

if TYPE_CHECKING:
    from lsm_jax.training.runs import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """The data and the options of an evaluation; the defaults use the run's data and length.

    Attributes:
        data: a store, or a text or JSONL file or folder; None is the run's held-out data.
        data_as_trained: whether `data` has the format of the run's data, such as instructions; otherwise it
            is text or a store.
        sequence_length: tokens of a row; None is the run's length.
        batch_size: rows read at a time.
        piece_length: tokens of each row computed at a time; the state is carried from piece to piece.
        max_tokens: stop after the batch with which so many tokens are read; None reads all.
        prompt: text to continue, or to map.
        chat: whether the prompt is a user's message, to be put into the tokenizer's chat template; EOS ends
            the answer.
        num_tokens: number of tokens to generate at most.
        temperature: divides the logits; 0 is greedy. None is 0 for a chat, whose answers small models get right most often
            so, and 0.8 for other prompts.
        top_k: sample from the k most likely tokens only.
        top_p: sample from the smallest set of tokens that has this probability.
        seed: the seed of sampling.
        needle: the text that is hidden in the data, and the question about it.
        maps: which layers and heads to show.
        lm_eval: which tasks of lm-evaluation-harness to run.
    """

    data: str | None = None
    data_as_trained: bool = False
    sequence_length: int | None = None
    batch_size: int = 8
    piece_length: int = 4096
    max_tokens: int | None = None
    prompt: str = ""
    chat: bool = False
    num_tokens: int = 256
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    needle: NeedleConfig = dataclasses.field(default_factory=NeedleConfig)
    maps: MapsConfig = dataclasses.field(default_factory=MapsConfig)
    lm_eval: HarnessConfig = dataclasses.field(default_factory=HarnessConfig)

    def validate(self) -> None:
        """Raise ValueError if a number of the request is out of range, its data does not exist or the
        prompt is not UTF-8."""
        for name in ("sequence_length", "batch_size", "piece_length", "max_tokens", "num_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: it must be at least 1")
            if value is not None and value >= 2**31:
                raise ValueError(f"{name}={value}: it must be below 2^31")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed}: accepted are 0 to 2^63 - 1")
        self.needle.validate()
        self.maps.validate()
        self.lm_eval.validate()
        if self.temperature is not None and not 0 <= self.temperature < math.inf:
            raise ValueError(
                f"temperature={self.temperature}: accepted are 0 (greedy) and positive numbers"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k}: it must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: accepted are numbers in (0, 1]")
        exists = bool(self.data) and Path(self.data).expanduser().exists()
        if self.data is not None and not exists and not (self.data and data_set(self.data)):
            raise ValueError(
                f"data={self.data!r} does not exist; accepted is a token store, a file or folder with text, or a data set, as for "
                "data.path"
            )
        try:
            self.prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"prompt={self.prompt!a}: not UTF-8 at character {error.start}; accepted is UTF-8 text"
            ) from error

    @property
    def sampling_temperature(self) -> float:
        """The temperature at which text is sampled: the given one, or the default of a chat or of another prompt."""
        if self.temperature is not None:
            return self.temperature
        return 0.0 if self.chat else 0.8

    def folder(self, step: int) -> str:
        """Return the name of the folder for the results, such as 1000-books-T8192: the checkpoint's step,
        and the data, row length and token limit if the request sets them."""
        parts = [str(step)]
        if self.data is not None:
            path = Path(self.data).absolute()
            # A store is named after its folder, since its file name is nearly always heldout.zarr.
            parts += [path.parent.name] if path.suffix == ".zarr" else []
            stem = path.stem if path.exists() else re.sub(r"[^\w.-]+", "-", path.stem).strip("-")
            parts += [stem]
        parts += [f"T{self.sequence_length}"] if self.sequence_length else []
        parts += [f"first{self.max_tokens}"] if self.max_tokens else []
        return "-".join(parts)


def heldout_config(run: Run, request: Request) -> DataConfig:
    """Return the data config with which an evaluation reads its data: the run's data config, with the
    request's data, format and row length in place of the run's where the request sets them. Every token of
    a store is read, whether or not the row length divides its documents' length."""
    changes: dict[str, Any] = {"row_remainder": "overlap"}
    if request.data is not None:
        inner_store = Path(request.data).expanduser() / "heldout.zarr"
        changes["heldout_path"] = str(inner_store) if inner_store.is_dir() else request.data
        if run.config.data.format != "text" and not request.data_as_trained:
            changes |= {"format": "text", "packing": "concat"}
    if request.sequence_length is not None:
        changes["sequence_length"] = request.sequence_length
        # Text is packed with the largest alignment that divides both.
        align = math.gcd(run.config.data.align_documents, request.sequence_length)
        changes["align_documents"] = align
    return dataclasses.replace(run.config.data, **changes)


def run_tokenizer(run: Run) -> Tokenizer:
    """Load the tokenizer with which a run was trained, from its data config."""
    return tokenizer_of(run.config.data)


def run_bos_id(run: Run, tokenizer: Tokenizer) -> int | None:
    """Return the id of the token that the run put in front of each document, or None if it put none."""
    data = run.config.data
    bos_id = tokenizer.bos_id if data.bos_id is None else data.bos_id
    return bos_id if data.add_bos else None


def count_batches(data: DataConfig, batch_size: int) -> int | None:
    """Return the number of batches of a store, or of the stores of a mixture, that an evaluation reads; None for text, whose number of rows
    is known only after packing."""
    stores = heldout_stores(data)
    if stores is None:
        return None
    sequences = sum(documents * num_columns(data, store) for store, _, documents in stores)
    return math.ceil(sequences / batch_size)
