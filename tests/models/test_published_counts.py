"""Tests of the numbers of parameters of every published model and baseline.

`by_hand` counts them from the authors' configs (widths, depths, heads, vocabularies) and the modules of their code, not from
ours: the code of Linear-MoE (b312754), MoM's `training/configs`, and config.json of Llama and Mistral. `test_fox` does so for FoX.
docs/papers has a table of the same numbers beside those that the papers print.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from configs import liger, linear_moe, lm, mom
from lsm_jax import models

PAPERS = Path(__file__).parents[2] / "docs" / "papers"
BILLION, MILLION = 1e9, 1e6


def swiglu(width: int, ratio: float) -> int:
    """Return the parameters of a SwiGLU layer of inner width `2/3 ratio width`, rounded up to a multiple of 256."""
    return 3 * width * 256 * -(-int(2 / 3 * ratio * width) // 256)


# ---------------------------------------------------------------------------------- MoM, 24 layers, untied head of 32,000


def mom_total(width: int, layer: int) -> int:
    """Return the parameters of a model of 24 layers, with two norms each, the last norm, embedding and head."""
    return 24 * (layer + 2 * width) + width + 2 * 32000 * width


def memory_parts(width: int, inner: str, keys: int = 1024) -> int:
    """Return the parameters that each memory has of its own: keys, values (1,024), and β and decay of four heads (Gated
    DeltaNet) or a decay of rank 16 with a bias (GLA).
    """
    gates = 8 * width if inner == "gated_deltanet" else 16 * (width + keys) + keys
    return width * (keys + 1024) + gates


def mom_layer(width: int, ratio: float, sets: int, inner: str = "gated_deltanet", memories: int = 4) -> int:  # fmt: skip
    """Return the parameters of a MoM layer with its feedforward: queries, `sets` times a memory's own parts, the router, gate
    and output, the norm of a head of 256; of Gated DeltaNet A and dt_bias, and three convolutions of width 4.
    """
    keys = 1024 if inner == "gated_deltanet" else 512
    extra = 8 + 3 * 4 * 1024 if inner == "gated_deltanet" else 0
    mixer = width * keys + sets * memory_parts(width, inner, keys) + memories * width
    return mixer + 2 * 1024 * width + 256 + extra + swiglu(width, ratio)


def gated_deltanet(expand_v: int) -> int:
    """Return the parameters of a Gated DeltaNet mixer of width 1,024 with four heads: q, k, v, gate and output, β and decay,
    A and dt_bias, convolutions of width 4, and the norm.
    """
    d, values = 1024, 1024 * expand_v
    return d * (2 * d + 3 * values) + 8 * d + 8 + 4 * (2 * d + values) + values // 4


def gla(expand_k: float) -> int:
    """Return the parameters of a GLA mixer of width 1,024 with four heads: q, k, v, gate and output, a decay of rank 16 with
    a bias, and the norm.
    """
    d, keys = 1024, int(1024 * expand_k)
    return d * (2 * keys + 3 * d) + 16 * (d + keys) + keys + 256


def named(active: int, width: int) -> int:
    """Return the active parameters without embedding and head, which the paper's names "380M" and "1.3B" count."""
    return active - 2 * 32000 * width


# ------------------------------------------------------------------------------- Linear-MoE: 64 experts, 8 active, vocabulary 151,936

LINEAR_MOE = {"a0.3b-2b": (1024, 12, 896), "a1b-7b": (2048, 16, 1024)}  # width, depth, expert width


