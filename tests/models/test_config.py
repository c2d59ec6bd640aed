"""Tests of model configs: errors, presets, and the sizes of presets."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cases import methods
from benchmarks.run import read_rows
from lsm_jax import mixers, models
from lsm_jax.feedforward import SwiGLUConfig
from tests.models.conftest import small_config

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(pattern="LXNY"), "letters that model.layers lacks: X, Y; accepted are L, N"),
        (dict(pattern="", num_layers=2), "pattern is empty.*L, N"),
        (dict(num_layers=6), "num_layers=6 is no multiple of the 4 letters"),
        (dict(num_layers=0), "num_layers=0: it must be greater than 0"),
        (dict(vocab_size=-1), "vocab_size=-1"),
        (dict(dtype="float16"), "dtype='float16': accepted are float32, bfloat16"),
        (
            dict(remat="some"),
            "remat='some': accepted are none, dots_and_states, dots_and_inputs, dots_and_convolutions, dots, full",
        ),
        (dict(hidden_size=30), r"layers\['L'\]: GLAConfig.num_heads=4 does not divide"),
    ],
)
def test_wrong_fields_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        small_config("gla", **fields).validate()


def test_wrong_parts_are_refused():
    config = small_config("gla")
    config.layers["L"].mixer = SwiGLUConfig()
    with pytest.raises(ValueError, match="is no mixer's config; accepted are .*GLAConfig"):
        config.validate()
    config = small_config("gla")
    config.layers["N"].feedforward = mixers.GLAConfig()
    with pytest.raises(ValueError, match="accepted are None and SwiGLUConfig"):
        config.validate()
    config.layers["N"].feedforward = SwiGLUConfig(intermediate_size=0)
    with pytest.raises(ValueError, match="intermediate_size=0"):
        config.validate()


def test_unknown_names_list_what_exists():
    with pytest.raises(ValueError, match="method='mamba9'.*gla, .*mamba2"):
        models.lm("mamba9")
    with pytest.raises(ValueError, match="size='7b'.*340m"):
        models.lm("gla", "7b")


def test_explicit_pattern_is_scanned_by_its_shortest_period():
    config = small_config("gla", "LLLNLLLN", num_layers=8)
    assert config.period() == "LLLN" and config.letters() == "LLLNLLLN"
    assert small_config("gla", "LLNL").period() == "LLNL"


# Presets outside the sizes below: a token writes twice, ranks, no projection of the output. Their numbers in millions.
OTHER_SIZES = {
    ("gated_deltaproduct", "10m"): 13.08,
    ("mamba3_mimo", "10m"): 13.09,
    ("slstm", "1.3b"): 1098,
}
# Operations that grow with the row's length at 2,048 tokens, as a multiple of those of softmax attention to all earlier tokens: the
# least and the most of the presets. A method that is not here has none.
GROWING = {
    "fox": (0.99, 1),
    "gated_attention": (0.99, 1),
    "softmax": (0.99, 1),
    "mla": (1.24, 1.26),  # keys have more channels than values
    "path": (1.49, 1.51),  # a product of matrices too
    "liger": (0.06, 0.061),  # a window
    "lolcats": (0.06, 0.061),
    "moba": (0.22, 0.88),  # selected blocks
    "nsa": (2.05, 3.03),  # three kinds of attention
    "log_linear_gated_deltanet": (1.28, 3.87),  # one memory for each level
    "log_linear_mamba2": (1.71, 3.44),
}
MORE_THAN_ATTENTION = ("mla", "path", "nsa", "log_linear_gated_deltanet", "log_linear_mamba2")


def test_published_sizes(method):
    """The presets' numbers of parameters are near those in the models' names, with GLA's width and its number of layers or, of
    layers without a feedforward, twice as many. The layers have 2 to 3.5 floating-point operations per parameter and token of a
    row of 2,048, or, of methods with more such operations than softmax attention, of a row of one token.
    """
    for size, low, high in (("10m", 8e6, 13e6), ("340m", 0.29e9, 0.45e9), ("1.3b", 1.1e9, 1.75e9)):
        config, gla = models.lm(method, size), models.lm("gla", size)
        count = models.count_parameters(config)
        named = count["non_embedding"] if size == "10m" else count["total"]
        if (method, size) in OTHER_SIZES:
            assert abs(named / 1e6 / OTHER_SIZES[method, size] - 1) < 1e-3
        else:
            assert low < named < high
        assert config.hidden_size == gla.hidden_size
        assert config.num_layers in (gla.num_layers, 2 * gla.num_layers)
        assert count["total"] == count["embedding"] + count["non_embedding"]
        one, row = (
            models.flops_per_token(config, length) - 2 * count["embedding"] for length in (1, 2048)
        )
        most = one if method in MORE_THAN_ATTENTION else row
        assert 1.99 * count["non_embedding"] < one
        assert most < 3.5 * count["non_embedding"]
        attention = 4 * (2048 + 1) / 2 * config.hidden_size * config.num_layers
        least, most = GROWING.get(method, (0, 0))
        assert least <= (row - one) / attention <= most
    assert SwiGLUConfig().width(1024) == 2816 and SwiGLUConfig().width(2048) == 5632


def test_mamba2_counts_as_published():
    """A Mamba2 model has as many parameters as state-spaces/mamba2-130m: 24 layers of width 768, a
    vocabulary of 50,288, tied embeddings.
    """
    config = models.lm("mamba2", "125m", vocab_size=50288)
    assert config.num_layers == 24
    assert models.count_parameters(config)["total"] == 128_989_632


def test_mamba_counts_as_published():
    """A Mamba model has as many parameters as state-spaces/mamba-130m: 24 layers of width 768, a vocabulary
    of 50,280, tied embeddings.
    """
    config = models.lm("mamba", "125m", vocab_size=50280)
    assert config.num_layers == 24
    inner, state, rank, conv = 2 * 768, 16, 48, 4
    projections = 768 * 2 * inner + inner * (rank + 2 * state) + (rank + 1) * inner + inner * 768
    layer = projections + inner * (conv + 1) + inner * (state + 1) + 768
    assert 24 * layer + 768 + 50280 * 768 == 129_135_360
    assert models.count_parameters(config)["total"] == 129_135_360


def test_rwkv7_counts_as_published():
    """An RWKV7 model has as many parameters as RWKV7-World 0.1B (arXiv 2503.14456), 191,034,624, but for
    known differences.

    Our model has RMS norms in place of layer norms (2 vectors less per layer, and 3 less outside the layers),
    and has parameters for the value mix in the first layer too.
    """
    config = models.lm("rwkv7", "125m", vocab_size=65536)
    config.tie_embeddings = False
    width, depth, rank = 768, 12, 32
    norms, first = (2 * depth + 3) * width, 2 * width * rank + width
    assert models.count_parameters(config)["total"] == 191_034_624 - norms + first


def test_commands_of_the_table_of_methods_start():
    """The command in each row of the table of methods is the one that the benchmark `methods` writes.
    train.py is started with one of them, with a run of 0 steps.
    """
    for row in read_rows(ROOT / "docs" / "methods.jsonl"):
        given = f"{row['method']}-10m", row["tokens"], 128, row.get("fields", "")
        assert row["command"] == methods.command(*given)
    _, *arguments = shlex.split(row["command"])
    done = subprocess.run(
        [sys.executable, *arguments, "--config.total_tokens=1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("train.py: total_tokens=1: one step takes"), done.stderr


def test_untied_head_counts():
    tied, untied = small_config("gla"), small_config("gla", tie_embeddings=False)
    more = models.count_parameters(untied)["total"] - models.count_parameters(tied)["total"]
    assert more == 50 * 32
