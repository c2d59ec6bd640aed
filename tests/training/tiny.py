"""A run small enough to train in seconds, and a command that trains it:
`python -m tests.training.tiny WORKDIR TEXT STOP_AT FSDP`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from lsm_jax.data import DataConfig
from lsm_jax.feedforward import SwiGLUConfig
from lsm_jax.mixers import GatedDeltaNetConfig, OpConfig, SoftmaxConfig
from lsm_jax.models import LayerConfig, ModelConfig
from lsm_jax.parallel import MeshConfig
from lsm_jax.training import OptimizerConfig, TrainConfig, train


def config(text: str | Path, **changes) -> TrainConfig:
    """Return the training config of a run of 12 steps of 8 rows of 32 bytes, of a path or, with blanks, of a mixture."""
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
        data=DataConfig(
            **{"mixture" if " " in str(text) else "path": str(text)},
            heldout_fraction=0.2,
            sequence_length=32,
            num_threads=0,
            prefetch=0,
        ),
        optimizer=OptimizerConfig(peak_lr=1e-2, warmup_tokens=512),
        batch_size=8,
        total_tokens=12 * 256,
        log_every=1,
        eval_every=0,
        checkpoint_every=3,
    )
    return TrainConfig(**fields | changes)


def write_text(folder: Path) -> Path:
    """Write the training text of the tiny run, ten short documents, into `folder`, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(10):
        (folder / f"{i}.txt").write_text(
            f"document {i}: " + "to be or not to be, that is the question. " * (5 + i)
        )
    return folder


def stop_at(step: int, number: int = signal.SIGTERM) -> Callable[[int], None]:
    """Return an `on_report` callback for `train` that sends this process a signal once the step `step` is
    reported.
    """

    def on_report(reported: int) -> None:
        if reported == step:
            os.kill(os.getpid(), number)

    return on_report


def main() -> None:
    """Train the tiny run with the command line's arguments. The run stops itself after step |STOP_AT|: by
    SIGTERM if STOP_AT is positive, by SIGKILL if it is negative; 0 does not stop it.
    """
    workdir, text, stop, fsdp = sys.argv[1:5]
    on_report = stop_at(abs(int(stop)), signal.SIGTERM if int(stop) > 0 else signal.SIGKILL)
    train(config(text, mesh=MeshConfig(fsdp=int(fsdp))), workdir, on_report=on_report)


if __name__ == "__main__":
    main()
