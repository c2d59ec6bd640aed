"""Tests of the devices' peak speeds and of the share of it that a run reports."""

from __future__ import annotations

import pytest

from lsm_jax.training import loop, read_rows, train
from lsm_jax.training.peak_flops import peak_flops
from tests.training import tiny


@pytest.mark.parametrize(
    ("kind", "teraflops"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10G", 70),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("TPU v5 lite", 197),
        ("TPU v5p", 459),
        ("TPU v6 lite", 918),
    ],
)
def test_peaks_of_known_devices(kind, teraflops):
    assert peak_flops(kind) == pytest.approx(1e12 * teraflops)


@pytest.mark.parametrize("kind", ["cpu", "", "NVIDIA H2000", "TPU v99", "NVIDIA"])
def test_other_devices_have_none(kind):
    assert peak_flops(kind) is None


@pytest.mark.slow
def test_a_run_reports_its_share_of_the_peak(tmp_path, monkeypatch):
    text = tiny.write_text(tmp_path / "text")
    config = tiny.config(text, total_tokens=4 * 256)
    train(config, tmp_path / "unknown")
    assert not any("perf/mfu" in row for row in read_rows(tmp_path / "unknown" / "metrics.jsonl"))
    monkeypatch.setattr(loop, "peak_flops", lambda _: 1e12)
    train(config, tmp_path / "known")
    row = read_rows(tmp_path / "known" / "metrics.jsonl")[-1]
    assert row["perf/mfu"] > 0
    assert row["perf/mfu"] == pytest.approx(row["perf/model_flops_per_second"] / 1e12)