def linear_moe_mixer(name: str, d: int) -> int:
    """Return the parameters of a mixer of the authors' code at width d, with heads of 128 channels."""
    heads, norm, biases = d // 128, 128, 4 * d  # biases of queries, keys, values and gate
    gated = 5 * d * d + biases + norm
    inner, groups, states = 2 * d, 8, 128  # of Mamba2, with heads of 64 channels
    channels = inner + 2 * groups * states
    return {
        "softmax": 4 * d * d + 3 * d,
        "linear_attention": gated,
        "lightning": gated,
        "retnet": gated,
        "gla": gated + 2 * 16 * d + d,
        "deltanet": gated + d * heads,
        "gated_deltanet": gated - norm + 2 * d * heads + 2 * heads,
        "hgrn2": 4 * d * d + norm,
        "mamba2": d * (inner + channels + inner // 64) + 5 * channels + 3 * inner // 64 + inner + inner * d,
    }[name]  # fmt: skip


def linear_moe_counts(size: str, layers: dict[str, int], *, plain: int = 0) -> dict[str, int]:
    """Return the numbers of parameters of a Linear-MoE model with so many layers of each mixer: "active" and "non_embedding"
    without embedding and head, and "total"; `plain` is subtracted from each mixer.
    """
    d, depth, expert = LINEAR_MOE[size]
    assert sum(layers.values()) == depth
    mixers = sum(n * (linear_moe_mixer(name, d) - plain) for name, n in layers.items())
    rest = mixers + depth * (64 * d + 2 * d) + d  # routers and norms
    counts = {
        name: rest + depth * number * 3 * d * expert
        for name, number in (("active", 8), ("non_embedding", 64))
    }
    return counts | {"total": counts["non_embedding"] + 2 * 151936 * d}


# ------------------------------------------------------------------------------------------------- the counts

MOM = [  # variant, count, by hand, printed in the paper, its unit
    ("340m", "active", mom_total(1024, mom_layer(1024, 3, 3)), 444, MILLION),
    ("340m,inner=gla", "active", mom_total(1024, mom_layer(1024, 3, 3, "gla")), 395, MILLION),
    ("340m,baseline=expanded", "active", mom_total(1024, gated_deltanet(3) + swiglu(1024, 4)), 550.7, MILLION),
    ("340m,inner=gla,baseline=expanded", "active", mom_total(1024, gla(1.5) + swiglu(1024, 4)), 425.2, MILLION),
    ("340m,baseline=inner", "active", mom_total(1024, gated_deltanet(1) + swiglu(1024, 4)), 399.5, MILLION),
    ("340m", "total", mom_total(1024, mom_layer(1024, 3, 5)), None, MILLION),
    ("340m,shared=0", "active", mom_total(1024, mom_layer(1024, 3, 2)), None, MILLION),
    ("340m,hidden_ratio=2", "active", mom_total(1024, mom_layer(1024, 2, 3)), None, MILLION),
    ("340m,memories=2,top_k=1", "active", mom_total(1024, mom_layer(1024, 3, 2, memories=2)), None, MILLION),
    ("340m,memories=8,top_k=4", "active", mom_total(1024, mom_layer(1024, 3, 5, memories=8)), None, MILLION),
    ("340m,memories=16,top_k=8", "active", mom_total(1024, mom_layer(1024, 3, 9, memories=16)), None, MILLION),
    ("1.3b", "active", mom_total(2048, mom_layer(2048, 4, 3)), None, BILLION),
    ("1.3b", "total", mom_total(2048, mom_layer(2048, 4, 5)), None, BILLION),
]  # fmt: skip


def matches(count: int, printed: float, unit: float) -> bool:
    """Return whether a count is within 0.1 % of a printed number, or is that number in its digits."""
    digits = len(str(printed).partition(".")[2])
    return round(count / unit, digits) == printed or abs(count / unit / printed - 1) < 1e-3


@pytest.mark.parametrize(("variant", "key", "by_hand", "printed", "unit"), MOM)
def test_mom(variant, key, by_hand, printed, unit):
    """Each count is within 0.1 % of the count by hand from the authors' config, and of what the paper prints or its
    rounding.
    """
    counted = models.count_parameters(mom.get_config(variant).model)[key]
    assert abs(counted / by_hand - 1) < 1e-3, (counted, by_hand)
    assert printed is None or matches(counted, printed, unit)


def test_the_names_of_mom_count_active_parameters_without_embedding_and_head():
    """ "380M" and "1.3B" are two digits of 378.5 M and 1.285 B."""
    small, large = (
        named(models.count_parameters(mom.get_config(variant).model)["active"], width)
        for variant, width in (("340m", 1024), ("1.3b", 2048))
    )
    assert round(small, -7) == 380e6 and round(large, -8) == 1.3e9
    assert (small, large) == (378_526_912, 1_285_234_880)


HYBRID = ("linear_attention", "retnet", "gla", "mamba2", "hgrn2")
ROWS = [("pattern=N", {"softmax": 1})]
ROWS += [(f"mixer={name}", {name: 1}) for name in (*HYBRID, "lightning", "deltanet", "gated_deltanet")]  # fmt: skip
ROWS += [(f"mixer={name},pattern=LLLN", {name: 3, "softmax": 1}) for name in HYBRID]


@pytest.mark.parametrize("size", LINEAR_MOE)
def test_linear_moe(size):
    """All variants of Tables 3 to 6 have the counts by hand to 0.1 %; the plain ones of basic linear attention too, which lack
    the biases. The names "A0.3B-2B" and "A1B-7B" are one digit of the counts without embeddings, except Mamba2's.
    """
    depth = LINEAR_MOE[size][1]
    active, every = {"a0.3b-2b": (0.3, 2), "a1b-7b": (1, 7)}[size]
    for options, layers in ROWS:
        per_period = depth // sum(layers.values())
        expected = linear_moe_counts(size, {name: n * per_period for name, n in layers.items()})
        variant = f"{size},{options},as_published=1"
        counts = models.count_parameters(linear_moe.get_config(variant).model)
        counted = counts | {"active": counts["active"] - counts["embedding"]}
        for key, by_hand in expected.items():
            assert abs(counted[key] / by_hand - 1) < 1e-3, (variant, key, counted[key], by_hand)
        if "mamba2" not in options:
            assert matches(expected["active"], active, BILLION), variant
            assert matches(expected["non_embedding"], every, BILLION), variant
    counts = models.count_parameters(linear_moe.get_config(size).model)
    width = LINEAR_MOE[size][0]
    expected = linear_moe_counts(size, {"linear_attention": depth}, plain=4 * width)
    assert abs(counts["total"] / expected["total"] - 1) < 1e-3


LLAMAS = {  # width, depth, heads, key heads, channels of a head, inner width, vocabulary, tied: from their config.json
    "llama3.2-1b": (2048, 16, 32, 8, 64, 8192, 128256, True),
    "llama3.2-3b": (3072, 28, 24, 8, 128, 8192, 128256, True),
    "llama3-8b": (4096, 32, 32, 8, 128, 14336, 128256, False),
    "mistral-7b": (4096, 32, 32, 8, 128, 14336, 32000, False),
}


@pytest.mark.parametrize("name", LLAMAS)
def test_the_pretrained_models_of_liger(name):
    """The transformers that Liger makes linear have the counts by hand, exactly; the adapters add rank 8 of three
    projections.
    """
    width, depth, heads, key_heads, channels, inner, vocab, tied = LLAMAS[name]
    queries, keys = heads * channels, key_heads * channels
    layer = 2 * width * (queries + keys) + 3 * width * inner + 2 * width
    expected = depth * layer + width + vocab * width * (1 if tied else 2)
    assert models.count_parameters(liger.MODELS[name])["total"] == expected
    adapters = depth * 8 * (3 * width + queries + 2 * keys)
    tuned = models.count_parameters(liger.get_config(name).model)["total"]
    assert tuned == expected + adapters


CONFIGS = {"lm": lm, "mom": mom, "linear_moe": linear_moe, "liger": liger}
COUNT = re.compile(r"^\| `configs/(\w+)\.py:(\S+)` \| ([a-z ]+) \| [^|]* \| ([\d,]{9,}) \|")
KEYS = {"active": "active", "all": "total", "without embeddings": "non_embedding"}


@pytest.mark.parametrize(
    ("page", "rows"),
    [
        pytest.param("linear_moe", 26, marks=pytest.mark.slow),
        pytest.param("mom", 27, marks=pytest.mark.slow),
        ("liger", 4),
    ],
)
def test_the_counts_in_the_documentation_are_those_of_the_models(page, rows):
    """Every row of the tables of parameter counts in docs/papers has the number that the config's model has."""
    seen = 0
    for line in (PAPERS / f"{page}.md").read_text().splitlines():
        if found := COUNT.match(line):
            config, variant, kind, number = found.groups()
            counts = models.count_parameters(CONFIGS[config].get_config(variant).model)
            if kind == "active without embeddings":
                counted = counts["active"] - counts["embedding"]
            else:
                counted = counts[KEYS[kind]]
            assert counted == int(number.replace(",", "")), line
            seen += 1
    assert seen == rows
