"""A model that reads rows piece by piece, its state carried on, on all devices of this host: rows each, or parts of a row."""

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
    """The parameters on every device, and rows spread over them.

    Args:
        model: the decoder.
        piece_length: tokens of each row that are read at a time.
        rows: of a batch. Where they are fewer than the devices, those left over cut each row along time; None is enough of them.
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
        # Layers' states lead with the layers' axis. Set for every call, so that all pieces run one program.
        layers = NamedSharding(self._mesh, partition_spec((None, "batch")))
        self._state_rows = DecoderState(layers, cast(Any, self._rows))
        self._init_state = jax.jit(
            lambda params, rows, length: self._model(params).init_state(rows, length),
            static_argnums=(1, 2),
            out_shardings=self._state_rows,
        )

    def _model(self, params: Any) -> Decoder:
        return nnx.merge(self._graphdef, params)

    def _filled(self, rows: np.ndarray) -> np.ndarray:
        """[B, ...] with rows of zeros more, so that the devices share them evenly."""
        return np.pad(rows, ((0, -len(rows) % self._shards), (0, 0)))


class Answerer(Reader):
    """What a model says after a prompt: how likely one given answer is to it, and how it goes on by itself.

    A prompt is read once, in pieces of one length (the first one padded on its left), so that prompts of all lengths run one
    program. Memory does not grow with the prompt, but for the keys and values of softmax layers without a window.

    Args:
        model: the decoder.
        max_length: tokens of the longest prompt; softmax layers keep room for them all.
        num_tokens: how many to generate.
        piece_length: tokens of each prompt that are read at a time.
    """

    def __init__(
        self, model: Decoder, *, max_length: int, num_tokens: int, piece_length: int = 4096
    ):
        for name, value in (("max_length", max_length), ("num_tokens", num_tokens)):
            if value < 1:
                raise ValueError(f"{name}={value}: it must be at least 1")
        super().__init__(model, piece_length=min(piece_length, max_length))
        self.max_length, self.num_tokens = max_length, num_tokens

        def read(params, state, tokens, segment_ids):
            hidden, state, _ = self._model(params).hidden(
                tokens, state=state, segment_ids=segment_ids
            )
            return hidden[:, -1:], state

        def answer(params, state, hidden, answer):
            model = self._model(params)
            known = hidden
            if answer.shape[1] > 1:
                after, _, _ = model.hidden(answer[:, :-1], state=state)
                known = jnp.concatenate([hidden, after], axis=1)
            nll = next_token_loss(known, model.head(), answer, chunk_size=model.loss_chunk_size)

            def step(carry, _):
                hidden, state = carry
                token = jnp.argmax(model.logits(hidden), axis=-1).astype(jnp.int32)
                hidden, state, _ = model.hidden(token, state=state)
                return (hidden, state), token[:, 0]

            _, drawn = jax.lax.scan(step, (hidden, state), length=num_tokens)
            return nll, drawn.T

        self._read = jax.jit(read, donate_argnums=1, out_shardings=(self._rows, self._state_rows))
        self._answer = jax.jit(answer)

    def __call__(self, prompts: np.ndarray, answers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Read a batch of prompts.

        Args:
            prompts: int [B, P], P up to `max_length`.
            answers: int [B, A], one a prompt.

        Returns:
            Nats of each token of the answers, float32 [B, A]; the greedy continuations, int32 [B, num_tokens].

        Raises:
            ValueError: shapes that do not fit, or ids outside the model's vocabulary.
        """
        for name, ids in (("prompts", prompts), ("answers", answers)):
            if ids.ndim != 2 or 0 in ids.shape or len(ids) != len(prompts):
                raise ValueError(
                    f"{name} has shape {ids.shape}; accepted are [B, T], one of both a row"
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
        real = np.broadcast_to(np.arange(tokens.shape[1]) >= padding, tokens.shape)
        room = self.max_length + max(answers.shape[1], self.num_tokens)
        with jax.set_mesh(self._mesh):
            state, hidden = self._init_state(self._params, len(tokens), room), None
            for first in range(0, tokens.shape[1], size):
                piece = (x[:, first : first + size] for x in (tokens, real.astype(np.int32)))
                piece = jax.device_put(tuple(piece), self._rows)
                hidden, state = self._read(self._params, state, *piece)
            wanted = jax.device_put(self._filled(answers), self._rows)
            nll, drawn = self._answer(self._params, state, hidden, wanted)
        return np.asarray(nll)[:rows], np.asarray(drawn)[:rows]
