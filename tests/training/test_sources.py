"""Runs on mixtures and on files that are unpacked: killed and resumed to the bit, with the fractions in the metrics."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import pytest

from lsm_jax.data.mixture import format_mixture
from lsm_jax.data.tokenize import main as tokenize
from lsm_jax.training import read_rows, train
from lsm_jax.training.run_files import pinned, write_config
from tests.hub_server import Hub
from tests.training import tiny
from tests.training.test_loop import drive, losses


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """Return a mixture of two stores of bytes."""
    folder, paths = tmp_path_factory.mktemp("sources"), []
    for name, text in (("one", "the sea is blue. "), ("two", "a hill, a tree; ")):
        (folder / f"{name}.txt").write_text(text * 300)
        paths.append(str(folder / f"{name}.zarr"))
        options = ["--tokenizer=bytes", "--sequence_length=64", "--pack", "--num_workers=1"]
        assert tokenize([f"--input={folder / name}.txt", f"--output={paths[-1]}", *options]) == 0
    return format_mixture(zip((3, 1), paths, strict=True))


@pytest.mark.slow
def test_a_killed_run_of_a_mixture_resumes_to_the_bit(mixture, tmp_path):
    assert train(tiny.config(mixture), tmp_path / "whole").step == 12
    rows = read_rows(tmp_path / "whole" / "metrics.jsonl")
    fractions = [{k: v for k, v in row.items() if k.startswith("data/")} for row in rows]
    assert all(len(f) == 2 and sum(f.values()) == pytest.approx(1) for f in fractions)
    first = [v for f in fractions for k, v in f.items() if k.endswith("one.zarr")]
    assert abs(first[-1] - 0.75) < 0.03 and all(0.6 < f < 0.9 for f in first)
    killed = drive(tmp_path / "run", mixture, stop=-8)
    assert killed.returncode == -9, killed.stderr
    assert train(tiny.config(mixture), tmp_path / "run").step == 12
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert json.loads((tmp_path / "run" / "data.json").read_text())["kind"] == "mixture"
    with pytest.raises(ValueError, match=r"data\.mixture"):
        train(tiny.config(mixture.replace("3", "2", 1)), tmp_path / "run")


@pytest.mark.slow
def test_a_stopped_run_of_parquet_resumes_to_the_bit(tmp_path):
    texts = [f"row {i}: " + "to be or not to be. " * (1 + i % 4) for i in range(60)]
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "x.parquet")
    config = tiny.config(tmp_path / "x.parquet", total_tokens=6 * 256)
    config.data.cache_dir = str(tmp_path / "cache")
    assert train(config, tmp_path / "whole").step == 6
    stopped = train(config, tmp_path / "run", on_report=tiny.stop_at(3))
    assert stopped.interrupted is not None and stopped.step < 6
    assert train(config, tmp_path / "run").step == 6
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert np.isfinite(losses(tmp_path / "run")).all()


def test_a_run_continues_with_the_commits_of_its_config(tmp_path, monkeypatch):
    server = Hub()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for name in (
        "http_proxy",
        "https_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "all_proxy",
        "ALL_PROXY",
    ):
        monkeypatch.delenv(name, raising=False)
    old = server.add("datasets", "org/corpus", {"README.md": b"1"})
    config = tiny.config("org/corpus:train")
    config.data.cache_dir = str(tmp_path / "cache")
    first = pinned(config, tmp_path)
    assert first.data.path == f"org/corpus@{old}:train"
    (tmp_path / "run").mkdir()
    write_config(tmp_path / "run", first, {})
    new = server.add("datasets", "org/corpus", {"README.md": b"2"})
    assert pinned(config, tmp_path / "run") == first
    assert pinned(config, tmp_path / "other").data.path == f"org/corpus@{new}:train"
    mixed = dataclasses.replace(
        config, data=dataclasses.replace(config.data, path="", mixture="2 org/corpus 1 /x")
    )
    assert pinned(mixed, tmp_path / "other").data.mixture == f"2.0 org/corpus@{new} 1.0 /x"
    server.close()
