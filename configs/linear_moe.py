"""Linear-MoE language models: `--config=configs/linear_moe.py:<size>[,option=value ...]`, e.g. `a0.3b-2b,mixer=gla,pattern=LLLN`.

Reproduces: Linear-MoE (arXiv 2503.05447, Table 2) at its two sizes, a0.3b-2b and a1b-7b (`a-small` is a smaller one for
comparisons): every layer has 64 SwiGLU experts, eight of them active for a token, and heads of 128 channels; the data are 15 B and
100 B tokens of SlimPajama by Qwen2's tokenizer, in rows of 2,048. The option `mixer` is any method of the registry (default: basic linear attention with an output gate).
`pattern=LLLN` is the published hybrid, `pattern=N` the softmax baseline.
Command: python train.py --config=configs/linear_moe.py:a0.3b-2b --workdir=runs/moe --config.data.path=STORE --config.mesh.fsdp=8
Hardware: eight A100 in the paper; a laptop for `tiny`. Every mesh is supported: --config.mesh.expert=8 distributes the experts,
tensor the heads and widths, sequence the tokens of each row, pipeline the layers.
`python -m lsm_jax.plan --config=... --devices=8 --hbm=80 --search` prints the meshes that fit into memory.
Expected: 2.18 B parameters of which 0.328 B are active, and 6.78 B of which 1.14 B are, without embeddings (2 x 151,936 rows).
Table 5, at a0.3b-2b, average accuracy over PIQA, HellaSwag, Winogrande, ARC and MMLU: attention 35.53, GLA 41.20, GLA hybrid
42.94, Mamba2 42.45.

The balance loss is 0 in the authors' scripts; here it is 1e-2, Megatron's value in their other models (set
`--config.model.layers.L.feedforward.balance_scale=0.0`, and the same for N). The batch size is not published; 64 and 128 rows
are from the name of a released checkpoint and from the evaluation script.

Different from the authors' code, unless `as_published=1`: queries, keys, values and gates have no biases; output projections are
initialised like all others (theirs smaller by sqrt(2 depth)); the balance loss is not 0; and as in the methods' own papers, RetNet
rotates and GLA and RetNet have no SiLU on queries and keys, lightning attention decays more slowly in higher layers (theirs: ALiBi's
slopes in all), the delta rule has short convolutions, Gated DeltaNet an output norm, and HGRN2 its lower bounds and one norm of the
whole width. `as_published=1` is for the rows of Table 5 and for the authors' other modules that train as committed (`PUBLISHED`);
what is a bug of their code (DeltaNet's β of other tokens) is not reproduced.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

from configs.lm import RECIPES, Recipe
from configs.variants import Option, check_head, listed, parse_variant
from lsm_jax import mixers
from lsm_jax.data import DataConfig
from lsm_jax.feedforward import MoEConfig
from lsm_jax.feedforward.moe import EXECUTIONS
from lsm_jax.models import LayerConfig, ModelConfig
from lsm_jax.training import OptimizerConfig, TrainConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """The dimensions of a Linear-MoE model of one size, and its training recipe."""

    hidden_size: int
    num_layers: int
    experts: dict[str, Any]
    recipe: Recipe
    vocab_size: int = 151936
    head_dim: int = 128
    init_std: float = 0.008


def _recipe(tokens: int, batch_size: int, peak_lr: float) -> Recipe:
    return Recipe(
        total_tokens=tokens, batch_size=batch_size, warmup_tokens=0, peak_lr=peak_lr, weight_decay=0.1
    )  # fmt: skip


SIZES = {
    "a0.3b-2b": Size(
        hidden_size=1024, num_layers=12, experts=dict(expert_size=896), recipe=_recipe(15_000_000_000, 64, 1e-4),
    ),
    "a1b-7b": Size(
        hidden_size=2048, num_layers=16, experts=dict(expert_size=1024), recipe=_recipe(100_000_000_000, 128, 1e-5),
    ),
    # Not published: the width and depth of 125M parameters, and experts as narrow as those of a0.3b-2b relative to a token's
    # feedforward: the eight active ones are as wide as a dense one.
    "a-small": Size(
        hidden_size=768, num_layers=12, experts=dict(expert_size=256), recipe=RECIPES["125m"], vocab_size=32000,
    ),
    "tiny": Size(
        hidden_size=64, num_layers=4, experts=dict(num_experts=8, top_k=2, expert_size=56), recipe=RECIPES["tiny"],
        vocab_size=257, head_dim=16, init_std=0.02,
    ),
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "linear_attention": dict(qkv_bias=True),
    "lightning": dict(qkv_bias=True, decay="alibi"),
    "retnet": dict(qkv_bias=True, rotary=False, feature_map="silu"),
    "gla": dict(qkv_bias=True, feature_map="silu"),
    "deltanet": dict(qkv_bias=True, conv_size=1, qkv_silu=False),
    "gated_deltanet": dict(qkv_bias=True, conv_size=1, output_norm=False),
    "mamba2": {},
    "hgrn2": dict(lower_bound=0.0, head_norm=True),
    "softmax": dict(qkv_bias=True),
}
"""The fields of each mixer that `as_published=1` changes, from the authors' code (OpenSparseLLMs/Linear-MoE, b312754)."""
OPTIONS = dict(
    mixer=Option(choices=collections.ChainMap(mixers.WRAPPERS, mixers.METHODS)),
    pattern=Option(),
    as_published=Option(kind=bool),
    execution=Option(choices=EXECUTIONS),
    vocab_size=Option(kind=int, least=1),
)


