"""Language models of every method and size: `--config=configs/lm.py:<method>-<size>[,pattern=LLLN]`.

Reproduces: the 340M and 1.3B settings that the linear-attention literature compares at (GLA, Gated DeltaNet, MoM
arXiv 2502.13685 App. C): 15 B tokens at 0.5 M a step and 100 B at 2 M, AdamW (0.9, 0.95), peak 3e-4, cosine to a tenth.
Command: python train.py --config=configs/lm.py:gated_deltanet-340m,pattern=LLLN --workdir=runs/gdn --config.data.path=STORE
Hardware: 340m wants a data-parallel machine of 8 cards or more for a day; 10m one card for minutes; tiny a laptop.
Expected: see docs/results/ for what was measured.

Without `--config.data.path` a run reads the demo text, the running interpreter's own library as bytes.
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
    """How a size is trained."""

    total_tokens: int
    batch_size: int
    warmup_tokens: int
    sequence_length: int = 2048
    peak_lr: float = 3e-4
    weight_decay: float = 0.01


RECIPES = {
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
    """The run `<method>-<size>[,pattern=...][,feedforward=...][,vocab_size=...]`.

    Raises:
        ValueError: a method, size or option that does not exist; the message lists what does.
    """
    head, arguments = parse_variant(variant, OPTIONS)
    method, size = split_head(variant, head, "method", f"gla-340m; sizes: {', '.join(SIZES)}")
    if size in ("tiny", "10m"):
        arguments.setdefault("vocab_size", 257)  # bytes and BOS
    model = lm(method, size, **arguments)
    recipe = RECIPES[size]
    # Where a mini-batch begins with a window, an online-learned memory reads the window in one pass.
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
