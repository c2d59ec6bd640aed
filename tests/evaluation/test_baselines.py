"""Tests of the baselines of evaluation (simple language models) on sources whose entropy is known."""

from __future__ import annotations

import lzma
import math

import numpy as np
import pytest

from lsm_jax.data import write_demo_store
from lsm_jax.data.store import TokenStore
from lsm_jax.evaluation import ContextModel, byte_baselines, store_documents, xz_bits


@pytest.fixture(scope="module")
def random_bytes():
    return np.random.default_rng(0).integers(0, 256, 3_000_000, dtype=np.uint8)


@pytest.mark.parametrize("order", [0, 1, 2])
def test_random_bytes_cost_eight_bits_and_never_less(order, random_bytes):
    train, heldout = random_bytes[:2_500_000], random_bytes[2_500_000:]
    bits = ContextModel([train], order).bits([heldout])
    # The sample fluctuates by 1e-5 bits; a higher order has a higher cost for contexts that it has rarely
    # seen.
    assert 7.9995 < bits < (8.001, 8.05, 8.7)[order]


def test_order_0_is_the_entropy_of_a_skewed_source():
    rng = np.random.default_rng(1)
    draw = rng.choice(4, 400_000, p=[0.5, 0.25, 0.125, 0.125]).astype(np.uint8)
    assert ContextModel([draw[:300_000]], 0).bits([draw[300_000:]]) == pytest.approx(1.75, abs=0.01)
    # Independent draws: more context cannot help, and costs little.
    assert 1.74 < ContextModel([draw[:300_000]], 2).bits([draw[300_000:]]) < 1.76


def test_only_order_2_sees_a_period_that_needs_two_bytes():
    # a a b a a b ...: after b comes a, after one a either, after two bytes only one.
    text = np.tile(np.frombuffer(b"aab", np.uint8), 20_000)
    assert ContextModel([text], 0).bits([text[:9000]]) == pytest.approx(
        -(2 / 3 * math.log2(2 / 3) + 1 / 3 * math.log2(1 / 3)), abs=1e-2
    )
    assert ContextModel([text], 1).bits([text[:9000]]) == pytest.approx(2 / 3, abs=1e-2)
    assert ContextModel([text], 2).bits([text[:9000]]) < 1e-2


def test_probabilities_sum_to_one():
    model = ContextModel([np.random.default_rng(2).integers(0, 5, 500, dtype=np.uint8)], 2)
    for context in ([], [3], [1, 2], [200, 1], [200, 201]):
        each = [
            model.probabilities(np.array([*context, byte], np.uint8))[-1] for byte in range(256)
        ]
        assert sum(each) == pytest.approx(1.0, abs=1e-12)


def test_documents_do_not_run_into_one_another():
    train = [np.frombuffer(b"ab" * 500, np.uint8)]
    apart = [np.frombuffer(b"a", np.uint8), np.frombuffer(b"b", np.uint8)]
    together = [np.frombuffer(b"ab", np.uint8)]
    assert ContextModel(train, 2).bits(apart) > ContextModel(train, 2).bits(together)


def test_xz_is_the_size_of_the_file():
    text = np.frombuffer(b"the quick brown fox " * 500, np.uint8)
    size = len(lzma.compress(text.tobytes(), preset=9))
    assert xz_bits([text[:100], text[100:]]) == 8 * size / text.size


def test_documents_of_a_store(tmp_path):
    train, heldout = write_demo_store(tmp_path / "demo", row_length=256, max_bytes=200_000)
    documents = store_documents(TokenStore(heldout))
    rows = TokenStore(heldout).read(
        np.arange(TokenStore(heldout).num_documents), 0, 256, vocab_size=257
    )
    assert b"".join(d.tobytes() for d in documents) == rows[rows < 256].astype(np.uint8).tobytes()
    assert len(documents) >= (rows == 256).sum()
    bits = byte_baselines(store_documents(TokenStore(train)), documents)
    assert list(bits) == ["order-0", "order-2", "xz -9"]
    assert bits["order-2"] < bits["order-0"] < 8


def test_errors():
    one = [np.zeros(3, np.uint8)]
    with pytest.raises(ValueError, match="order=3, accepted: 0 to 2"):
        ContextModel(one, 3).bits(one)
    with pytest.raises(ValueError, match="train has no bytes"):
        ContextModel([], 0).bits(one)
    with pytest.raises(ValueError, match="heldout has no bytes"):
        ContextModel(one, 0).bits([])
    with pytest.raises(ValueError, match="accepted: uint8"):
        ContextModel([np.zeros(3, np.int32)], 0).bits(one)
