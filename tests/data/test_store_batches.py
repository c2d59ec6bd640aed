import logging

import numpy as np
import pytest

from lsm_jax.data import DataConfig, make_eval_iterator, make_train_iterator
from tests.data.stores import assert_resumes, numbered, rewrite_with_chunks, same, write_array

BOS = 50256


def config(path, **fields):
    fields = {"tokenizer": "gpt2", "sequence_length": 8, "heldout_fraction": 0.0} | fields
    return DataConfig(path=str(path), **fields)


@pytest.fixture
def store(tmp_path):
    return write_array(tmp_path / "x.zarr", numbered(11, 28))


def take(iterator, count):
    return [next(iterator) for _ in range(count)]


def test_published_order_bos_and_tokens_that_are_not_read(store, caplog):
    with caplog.at_level(logging.INFO, logger="absl"):
        iterator = make_train_iterator(config(store, shuffle=False), global_batch_size=4, seed=0)
    # 2 groups of 4 documents, 3 blocks of 8 tokens: 3 documents and 4 columns are not read.
    assert f"{11 * 28 - 8 * 24} of {11 * 28} tokens are not read" in caplog.text
    for i, batch in enumerate(take(iterator, 13)):
        column, row = i % 6 // 2, i % 2
        expected = numbered(11, 28)[4 * row : 4 * row + 4, 8 * column : 8 * column + 8]
        assert np.array_equal(batch["labels"], expected)
        assert np.array_equal(batch["tokens"][:, 1:], expected[:, :-1])
        assert (batch["tokens"][:, 0] == BOS).all()
        assert (batch["loss_mask"] == 1).all() and batch["loss_mask"].dtype == np.float32
        assert batch["tokens"].dtype == batch["labels"].dtype == np.int32
        assert set(batch) == {"tokens", "labels", "loss_mask"}


def test_tokens_and_labels_with_and_without_bos(store):
    batch = next(make_train_iterator(config(store, add_bos=False), global_batch_size=4, seed=0))
    assert np.array_equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
    assert (batch["loss_mask"][:, -1] == 0).all() and (batch["loss_mask"][:, :-1] == 1).all()
    batch = next(make_train_iterator(config(store, bos_id=7), global_batch_size=4, seed=0))
    assert (batch["tokens"][:, 0] == 7).all()


@pytest.mark.parametrize("chunks", [(11, 28), (3, 16), (4, 8), (1, 5)])
@pytest.mark.parametrize("blocks", [1, 3])
def test_shuffled_epochs_have_every_sequence_once(tmp_path, chunks, blocks):
    path = rewrite_with_chunks(tmp_path / "x.zarr", numbered(11, 28).astype("<u2"), chunks)
    settings = config(path, shuffle_blocks=blocks)
    batches = take(make_train_iterator(settings, global_batch_size=3, seed=1), 22)
    first = [b["labels"][:, 0] for b in batches]
    epochs = [np.concatenate(first[:11]), np.concatenate(first[11:])]
    expected = numbered(11, 28)[:, :24:8].ravel()
    for epoch in epochs:
        assert np.array_equal(np.sort(epoch), np.sort(expected))
        assert not np.array_equal(epoch, expected)
    assert not np.array_equal(*epochs)
    other = take(make_train_iterator(settings, global_batch_size=3, seed=2), 11)
    assert not np.array_equal(np.concatenate([b["labels"][:, 0] for b in other]), epochs[0])


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_shards_of_a_batch_are_the_batch_of_a_single_host(store, shuffle):
    settings = config(store, shuffle=shuffle)
    global_batches = take(make_train_iterator(settings, global_batch_size=4, seed=3), 15)
    for count in (2, 4):
        shards = [
            make_train_iterator(
                settings, global_batch_size=4, seed=3, shard_index=i, shard_count=count
            )
            for i in range(count)
        ]
        for batch in global_batches:
            parts = [next(shard) for shard in shards]
            joined = {k: np.concatenate([p[k] for p in parts]) for k in batch}
            assert same(joined, batch)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("threads", [0, 3])
def test_resumes_exactly(store, shuffle, threads):
    settings = config(store, shuffle=shuffle, num_threads=threads)
    assert_resumes(lambda: make_train_iterator(settings, global_batch_size=4, seed=0))


def test_resumes_on_another_number_of_hosts(store):
    single = make_train_iterator(config(store), global_batch_size=4, seed=0)
    take(single, 3)
    second_of_two = make_train_iterator(
        config(store), global_batch_size=4, seed=0, shard_index=1, shard_count=2
    )
    second_of_two.set_state(single.get_state())
    assert np.array_equal(next(second_of_two)["tokens"], next(single)["tokens"][2:])


