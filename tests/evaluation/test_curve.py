"""Tests of the loss by position, L(i), and of the perplexity by length, P(l), against float64 arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

from lsm_jax.evaluation.curve import LossCurve, report_lengths


def test_report_lengths():
    assert report_lengths(65536) == [65536, 32768, 16384, 8192, 4096, 2048, 1024, 512]
    assert report_lengths(1024) == [1024, 512, 256, 128]
    assert report_lengths(3000) == [3000, 1500, 750, 375]
    assert report_lengths(1) == [1]


def test_loss_and_perplexity_are_the_definition():
    rng = np.random.default_rng(0)
    nll = rng.gamma(2.0, 1.0, (6, 1024)).astype(np.float32)
    curve = LossCurve(1024)
    curve.add(nll[:4])
    curve.add(nll[4:, :500])
    curve.add(nll[4:, 500:], start=500)
    loss = nll.astype(np.float64).mean(0)
    np.testing.assert_allclose(curve.loss, loss, rtol=1e-14)
    summary = curve.summary()
    for length in (1024, 512, 256, 128):
        mean = loss[:length].mean()
        assert summary[f"val/loss_avg_len_{length}"] == pytest.approx(mean, rel=1e-13)
        assert summary[f"val/perplexity_len_{length}"] == pytest.approx(np.exp(mean), rel=1e-13)
    np.testing.assert_allclose(
        curve.running_perplexity(), np.exp(np.cumsum(loss) / np.arange(1, 1025)), rtol=1e-12
    )
    assert summary["val/tokens"] == nll.size
    assert summary["val/loss"] == pytest.approx(nll.astype(np.float64).mean(), rel=1e-13)


def test_many_small_losses_are_not_lost():
    # In float32 a sum of 2**24 ones would not grow any further.
    curve = LossCurve(2)
    curve.total[:], curve.count[:] = 2.0**26, 2**26
    curve.add(np.ones((3, 2), np.float32))
    assert (curve.total == 2.0**26 + 3).all()


def test_ragged_and_packed_rows_count_at_positions_in_documents():
    nll = np.array([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, np.nan, np.nan]])
    mask = np.array([[1, 1, 1, 1], [1, 1, 0, 0]])
    curve = LossCurve(4)
    curve.add(nll, mask)
    np.testing.assert_array_equal(curve.loss, [3.0, 4.0, 3.0, 4.0])
    assert curve.mean == pytest.approx(21 / 6)
    assert curve.average(4) == pytest.approx(3.5)

    packed = LossCurve(4)
    packed.add(nll, mask, np.array([[0, 1, 2, 0], [0, 1, 0, 0]]))
    np.testing.assert_array_equal(packed.count, [3, 2, 1, 0])
    np.testing.assert_array_equal(packed.loss, [10 / 3, 4.0, 3.0, np.nan])
    assert packed.perplexity(4) == pytest.approx(np.exp((10 / 3 + 4 + 3) / 3))
    np.testing.assert_allclose(packed.running_perplexity()[-1], packed.perplexity(4))


def test_invalid_losses_are_refused():
    with pytest.raises(ValueError, match="position 1 is not finite"):
        LossCurve(2).add(np.array([[1.0, np.inf]]))
    with pytest.raises(ValueError, match="accepted: 0 to 1"):
        LossCurve(2).add(np.ones((1, 3)))
    with pytest.raises(ValueError, match="no token was scored"):
        LossCurve(2).summary()
    with pytest.raises(ValueError, match="length=0"):
        LossCurve(0)
