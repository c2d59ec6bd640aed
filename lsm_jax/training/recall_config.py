"""The configs of sweeps of small models: on multi-query associative recall, and on state tracking."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from lsm_jax.data import (
    RecallExamples,
    RecallTask,
    TrackingTask,
    recall_examples,
    tracking_examples,
)
from lsm_jax.models import RecallModelConfig
from lsm_jax.training.config import check_implementations, resolve_annotations
from lsm_jax.training.config_json import check_types


@dataclasses.dataclass(kw_only=True)
class SmallModelsConfig:
    """The config of a sweep that trains small models on tasks whose examples are drawn: everything its result depends on.

    Attributes:
        name: the name shown in logs.
        model: the config of the small model that is trained.
        train: the tasks to train on; each batch is of one task, and tasks alternate.
        test: the tasks to measure accuracy on.
        learning_rates: peak learning rates; each combination of a learning rate and a seed is a member.
        seeds: seeds of the parameters.
        data_seed: the seed of the examples and their order.
        batch_size: examples per step.
        epochs: number of passes over the training examples; the learning rate falls to 0 over all of them by a
            cosine.
        stop_above: end after an epoch whose best member has a mean accuracy above this; 1 never ends early.
        weight_decay: decoupled weight decay of embedding and projections.
        clip_norm: each member's gradients are scaled down to this global norm; 0 does not scale.
        steps_per_call: the largest number of consecutive training steps on one task, which one call of a
            compiled function takes.
    """

    name: str
    model: RecallModelConfig
    train: tuple[Any, ...]
    test: tuple[Any, ...]
    learning_rates: tuple[float, ...] = (1e-3, 10**-2.5, 1e-2, 10**-1.5)
    seeds: tuple[int, ...] = (0,)
    data_seed: int = 0
    batch_size: int = 256
    epochs: int = 32
    stop_above: float = 0.99
    weight_decay: float = 0.1
    clip_norm: float = 0.0
    steps_per_call: int = 6

    def __post_init__(self) -> None:
        resolve_annotations(self)

    def members(self) -> list[tuple[float, int]]:
        """Return a list with (peak learning rate, seed) of each member of the sweep, the models that are trained
        at once."""
        return [(rate, seed) for rate in self.learning_rates for seed in self.seeds]

    def drawing(self) -> tuple[Callable[..., RecallExamples], dict[str, Any]]:
        """Return the function that draws the examples of a task of this config, and its arguments but the task and the
        seed."""
        raise NotImplementedError

    def validate(self) -> None:
        """Raise ValueError if a field of the sweep's config is out of range; nothing is compiled."""
        check_types(self)
        self.model.validate()
        check_implementations(self.model, "model.")
        for name in ("train", "test", "learning_rates", "seeds"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty: it must have at least one entry")
        for name in ("train", "test"):
            for task in getattr(self, name):
                try:
                    task.validate(self.model.vocab_size)
                except ValueError as error:
                    raise ValueError(f"{name} {task.name}: {error}") from error
        names = [task.name for task in self.test]
        if len(set(names)) < len(names):
            raise ValueError(f"test={', '.join(names)}: tasks must differ in what their names say")
        for name in ("batch_size", "epochs", "steps_per_call"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: it must be at least 1")
        if not self.stop_above > 0:
            raise ValueError(f"stop_above={self.stop_above}: it must be greater than 0")
        for name in ("weight_decay", "clip_norm"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: it must be at least 0")
        for rate in self.learning_rates:
            if not rate > 0:
                raise ValueError(
                    f"learning_rates={self.learning_rates}: all must be greater than 0"
                )
        fewest = min(task.num_examples for task in self.train)
        if self.batch_size > fewest:
            raise ValueError(f"batch_size={self.batch_size}: a training task has {fewest} examples")


@dataclasses.dataclass(kw_only=True)
class RecallConfig(SmallModelsConfig):
    """The config of a sweep that trains small models on multi-query associative recall: the fields of
    `SmallModelsConfig`, and

    Attributes:
        power: the exponent of the power law of gaps between a pair and its query.
        random_fill: whether tokens between queries are random; otherwise they are 0.
    """

    train: tuple[RecallTask, ...]
    test: tuple[RecallTask, ...]
    power: float = 0.01
    random_fill: bool = True

    def drawing(self) -> tuple[Callable[..., RecallExamples], dict[str, Any]]:
        """Return `recall_examples`, and its arguments but the task and the seed."""
        law = dict(power=self.power, random_fill=self.random_fill)
        return recall_examples, dict(vocab_size=self.model.vocab_size, **law)

    def validate(self) -> None:
        """Raise ValueError if a field of the recall sweep's config is out of range; nothing is compiled."""
        super().validate()
        if not self.power > 0:
            raise ValueError(f"power={self.power}: it must be greater than 0")


@dataclasses.dataclass(kw_only=True)
class TrackingConfig(SmallModelsConfig):
    """The config of a sweep that trains small models on state tracking: the fields of `SmallModelsConfig`, whose tasks
    are words of permutation groups.
    """

    train: tuple[TrackingTask, ...]
    test: tuple[TrackingTask, ...]

    def drawing(self) -> tuple[Callable[..., RecallExamples], dict[str, Any]]:
        """Return `tracking_examples`, which has no arguments but the task and the seed."""
        return tracking_examples, {}
