"""The config of a training run: model, data, optimizer, mesh, length, and how often to report, evaluate and
save."""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from typing import Any

from absl import logging

from lsm_jax import mixers
from lsm_jax.data import DataConfig
from lsm_jax.models import ModelConfig
from lsm_jax.names import did_you_mean
from lsm_jax.ops.backends.registry import backends_of, names_of
from lsm_jax.parallel import MeshConfig, batch_shards
from lsm_jax.training.config_json import check_types
from lsm_jax.training.optimizer_config import OptimizerConfig
from lsm_jax.training.partition import FROZEN_DTYPES
from lsm_jax.training.samples_config import SamplesConfig


@dataclasses.dataclass(kw_only=True)
class TrainConfig:
    """The config of a training run: everything that its result depends on.

    Attributes:
        name: the name shown in logs and plots.
        model: the config of the decoder.
        data: the config of the training data.
        optimizer: the config of the optimizer and the learning-rate schedule.
        mesh: number of devices along each mesh axis.
        batch_size: sequences per step, over all devices and accumulation steps.
        accumulation_steps: number of equal subsets of the batch's sequences whose gradients are computed one
            after another and summed.
        label_smoothing: the share of each target that is spread evenly over the vocabulary, in [0, 1).
        z_loss: the weight of the square of the logits' log-sum-exp in the loss. Both change the loss that is minimised;
            `train/loss` and held-out losses remain the negative log-likelihood.
        ema_decay: decay of the exponential moving average of the trained parameters, in [0, 1): after step t = 0, 1, ... the
            average has the decay min(ema_decay, (1 + t) / (10 + t)). Evaluation and sampling use the average unless they are
            asked for the trained parameters; 0 keeps no average.
        total_tokens: length of the run in tokens; a last, incomplete step is not taken.
        seed: the seed of the parameters and of the order of the data.
        log_every: steps between rows of metrics.jsonl.
        eval_every: steps between held-out losses; 0 never computes one.
        eval_batches: batches of `batch_size` sequences over which a held-out loss is computed.
        checkpoint_every: steps between checkpoints; one is always written at the end.
        keep_last: number of the newest checkpoints that are kept; older ones are removed.
        keep_every: checkpoints at multiples of this number of steps are kept, too; 0 keeps no others.
        best_metric: the name of a metric of evaluations, such as "val/loss" or "val/ema_loss". An evaluation that is better
            than all before is saved as a checkpoint, and the `keep_best` best ones are kept; empty keeps none for that.
        best_mode: "min" if lower is better, or "max".
        keep_best: number of the best checkpoints that are kept.
        samples: the texts that are sampled during training.
        grad_norms: whether to report the norm of the gradient of each part of the model, before it is clipped.
        wandb: the project of Weights & Biases, PROJECT or ENTITY/PROJECT, to which metrics are sent (extra [wandb]); empty
            sends nothing.
        init_from: the directory of another run, whose newest parameters this run starts from. Trained
            parameters that the other run does not have are initialised.
        base: the pretrained model to start from if `init_from` is empty: None, or an object with
            `validate(model)` and `load(model, target)` such as `lsm_jax.linearize.Pretrained`.
        trainable: names of modules or parameters. Parameters with one of them in their path are trained and
            saved. The others are frozen: they are stored as `frozen_dtype` says, and read again from `init_from` or
            `base` whenever the run is opened. If empty, all parameters are trained.
        frozen_dtype: the dtype of frozen parameters: "bfloat16", "float32", or "bfloat16_matrices": kernels, embeddings and
            experts in bfloat16, and the others (norms, biases, decay rates, convolutions) in float32.
        frozen_initial: names of modules or parameters that are frozen at their initial values, which follow
            from `seed`, if neither `init_from` nor `base` has them.
        max_bad_steps: training stops after this many consecutive steps whose loss, gradient or new parameters
            are not finite. Such a step changes neither parameters nor the optimizer's state.
        profile_start: number of steps of this process before the profiler starts; its trace is written to
            workdir/profile.
        profile_steps: number of steps that are profiled; 0 profiles none.
    """

    name: str
    model: ModelConfig
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    batch_size: int = 32
    accumulation_steps: int = 1
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    ema_decay: float = 0.0
    total_tokens: int = 1_000_000_000
    seed: int = 42
    log_every: int = 10
    eval_every: int = 500
    eval_batches: int = 16
    checkpoint_every: int = 1000
    keep_last: int = 2
    keep_every: int = 0
    best_metric: str = ""
    best_mode: str = "min"
    keep_best: int = 1
    samples: SamplesConfig = dataclasses.field(default_factory=SamplesConfig)
    grad_norms: bool = False
    wandb: str = ""
    init_from: str = ""
    base: Any = None
    trainable: tuple[str, ...] = ()
    frozen_dtype: str = FROZEN_DTYPES[0]
    frozen_initial: tuple[str, ...] = ()
    max_bad_steps: int = 20
    profile_start: int = 10
    profile_steps: int = 0

    def __post_init__(self) -> None:
        resolve_annotations(self)

    @property
    def tokens_per_step(self) -> int:
        """The number of tokens in the batch of one training step, over all devices: sequences times tokens
        in each."""
        return self.batch_size * self.data.sequence_length

    @property
    def num_steps(self) -> int:
        """The number of training steps of the whole run: `total_tokens` divided by the tokens of a step,
        rounded down."""
        return self.total_tokens // self.tokens_per_step

    def validate(self, num_devices: int | None = None, *, on_paper: bool = False) -> None:
        """Raise ValueError if a field of the run's config is out of range or fields contradict each other;
        nothing is compiled.

        Args:
            num_devices: number of devices to check the mesh for; None does not check it.
            on_paper: whether to skip the checks that open the files of the pretrained model `base`.
        """
        check_types(self)
        self.model.validate()
        check_implementations(self.model, "model.")
        self.data.validate()
        self.optimizer.validate()
        for name in (
            "batch_size",
            "accumulation_steps",
            "log_every",
            "eval_batches",
            "checkpoint_every",
            "keep_last",
            "keep_best",
            "max_bad_steps",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: it must be at least 1")
        for name in ("eval_every", "keep_every", "profile_start", "profile_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: it must be at least 0")
        for name in ("label_smoothing", "ema_decay"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: it must be in [0, 1)")
        if not 0 <= self.z_loss < math.inf:
            raise ValueError(f"z_loss={self.z_loss}: it must be at least 0, and finite")
        self.samples.validate()
        self._check_best()
        if self.wandb and not re.fullmatch(r"([\w.-]+/)?[\w.-]+", self.wandb):
            raise ValueError(f"wandb={self.wandb!r}: accepted is PROJECT or ENTITY/PROJECT")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed}: accepted are 0 to 2^63 - 1")
        if self.num_steps < 1:
            raise ValueError(
                f"total_tokens={self.total_tokens}: one step takes batch_size={self.batch_size} x "
                f"data.sequence_length={self.data.sequence_length} = {self.tokens_per_step} tokens"
            )
        if self.optimizer.warmup_tokens >= self.total_tokens:
            raise ValueError(
                f"optimizer.warmup_tokens={self.optimizer.warmup_tokens}: it must be less than "
                f"total_tokens={self.total_tokens}"
            )
        if self.base is not None and not on_paper:
            self.base.validate(self.model)
        if self.trainable and not (self.init_from or self.base):
            raise ValueError(
                f"trainable={self.trainable}: the other parameters are frozen; set init_from or base, from which they are read"
            )
        if self.frozen_dtype not in FROZEN_DTYPES:
            raise ValueError(
                f"frozen_dtype={self.frozen_dtype!r}: accepted are {', '.join(FROZEN_DTYPES)}"
            )
        if self.frozen_initial and not self.trainable:
            raise ValueError(
                f"frozen_initial={self.frozen_initial}: all parameters are trained; accepted is () unless trainable is set"
            )
        if both := sorted(set(self.frozen_initial) & set(self.trainable)):
            raise ValueError(
                f"frozen_initial={self.frozen_initial}: {', '.join(both)} is trained; accepted are names that trainable does not have"
            )
        decay = self.optimizer.decay_fraction * self.total_tokens
        if (
            self.optimizer.schedule == "wsd"
            and decay + self.optimizer.warmup_tokens > self.total_tokens
        ):
            raise ValueError(
                f"optimizer.decay_fraction={self.optimizer.decay_fraction}: the decay and optimizer.warmup_tokens="
                f"{self.optimizer.warmup_tokens} are longer than total_tokens={self.total_tokens}; choose a smaller fraction"
            )
        periods = self.model.num_layers // len(self.model.period())
        if self.optimizer.name == "adafactor" and periods >= self.optimizer.adafactor_min_size:
            raise ValueError(
                f"optimizer.adafactor_min_size={self.optimizer.adafactor_min_size}: it must be greater than the number of "
                f"periods of the pattern, {periods}, over which the matrices of layers are stacked"
            )
        self._check_lengths()
        self._advise_on_alignment()
        shards = 1
        if num_devices is not None:
            sizes = self.mesh.shape(num_devices)
            self._check_mesh(sizes)
            shards = batch_shards(sizes)
        per_device = self.mesh.pieces() // self.mesh.pipeline  # microbatches of one device's rows
        if self.batch_size % (shards * per_device * self.accumulation_steps):
            microbatches = f" x {per_device} microbatches of each" if per_device > 1 else ""
            if per_device > 1 and self.mesh.microbatches:
                microbatches += f" (mesh.microbatches={self.mesh.microbatches})"
            raise ValueError(
                f"batch_size={self.batch_size}: it must be divisible by {shards} devices{microbatches} x "
                f"accumulation_steps={self.accumulation_steps}"
            )

    def evaluated_metrics(self) -> list[str]:
        """Return the names of the metrics that an evaluation during training writes."""
        names = {"val/loss": True, "val/ema_loss": bool(self.ema_decay)}
        names["val/teacher_loss"] = self.model.teacher() is not None
        return [name for name, written in names.items() if written and self.eval_every]

    def _check_best(self) -> None:
        """Raise ValueError if the fields that select the best checkpoints are not valid."""
        if self.best_mode not in ("min", "max"):
            raise ValueError(f"best_mode={self.best_mode!r}: accepted are 'min' and 'max'")
        if self.best_metric and not self.eval_every:
            raise ValueError(
                f"best_metric={self.best_metric!r}: eval_every is 0, so that nothing is evaluated; it must be at least 1"
            )
        if self.best_metric and self.best_metric not in (known := self.evaluated_metrics()):
            near = did_you_mean(self.best_metric, known)
            raise ValueError(
                f"best_metric={self.best_metric!r}: accepted in this run are {', '.join(known)}{near}"
            )

    def _check_mesh(self, sizes: dict[str, int]) -> None:
        """Raise ValueError if the model's layers, a row's tokens or the experts cannot be divided evenly
        over a mesh with these sizes of its axes.

        Heads and widths are checked by `lsm_jax.training.step.param_shardings`.
        """
        periods = self.model.num_layers // len(self.model.period())
        stages, rounds = sizes["pipeline"], self.mesh.rounds
        if rounds > 1 and periods % (stages * rounds):
            raise ValueError(
                f"mesh.pipeline={stages} x mesh.rounds={rounds}: the model's {periods} periods of {self.model.period()!r} are not "
                "divisible by it; in several rounds each stage computes one or more whole periods at a time"
            )
        layers = self.model.num_layers
        if layers % stages:
            raise ValueError(
                f"mesh.pipeline={stages}: the model's {layers} layers are not divisible by it; accepted are "
                f"{', '.join(str(n) for n in range(1, layers + 1) if layers % n == 0)}"
            )
        if periods % stages and sizes["sequence"] > 1:
            raise ValueError(
                f"mesh.sequence={sizes['sequence']} with mesh.pipeline={stages}: the model's {periods} periods of "
                f"{self.model.period()!r} are not divisible by the stages; accepted are stages of whole periods, or mesh.sequence=1"
            )
        length = self.data.sequence_length
        if length < sizes["sequence"]:
            raise ValueError(
                f"data.sequence_length={length}: it must be at least mesh.sequence={sizes['sequence']}, one token per device"
            )
        for letter in sorted(set(self.model.pattern)):
            count = getattr(self.model.layers[letter].feedforward, "num_experts", 0)
            if count % sizes["expert"]:
                raise ValueError(
                    f"model.layers.{letter}.feedforward.num_experts={count}: it must be divisible by mesh.expert={sizes['expert']}"
                )

    def _check_lengths(self) -> None:
        length = self.data.sequence_length
        for letter in sorted(set(self.model.pattern)):
            mixer = self.model.layers[letter].mixer
            chunk_size = mixer.op.chunk_size if isinstance(mixer, mixers.RecurrentConfig) else None
            for name, value in (
                ("window", getattr(mixer, "window", None)),
                ("op.chunk_size", chunk_size),
            ):
                if name == "window" and self.base is not None:
                    continue  # the window of a pretrained layer may be longer than the rows
                if value is not None and value > length:
                    raise ValueError(
                        f"model.layers.{letter}.mixer.{name}={value} is longer than data.sequence_length={length}; accepted are "
                        "values up to it"
                    )

    def _advise_on_alignment(self) -> None:
        """Log a warning if packed documents may begin inside the mini-batches of a memory that is learned
        online (TTT, Titans), which is slower."""
        for letter in sorted(set(self.model.pattern)):
            size = getattr(self.model.layers[letter].mixer, "mini_batch", 1)
            if self.data.align_documents % size:
                logging.warning(
                    "data.align_documents=%d is not a multiple of model.layers.%s.mixer.mini_batch=%d. Packed documents then begin "
                    "inside mini-batches, which are computed up to three times; the results are the same. To avoid this, set "
                    "data.align_documents=%d",
                    self.data.align_documents,
                    letter,
                    size,
                    math.lcm(self.data.align_documents, size),
                )


def check_implementations(config: Any, prefix: str = "") -> None:
    """Check that the names of backends in a model's config, and in the configs in it, exist; `prefix` begins the name of
    the field in the message.

    Raises:
        ValueError: an op has no backend of a name; the message lists those that it has.
    """
    if isinstance(config, dict):
        for key, item in config.items():
            check_implementations(item, f"{prefix}{key}.")
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        return
    named: dict[str, tuple[str, Any]] = {}  # field -> (op, names of backends)
    if isinstance(config, mixers.RecurrentConfig):
        named["op.implementation"] = mixers.method_of(config).op, config.op.names()
    if given := getattr(config, "implementation", None):
        named["implementation"] = "attention", tuple(str(given).split(","))
    for field, (op, names) in named.items():
        if names and not isinstance(config, mixers.OpConfig):
            ops = {op} if backends_of(op) else {m.op for m in mixers.METHODS.values()}
            accepted = names_of(b for op in sorted(ops) for b in backends_of(op))
            if wrong := [name for name in names if name not in accepted]:
                listed = ", ".join(map(repr, accepted))
                raise ValueError(
                    f"{prefix}{field}={','.join(names)!r}: {op} has no backend {wrong[0]!r}; accepted are None and {listed}, "
                    "or several with commas between them"
                )
    for field in dataclasses.fields(config):
        check_implementations(getattr(config, field.name), f"{prefix}{field.name}.")


def resolve_annotations(config: Any) -> None:
    """Replace, in a config's class and in those of the configs in its fields, annotations that are strings by the
    types that they name; ml-collections checks command-line overrides of fields by these types."""
    if isinstance(config, dict):
        for item in config.values():
            resolve_annotations(item)
    elif dataclasses.is_dataclass(config):
        hints = typing.get_type_hints(type(config))
        for field in dataclasses.fields(config):
            field.type = _flag_type(hints[field.name])
            resolve_annotations(getattr(config, field.name))


def _flag_type(hint: Any) -> Any:
    """Return the type with which ml-collections checks command-line overrides of a config field that is
    annotated with the type `hint`: `hint` itself, except that `str | tuple[str, ...] | None`, names in order of
    preference, becomes `str | None`, names separated by commas.

    ml-collections supports no unions except those with None.
    """
    kinds = typing.get_args(hint)
    if str in kinds and any(typing.get_origin(kind) is tuple for kind in kinds):
        return str | None
    return hint
