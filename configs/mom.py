"""Mixture-of-Memories language models: `--config=configs/mom.py:<size>[,option=value ...]`, e.g. `340m` or `340m,hybrid=1`.

Reproduces: MoM (arXiv 2502.13685) at its two sizes: Gated DeltaNet with four heads of 256 channels, four memories, of which a
token uses two, and a shared memory; 15 B tokens of SlimPajama with 0.5 M per step, and 100 B with 2 M. With `hybrid=1` one layer
of eight has softmax attention, and the depth is the next multiple of eight.
Ablations: `memories`, `top_k`, `shared=0`, `balance_scale=0.01`, `inner=gla` (any inner mixer in its published proportions, TTT and
Titans included), `conv=4` (the width of the inner mixer's short convolutions, of which GLA has none as published; 1 is none),
`row_conv=4` (a convolution along the row's tokens ahead of the memories), `hidden_ratio=2` (the feedforward of the comparison at
equal active parameters), and three kinds of baselines without a router:

    baseline=inner      the inner mixer alone, with a feedforward of ratio 4 (Gated DeltaNet: 399.5 M at 340m)
    baseline=expanded   the same with a memory three times as large, as many as a token of MoM reads (Gated DeltaNet 550.7 M with
                        its values tripled, GLA 425.2 M with its keys tripled; `WIDENED` has the field of each method)
    expanded=N          the inner mixer with N times the value channels, and MoM's feedforward
Command: python train.py --config=configs/mom.py:340m --workdir=runs/mom --config.data.path=STORE
Hardware: 32 A800 for 10 hours and for 6 days in the paper; a laptop for `tiny`; one GPU for `10m`.
Expected: 444 M of 545 M parameters active, and 1.42 B of 1.62 B, with untied heads, as in the paper. See docs/results/mom.md.

Different from the authors' code, unless `as_published=1`: projections are initialised from a normal distribution with standard
deviation 0.02 (their memory layers: Xavier-uniform with gain 2^-2.5); the balance loss is computed for each layer and averaged over
the layers with memories (theirs: for the routing of all layers together); the epsilon of the output norm is 1e-5 (theirs 1e-6).

Different from it in any case: short convolutions never cross from one memory's tokens to another's (theirs do in training, and read
later tokens there); the scale of the balance loss is that of the paper's later version, 1e-3 (their default: 1e-2); the warm-up at
340m has 1,024 steps, as in the authors' README (their appendix says 0.25 M tokens).
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
    "row_conv",
    "balance_scale",
    "execution",
)  # options of the router and its memories
WIDENED = {
    "gla": "expand_k",  # as published; values would do as well
    "gated_deltanet": "expand_v",  # as published
    "linear_attention": "expand_v",
    "retnet": "expand_v",
    "gated_retention": "expand_v",
    "gfw": "expand_v",
    "deltanet": "expand_v",
    "kda": "expand_v",
    "mlstm": "v_dim_factor",
    "mamba": "state_size",
    "mamba2": "state_size",
    "gsa": "num_slots",
    "ttt_mlp": "inner_expand",
    "gated_deltaproduct": "expand_v",
    "gated_deltanet2": "expand_v",
    "comba": "expand_v",
    "precond_gated_deltanet": "expand_v",
    "precond_kda": "expand_v",
    "mamba3": "state_size",
    "mamba3_mimo": "state_size",
    "abc": "num_slots",
    "log_linear_mamba2": "state_size",
    "log_linear_gated_deltanet": "expand_v",
    "momentum_deltanet": "expand_v",
}
"""The field that makes the memory of an inner mixer larger: `baseline=expanded` triples it."""
OPTIONS = dict(
    inner=Option(choices=mixers.METHODS),
    memories=Option(kind=int),
    top_k=Option(kind=int),
    shared=Option(kind=bool),
    single=Option(kind=bool),
    conv=Option(kind=int, least=1),
    row_conv=Option(kind=int, least=1),
    balance_scale=Option(kind=float),
    execution=Option(choices=EXECUTIONS),
    hybrid=Option(kind=bool),
    hidden_ratio=Option(kind=float, positive=True),
    baseline=Option(choices=("inner", "expanded")),
    as_published=Option(kind=bool),
    expanded=Option(kind=int, least=1),
    vocab_size=Option(kind=int, least=1),
)


def mixer_config(hidden_size: int, given: dict[str, Any]) -> Any:
    """Return the config of the mixer of letter L (all layers but those of softmax attention) of a
    Mixture-of-Memories model.

    It is MoM, or with the options `baseline` and `expanded` only its inner mixer, possibly with a larger memory.
    """
    config = mixers.MoMConfig.for_width(hidden_size)
    if "inner" in given:
        config = dataclasses.replace(
            config, mixer=mixers.get_method(given["inner"]).config.for_width(hidden_size)
        )
    if "conv" in given:
        if not hasattr(config.mixer, "conv_size"):
            raise ValueError(
                f"conv={given['conv']} requires an inner mixer with conv_size, which {type(config.mixer).__name__} does not have"
            )
        config = dataclasses.replace(
            config, mixer=dataclasses.replace(config.mixer, conv_size=given["conv"])
        )
    if given.get("as_published"):
        changes: dict[str, Any] = dict(balance="model")
        if hasattr(config.mixer, "norm_eps"):
            changes["mixer"] = dataclasses.replace(config.mixer, norm_eps=1e-6)
        config = dataclasses.replace(config, **changes)
    if "baseline" in given:
        return config.mixer if given["baseline"] == "inner" else _expanded(config.mixer)
    if "expanded" in given:
        if not hasattr(config.mixer, "expand_v"):
            raise ValueError(
                f"expanded={given['expanded']} requires an inner mixer with expand_v, which {type(config.mixer).__name__} "
                "does not have"
            )
        width = config.mixer.expand_v * given["expanded"]
        return dataclasses.replace(config.mixer, expand_v=width)
    fields = dict(
        memories="num_memories", top_k="top_k", shared="shared_memory", single="single_projections",
        row_conv="row_conv_size", balance_scale="balance_scale",
    )  # fmt: skip
    changes = {f: given[n] for n, f in fields.items() if n in given}
    if "execution" in given:
        changes["execution"] = given["execution"]
    return dataclasses.replace(config, **changes)


def _expanded(inner: Any) -> Any:
    """Return the config of the inner mixer `inner` with a memory three times as large, the baseline of
    Mixture-of-Memories.
    """
    name = mixers.method_of(inner).name
    if name not in WIDENED:
        raise ValueError(
            f"baseline=expanded: no field of inner={name} makes its memory three times as large at the same width; accepted are "
            f"{', '.join(WIDENED)}"
        )
    field = WIDENED[name]
    return dataclasses.replace(inner, **{field: 3 * getattr(inner, field)})


def get_config(variant: str = "340m") -> TrainConfig:
    """Return the training config of the Mixture-of-Memories run `<size>[,option=value ...]`; sizes are
    `lsm_jax.models.SIZES`, options `OPTIONS`.

    Raises:
        ValueError: the size, an option or a value does not exist (the message lists those that do), or options exclude each
            other.
    """
    size, given = parse_variant(variant, OPTIONS)
    check_head(variant, "size", size, SIZES)
    for option in ("baseline", "expanded"):
        excluded = (*MEMORIES, "expanded") if option == "baseline" else MEMORIES
        if option in given and (other := [name for name in excluded if name in given]):
            raise ValueError(
                f"variant {variant!r}: {option}={given[option]} excludes {', '.join(other)}, since it has one memory"
            )
    dims, recipe = SIZES[size], RECIPES[size]
    inner = SwiGLUConfig.for_width(dims.hidden_size, dims.multiple_of)
    ratio = 4.0 if "baseline" in given else HIDDEN_RATIO.get(size, 4.0)
    inner = dataclasses.replace(inner, hidden_ratio=given.get("hidden_ratio", ratio))
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
            "L": LayerConfig(
                mixer=mixer_config(dims.hidden_size, given),
                feedforward=inner,
                mixer_init="xavier" if given.get("as_published") else "normal",
            ),
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
