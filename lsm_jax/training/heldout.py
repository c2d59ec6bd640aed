"""Write the held-out loss by position that is computed during training."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np

from lsm_jax.files import replacing
from lsm_jax.training.failures import writing


def write_curve(workdir: Path, nll: np.ndarray, count: np.ndarray) -> None:
    """Write the loss by position of the last held-out evaluation to plots/loss_by_position.npz, in the format of an
    evaluation's results.npz. Only the first host writes.

    Args:
        workdir: the run's directory.
        nll: [T], the summed losses at each position in nats.
        count: [T], the tokens at each position.
    """
    if jax.process_index() != 0:
        return
    path = workdir / "plots" / "loss_by_position.npz"
    with writing(path):
        path.parent.mkdir(exist_ok=True)
        with replacing(path) as draft, open(draft, "wb") as file:
            loss = np.where(count > 0, nll, np.nan) / np.maximum(count, 1)
            arrays = {"val/loss_per_token": loss, "val/tokens_per_position": count.astype(np.int64)}
            np.savez_compressed(file, **arrays)
