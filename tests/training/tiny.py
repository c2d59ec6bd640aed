"""A run small enough to train in seconds, and a driver: `python -m tests.training.tiny WORKDIR TEXT STOP_AT FSDP`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from lsm_jax.data import DataConfig
from lsm_jax.feedforward import SwiGLUConfig
from lsm_jax.mixers import GatedDeltaNetConfig, OpConfig, SoftmaxConfig
from lsm_jax.models import LayerConfig, ModelConfig
from lsm_jax.parallel import MeshConfig
from lsm_jax.training import OptimizerConfig, TrainConfig, loop, train


def config(text: str | Path, **changes) -> TrainConfig:
    """12 steps of 8 rows of 32 bytes."""
    inner = SwiGLUConfig(multiple_of=16)
    recurrent = GatedDeltaNetConfig(
        num_heads=2, head_dim=8, expand_v=1.0, op=OpConfig(chunk_size=16)
    )
    fields = dict(
        name="tiny",
        model=ModelConfig(
            vocab_size=257,
            hidden_size=16,
            num_layers=2,
            pattern="LN",
            layers={
                "L": LayerConfig(mixer=recurrent, feedforward=None),
                "N": LayerConfig(mixer=SoftmaxConfig(num_heads=2, head_dim=8), feedforward=inner),
            },
            dtype="float32",
        ),
        data=DataConfig(path=str(text), heldout_fraction=0.2, sequence_length=32, num_threads=0, prefetch=0),
        optimizer=OptimizerConfig(peak_lr=1e-2, warmup_tokens=512),
        batch_size=8,
        total_tokens=12 * 256,
        log_every=1,
        eval_every=0,
        checkpoint_every=3,
    )  # fmt: skip
    return TrainConfig(**fields | changes)


def write_text(folder: Path) -> Path:
    """Ten short documents."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(10):
        (folder / f"{i}.txt").write_text(
            f"document {i}: " + "to be or not to be, that is the question. " * (5 + i)
        )
    return folder


def stop_at(step: int | None, number: int = signal.SIGTERM) -> None:
    """Send this process a signal once it has reported `step`."""
    report = loop._Loop._report

    def report_and_stop(self, reported, metrics):
        report(self, reported, metrics)
        if reported == step:
            os.kill(os.getpid(), number)

    loop._Loop._report = report_and_stop


def main() -> None:
    """The driver."""
    workdir, text, stop, fsdp = sys.argv[1:5]
    if int(stop):  # a negative step: by SIGKILL
        stop_at(abs(int(stop)), signal.SIGTERM if int(stop) > 0 else signal.SIGKILL)
    train(config(text, mesh=MeshConfig(fsdp=int(fsdp))), workdir)


if __name__ == "__main__":
    main()
