"""Generate text: tokenize a prompt, sample, decode; and measure the speed and the size of the state."""

from __future__ import annotations

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np

from lsm_jax.data import Tokenizer
from lsm_jax.data.decoding import decode
from lsm_jax.models import Decoder, sample

_REPEAT_WITHIN = 20.0  # seconds; a shorter first call is repeated to time it without compilation


@dataclasses.dataclass(frozen=True)
class Generation:
    """A generated text: a prompt and the continuation that a model sampled, with speed and size of the
    state.

    Attributes:
        prompt: the text that was continued.
        text: the continuation, without the prompt.
        tokens: the ids of the continuation, up to the end of the document if the model ended it.
        ended: whether the model ended the document.
        seconds: wall time of the first call, including compilation.
        tokens_per_second: generated tokens per second, including prefill; without compilation if
            `timed_compiled`.
        timed_compiled: whether a second call, which compiled nothing, was timed.
        state_bytes: size of the decode state of one row.
        state_grows: bytes that each further token adds to the state; 0 for a state of constant size.
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
        """Return one line of text with the number of generated tokens, the speed and the size of the state."""
        speed = f"{len(self.tokens)} tokens, {self.tokens_per_second:,.0f} tokens/s"
        if not self.timed_compiled:
            speed += " with compilation"
        growth = "of constant size"
        if self.state_grows:
            growth = f"for this length, {self.state_grows:,.0f} more per token"
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
    """Sample a model's continuation of a prompt, and measure speed and size of the state.

    Args:
        model: the decoder.
        tokenizer: the tokenizer with which the model was trained.
        prompt: the text to continue; may be empty if there is a `bos_id`.
        num_tokens: number of tokens to generate at most.
        temperature: divides the logits; 0 is greedy.
        top_k: sample from the k most likely tokens only.
        top_p: sample from the smallest set of tokens that has this probability, in (0, 1].
        seed: the seed of sampling; the same seed gives the same text.
        bos_id: put before the prompt, and ends the text when the model samples it; None does neither.
        stop_id: ends the text instead of `bos_id`; None leaves that to `bos_id`.
        prefill_chunk: tokens of the prompt read at a time.

    Raises:
        ValueError: the prompt has no token, or ids above the model's vocabulary, or an argument of sampling
            is not valid.
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
        sampled = sample(
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
        return np.asarray(sampled)[0], time.perf_counter() - start

    sampled, first = call()
    second = call()[1] if first < _REPEAT_WITHIN else None
    ended = stop_id is not None and stop_id in sampled
    tokens = sampled[: list(sampled).index(stop_id)] if ended else sampled
    length = len(ids) + num_tokens
    size = state_bytes(model, length)
    return Generation(
        prompt=prompt,
        text=decode(tokenizer, tokens),
        tokens=tokens.tolist(),
        ended=ended,
        seconds=first,
        tokens_per_second=(len(tokens) + ended) / (second or first),
        timed_compiled=second is not None,
        state_bytes=size,
        state_grows=(state_bytes(model, 2 * length) - size) / length,
    )


def state_bytes(model: Decoder, max_length: int) -> int:
    """Return the bytes of a model's decode state for one sequence of up to `max_length` tokens; nothing is
    allocated."""
    state = jax.eval_shape(lambda: model.init_state(1, max_length))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
