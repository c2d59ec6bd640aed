"""State tracking: the states of every example are the products of its moves."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from lsm_jax.data import TrackingTask, tracking_examples, tracking_vocabulary
from lsm_jax.data.recall_task import NOT_ASKED
from lsm_jax.data.tracking_task import permutations


@pytest.mark.parametrize(("things", "moves"), [(2, "all"), (3, "all"), (5, "swaps"), (5, "all")])
def test_states_are_the_products_of_moves(things, moves):
    task = TrackingTask(things=things, moves=moves, length=12, num_examples=100, first=4)
    tokens, targets = tracking_examples(task, seed=3)
    table = list(itertools.permutations(range(things)))
    number = len(table)
    assert tokens.shape == targets.shape == (100, 13) == (100, task.num_tokens)
    assert tokens.dtype == targets.dtype == np.int32
    assert np.all(tokens[:, 0] == 2 * number) and 2 * number + 1 == tracking_vocabulary(things)
    for row, asked in zip(tokens.tolist(), targets.tolist(), strict=True):
        places = list(range(things))  # where each thing is
        for t, move in enumerate(row[1:], 1):
            moved = sum(a != i for i, a in enumerate(table[move]))
            assert moves == "all" or moved in (0, 2)
            places = [table[move][place] for place in places]
            state = number + table.index(tuple(places))
            assert asked[t] == (state if t >= 4 else NOT_ASKED)
    assert len(np.unique(tokens[:, 1:])) == (11 if moves == "swaps" else number)


def test_parity_is_the_number_of_swaps():
    task = TrackingTask(things=2, length=9, num_examples=20)
    tokens, targets = tracking_examples(task)
    np.testing.assert_array_equal(targets[:, 1:] - 2, np.cumsum(tokens[:, 1:], axis=1) % 2)
    assert task.name == "S2 1-9" and task.num_tokens == 10
    assert (
        TrackingTask(things=5, moves="swaps", length=9, first=3, num_examples=1).name
        == "S5 swaps 3-9"
    )


def test_the_seed_decides_the_examples():
    task = TrackingTask(things=3, length=16, num_examples=8)
    same, other = tracking_examples(task, seed=(1, 0)), tracking_examples(task, seed=(1, 1))
    np.testing.assert_array_equal(same.tokens, tracking_examples(task, seed=(1, 0)).tokens)
    assert np.any(same.tokens != other.tokens)
    positions, answers = same.queries()
    np.testing.assert_array_equal(positions, np.tile(np.arange(1, 17), (8, 1)))
    np.testing.assert_array_equal(answers, same.targets[:, 1:])
    assert len(permutations(4)) == 24


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(things=1), "things=1: accepted is a number from 2 to 6"),
        (dict(moves="cycles"), "moves='cycles': accepted are all, swaps"),
        (dict(length=0), "length=0: it must be at least 1"),
        (dict(first=5), "first=5: accepted is a number from 1 to 4"),
    ],
)
def test_errors_name_the_field(change, message):
    fields = dict(things=3, length=4, num_examples=2) | change
    with pytest.raises(ValueError, match=message):
        tracking_examples(TrackingTask(**fields))
    with pytest.raises(ValueError, match="vocab_size=12: .* require 13"):
        TrackingTask(things=3, length=4, num_examples=2).validate(12)
