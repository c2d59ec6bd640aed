"""The config of a run's optimizer and of its learning rate."""

from __future__ import annotations

import dataclasses
import math

from lsm_jax.names import did_you_mean

OPTIMIZERS = ("adamw", "lion", "muon", "adafactor")
SCHEDULES = ("cosine", "wsd", "linear", "constant", "inverse_sqrt")


@dataclasses.dataclass(kw_only=True)
class OptimizerConfig:
    """The config of the optimizer and of the learning rate: a linear warm-up and then a schedule, both counted in tokens.

    Attributes:
        name: "adamw"; "lion" (arXiv 2302.06675), whose rate is usually 3 to 10 times smaller; "muon": orthogonalised momentum
            for the matrices of layers, scaled to the size of AdamW's updates (arXiv 2502.16982), and AdamW for embeddings,
            heads, vectors and convolutions; or "adafactor" (arXiv 1804.04235), whose second moment of a matrix is the product
            of a row and a column, with the rate, warm-up and weight decay of AdamW in place of its own.
        schedule: the learning rate r(t) after the warm-up, from `peak_lr` p to e = `peak_lr` x `end_lr_ratio`. "cosine" and
            "linear" fall to e over the rest of the run; "wsd" remains at p and falls linearly to e in the last `decay_fraction`
            of the run (warm-up, stable, decay); "constant" remains at p, and "inverse_sqrt" is p sqrt(warmup_tokens / tokens):
            these two do not use `end_lr_ratio`.
        decay_fraction: the part of the run's tokens in which "wsd" falls.
        peak_lr: learning rate after the warm-up.
        end_lr_ratio: learning rate at the end of the run, divided by `peak_lr`.
        warmup_tokens: number of tokens over which the learning rate rises linearly to `peak_lr`.
        start_lr_ratio: learning rate at the beginning of the warm-up, divided by `peak_lr`.
        warmup_from_zero: if True, a step's learning rate depends on the tokens before it, so the first step's
            is that of the beginning; otherwise its own tokens are included.
        b1: decay of the first moment; with "adafactor" that of its updates, and 0 stores none.
        b2: decay of the second moment; for "lion" the decay of its only moment, where b1 weighs the update. "adafactor" has
            `adafactor_decay` instead.
        eps: added to the square root of the second moment; "lion" and "adafactor" do not use it.
        momentum: decay of Muon's momentum.
        adafactor_decay: the decay of Adafactor's second moment at step t is 1 - t ** -adafactor_decay, in (0, 1].
        adafactor_clip: updates of one layer's parameter with a larger root mean square are scaled down to this one.
        adafactor_min_size: matrices with fewer rows or columns have a second moment of their own size.
        weight_decay: decoupled weight decay; it does not apply to norms, biases, convolutions, A_log, dt_bias
            and D.
        clip_norm: gradients with a larger global norm are scaled down to this one.
    """

    name: str = "adamw"
    schedule: str = "cosine"
    decay_fraction: float = 0.2
    peak_lr: float = 3e-4
    end_lr_ratio: float = 0.1
    warmup_tokens: int = 0
    start_lr_ratio: float = 0.0
    warmup_from_zero: bool = False
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.95
    adafactor_decay: float = 0.8
    adafactor_clip: float = 1.0
    adafactor_min_size: int = 128
    weight_decay: float = 0.1
    clip_norm: float = 1.0

    def validate(self) -> None:
        """Raise ValueError if a field of the optimizer's config is out of range."""
        for name, accepted in (("name", OPTIMIZERS), ("schedule", SCHEDULES)):
            if getattr(self, name) not in accepted:
                near = did_you_mean(getattr(self, name), accepted)
                raise ValueError(
                    f"optimizer.{name}={getattr(self, name)!r}: accepted are {', '.join(accepted)}{near}"
                )
        for name, value in dataclasses.asdict(self).items():
            if not isinstance(value, str) and not math.isfinite(value):
                raise ValueError(f"optimizer.{name}={value}: it must be finite")
        for name in ("peak_lr", "eps", "clip_norm", "adafactor_clip"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"optimizer.{name}={getattr(self, name)}: it must be greater than 0"
                )
        for name in ("end_lr_ratio", "start_lr_ratio", "warmup_tokens", "weight_decay"):
            if getattr(self, name) < 0:
                raise ValueError(f"optimizer.{name}={getattr(self, name)}: it must be at least 0")
        for name in ("b1", "b2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name}={getattr(self, name)}: it must be in [0, 1)")
        for name in ("decay_fraction", "adafactor_decay"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"optimizer.{name}={getattr(self, name)}: it must be in (0, 1]")
        if self.adafactor_min_size < 2:
            raise ValueError(
                f"optimizer.adafactor_min_size={self.adafactor_min_size}: it must be at least 2"
            )
        if self.schedule == "inverse_sqrt" and not self.warmup_tokens:
            raise ValueError(
                "optimizer.schedule='inverse_sqrt': optimizer.warmup_tokens is 0; it must be greater than 0"
            )
