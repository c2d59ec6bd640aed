"""Several sources with weights: their shares, order, resumption, hosts, held-out data, and fractions in the metrics."""

from __future__ import annotations

import json

import numpy as np
import pytest

from lsm_jax.data import (
    DataConfig,
    fingerprint,
    fingerprint_changes,
    make_eval_iterator,
    make_train_iterator,
)
from lsm_jax.data.mixed_streams import source_fractions
from lsm_jax.data.mixture import PERIOD, Schedule, format_mixture, parse_mixture, shares
from lsm_jax.data.sources import with_tokenizer
from tests.data.stores import assert_resumes, numbered, same, write_array, write_texts

STARTS = (0, 20_000, 40_000)


@pytest.fixture
def stores(tmp_path):
    """Return the mixture of three stores whose token ids tell the store."""
    paths = []
    for start, (documents, length) in zip(STARTS, ((11, 28), (5, 16), (30, 9)), strict=True):
        paths.append(write_array(tmp_path / f"s{start}.zarr", start + numbered(documents, length)))
    return format_mixture(zip((6, 3, 1), map(str, paths), strict=True))


def config(mixture, **fields):
    fields = dict(tokenizer="gpt2", sequence_length=8, heldout_fraction=0.0, num_threads=0) | fields
    return DataConfig(mixture=mixture, **fields)


def take(iterator, count):
    return [next(iterator) for _ in range(count)]


def source_of(labels):
    return np.searchsorted(STARTS, labels[:, 0], side="right") - 1


def test_the_schedule_is_exact_in_every_period_and_even_inside():
    for weights in ((1.0,), (0.7, 0.2, 0.1), (3, 3, 3), (1, 9999)):
        schedule = Schedule(weights, seed=5)
        sources, numbers = schedule(np.arange(2 * PERIOD + 137))
        expected = np.array(weights) / sum(weights)
        for i in range(len(weights)):
            assert np.array_equal(numbers[sources == i], np.arange((sources == i).sum()))
        assert (
            np.abs(shares(weights) - expected * PERIOD).max() < 1
            and shares(weights).sum() == PERIOD
        )
        for rows in (1, 100, PERIOD, PERIOD + 999, 2 * PERIOD + 137):
            seen = schedule.seen(rows)
            assert np.array_equal(seen, np.bincount(sources[:rows], minlength=len(weights)))
            assert np.abs(seen - expected * rows).max() < 3
        shuffled = np.random.default_rng(0).permutation(len(sources))[:500]
        assert np.array_equal(schedule(shuffled), (sources[shuffled], numbers[shuffled]))
    other = Schedule((0.7, 0.2, 0.1), seed=6)(np.arange(1000))[0]
    assert not np.array_equal(other, Schedule((0.7, 0.2, 0.1), seed=5)(np.arange(1000))[0])


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_mixture_of_stores_reads_each_source_in_its_own_order(stores, shuffle):
    batches = take(
        make_train_iterator(config(stores, shuffle=shuffle), global_batch_size=4, seed=3), 60
    )
    labels = np.concatenate([b["labels"] for b in batches])
    source = source_of(labels)
    sequences = (11 * 3, 5 * 2, 30 * 1)
    for i, path in enumerate(p for _, p in parse_mixture(stores)):
        mine = labels[source == i]
        alone = config("", path=path, shuffle=shuffle)
        alone = np.concatenate([b["labels"] for b in take(make_train_iterator(alone, global_batch_size=1, seed=3), len(mine))])  # fmt: skip
        assert np.array_equal(mine, alone)
        assert len(mine) > sequences[i] or i == 2  # over several epochs
    fractions = source_fractions(config(stores), 3, len(labels))
    assert list(fractions.values()) == [np.mean(source == i) for i in range(3)]
    assert np.abs(np.array(list(fractions.values())) - (0.6, 0.3, 0.1)).max() < 0.02


@pytest.mark.parametrize("threads", [0, 3])
def test_stores_resume_exactly_also_on_another_number_of_hosts(stores, threads):
    settings = config(stores, num_threads=threads)

    def make(**hosts):
        return make_train_iterator(settings, global_batch_size=4, seed=0, **hosts)

    assert_resumes(make)
    single = make()
    take(single, 3)
    state = json.loads(json.dumps(single.get_state()))
    expected = next(single)
    for count in (2, 4):
        hosts = [make(shard_index=i, shard_count=count) for i in range(count)]
        for host in hosts:
            host.set_state(state)
        parts = [next(host) for host in hosts]
        assert same({k: np.concatenate([p[k] for p in parts]) for k in expected}, expected)


