"""Multi-query associative recall: the structure of every example, and the distributions of its parts."""

from __future__ import annotations

import numpy as np
import pytest

from lsm_jax.data import RecallTask, recall_examples
from lsm_jax.data.recall_task import NOT_ASKED, _distinct


def task(length=64, num_pairs=4, num_examples=200):
    return RecallTask(length=length, num_pairs=num_pairs, num_examples=num_examples)


@pytest.mark.parametrize("random_fill", [True, False])
@pytest.mark.parametrize(("length", "pairs"), [(64, 4), (64, 16), (256, 64), (8, 1)])
def test_every_query_is_a_key_of_the_pairs(length, pairs, random_fill):
    vocab = 512
    tokens, targets = recall_examples(
        task(length, pairs), vocab_size=vocab, seed=1, random_fill=random_fill
    )
    assert tokens.shape == targets.shape == (200, length)
    assert tokens.dtype == targets.dtype == np.int32
    keys, values = tokens[:, 0 : 2 * pairs : 2], tokens[:, 1 : 2 * pairs : 2]
    assert keys.min() >= 1 and keys.max() < vocab // 2
    assert values.min() >= vocab // 2 and values.max() < vocab
    for row in range(200):
        assert len(set(keys[row])) == len(set(values[row])) == pairs
        asked = np.flatnonzero(targets[row] != NOT_ASKED)
        assert len(asked) == pairs and asked.min() >= 2 * pairs
        assert not np.any((asked - 2 * pairs) % 2)
        answer = dict(zip(keys[row], values[row], strict=True))
        assert {
            t: targets[row, i] for i, t in zip(asked, tokens[row, asked], strict=True)
        } == answer
    rest = targets == NOT_ASKED
    rest[:, : 2 * pairs] = False
    if random_fill:
        assert tokens.min() >= 0 and tokens.max() < vocab
        assert len(np.unique(tokens[rest])) > vocab // 2
    else:
        assert not tokens[rest].any()


def test_positions_and_answers_of_queries_are_the_targets():
    examples = recall_examples(task(num_examples=7), seed=0)
    positions, answers = examples.queries()
    assert positions.shape == answers.shape == (7, 4)
    assert np.all(np.diff(positions, axis=1) > 0)
    targets = np.full_like(examples.targets, NOT_ASKED)
    np.put_along_axis(targets, positions, answers, axis=1)
    np.testing.assert_array_equal(targets, examples.targets)


@pytest.mark.parametrize("power", [0.01, 1.0])
def test_gaps_follow_the_power_law(power):
    number, pairs, places = 40_000, 2, 14
    tokens, targets = recall_examples(
        task(32, pairs, number), vocab_size=64, seed=3, power=power, random_fill=False
    )
    weight = np.arange(1, places + 1) ** (power - 1.0)
    weight /= weight.sum()
    after = tokens[:, 2 * pairs :: 2]
    first, second = (np.argmax(after == tokens[:, i, None], axis=1) for i in (0, 2))
    frequency = np.zeros((places, places))
    np.add.at(frequency, (first, second), 1 / number)
    # The second key's gap is drawn from all gaps but the first key's.
    expected = weight[:, None] * weight / (1 - weight[:, None])
    np.fill_diagonal(expected, 0)
    error = np.sqrt(expected * (1 - expected) / number)
    assert np.all(np.abs(frequency - expected) <= 5 * error)
    assert np.all(np.diag(frequency) == 0)


@pytest.mark.parametrize(("count", "size"), [(3, 8), (5, 8), (8, 8)])
def test_draws_without_replacement_are_uniform(count, size):
    number = 40_000
    drawn = _distinct(np.random.default_rng(0), number, count, size)
    assert all(len(set(row)) == count for row in drawn[:1000])
    for place in range(count):
        share = np.bincount(drawn[:, place], minlength=size) / number
        np.testing.assert_allclose(share, 1 / size, atol=5 * np.sqrt(1 / size / number))


def test_the_seed_determines_the_examples():
    one, same, other = (recall_examples(task(), seed=seed) for seed in (5, 5, (5, 1)))
    np.testing.assert_array_equal(one.tokens, same.tokens)
    np.testing.assert_array_equal(one.targets, same.targets)
    assert np.any(one.tokens != other.tokens)


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (task(length=63), {}, "length=63: it must be even"),
        (task(length=0), {}, "length=0: it must be at least 1"),
        (task(num_pairs=17), {}, "num_pairs=17: pairs and queries require 68 tokens, but length=64; at most 16"),
        (task(num_pairs=0), {}, "num_pairs=0: it must be at least 1"),
        (task(num_examples=0), {}, "num_examples=0: it must be at least 1"),
        (task(), dict(vocab_size=8), "vocab_size=8 .* requires a vocabulary of at least 10"),
        (task(), dict(power=0.0), "power=0.0: it must be greater than 0"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(given, options, message):
    with pytest.raises(ValueError, match=message):
        recall_examples(given, **options)
    recall_examples(task(num_examples=1), vocab_size=10)
