"""Decode the ids that a model has generated, of which its tokenizer may not have all."""

from __future__ import annotations

import numpy as np

from lsm_jax.data.tokenizers import Tokenizer


def decode(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    """Return the text of token ids; ids of a padded vocabulary that the tokenizer does not have become
    U+FFFD."""
    outside = np.flatnonzero(np.asarray(ids) >= tokenizer.vocab_size)
    parts = [part[part < tokenizer.vocab_size] for part in np.split(np.asarray(ids), outside)]
    return "\ufffd".join(tokenizer.decode(part) for part in parts)