def test_orbax_saves_and_restores_the_iterator(store, tmp_path):
    from orbax.checkpoint import v1 as ocp

    iterator = make_train_iterator(config(store), global_batch_size=4, seed=0)
    take(iterator, 2)
    with ocp.training.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save_checkpointables(2, {"data": iterator})
        expected = next(iterator)
        other = make_train_iterator(config(store), global_batch_size=4, seed=0)
        checkpointer.load_checkpointables(2, {"data": other})
    assert same(next(other), expected)


def test_evaluation_reads_each_sequence_once_in_order(store):
    settings = config("", heldout_path=str(store), sequence_length=14)
    batches = list(make_eval_iterator(settings, global_batch_size=11))
    ids = numbered(11, 28)
    assert np.array_equal(batches[0]["labels"], ids[:, :14])
    assert np.array_equal(batches[1]["labels"], ids[:, 14:])
    assert len(batches) == 2


def test_evaluation_reads_every_token_or_raises(store):
    settings = config(store, heldout_path=str(store))
    with pytest.raises(ValueError, match="sequence_length=8 does not divide the length 28"):
        make_eval_iterator(settings, global_batch_size=11)
    settings = config(store, heldout_path=str(store), sequence_length=14)
    with pytest.raises(
        ValueError, match="batch_size=4 does not divide the 22 held-out sequences of 14 tokens"
    ):
        make_eval_iterator(settings, global_batch_size=4)
    batches = list(make_eval_iterator(settings, global_batch_size=4, remainder="pad"))
    assert [b["loss_mask"].sum() for b in batches] == [4 * 14] * 5 + [2 * 14]
    labels = np.concatenate([b["labels"] for b in batches])[:22]
    assert np.array_equal(np.sort(labels[:, 0]), np.sort(numbered(11, 28)[:, ::14].ravel()))
    with pytest.raises(ValueError, match="remainder='drop'"):
        make_eval_iterator(settings, global_batch_size=4, remainder="drop")


