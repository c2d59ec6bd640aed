"""Text from a model: tokenise a prompt, sample, decode; with the speed and the size of the state."""

from __future__ import annotations

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np

from lsm_jax.data import Tokenizer
from lsm_jax.models import Decoder, sample

_REPEAT_WITHIN = 20.0  # seconds: a first call this short is repeated to time it without compilation


@dataclasses.dataclass(frozen=True)
class Generation:
    """A continued prompt.

    Attributes:
        prompt: as given.
        text: the continuation.
        tokens: its ids, up to the end of the document where the model ended it.
        ended: whether the model ended the document.
        seconds: wall time of the first call, compilation included.
        tokens_per_second: generated, prefill included; without compilation where `timed_compiled`.
        timed_compiled: whether a second call, with nothing to compile, was timed.
        state_bytes: of the decode state, for one row.
        state_grows: bytes it would take more for each further token; 0 for a state of constant size.
    """

    prompt: str
    text: str
    tokens: list[int]
    ended: bool
    seconds: float
    tokens_per_second: float
    timed_compiled: bool
    state_bytes: int
    state_grows: float

    def describe(self) -> str:
        """One line: tokens, speed, state."""
        speed = f"{len(self.tokens)} tokens, {self.tokens_per_second:,.0f} tokens/s"
        if not self.timed_compiled:
            speed += " with compilation"
        growth = "of constant size"
        if self.state_grows:
            growth = f"for this length, {self.state_grows:,.0f} more a token"
        return f"{speed}; state {self.state_bytes:,} bytes, {growth}"


def generate(
    model: Decoder,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    num_tokens: int = 256,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    bos_id: int | None = None,
    stop_id: int | None = None,
    prefill_chunk: int = 4096,
) -> Generation:
    """Continue a prompt.

    Args:
        model: the decoder.
        tokenizer: the one it was trained with.
        prompt: text; may be empty where there is a `bos_id`.
        num_tokens: the most tokens to generate.
        temperature: divides the logits; 0 is greedy.
        top_k: draw from the k likeliest tokens only.
        top_p: draw from the smallest set of this probability, in (0, 1].
        seed: same seed, same text.
        bos_id: set before the prompt, and taken for the end where the model draws it; None for neither.
        stop_id: taken for the end in its stead; None leaves it to `bos_id`.
        prefill_chunk: tokens of the prompt read at a time.

    Raises:
        ValueError: a prompt without a token or with ids over the model's vocabulary, or a bad sampling argument.
    """
    ids = [] if bos_id is None else [bos_id]
    ids += tokenizer.encode(prompt)
    if not ids:
        raise ValueError("the prompt is empty and the tokenizer has no BOS token: give a --prompt")
    if max(ids) >= model.vocab_size:
        raise ValueError(
            f"the prompt has token id {max(ids)}; the model's vocabulary has {model.vocab_size}: "
            f"is {tokenizer.name!r} the tokenizer it was trained with?"
        )
    rows, stop_id = jnp.asarray([ids], jnp.int32), bos_id if stop_id is None else stop_id

    def call() -> tuple[np.ndarray, float]:
        start = time.perf_counter()
        drawn = sample(
            model,
            rows,
            num_tokens=num_tokens,
            key=jax.random.key(seed),
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            stop_token=stop_id,
            prefill_chunk=prefill_chunk,
        )
        return np.asarray(drawn)[0], time.perf_counter() - start

    drawn, first = call()
    again = call()[1] if first < _REPEAT_WITHIN else None
    ended = stop_id is not None and stop_id in drawn
    tokens = drawn[: list(drawn).index(stop_id)] if ended else drawn
    length = len(ids) + num_tokens
    size = state_bytes(model, length)
    return Generation(
        prompt=prompt,
        text=decode(tokenizer, tokens),
        tokens=tokens.tolist(),
        ended=ended,
        seconds=first,
        tokens_per_second=(len(tokens) + ended) / (again or first),
        timed_compiled=again is not None,
        state_bytes=size,
        state_grows=(state_bytes(model, 2 * length) - size) / length,
    )


def state_bytes(model: Decoder, max_length: int) -> int:
    """Bytes of the decode state of one row of up to `max_length` tokens; nothing is allocated."""
    state = jax.eval_shape(lambda: model.init_state(1, max_length))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def decode(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    """Text of the ids; those a padded vocabulary has beyond the tokenizer's become U+FFFD."""
    outside = np.flatnonzero(np.asarray(ids) >= tokenizer.vocab_size)
    parts = [part[part < tokenizer.vocab_size] for part in np.split(np.asarray(ids), outside)]
    return "\ufffd".join(tokenizer.decode(part) for part in parts)
