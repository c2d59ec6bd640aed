"""Tokens for training and evaluation: stores, text, tokenizers, packing, batches.

    config = DataConfig(path="longcrawl64", tokenizer="gpt2", sequence_length=16384)
    batches = make_train_iterator(config, global_batch_size=32, seed=0)
    batch = next(batches)       # tokens, labels, loss_mask, and for packed rows segment_ids, ...

`python -m lsm_jax.data.tokenize` makes stores from text.
"""

from lsm_jax.data.config import DataConfig
from lsm_jax.data.demo import write_demo_store
from lsm_jax.data.fingerprints import fingerprint, fingerprint_changes
from lsm_jax.data.iterators import make_eval_iterator, make_train_iterator
from lsm_jax.data.needle import NeedleConfig, NeedleTask, haystack_tokens
from lsm_jax.data.recall_task import RecallExamples, RecallTask, recall_examples
from lsm_jax.data.store import TokenStore
from lsm_jax.data.token_text import json_escape, json_unescape
from lsm_jax.data.tokenizers import (
    ByteTokenizer,
    GPT2Tokenizer,
    JSONTokenizer,
    Tokenizer,
    load_tokenizer,
)
from lsm_jax.data.tracking_task import TrackingTask, tracking_examples, tracking_vocabulary
from lsm_jax.data.world_tokenizer import WorldTokenizer

__all__ = [
    "ByteTokenizer",
    "DataConfig",
    "GPT2Tokenizer",
    "JSONTokenizer",
    "NeedleConfig",
    "NeedleTask",
    "RecallExamples",
    "RecallTask",
    "TokenStore",
    "Tokenizer",
    "TrackingTask",
    "WorldTokenizer",
    "fingerprint",
    "fingerprint_changes",
    "haystack_tokens",
    "json_escape",
    "json_unescape",
    "load_tokenizer",
    "make_eval_iterator",
    "make_train_iterator",
    "recall_examples",
    "tracking_examples",
    "tracking_vocabulary",
    "write_demo_store",
]
