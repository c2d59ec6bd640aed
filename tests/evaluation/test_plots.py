"""Tests of the plots of training: smoothing, reading of metrics, and PNG files."""

from __future__ import annotations

import json

import numpy as np
import pytest

from lsm_jax.evaluation import (
    LossCurve,
    moving_average,
    plot_loss_by_position,
    plot_training,
    plots,
    read_metrics,
)
from lsm_jax.evaluation.plots import new_figure

PNG = b"\x89PNG"


def test_moving_average_is_centred_and_keeps_to_the_data():
    rng = np.random.default_rng(0)
    values = rng.normal(size=400)
    smooth = moving_average(values, 101)
    for i in (0, 7, 50, 200, 399):
        assert smooth[i] == pytest.approx(values[max(0, i - 50) : i + 51].mean(), abs=1e-12)
    np.testing.assert_allclose(moving_average(values, 1), values, atol=1e-12)
    # By default 101, and less where there are fewer than 20 windows.
    np.testing.assert_array_equal(moving_average(values), moving_average(values, 19))
    long = rng.normal(size=5000)
    np.testing.assert_array_equal(moving_average(long), moving_average(long, 101))
    gap = np.array([1.0, np.nan, 3.0])
    np.testing.assert_allclose(moving_average(gap, 3), [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="accepted: odd"):
        moving_average(values, 10)


@pytest.mark.parametrize("length", [1, 2, 96, 8192])
def test_loss_by_position(tmp_path, length):
    curves = {}
    for name in ("one", "two"):
        curves[name] = LossCurve(length)
        curves[name].add(np.random.default_rng(0).gamma(2.0, 1.0, (3, length)))
    path = plot_loss_by_position(
        curves, tmp_path / "plots" / "loss.png", train_length=length // 2 or 1
    )
    assert path.read_bytes().startswith(PNG)
    assert [p.name for p in path.parent.iterdir()] == ["loss.png"]


def test_training_curves(tmp_path, monkeypatch):
    lines = [{"step": s, "train/loss": 5.0 - s, "note": "x"} for s in (1, 2, 3, 2)]
    lines[-1]["train/loss"] = 9.0
    lines += [{"step": 2, "val/loss": 4.0}]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "train/lo'
    (tmp_path / "metrics.jsonl").write_text(text)
    steps, values = read_metrics(tmp_path / "metrics.jsonl")["train/loss"]
    assert steps.tolist() == [1, 2, 3] and values.tolist() == [4.0, 9.0, 2.0]
    drawn = []
    monkeypatch.setattr(plots, "save_figure", lambda figure, *_, **__: drawn.append(figure))
    plot_training({"run": tmp_path}, tmp_path / "training.png", unit="byte")
    monkeypatch.undo()
    train, heldout = drawn[0].axes[0].lines
    assert drawn[0].axes[0].get_ylabel() == "loss (nats per byte)"
    assert train.get_marker() == "" and heldout.get_marker() == "o"
    path = plot_training({"run": tmp_path}, tmp_path / "training.png")
    assert path.read_bytes().startswith(PNG)
    with pytest.raises(ValueError, match="train/loss, val/loss"):
        plot_training({"run": tmp_path}, tmp_path / "none.png", names=("speed",))


def test_a_long_title_is_not_clipped():
    title = "a run with a long name: layer 3, GatedDeltaNet, the first 1,024 tokens of the held-out data, step 20,000"
    for columns in (1, 2):
        figure, _ = new_figure(title, columns=columns, size=(4.0, 3.0))
        figure.canvas.draw()
        box = figure.get_suptitle(), figure._suptitle.get_window_extent()
        assert box[0].replace("\n", " ") == title
        assert 0 < box[1].x0 and box[1].x1 < figure.bbox.x1


def test_a_training_loss_is_smoothed_and_a_single_one_is_a_point(tmp_path, monkeypatch):
    means = plots.trailing_mean(np.arange(40.0))
    assert means[0] == 0 and np.array_equal(means[1:], np.arange(40.0)[1:] - 0.5)
    (tmp_path / "metrics.jsonl").write_text('{"step": 4, "train/loss": 4.5}\n')
    drawn = []
    monkeypatch.setattr(plots, "save_figure", lambda figure, *_, **__: drawn.append(figure))
    plot_training({"run": tmp_path}, tmp_path / "training.png")
    assert [line.get_marker() for line in drawn[0].axes[0].lines] == ["o"]
