"""Read rows with a model piece by piece, with its state carried on; rows, or parts of a row, are
distributed over devices."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from lsm_jax.models import Decoder, DecoderState, next_token_loss
from lsm_jax.parallel import MeshConfig, batch_sharding, largest_divisor, make_mesh, partition_spec


class Reader:
    """Base class that reads rows of tokens with a model: the parameters are on every device of this host,
    and the rows are distributed over these devices.

    Args:
        model: the decoder.
        piece_length: tokens of each row read at a time.
        rows: rows of a batch. If it has fewer rows than there are devices, the tokens of each row are
            distributed over the remaining devices; None means at least one row per device.
    """

    def __init__(self, model: Decoder, *, piece_length: int = 4096, rows: int | None = None):
        if piece_length < 1:
            raise ValueError(f"piece_length={piece_length}: it must be at least 1")
        self.piece_length = piece_length
        devices = jax.local_devices()
        self._shards = len(devices) if rows is None else largest_divisor(len(devices), rows)
        self.vocab_size = model.vocab_size
        self._graphdef, params = nnx.split(model)
        mesh = MeshConfig(data=self._shards, sequence=len(devices) // self._shards)
        self._mesh = make_mesh(mesh, devices)
        self._rows = batch_sharding(self._mesh)
        self._params = jax.device_put(params, NamedSharding(self._mesh, PartitionSpec()))
        # States of layers have the layers as first axis. The sharding is the same for every call, so all
        # pieces run one program.
        layers = NamedSharding(self._mesh, partition_spec((None, "batch")))
        self._state_rows = DecoderState(layers, cast(Any, self._rows))
        self._init_state = jax.jit(
            lambda params, rows, length: self._model(params).init_state(rows, length),
            static_argnums=(1, 2),
            out_shardings=self._state_rows,
        )

    def init_state(self, rows: int, length: int) -> DecoderState:
        """Return the model's state before the first token, for `rows` rows of up to `length` tokens, on the
        devices."""
        return self._init_state(self._params, rows, length)

    def _model(self, params: Any) -> Decoder:
        return nnx.merge(self._graphdef, params)

    def _filled(self, rows: np.ndarray) -> np.ndarray:
        """Return an array [B, N] of tokens with rows of zeros appended, so that the number of rows is a
        multiple of the number of devices that the rows are distributed over."""
        return np.pad(rows, ((0, -len(rows) % self._shards), (0, 0)))


class Answerer(Reader):
    """Compute a model's answers to prompts: the loss of one given answer, and the greedy continuation.

    A prompt is read once, in pieces of one length (the first one padded on its left), so that prompts of all
    lengths run one program. Memory does not grow with the prompt, except for the keys and values of softmax
    layers without a window.

    Args:
        model: the decoder.
        max_length: tokens of the longest prompt; softmax layers allocate keys and values for so many.
        num_tokens: number of tokens to generate.
        piece_length: tokens of each prompt read at a time.
    """

    def __init__(
        self, model: Decoder, *, max_length: int, num_tokens: int, piece_length: int = 4096
    ):
        for name, value in (("max_length", max_length), ("num_tokens", num_tokens)):
            if value < 1:
                raise ValueError(f"{name}={value}: it must be at least 1")
        super().__init__(model, piece_length=min(piece_length, max_length))
        self.max_length, self.num_tokens = max_length, num_tokens

        def read_piece(params, state, tokens, segment_ids):
            hidden, state, _ = self._model(params).hidden(
                tokens, state=state, segment_ids=segment_ids
            )
            return hidden[:, -1:], state

        def answer(params, state, hidden, answer):
            model = self._model(params)
            hidden_states = hidden
            if answer.shape[1] > 1:
                after, _, _ = model.hidden(answer[:, :-1], state=state)
                hidden_states = jnp.concatenate([hidden, after], axis=1)
            nll = next_token_loss(
                hidden_states,
                model.head(),
                answer,
                chunk_size=model.loss_chunk_size,
                cap=model.logits_cap,
            )

            def step(carry, _):
                hidden, state = carry
                token = jnp.argmax(model.logits(hidden), axis=-1).astype(jnp.int32)
                hidden, state, _ = model.hidden(token, state=state)
                return (hidden, state), token[:, 0]

            _, continuation = jax.lax.scan(step, (hidden, state), length=num_tokens)
            return nll, continuation.T

        self._read = jax.jit(
            read_piece, donate_argnums=1, out_shardings=(self._rows, self._state_rows)
        )
        self.answer = jax.jit(answer)

    def __call__(
        self, prompts: np.ndarray, answers: np.ndarray, lengths: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Read a batch of prompts, and return the losses of the given answers and the greedy continuations.

        Args:
            prompts: token ids of the prompts, int [B, P], P up to `max_length`.
            answers: token ids of the answers, int [B, A], one per prompt.
            lengths: tokens of each prompt, int [B], 1 to P: its last ones in `prompts`. None means P for all.

        Returns:
            The losses of the answers' tokens in nats, float32 [B, A]; the greedy continuations, int32 [B,
            num_tokens].

        Raises:
            ValueError: the prompts are too long, `prompts` and `answers` have different numbers of rows or
                are empty, lengths are not in 1 to P, or ids are outside the model's vocabulary.
        """
        for name, ids in (("prompts", prompts), ("answers", answers)):
            if ids.ndim != 2 or 0 in ids.shape or len(ids) != len(prompts):
                raise ValueError(
                    f"{name} has shape {ids.shape}; accepted is [B, T], with a row of both for each prompt"
                )
            if name == "prompts" and ids.shape[1] > self.max_length:
                raise ValueError(
                    f"prompts have {ids.shape[1]} tokens, over max_length={self.max_length}"
                )
            if ids.min() < 0 or ids.max() >= self.vocab_size:
                raise ValueError(
                    f"{name} has ids from {ids.min()} to {ids.max()}; the model's vocabulary has "
                    f"{self.vocab_size}: is this the tokenizer it was trained with?"
                )
        rows, size = len(prompts), self.piece_length
        padding = -prompts.shape[1] % size
        tokens = np.pad(self._filled(prompts), ((0, 0), (padding, 0)))
        begins = np.full(len(tokens), padding)
        if lengths is not None:
            lengths = np.asarray(lengths)
            if lengths.shape != (rows,) or not 1 <= lengths.min() <= lengths.max() <= prompts.shape[1]:  # fmt: skip
                raise ValueError(
                    f"lengths={lengths.tolist()}: accepted are {rows} numbers of 1 to {prompts.shape[1]}"
                )
            begins[:rows] = tokens.shape[1] - lengths
        not_padding = np.arange(tokens.shape[1]) >= begins[:, None]
        capacity = self.max_length + max(answers.shape[1], self.num_tokens)
        with jax.set_mesh(self._mesh):
            state, hidden = self.init_state(len(tokens), capacity), None
            for first in range(0, tokens.shape[1], size):
                piece = (x[:, first : first + size] for x in (tokens, not_padding.astype(np.int32)))
                piece = jax.device_put(tuple(piece), self._rows)
                hidden, state = self._read(self._params, state, *piece)
            placed_answers = jax.device_put(self._filled(answers), self._rows)
            nll, continuations = self.answer(self._params, state, hidden, placed_answers)
        return np.asarray(nll)[:rows], np.asarray(continuations)[:rows]
