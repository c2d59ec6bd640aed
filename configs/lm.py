"""Language models of every method and size: `--config=configs/lm.py:<method>-<size>[,pattern=LLLN]`.

Reproduces: the 340M and 1.3B settings of the linear-attention literature (GLA, Gated DeltaNet, MoM arXiv 2502.13685 App. C):
15 B tokens with 0.5 M per step, and 100 B with 2 M; AdamW (0.9, 0.95), peak rate 3e-4, cosine to a tenth.
Command: python train.py --config=configs/lm.py:gated_deltanet-340m,pattern=LLLN --workdir=runs/gdn --config.data.path=STORE
Hardware: 8 GPUs or more for a day for 340m; one GPU for minutes for 10m; a laptop for tiny (a quarter of an hour) and nano (a minute).
Expected: docs/results/ has the measurements.

Without `--config.data.path` a run reads the demo text, the bytes of the running interpreter's standard library.
"""

from __future__ import annotations

import dataclasses
import math

from configs.variants import Option, parse_variant, split_head
from lsm_jax.data import DataConfig
from lsm_jax.feedforward import FEEDFORWARDS
from lsm_jax.models import SIZES, lm
from lsm_jax.training import OptimizerConfig, TrainConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """The training recipe of a language model of one size: tokens, batch and learning rate."""

    total_tokens: int
    batch_size: int
    warmup_tokens: int
    sequence_length: int = 2048
    peak_lr: float = 3e-4
    weight_decay: float = 0.01


RECIPES = {
    "nano": Recipe(
        total_tokens=409_600, batch_size=16, warmup_tokens=40_960, sequence_length=256, peak_lr=5e-3,
        weight_decay=0.1,
    ),
    "tiny": Recipe(
        total_tokens=4_000_000, batch_size=16, warmup_tokens=200_000, sequence_length=256,
        peak_lr=3e-3, weight_decay=0.1,
    ),
    "10m": Recipe(
        total_tokens=26_214_400, batch_size=64, warmup_tokens=2_000_000, sequence_length=1024,
        peak_lr=2e-3, weight_decay=0.1,
    ),
    "125m": Recipe(total_tokens=2_700_000_000, batch_size=256, warmup_tokens=268_435_456, peak_lr=2e-3, weight_decay=0.1),
    "340m": Recipe(total_tokens=15_000_000_000, batch_size=256, warmup_tokens=536_870_912),
    "760m": Recipe(total_tokens=16_000_000_000, batch_size=256, warmup_tokens=268_435_456, peak_lr=1e-3, weight_decay=0.1),
    "1.3b": Recipe(total_tokens=100_000_000_000, batch_size=1024, warmup_tokens=1_000_000_000),
}  # fmt: skip


OPTIONS = dict(
    pattern=Option(), feedforward=Option(choices=FEEDFORWARDS), vocab_size=Option(kind=int, least=1)
)


def get_config(variant: str = "gla-340m") -> TrainConfig:
    """Return the training config of the language model
    `<method>-<size>[,pattern=...][,feedforward=...][,vocab_size=...]`.

    Raises:
        ValueError: the method, size or option does not exist; the message lists those that do.
    """
    head, arguments = parse_variant(variant, OPTIONS)
    method, size = split_head(variant, head, "method", f"gla-340m; sizes: {', '.join(SIZES)}")
    if size in ("nano", "tiny", "10m"):
        arguments.setdefault("vocab_size", 257)  # bytes and BOS
    model = lm(method, size, **arguments)
    if size == "nano":
        model = dataclasses.replace(model, dtype="float32", remat="none")  # faster on CPUs
    recipe = RECIPES[size]
    # An online-learned memory reads a window in one pass if a mini-batch begins at the window's start.
    align = math.lcm(*(getattr(model.layers[x].mixer, "mini_batch", 1) for x in set(model.pattern)))
    return TrainConfig(
        name=variant,
        model=model,
        data=DataConfig(sequence_length=recipe.sequence_length, align_documents=align),
        optimizer=OptimizerConfig(
            peak_lr=recipe.peak_lr,
            warmup_tokens=recipe.warmup_tokens,
            weight_decay=recipe.weight_decay,
        ),
        batch_size=recipe.batch_size,
        total_tokens=recipe.total_tokens,
    )
