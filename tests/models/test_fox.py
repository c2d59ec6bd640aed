"""Tests of the published models of FoX's paper: their numbers of parameters, counted here by hand, and errors
for models that do not exist.
"""

from __future__ import annotations

import dataclasses

import pytest

from lsm_jax import models
from lsm_jax.mixers import MambaConfig

VOCAB = 50257
# By size: width, depth, heads of FoX, heads of the transformers, and the inner width of SwiGLU in the LLaMA
# and in the Pro blocks.
SIZES = {
    "125m": (768, 12, 12, 12, 2048, 1792),
    "360m": (1024, 24, 16, 16, 2816, 2560),
    "760m": (1536, 24, 24, 12, 4096, 3584),
}
# Millions of parameters without the embedding, from the paper's tables and the published configs.
PUBLISHED = {
    "llama": (123.7, 360.2, 757.6),
    "pro": (123.9, 367.3, 759.4),
    "transformer-llama": (123.6, 359.8, 756.7),
    "transformer-pro": (123.8, 366.9, 757.7),
}


def without_embedding(config) -> int:
    return models.count_parameters(config)["total"] - VOCAB * config.hidden_size


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_are_the_published_ones(name, size):
    width, depth, fox_heads, plain_heads, llama_inner, pro_inner = SIZES[size]
    gated, pro = not name.startswith("transformer"), name.endswith("pro")
    heads = fox_heads if gated else plain_heads
    layer = 4 * width**2 + 3 * width * (pro_inner if pro else llama_inner) + 2 * width
    if gated:
        layer += width * heads + heads
    if pro:  # output gate, output norm, two shifts, norms of queries and keys that all heads share
        layer += width**2 + width + 2 * width * heads + 2 * (width // heads)
    config = models.fox(name, size)
    assert without_embedding(config) == depth * layer + width + VOCAB * width
    assert round(without_embedding(config) / 1e6, 1) == PUBLISHED[name][list(SIZES).index(size)]
    if pro:
        config.layers["L"].mixer.qk_norm_per_head = True
        more = 2 * depth * (width - width // heads)
        assert without_embedding(config) == depth * layer + width + VOCAB * width + more


def test_baselines_are_as_large_as_published():
    """The baselines of FoX's paper have 780M, 756M, 757M and 756M parameters, from its Table 6 and configs;
    the size of Samba is not published.
    """
    millions = dict.fromkeys(("mamba2", "hgrn2", "deltanet", "transformer-swa"))
    for name in millions:
        config = models.fox(name)
        assert not config.tie_embeddings
        millions[name] = int(without_embedding(config) / 1e6)
    assert list(millions.values()) == [780, 756, 757, 756]
    assert models.fox("transformer-swa").layers["L"].mixer.window == 2048
    samba = models.fox("samba")
    assert samba.letters() == "ML" * 12 and samba.layers["L"].mixer.window == 2048
    assert samba.layers["M"].mixer == MambaConfig() and samba.layers["M"].feedforward.width(1536) == 3072  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
def test_baselines_at_every_size(size):
    """The baselines of FoX's paper have the shapes of the published configs, and the numbers of parameters
    that the published code counts.
    """
    width, depth, *_, inner, _ = SIZES[size]
    plain = 3 * width * inner + 2 * width  # SwiGLU and two norms
    heads, states = width // 32, 128
    channels = 2 * width + 2 * states  # those of Mamba2's convolution
    mamba2 = width * (2 * width + channels + heads) + 5 * channels + 3 * heads
    layers = {
        "mamba2": 2 * (mamba2 + 2 * width + 2 * width**2 + width),
        # The lower bounds of the gate are a parameter of the published model, too.
        "hgrn2": 4 * width**2 + width + width + plain,
        "deltanet": 4 * width**2 + width * (width // 128) + 3 * 4 * width + 128 + plain,
    }
    for name, layer in layers.items():
        config = models.fox(name, size)
        assert without_embedding(config) == depth * layer + width + VOCAB * width, name
    assert models.fox("mamba2", size).num_layers == 2 * depth
    assert models.fox("mamba2", size).layers["L"].mixer.num_heads(width) == heads
    assert models.fox("hgrn2", size).layers["L"].mixer.head_dim == 128
    assert models.fox("deltanet", size).layers["L"].mixer.num_heads == width // 128


# Table 3: RoPE, forget gate, QK-norm, output gate, output norm, KV-shift; perplexities are the paper's.
TABLE_3 = {
    "transformer-llama-no-rope": "......",
    "transformer-llama": "x.....",
    "llama-rope": "xx....",
    "llama": ".x....",
    "llama-qk-norm": ".xx...",
    "llama-output-gate": ".xxx..",
    "llama-output-norm": ".xxxx.",
    "pro": ".xxxxx",
    "pro-no-qk-norm": ".x.xxx",
    "pro-no-output-gate": ".xx.xx",
    "pro-no-output-norm": ".xxx.x",
    "pro-no-kv-shift": ".xxxx.",
    "pro-rope": "xxxxxx",
    "transformer-pro": "x.xxxx",
    "pro-no-forget-gate": "..xxxx",
}


def test_table_3_has_its_rows():
    """The ablations of FoX's Table 3 have the parts of every row, and parameters within 2.1 % of each
    other: an output gate narrows the feedforward.
    """
    assert tuple(TABLE_3) == models.FOX_TABLE_3
    width, depth, counts = 1024, 24, []
    for name, row in TABLE_3.items():
        config = models.fox(name, "360m")
        mixer = config.layers["L"].mixer
        rope, gate, norm, output_gate, output_norm, shift = (letter == "x" for letter in row)
        assert mixer.rope_base == (500000.0 if rope else None), name
        assert mixer.forget_gate == ("data_dependent" if gate else "none"), name
        assert (mixer.qk_norm, mixer.output_gate, mixer.output_norm) == (norm, output_gate, output_norm), name  # fmt: skip
        assert (mixer.key_shift, mixer.value_shift) == (shift, shift), name
        layer = 4 * width**2 + 3 * width * (2560 if output_gate else 2816) + 2 * width
        layer += gate * (width + 1) * 16 + norm * 2 * 64 + output_gate * width**2
        layer += output_norm * width + shift * 2 * width * 16
        assert without_embedding(config) == depth * layer + width + VOCAB * width, name
        counts.append(without_embedding(config))
    assert max(counts) < 1.021 * min(counts)


def test_figure_7_has_its_gates():
    kinds = [f"{b}-{k}-{n}" for b in ("llama", "pro") for k in ("independent", "fixed") for n in (256, 2048, 16384)]  # fmt: skip
    assert models.FOX_FIGURE_7 == ("llama", "pro", *kinds)
    for name in kinds:
        block, kind, longest = name.split("-")
        mixer, plain = (models.fox(n, "360m").layers["L"].mixer for n in (name, block))
        changed = dataclasses.replace(
            plain,
            forget_gate="fixed" if kind == "fixed" else "data_independent",
            decay_time_min=2.0,
            decay_time_max=float(longest),
        )
        assert mixer == changed
        less = 24 * 16 * (1025 - (kind == "independent"))  # the gate's projection
        counts = (without_embedding(models.fox(n, "360m")) for n in (block, name))
        assert next(counts) - next(counts) == less


def test_names_that_do_not_exist_list_what_does():
    with pytest.raises(ValueError, match="model='fox'.* accepted are pro, llama, transformer-pro"):
        models.fox("fox")
    with pytest.raises(ValueError, match="size='1b' does not exist; accepted are 125m, 360m, 760m"):
        models.fox("pro", "1b")
    with pytest.raises(
        ValueError, match="size='125m': model samba was published at one size; accepted is '760m'"
    ):
        models.fox("samba", "125m")
