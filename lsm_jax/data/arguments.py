"""Check the arguments of a batch iterator before any data are read: shards, tokenizer, vocabulary, BOS."""

from __future__ import annotations

from lsm_jax.data.config import DataConfig
from lsm_jax.data.sources import tokenizer_of
from lsm_jax.data.tokenizers import Tokenizer


def check_arguments(
    config: DataConfig,
    tokenizer: Tokenizer | None,
    batch: int,
    shard_index: int,
    shard_count: int,
    vocab_size: int | None,
) -> tuple[Tokenizer, slice, int]:
    """Check the arguments with which a batch iterator is made: data config, tokenizer, global batch size,
    number of this host and of all hosts, and vocabulary size. A tokenizer of None is loaded by the config,
    a vocabulary size of None is the tokenizer's.

    Returns:
        The tokenizer, the slice of this host's rows in a global batch, and the vocabulary size.

    Raises:
        ValueError: an argument is out of range, or contradicts another; the message names them.
    """
    config.validate()
    if not 0 <= shard_index < shard_count:
        raise ValueError(f"shard_index={shard_index}; it must be in [0, shard_count={shard_count})")
    if batch < 1 or batch % shard_count:
        raise ValueError(
            f"global_batch_size={batch}; it must be a positive multiple of "
            f"shard_count={shard_count}"
        )
    if tokenizer is None:
        tokenizer = tokenizer_of(config)
    elif tokenizer.json_escape != config.json_escape:
        raise ValueError(
            f"data.json_escape={config.json_escape}, but the given tokenizer has "
            f"json_escape={tokenizer.json_escape}; they must be the same"
        )
    size = tokenizer.vocab_size if vocab_size is None else vocab_size
    bos_id = bos_id_of(config, tokenizer)
    if tokenizer.vocab_size > size:
        raise ValueError(
            f"vocab_size={size} of the model is smaller than the vocabulary of tokenizer {tokenizer.name!r}, "
            f"which has {tokenizer.vocab_size} ids; set model.vocab_size to at least that number"
        )
    if bos_id is not None and bos_id >= size:
        raise ValueError(f"data.bos_id={bos_id}; it must be less than the vocabulary size, {size}")
    if bos_id is None and (config.add_bos or config.separate_documents):
        raise ValueError(
            f"tokenizer {tokenizer.name!r} has no BOS token, which data.add_bos and data.separate_documents require; "
            "set data.bos_id, or set both to False"
        )
    if config.format != "text" and config.predict_end and tokenizer.eos_id is None:
        raise ValueError(
            f"tokenizer {tokenizer.name!r} has no EOS token, with which data.predict_end=True ends an answer; "
            "set data.predict_end to False"
        )
    local = batch // shard_count
    return tokenizer, slice(shard_index * local, (shard_index + 1) * local), size


def bos_id_of(config: DataConfig, tokenizer: Tokenizer) -> int | None:
    """Return the id of the token that begins documents (BOS): the data config's, or the tokenizer's if the
    config has None."""
    return tokenizer.bos_id if config.bos_id is None else config.bos_id
