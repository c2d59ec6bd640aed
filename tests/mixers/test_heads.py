"""Sizes of heads by a model's width."""

import jax
import pytest

from lsm_jax import mixers, models
from lsm_jax.mixers.heads import head_size, three_or_four

OF_THE_KERNELS = {64, 128, 256, 512}
METHODS = (
    "gla",
    "retnet",
    "gated_retention",
    "gsa",
    "abc",
    "gated_deltanet",
    "gated_deltaproduct",
    "comba",
    "kda",
    "mom",
)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("width", [768, 1024, 1536, 2048])
def test_heads_of_published_widths_have_the_sizes_of_fused_kernels(name, width):
    layer = models.LayerConfig(
        mixer=(mixers.MoMConfig if name == "mom" else mixers.METHODS[name].config).for_width(width),
        feedforward=None,
    )
    config = models.ModelConfig(vocab_size=64, hidden_size=width, num_layers=1, layers={"L": layer})
    state = jax.eval_shape(lambda m: m.init_state(1, 16), models.abstract(config))
    sizes = [x.shape[-2:] for x in jax.tree.leaves(state) if x.ndim >= 4 and min(x.shape[-2:]) > 4]
    assert sizes and {n for shape in sizes for n in shape} <= OF_THE_KERNELS


def test_the_size_of_a_head_is_the_largest_of_which_three_fit():
    assert [head_size(width, 256) for width in (64, 256, 512, 768, 1024, 1536, 2048)] == [16, 64, 128, 256, 256, 256, 256]  # fmt: skip
    assert head_size(100, 256) == 25 and head_size(1, 256) == 1
    assert [three_or_four(width) for width in (64, 96, 768, 1024, 1536, 2048, 2560, 3072)] == [4, 3, 3, 4, 3, 4, 4, 4]  # fmt: skip