def test_heldout_sequences_of_all_sources_are_read_once(stores):
    settings = config(stores, heldout_fraction=0.2, row_remainder="overlap")
    batches = list(make_eval_iterator(settings, global_batch_size=4, remainder="pad"))
    labels = np.concatenate([b["labels"][b["loss_mask"][:, -1] > 0] for b in batches])
    firsts = [int(x) for x in labels[:, 0]]
    expected = [
        *(100 * d + c for c in (0, 8, 16, 20) for d in (9, 10)),
        *(20_000 + 400 + c for c in (0, 8)),
        *(40_000 + 100 * d + c for c in (0, 1) for d in range(24, 30)),
    ]
    assert firsts == expected
    with pytest.raises(ValueError, match="global_batch_size=4 does not divide the 22 held-out"):
        make_eval_iterator(settings, global_batch_size=4)
    trained = take(make_train_iterator(settings, global_batch_size=4, seed=0), 40)
    heldout = {tuple(row) for row in labels}
    assert not any(tuple(row) in heldout for b in trained for row in b["labels"])
    one = config(stores, heldout_path=parse_mixture(stores)[1][1])
    assert sum(len(b["labels"]) for b in make_eval_iterator(one, global_batch_size=5)) == 10


@pytest.fixture
def texts(tmp_path):
    paths = [
        write_texts(tmp_path / name, {f"{i}.txt": f"{name}{i} " * (10 + i) for i in range(8)})
        for name in ("aaa", "bbb")
    ]
    return format_mixture([(3, str(paths[0])), (1, str(paths[1]))])


def test_a_mixture_of_texts_resumes_exactly_and_hosts_share_batches(texts):
    settings = config(texts, tokenizer="bytes", sequence_length=16, prefetch=0)

    def make(**hosts):
        return make_train_iterator(settings, global_batch_size=4, seed=0, **hosts)

    batches = assert_resumes(make)
    hosts = [make(shard_index=i, shard_count=2) for i in range(2)]
    for batch in batches:
        parts = [next(host) for host in hosts]
        assert same({k: np.concatenate([p[k] for p in parts]) for k in batch}, batch)
    rows = np.concatenate([b["tokens"] for b in take(make(), 50)])
    first = [row[row < 256][0] for row in rows]
    assert np.mean([(row == ord("b")).any() for row in rows]) == pytest.approx(0.25, abs=0.02)
    assert len(first) == 200


def test_heldout_text_of_all_sources_is_read_once(texts):
    settings = config(texts, tokenizer="bytes", sequence_length=64, heldout_fraction=0.3)
    make = lambda: iter(make_eval_iterator(settings, global_batch_size=2))  # noqa: E731
    batches = list(make())
    text = "".join(chr(t) for b in batches for t in b["tokens"][b["loss_mask"] > 0] if t < 256)
    assert "aaa" in text and "bbb" in text and text.rindex("a") < text.index("b")
    iterator = make()
    states = []
    for _ in batches:
        states.append(json.dumps(iterator.get_state()))
        next(iterator)
    for i, state in enumerate(states):
        resumed = make()
        resumed.set_state(json.loads(state))
        assert same(next(resumed), batches[i])


def test_errors_say_what_is_accepted(stores, texts, tmp_path):
    for mixture, message in {
        "0.5 a 0.5": "has 3 words; accepted are weights and paths in turn",
        "x a 1 b": "'x' is no weight above 0",
        "-1 a 1 b": "'-1' is no weight above 0",
        "1 a 2 a": "has 'a' twice",
        "1 a 20000 b": "the weight 1.0 is less than 1/10000 of the sum",
        "1 'a": "No closing quotation; accepted",
    }.items():
        with pytest.raises(ValueError, match=message):
            config(mixture).validate()
    with pytest.raises(ValueError, match="data.mixture='1 a' and data.path='b'; accepted is one"):
        config("1 a", path="b").validate()
    both = f"{stores} 1 {tmp_path / 'aaa'}"
    with pytest.raises(
        ValueError, match="has the token store .*, which is none; accepted are stores alone or"
    ):
        make_train_iterator(config(both), global_batch_size=2, seed=0)
    other = write_array(
        tmp_path / "other.zarr", numbered(4, 8) % 200, vocab_size=257, encoder="bytes"
    )
    with pytest.raises(ValueError, match="other.zarr was written with encoder 'bytes'"):
        make_train_iterator(config(f"{stores} 1 {other}"), global_batch_size=2, seed=0)
    with pytest.raises(ValueError, match="data.path='nowhere/' does not exist"):
        make_train_iterator(config("1 nowhere/"), global_batch_size=2, seed=0)
    assert parse_mixture(format_mixture([(0.25, "a b"), (1.0, "c")])) == [(0.25, "a b"), (1.0, "c")]


def test_the_fingerprint_names_the_source_that_changed(stores, tmp_path):
    settings = config(stores, tokenizer="auto")
    assert with_tokenizer(settings).tokenizer == "gpt2"
    first = json.loads(json.dumps(fingerprint(settings)))
    path = parse_mixture(stores)[1][1]
    (tmp_path / "s20000.zarr" / "0.0").write_bytes(b"x")
    changes = fingerprint_changes(first, fingerprint(settings))
    assert [c for c in changes if c.startswith(f"{path}: files whose size changed: 0.0")]
    reweighted = fingerprint(
        config(stores.replace("6.0", "5.0").replace("6 ", "5 "), tokenizer="auto")
    )
    assert any(c.startswith("mixture: ") for c in fingerprint_changes(first, reweighted))