def mixer_config(name: str, size: Size, *, as_published: bool = False) -> Any:
    """Return the config of the mixer called `name` for a Linear-MoE model of that size; `as_published`
    selects the layers of the authors' code.

    The methods of Linear-MoE have heads of the published width, keys and values as wide as the model, and an output gate.
    Other methods have the proportions of their papers.
    """
    heads = dict(num_heads=size.hidden_size // size.head_dim)
    changes: dict[str, dict[str, Any]] = {
        "linear_attention": heads | dict(output_gate=True),
        "lightning": heads,
        "retnet": heads | dict(expand_v=1.0),
        "gated_retention": heads,
        "gla": heads | dict(expand_k=1.0),
        "deltanet": heads | dict(output_gate=True),
        "gated_deltanet": heads | dict(head_dim=size.head_dim, expand_v=1.0),
        "mamba2": dict(num_groups=min(8, 2 * size.hidden_size // 64)),
        "hgrn2": dict(head_dim=size.head_dim),
        "rwkv6": dict(head_dim=size.head_dim),
        "softmax": heads | dict(rope_base=10000.0),
    }
    config = mixers.get_method(name).config.for_width(size.hidden_size)
    published = PUBLISHED[name] if as_published else {}
    return dataclasses.replace(config, **changes.get(name, {}) | published)


def get_config(variant: str = "a0.3b-2b") -> TrainConfig:
    """Return the training config of the Linear-MoE run `<size>[,option=value ...]`; sizes are `SIZES`,
    options `OPTIONS`.

    Raises:
        ValueError: the size, an option or a value does not exist; the message lists those that do.
    """
    name, given = parse_variant(variant, OPTIONS)
    check_head(variant, "size", name, SIZES)
    size, method = SIZES[name], given.get("mixer", "linear_attention")
    as_published = given.get("as_published", False)
    if as_published and method not in PUBLISHED:
        raise ValueError(
            f"variant {variant!r}: as_published=1 with mixer={method}; {listed(PUBLISHED)}"
        )

    def layer(method: str) -> LayerConfig:
        experts = MoEConfig(**size.experts, execution=given.get("execution", "grouped"))
        if as_published:
            experts.balance_scale = 0.0
        mixer = mixer_config(method, size, as_published=as_published)
        return LayerConfig(mixer=mixer, feedforward=experts)

    model = ModelConfig(
        vocab_size=given.get("vocab_size", size.vocab_size),
        hidden_size=size.hidden_size,
        num_layers=size.num_layers,
        pattern=given.get("pattern", "L"),
        layers={"L": layer(method), "N": layer("softmax")},
        tie_embeddings=False,
        init_std=size.init_std,
        scaled_output_init=as_published,
    )
    recipe = size.recipe
    align = getattr(model.layers["L"].mixer, "mini_batch", 1)  # as in configs/lm.py
    config = TrainConfig(
        name=f"linear-moe-{variant}",
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
    config.validate()
    return config
