"""Tune adapters of a released model on rows that four devices share, and on one device, and compare losses and adapters:
`python -m tests.linearize.shared_rows SOURCE ALPACA.jsonl FOLDER`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from lsm_jax.parallel import MeshConfig
from lsm_jax.training import load_run, read_rows, train
from lsm_jax.training.partition import leaves_of, split
from tests.linearize.test_finetune import tiny


def main(source: str, text: str, folder: str) -> None:
    """Train both runs of three steps and compare them."""
    runs = {}
    for name, mesh in (("one", MeshConfig(data=4)), ("shared", MeshConfig(data=1, sequence=4))):
        config = tiny(
            f"lora,source={source},rank=2",
            Path(text),
            mesh=mesh,
            batch_size=4,
            total_tokens=3 * 1024,
        )
        train(config, Path(folder) / name)
        rows = read_rows(Path(folder) / name / "metrics.jsonl")
        losses = [row["train/loss"] for row in rows if "train/loss" in row]
        adapters = leaves_of(split(load_run(Path(folder) / name).params, ("lora",))[0])
        runs[name] = losses, adapters
    np.testing.assert_allclose(runs["shared"][0], runs["one"][0], rtol=1e-5)
    scale = max(np.abs(x).max() for x in runs["one"][1].values())
    for name, value in runs["one"][1].items():
        np.testing.assert_allclose(runs["shared"][1][name], value, atol=2e-3 * scale, err_msg=name)
    print("losses", runs["one"][0], "are equal")


if __name__ == "__main__":
    main(*sys.argv[1:])
