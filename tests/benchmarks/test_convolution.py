"""Tests of the tilings that the benchmark `convolution` times."""

import pytest

from benchmarks.cases import convolution
from benchmarks.registry import UsageError
from pallas_kernels.short_convolution.hopper import tilings


def test_each_word_changes_the_table_as_it_was():
    table = dict(tilings.TILINGS)
    convolution.set_tiling("registers")
    assert set(tilings.TILINGS.values()) == {tilings.REGISTERS}
    convolution.set_tiling("wide_backward=8:4:2:64:9:3")
    assert tilings.TILINGS == table | dict(wide_backward=tilings.Tiling(8, 4, 2, 64, 9, 3))
    convolution.set_tiling("table")
    assert tilings.TILINGS == table


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("best", "accepted are table, registers and kernel="),
        ("sideways=8:4:4:128:512", "with a kernel of forward, backward, "),
        ("forward=8:4:4:128", "channels:step:stages:tokens:blocks"),
        ("forward=8:4:1:128:512", "0 or at least 2 stages, not 1"),
    ],
)
def test_names_what_is_accepted(word, message):
    with pytest.raises(UsageError, match=f"--tilings '{word}': .*{message}"):
        convolution.set_tiling(word)
