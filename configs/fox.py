"""FoX, the Forgetting Transformer, as published: `--config=configs/fox.py:<model>-<size>[,tokens=48b|,data=slimpajama]`.

Reproduces: arXiv 2503.02130 and github.com/zhixuan-lin/forgetting-transformer at 883f260. Models: pro and llama (FoX),
transformer-pro, transformer-llama, mamba2, hgrn2, deltanet; sizes 125m, 360m and 760m; at 760m also transformer-swa and samba.
Ablations, published at 360m: the rows of Table 3 (`lsm_jax.models.FOX_TABLE_3`), such as pro-no-qk-norm or llama-output-gate;
the gates of Figure 7 (`FOX_FIGURE_7`), such as pro-fixed-2048 or llama-independent-256.
Command: python train.py --config=configs/fox.py:pro-760m --workdir=runs/fox --config.data.path=longcrawl64 --config.mesh.fsdp=8
Hardware: 8 GPUs for days for 760m on 48 B tokens; one GPU for a day for 125m. A row has 16,384 tokens.
Expected: perplexity at 16,384 tokens, 360m: FoX (Pro) 6.62, Transformer (Pro) 6.82, FoX (LLaMA) 7.25, Transformer (LLaMA) 7.49.

The data are LongCrawl64 in its published order: the first 16,384 tokens of all documents, 32 documents per step, then the
second 16,384, and so on. A row's inputs are BOS and all its tokens but the last; it predicts all its tokens. A step has 2^19
tokens. The learning rate rises from 0 over 2^28 tokens and falls as a cosine to 0 at the end. Every part of a block is a field;
for example, the paper's ablation of QK-norm is --config.model.layers.L.mixer.qk_norm=False at pro-360m.

`data=slimpajama` is the run of Table 7, of the models in `SLIMPAJAMA` at 360m: 15 B tokens in rows of 2,048, 256 rows per step;
rotations of base 10,000; weight decay 0.01; the learning rate rises from 3e-5 to 3e-4 over 2^29 tokens and falls to 3e-5. The
recipe is that of the authors' first commit (6ef3e8f), which later ones lack. `data.path` is a store of SlimPajama's rows in Llama
2's tokens, and `data.tokenizer` that tokenizer's file.

Different from the published code: the residual stream is bfloat16; the baselines' short convolutions have no weight decay; the
baselines are initialised, and their norms' eps is, as in this library's other configs; HGRN2's gates have learned lower bounds,
which the published code has as parameters and never applies.
"""

from __future__ import annotations

from configs.variants import Option, check_head, parse_value, parse_variant, split_head
from lsm_jax.data import DataConfig
from lsm_jax.models import fox
from lsm_jax.training import OptimizerConfig, TrainConfig

GI = 2**30
# The runs of each size: number of tokens by the option's value; the first is the default.
TOKENS = {
    "125m": {"2.7b": 5 * GI // 2},
    "360m": {"7.5b": 7 * GI},
    "760m": {"48b": 45 * GI, "16b": 15 * GI},
}
# Peak learning rates of the run of 48 B tokens, which the paper tuned for each model. Models that are not listed have only the
# run of 16 B.
LONG_RUN = {
    "pro": 2e-3,
    "llama": 1e-3,
    "transformer-pro": 1e-3,
    "transformer-llama": 5e-4,
    "mamba2": 2e-3,
    "hgrn2": 2e-3,
    "deltanet": 1e-3,
}
# The models of Table 7 and their run's number of tokens.
SLIMPAJAMA = ("pro", "llama", "transformer-pro", "transformer-llama", "mamba2")
SLIMPAJAMA_TOKENS = {"15b": 14 * GI}


def get_config(variant: str = "pro-760m") -> TrainConfig:
    """Return the training config of the FoX run that the variant `<model>-<size>[,tokens=...][,data=...]`
    names.

    Raises:
        ValueError: the model, size, number of tokens or option does not exist; the message lists those that do.
    """
    options = dict(tokens=Option(), data=Option(choices=("longcrawl64", "slimpajama")))
    head, given = parse_variant(variant, options)
    name, size = split_head(variant, head, "model", "pro-760m")
    if given.get("data") == "slimpajama":
        return _slimpajama(variant, name, size, given.get("tokens", "15b"))
    model = fox(name, size)
    runs = {k: n for k, n in TOKENS[size].items() if k != "48b" or name in LONG_RUN}
    tokens = given.get("tokens", next(iter(runs)))
    parse_value(variant, "tokens", tokens, Option(choices=runs))
    rate = LONG_RUN[name] if tokens == "48b" else 1e-3 if tokens == "16b" else 2e-3
    return TrainConfig(
        name=variant,
        model=model,
        data=DataConfig(
            path="longcrawl64",
            tokenizer="gpt2",
            json_escape=True,
            sequence_length=2**14,
            shuffle=False,
        ),
        optimizer=OptimizerConfig(
            peak_lr=rate,
            end_lr_ratio=0.0,
            warmup_tokens=2**28,
            warmup_from_zero=True,
            weight_decay=0.1,
        ),
        batch_size=32,
        total_tokens=runs[tokens],
        seed=0,
        eval_every=2048,
        checkpoint_every=512,
    )


def _slimpajama(variant: str, name: str, size: str, tokens: str) -> TrainConfig:
    """Return the training config of a FoX run on SlimPajama (the paper's Table 7); `variant` is the
    complete variant, for messages, and `name`, `size` and `tokens` are its parts.
    """
    check_head(variant, "data=slimpajama, model", name, SLIMPAJAMA)
    check_head(variant, "data=slimpajama, size", size, ("360m",))
    parse_value(variant, "tokens", tokens, Option(choices=SLIMPAJAMA_TOKENS))
    model = fox(name, size, vocab_size=32000)
    mixer = model.layers["L"].mixer
    if name.startswith("transformer"):
        mixer.rope_base = 10000.0
    return TrainConfig(
        name=variant,
        model=model,
        data=DataConfig(
            path="slimpajama",
            tokenizer="slimpajama/tokenizer.json",
            bos_id=1,
            sequence_length=2**11,
            shuffle=False,
        ),
        optimizer=OptimizerConfig(
            peak_lr=3e-4,
            start_lr_ratio=0.1,
            end_lr_ratio=0.1,
            warmup_tokens=2**29,
            warmup_from_zero=True,
            weight_decay=0.01,
        ),
        batch_size=256,
        total_tokens=SLIMPAJAMA_TOKENS[tokens],
        seed=0,
        eval_every=2048,
        checkpoint_every=512,
    )
