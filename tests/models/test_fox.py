"""The published models of FoX's paper: their numbers of parameters, counted here by hand, and errors for
models that do not exist.
"""

from __future__ import annotations

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
    """The expected sizes are 780M, 756M, 757M and 756M, from Table 6 of the paper and its configs; the size
    of Samba is not published.
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


def test_names_that_do_not_exist_list_what_does():
    with pytest.raises(ValueError, match="model='fox'.* accepted are pro, llama, transformer-pro"):
        models.fox("fox")
    with pytest.raises(ValueError, match="size='1b' does not exist; accepted are 125m, 360m, 760m"):
        models.fox("pro", "1b")
    with pytest.raises(ValueError, match="size='125m': samba was published at 760m"):
        models.fox("samba", "125m")
