"""Language models whose answers are known, with the interface of a decoder."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax.models import DecoderState


class CopyOracle(nnx.Module):
    """A language model, with the interface of a decoder, that predicts the token which followed the latest
    earlier occurrence of the last 16 tokens, up to `reach` tokens back.

    If there is no such occurrence, all tokens have the same probability.
    """

    def __init__(self, vocab_size: int = 257, *, reach: int = 1 << 20):
        self.vocab_size, self.reach, self.loss_chunk_size = vocab_size, reach, 64
        self.logits_cap = None

    def init_state(self, batch_size: int, max_length: int) -> DecoderState:
        return DecoderState(
            jnp.full((1, batch_size, max_length), -1, jnp.int32), jnp.zeros(batch_size, jnp.int32)
        )

    def head(self) -> jax.Array:
        return jnp.eye(self.vocab_size)

    def logits(self, hidden: jax.Array) -> jax.Array:
        return hidden

    def hidden(self, tokens, *, state, segment_ids=None):
        not_padding = jnp.ones_like(tokens) if segment_ids is None else segment_ids
        rank = state.clock[:, None] + jnp.cumsum(not_padding, axis=1) - 1
        index = jnp.where(not_padding > 0, rank, state.layers.shape[2])
        read_tokens = jax.vmap(lambda row, i, x: row.at[i].set(x, mode="drop"))(
            state.layers[0], index, tokens
        )

        def before(i):  # the token i before each place, -2 where there is none
            return jnp.pad(read_tokens, ((0, 0), (i, 0)), constant_values=-2)[
                :, : read_tokens.shape[1]
            ]

        place = jnp.arange(read_tokens.shape[1])
        match = (place < rank[..., None]) & (place >= rank[..., None] - self.reach)
        for i in range(16):
            current = jnp.take_along_axis(before(i), jnp.maximum(rank, 0), axis=1)
            match &= (current[..., None] == before(i)[:, None]) & (before(i)[:, None] >= 0)
        last = jnp.where(match, place, -1).max(-1)
        copied = jnp.take_along_axis(read_tokens, jnp.maximum(last + 1, 0), axis=1)
        logits = 8.0 * jax.nn.one_hot(copied, self.vocab_size) * (last >= 0)[..., None]
        after = DecoderState(read_tokens[None], state.clock + not_padding.sum(axis=1))
        return logits, after, {}
