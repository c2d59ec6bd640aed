"""Mixture-of-Memories language models: `--config=configs/mom.py:<size>[,option=value ...]`, e.g. `340m` or `340m,hybrid=1`.

Reproduces: MoM (arXiv 2502.13685) at its two sizes: Gated DeltaNet with four heads of 256 channels, four memories, of which a
token uses two, and a shared memory; 15 B tokens of SlimPajama with 0.5 M per step, and 100 B with 2 M. With `hybrid=1` one layer
of eight has softmax attention, and the depth is the next multiple of eight.
Ablations: `memories`, `top_k`, `shared=0`, `inner=gla` (any inner mixer in its published proportions), and `expanded=3`, which
has instead of memories one inner mixer with three times the value channels (3 has as many as a token of MoM uses; 5 has as
large a state as MoM).
Command: python train.py --config=configs/mom.py:340m --workdir=runs/mom --config.data.path=STORE
Hardware: 32 A800 for 10 hours and for 6 days in the paper; a laptop for `tiny`; one GPU for `10m`.
Expected: 444 M of 545 M parameters active, and 1.42 B of 1.62 B, with untied heads, as in the paper. See docs/results/mom.md.

Different from the authors' code: projections are initialised from a normal distribution with standard deviation 0.02 (their
memory layers: Xavier-uniform with gain 2^-2.5); the balance loss is computed for each layer and averaged (theirs: for the routing
of all layers together), with the scale of the later version, 1e-3; the warm-up at 340m has 1,024 steps, as in the authors' README
(their appendix says 0.25 M tokens).
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
HIDDEN_RATIO = {"340m": 3.0}  # of the feedforward; 4 for other sizes
MEMORIES = (
    "memories",
    "top_k",
    "shared",
    "single",
    "execution",
)  # options that `expanded` excludes
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
    """Return the mixer of letter L.

    It is MoM, or with the option `expanded` only its inner mixer, with `expanded` times the value channels.
    """
    config = mixers.MoMConfig.for_width(hidden_size)
    if "inner" in given:
        config = dataclasses.replace(
            config, mixer=mixers.get_method(given["inner"]).config.for_width(hidden_size)
        )
    if "expanded" in given:
        if not hasattr(config.mixer, "expand_v"):
            raise ValueError(
                f"expanded={given['expanded']} requires an inner mixer with expand_v, which {type(config.mixer).__name__} "
                "does not have"
            )
        width = config.mixer.expand_v * given["expanded"]
        return dataclasses.replace(config.mixer, expand_v=width)
    fields = dict(memories="num_memories", top_k="top_k", shared="shared_memory", single="single_projections")  # fmt: skip
    changes: dict[str, Any] = {f: given[n] for n, f in fields.items() if n in given}
    if "execution" in given:
        changes["execution"] = given["execution"]
    return dataclasses.replace(config, **changes)


def get_config(variant: str = "340m") -> TrainConfig:
    """Return the config of the run `<size>[,option=value ...]`; sizes are `lsm_jax.models.SIZES`, options `OPTIONS`.

    Raises:
        ValueError: the size, an option or a value does not exist (the message lists those that do), or options exclude each
            other.
    """
    size, given = parse_variant(variant, OPTIONS)
    check_head(variant, "size", size, SIZES)
    if "expanded" in given and (other := [name for name in MEMORIES if name in given]):
        raise ValueError(
            f"variant {variant!r}: expanded={given['expanded']} excludes {', '.join(other)}, since it has one memory"
        )
    dims, recipe = SIZES[size], RECIPES[size]
    inner = SwiGLUConfig.for_width(dims.hidden_size, dims.multiple_of)
    inner = dataclasses.replace(inner, hidden_ratio=HIDDEN_RATIO.get(size, 4.0))
    softmax = mixers.SoftmaxConfig.for_width(dims.hidden_size)
    small = size in ("tiny", "10m")
    hybrid = given.get("hybrid", False)
    depth = dims.num_layers
    model = ModelConfig(
        vocab_size=given.get("vocab_size", 257 if small else 32000),
        hidden_size=dims.hidden_size,
        num_layers=depth + -depth % len(HYBRID) if hybrid else depth,
        pattern=HYBRID if hybrid else "L",
        layers={
            "L": LayerConfig(mixer=mixer_config(dims.hidden_size, given), feedforward=inner),
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