def test_held_out_documents_are_not_trained_on(store):
    settings = config(store, heldout_fraction=0.2, sequence_length=14)
    held = np.concatenate(
        [b["labels"][:, 0] for b in make_eval_iterator(settings, global_batch_size=1)]
    )
    train = make_train_iterator(settings, global_batch_size=3, seed=0)
    trained = np.concatenate([b["labels"][:, 0] for b in take(train, 12)])
    assert set(held // 100) == {9, 10}
    assert set(trained // 100) == set(range(9))


def test_a_folder_with_a_training_and_a_held_out_store(tmp_path):
    write_array(tmp_path / "train.zarr", numbered(4, 8))
    settings = config(tmp_path)
    assert next(make_train_iterator(settings, global_batch_size=4, seed=0))["labels"].max() < 400
    with pytest.raises(ValueError, match=r"no heldout\.zarr"):
        make_eval_iterator(settings, global_batch_size=2)
    write_array(tmp_path / "heldout.zarr", numbered(2, 8) + 1000)
    batch = next(make_eval_iterator(settings, global_batch_size=2))
    assert np.array_equal(batch["labels"], numbered(2, 8) + 1000)


def test_packed_rows_are_separated_into_documents(tmp_path):
    rows = np.array([[5, 6, BOS, 7, 8, 9, BOS, 1], [1, 2, 3, 4, 5, 6, 7, BOS]])
    path = write_array(tmp_path / "x.zarr", rows)
    settings = config(path, separate_documents=True, shuffle=False)
    batch = next(make_train_iterator(settings, global_batch_size=2, seed=0))
    assert batch["segment_ids"].tolist() == [[1, 1, 1, 2, 2, 2, 2, 3], [1] * 8]
    assert batch["positions"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 0], list(range(8))]
    assert batch["segment_ids"].dtype == batch["positions"].dtype == np.int32
    # The BOS of a segment predicts its first token; the last token of a document predicts BOS.
    assert batch["tokens"][0].tolist() == [BOS, 5, 6, BOS, 7, 8, 9, BOS]


def test_errors_are_raised_when_the_iterator_is_made(store, tmp_path):
    def train(batch=4, **fields):
        shards = {k: fields.pop(k) for k in ("shard_index", "shard_count") if k in fields}
        vocab = {k: fields.pop(k) for k in ("vocab_size",) if k in fields}
        return make_train_iterator(
            config(**({"path": store} | fields)), global_batch_size=batch, seed=0, **shards, **vocab
        )

    for fields, message in [
        ({"path": tmp_path / "none"}, "data.path=.*none' does not exist"),
        ({"path": "gs://bucket/x.zarr"}, "does not exist"),
        ({"sequence_length": 29}, "sequence_length=29 is longer than the documents .* 28 tokens"),
        ({"sequence_length": 0}, "data.sequence_length=0; it must be at least 1"),
        ({"batch": 12, "shuffle": False}, "less than one global batch of 12 rows"),
        ({"batch": 34}, "less than one global batch of 34 rows"),
        ({"batch": 0}, "global_batch_size=0"),
        ({"shard_count": 3}, "multiple of shard_count=3"),
        ({"shard_count": 2, "shard_index": 2}, "shard_index=2"),
        ({"tokenizer": "bytes"}, "encoder 'tiktoken-gpt2', but the tokenizer is 'bytes'"),
        ({"tokenizer": "gpt5"}, "unknown tokenizer 'gpt5'; accepted: 'bytes', 'gpt2'"),
        ({"vocab_size": 1000}, "vocab_size=1000 of the model is smaller .* which has 50257 ids"),
        ({"bos_id": 50257}, "data.bos_id=50257; it must be less than .* 50257"),
        ({"heldout_fraction": 1.0}, "data.heldout_fraction=1.0"),
        ({"heldout_fraction": 0.99}, "heldout_fraction=0.99 leaves none of the 11 documents"),
        ({"packing": "best"}, "data.packing='best'; accepted: 'concat', 'first_fit'"),
    ]:
        with pytest.raises(ValueError, match=message):
            train(**fields)
    with pytest.raises(ValueError, match="there are no held-out data: .*; set one of them"):
        make_eval_iterator(config(store), global_batch_size=1)


def test_ids_outside_the_vocabulary_raise_when_they_are_read(tmp_path):
    ids = numbered(8, 8)
    ids[6, 3] = 50257
    path = rewrite_with_chunks(tmp_path / "x.zarr", ids.astype("<u2"), (4, 8))
    settings = config(path, shuffle=False)
    iterator = make_train_iterator(settings, global_batch_size=4, seed=0)
    next(iterator)
    with pytest.raises(ValueError, match="document 6, column 3 has token id 50257"):
        next(iterator)
    # The padded vocabulary of a model contains this id.
    iterator = make_train_iterator(settings, global_batch_size=4, seed=0, vocab_size=50304)
    take(iterator, 2)


def test_ids_outside_the_vocabulary_are_known_at_once_from_the_checksums_file(tmp_path):
    ids = numbered(8, 8)
    ids[6, 3] = 50257
    settings = config(write_array(tmp_path / "x.zarr", ids))
    with pytest.raises(
        ValueError, match="token ids up to 50257, .* outside the vocabulary of 50257"
    ):
        make_train_iterator(settings, global_batch_size=4, seed=0)
    make_train_iterator(settings, global_batch_size=4, seed=0, vocab_size=50304)


def test_cut_rows_are_a_warning_with_the_fraction_and_the_setting(store, caplog):
    def warning(**fields):
        caplog.clear()
        batch = fields.pop("batch", 1)
        with caplog.at_level(logging.WARNING, logger="absl"):
            make_train_iterator(config(store, **fields), global_batch_size=batch, seed=0)
        return caplog.text

    said = warning(sequence_length=20)
    assert "28.6 % of the training tokens are never read (88 of 308)" in said
    assert "data.row_remainder='overlap'" in said and "data.sequence_length=14" in said
    assert warning(sequence_length=14) == warning(sequence_length=20, row_remainder="overlap") == ""
    assert "27.3 %" in warning(sequence_length=14, shuffle=False, batch=8)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("length", [8, 20, 27, 28])
def test_overlapping_rows_read_every_token_once(store, shuffle, length):
    settings = config(store, sequence_length=length, row_remainder="overlap", shuffle=shuffle)
    steps = 11 * -(-28 // length)
    batches = take(make_train_iterator(settings, global_batch_size=1, seed=0), steps)
    scored = np.concatenate([b["labels"][b["loss_mask"] > 0] for b in batches])
    assert np.array_equal(np.sort(scored), np.sort(numbered(11, 28).ravel()))
    for batch in batches:  # all tokens are of one document, in order
        assert (np.diff(batch["labels"]) == 1).all()
        assert np.array_equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
    heldout = config("", heldout_path=str(store), sequence_length=length, row_remainder="overlap")
    held = list(make_eval_iterator(heldout, global_batch_size=4, remainder="pad"))
    assert sum(b["loss_mask"].sum() for b in held) == 11 * 28


def test_overlapping_rows_without_bos_predict_each_token_at_most_once(store):
    settings = config(store, sequence_length=20, row_remainder="overlap", add_bos=False)
    batches = take(make_train_iterator(settings, global_batch_size=1, seed=0), 22)
    scored = np.concatenate([b["labels"][b["loss_mask"] > 0] for b in batches])
    # Only the first token of each document is not predicted.
    assert np.array_equal(np.sort(scored), np.sort(numbered(11, 28)[:, 1:].ravel()))


def test_other_row_remainders_are_refused(store):
    with pytest.raises(ValueError, match="data.row_remainder='pad'; accepted: 'skip', 'overlap'"):
        make_train_iterator(config(store, row_remainder="pad"), global_batch_size=1, seed=0)
