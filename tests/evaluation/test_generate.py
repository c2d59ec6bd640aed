"""Tests of text generation in evaluation: sampling, the prompt's tokens, where a document ends, and the size
of the decode state.
"""

from __future__ import annotations

import numpy as np
import pytest
from flax import nnx

from lsm_jax import models
from lsm_jax.data import ByteTokenizer
from lsm_jax.evaluation import generate, state_bytes
from lsm_jax.evaluation.generate import decode


@pytest.fixture(scope="module")
def linear():
    config = models.lm("retnet", "tiny", vocab_size=264)
    config.num_layers = 1
    return models.Decoder(config, rngs=nnx.Rngs(0))


def test_greedy_and_seeded_sampling_repeat(linear):
    tokenizer = ByteTokenizer()
    settings = dict(num_tokens=12, bos_id=256)
    greedy = generate(linear, tokenizer, "def f", temperature=0.0, seed=0, **settings)
    again = generate(linear, tokenizer, "def f", temperature=0.0, seed=1, **settings)
    assert greedy.tokens == again.tokens
    narrow = generate(linear, tokenizer, "def f", top_k=1, seed=3, **settings)
    assert narrow.tokens == greedy.tokens
    assert greedy.ended or len(greedy.tokens) == 12
    assert greedy.tokens_per_second > 0 and "tokens/s" in greedy.describe()
    assert greedy.state_grows == 0 and "constant" in greedy.describe()


def test_the_state_is_constant_but_for_softmax_layers(linear):
    assert state_bytes(linear, 10) == state_bytes(linear, 100_000) > 0
    config = models.lm("retnet", "tiny", "LN", vocab_size=264)
    softmax = models.abstract(config)
    assert state_bytes(softmax, 100_000) > state_bytes(softmax, 10)


def test_ids_beyond_the_tokenizer_become_replacement_characters():
    assert decode(ByteTokenizer(), np.array([97, 260, 98, 99, 263])) == "a\ufffdbc\ufffd"
    assert decode(ByteTokenizer(), np.array([], np.int32)) == ""


def test_invalid_prompts_are_refused(linear):
    tokenizer = ByteTokenizer()
    with pytest.raises(ValueError, match="prompt is empty"):
        generate(linear, tokenizer, "")
    small = models.abstract(models.lm("retnet", "tiny", vocab_size=100))
    with pytest.raises(ValueError, match="token id 120; the model's vocabulary has 100"):
        generate(small, tokenizer, "x")
    with pytest.raises(ValueError, match="top_p=2"):
        generate(linear, tokenizer, "x", top_p=2.0)
