"""Mixture-of-Memories language models: `--config=configs/mom.py:<size>[,option=value ...]`, e.g. `340m` or `340m,hybrid=1`.

Reproduces: MoM (arXiv 2502.13685) at its two sizes: Gated DeltaNet with four heads of 256, four memories, two a token and a
shared one; SlimPajama, 15 B tokens at 0.5 M a step and 100 B at 2 M. `hybrid=1` has softmax attention in one layer of eight,
its depth the next multiple of eight.
Ablations: `memories`, `top_k`, `shared=0`, `inner=gla` (any inner mixer in its published proportions), and `expanded=3`, one
inner mixer with three times the value channels in place of memories (3 is what a token of MoM activates; 5 keeps as much state).
Command: python train.py --config=configs/mom.py:340m --workdir=runs/mom --config.data.path=STORE
Hardware: the paper's is 32 A800 for 10 hours and 6 days; `tiny` and `10m` are a laptop's and one card's.
Expected: 444 M and 1.42 B parameters active of 545 M and 1.62 B, the head untied, as in the paper. See docs/results/mom.md.

Different are: projections start normal with 0.02 (the authors' memory layers Xavier-uniform with gain 2^-2.5); the balance loss
is a layer's own, averaged over layers, where theirs takes all layers' routing together; the scale is the later version's, 1e-3;
warm-up at 340m is 1,024 steps, as in the authors' README (their appendix says 0.25 M tokens).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from configs.lm import RECIPES
from configs.variants import Option, check_head, parse_variant
from lsm_jax import mixers
from lsm_jax.data import DataConfig
from lsm_jax.feedforward import SwiGLUConfig
from lsm_jax.mixers.mom import EXECUTIONS
from lsm_jax.models import SIZES, LayerConfig, ModelConfig
from lsm_jax.training import OptimizerConfig, TrainConfig

HYBRID = "LLLLLLLN"
HIDDEN_RATIO = {"340m": 3.0}  # of the feedforward; other sizes have the customary 4
MEMORIES = ("memories", "top_k", "shared", "single", "execution")  # which `expanded` has not
OPTIONS = dict(
    inner=Option(choices=mixers.METHODS),
    memories=Option(kind=int),
    top_k=Option(kind=int),
    shared=Option(kind=bool),
    single=Option(kind=bool),
    execution=Option(choices=EXECUTIONS),
    hybrid=Option(kind=bool),
    expanded=Option(kind=int, least=1),
    vocab_size=Option(kind=int, least=1),
)


def mixer_config(hidden_size: int, given: dict[str, Any]) -> Any:
    """The letter L: MoM, or with `expanded` its inner mixer alone with so many times the value channels."""
    config = mixers.MoMConfig.for_width(hidden_size)
    if "inner" in given:
        config = dataclasses.replace(
            config, mixer=mixers.get_method(given["inner"]).config.for_width(hidden_size)
        )
    if "expanded" in given:
        if not hasattr(config.mixer, "expand_v"):
            raise ValueError(f"expanded: {type(config.mixer).__name__} has no expand_v to widen")
        width = config.mixer.expand_v * given["expanded"]
        return dataclasses.replace(config.mixer, expand_v=width)
    fields = dict(memories="num_memories", top_k="top_k", shared="shared_memory", single="single_projections")  # fmt: skip
    changes: dict[str, Any] = {f: given[n] for n, f in fields.items() if n in given}
    if "execution" in given:
        changes["execution"] = given["execution"]
    return dataclasses.replace(config, **changes)


def get_config(variant: str = "340m") -> TrainConfig:
    """The run `<size>[,option=value ...]`; sizes are those of `lsm_jax.models.SIZES`, options `OPTIONS`.

    Raises:
        ValueError: a size, option or value that does not exist (the message lists what does), and options that exclude each other.
    """
    size, given = parse_variant(variant, OPTIONS)
    check_head(variant, "size", size, SIZES)
    if "expanded" in given and (other := [name for name in MEMORIES if name in given]):
        raise ValueError(
            f"variant {variant!r}: {', '.join(other)}: expanded={given['expanded']} has one memory"
        )
    found, recipe = SIZES[size], RECIPES[size]
    inner = SwiGLUConfig.for_width(found.hidden_size, found.multiple_of)
    inner = dataclasses.replace(inner, hidden_ratio=HIDDEN_RATIO.get(size, 4.0))
    softmax = mixers.SoftmaxConfig.for_width(found.hidden_size)
    small = size in ("tiny", "10m")
    hybrid = given.get("hybrid", False)
    depth = found.num_layers
    model = ModelConfig(
        vocab_size=given.get("vocab_size", 257 if small else 32000),
        hidden_size=found.hidden_size,
        num_layers=depth + -depth % len(HYBRID) if hybrid else depth,
        pattern=HYBRID if hybrid else "L",
        layers={
            "L": LayerConfig(mixer=mixer_config(found.hidden_size, given), feedforward=inner),
            "N": LayerConfig(mixer=softmax, feedforward=inner),
        },
        tie_embeddings=False,
    )
    config = TrainConfig(
        name=f"mom-{variant}",
        model=model,
        data=DataConfig(sequence_length=recipe.sequence_length),
        optimizer=OptimizerConfig(
            peak_lr=recipe.peak_lr,
            warmup_tokens=recipe.warmup_tokens,
            weight_decay=recipe.weight_decay,
        ),
        batch_size=recipe.batch_size,
        total_tokens=recipe.total_tokens,
    )
    config.validate()
    return config
