"""Report a recall sweep: its members' names, its metrics, result.json and the line that announces it."""

from __future__ import annotations

import math
import sys
from typing import Any

import jax
import numpy as np

from lsm_jax import mixers
from lsm_jax.models import recall_state_size
from lsm_jax.training.recall_config import SmallModelsConfig
from lsm_jax.training.sweep import SweepState


def member_label(member: tuple[float, int], config: SmallModelsConfig) -> str:
    """Return a member's name in logs and metrics: its learning rate, and its seed where there are several."""
    rate, seed = member
    return f"{rate:.1e}" if len(config.seeds) == 1 else f"{rate:.1e}/seed{seed}"


def by_member(config: SmallModelsConfig, scores: np.ndarray) -> str:
    """Return each member's name with its mean accuracy, as text; `scores` has the accuracies [test tasks, members]."""
    pairs = zip(config.members(), scores.mean(axis=0), strict=True)
    return ", ".join(f"{member_label(member, config)} {score:.3f}" for member, score in pairs)


def member_metrics(config: SmallModelsConfig, scores: np.ndarray, losses: Any) -> dict[str, float]:
    """Return the metrics of an epoch by name: each member's last loss, from `losses` [steps, members], and its mean accuracy,
    from `scores` [test tasks, members]."""
    values = {}
    for i, member in enumerate(config.members()):
        label = member_label(member, config)
        values[f"loss/{label}"] = float(np.asarray(losses)[-1, i])
        values[f"accuracy/{label}"] = float(scores[:, i].mean())
    return values


def result_of(config: SmallModelsConfig, scores: np.ndarray) -> dict[str, Any]:
    """Return the entries of result.json that describe the recall config, and the accuracy of each member and
    of the best one; `scores` has the accuracies [test tasks, members]."""
    names = [task.name for task in config.test]
    members = [
        dict(
            learning_rate=rate,
            seed=seed,
            mean=round(float(member_scores.mean()), 5),
            accuracy={n: round(float(a), 5) for n, a in zip(names, member_scores, strict=True)},
        )
        for (rate, seed), member_scores in zip(config.members(), scores.T, strict=True)
    ]
    best = max(members, key=lambda m: m["mean"])
    longest = max(task.num_tokens for task in (*config.train, *config.test))
    return {
        "name": config.name,
        "method": mixers.method_of(config.model.mixer).name,
        "width": config.model.hidden_size,
        "pattern": config.model.pattern,
        "dtype": config.model.dtype,
        "train": [f"{t.name}:{t.num_examples}" for t in config.train],
        **best,
        "members": members,
        "state_size": recall_state_size(config.model, longest),
        "batch_size": config.batch_size,
    }


def count_parameters(state: SweepState) -> dict[str, int]:
    """Return the number of parameters of one member of a recall sweep: {"total": all of them, "non_embedding":
    all but the embedding}."""
    total = sum(math.prod(x.shape[1:]) for x in jax.tree.leaves(state.params))
    embedding = math.prod(state.params["embedding"].shape[1:])
    return dict(total=total, non_embedding=total - embedding)


def announce(config: SmallModelsConfig, num_steps: int, seconds: float) -> None:
    """Print the line that says what a sweep trains: members, steps and the seconds of compiling."""
    print(
        f"{config.name}: {len(config.members())} members, at most {num_steps:,} steps of {config.batch_size} examples, "
        f"compiled in {seconds:.1f} s, on {jax.devices()[0].device_kind}",
        file=sys.stderr,
        flush=True,
    )
