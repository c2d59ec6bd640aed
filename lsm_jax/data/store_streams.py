"""Make the batches of a token store, and the order in which it is read, by a data config."""

from __future__ import annotations

from absl import logging

from lsm_jax.data.arguments import bos_id_of
from lsm_jax.data.config import DataConfig
from lsm_jax.data.order import ColumnOrder, ShuffledOrder
from lsm_jax.data.rows import StoreBatches
from lsm_jax.data.store import TokenStore
from lsm_jax.data.tokenizers import Tokenizer


def store_batches(
    config: DataConfig,
    tokenizer: Tokenizer,
    source: tuple[TokenStore, int, int],
    order: ColumnOrder | ShuffledOrder,
    num_sequences: int,
    batch: int,
    rows_of: slice,
    vocab_size: int,
) -> StoreBatches:
    """Return the batches of a token store, as a function of the step, by the rules of the data config.

    Args:
        config: the data config of the run.
        tokenizer: the tokenizer, whose BOS is used if the config has none.
        source: (the store, number of its first document to read, number of documents to read).
        order: the order in which the store's sequences are read.
        num_sequences: number of sequences in the order; rows of batches beyond them are padding.
        batch: number of rows in a global batch, over all hosts.
        rows_of: the range of a global batch's rows that this host makes.
        vocab_size: number of ids in the model's vocabulary; a token id that is not below it is an error.

    Raises:
        ValueError: the store's largest token id is not below `vocab_size`.
    """
    source[0].check_vocabulary(vocab_size)
    bos_id = bos_id_of(config, tokenizer)
    return StoreBatches(
        source[0],
        order,
        first_document=source[1],
        num_sequences=num_sequences,
        sequence_length=config.sequence_length,
        global_batch_size=batch,
        rows_of=rows_of,
        bos_id=bos_id if config.add_bos else None,
        separator=bos_id if config.separate_documents else None,
        vocab_size=vocab_size,
    )


def num_columns(config: DataConfig, store: TokenStore) -> int:
    """Return into how many sequences of the data config's row length each document of a store is divided.

    Raises:
        ValueError: the store's documents are shorter than a sequence of the config's row length.
    """
    if config.sequence_length > store.length:
        raise ValueError(
            f"data.sequence_length={config.sequence_length} is longer than the documents in {store.path}, "
            f"which have {store.length} tokens"
        )
    if config.row_remainder == "overlap":
        return -(-store.length // config.sequence_length)
    return store.length // config.sequence_length


def train_order(
    config: DataConfig, store: TokenStore, documents: int, batch: int, seed: int
) -> ColumnOrder | ShuffledOrder:
    """Return the order in which training reads the sequences of a store, and log how many tokens are not
    read in an epoch; a warning if the end of every document, or 1 % of the documents, are never read.

    Raises:
        ValueError: the store has too few documents for one global batch.
    """
    length = config.sequence_length
    columns = num_columns(config, store)
    if config.shuffle:
        order: ColumnOrder | ShuffledOrder = ShuffledOrder(
            documents,
            columns,
            multiple=batch,
            block=(store.chunks[0], max(1, store.chunks[1] // length)),
            window_blocks=config.shuffle_blocks,
            seed=seed,
        )
    else:
        order = ColumnOrder(documents, columns, multiple=batch)
    used = order.sequences_per_epoch
    if not used:
        raise ValueError(
            f"{store.path} has {documents} training documents of {store.length} tokens, which is less than "
            f"one global batch of {batch} rows of {length} tokens"
        )
    total = documents * store.length
    cut = documents * max(0, store.length - columns * length)
    never = cut
    if isinstance(order, ColumnOrder):  # all epochs are the same
        never = total - order.num_documents * (store.length - cut // documents)
    if cut or never >= total / 100:
        advice = []
        if cut:
            divisor = next(n for n in range(length, 0, -1) if store.length % n == 0)
            advice.append(
                f"data.row_remainder='overlap' reads the end of every document, and so does data.sequence_length={divisor}"
            )
        if never > cut:
            advice.append(
                "with data.shuffle=True no document is left out in every epoch"
                if documents >= batch
                else "choose a smaller batch size"
            )
        logging.warning(
            "%s: %.3g %% of the training tokens are never read (%d of %d): documents of %d tokens are cut into %d sequences of %d. %s.",
            store.path,
            100 * never / total,
            never,
            total,
            store.length,
            columns,
            length,
            "; ".join(advice),
        )
    logging.info(
        "%s: %d steps of %d tokens per epoch; %d of %d tokens are not read, since they do not fill a row or a batch.",
        store.path,
        used // batch,
        batch * length,
        max(0, total - used * length),
        total,
    )
    return order
