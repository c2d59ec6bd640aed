"""Tests of the counts of operations in the tables of training steps beside peers' models."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.peers import jla_trainer
from benchmarks.registry import UsageError
from benchmarks.step_choices import set_fields
from benchmarks.tables import TABLES, step_profile
from benchmarks.tables.table import read_rows
from benchmarks.tables.training_steps import (
    FLOPS,
    FLOPS_OF_LENGTH,
    JLA_FLOPS,
    LENGTHS,
    PEAK,
    PEER_VARIANTS,
    flops,
)
from configs import lm
from lsm_jax.models import count_parameters, flops_per_token

DOCS = Path(__file__).resolve().parents[2] / "docs"
ROWS = read_rows(DOCS, "model_step.jsonl")
VOCAB_SIZE = 32_000  # of all models of the tables


def counted(config, length):
    config.vocab_size = VOCAB_SIZE
    return 3 * flops_per_token(config, length)


def test_stored_counts_are_those_of_the_models():
    assert {*FLOPS, *FLOPS_OF_LENGTH} == set(PEER_VARIANTS)
    for variant, counts in FLOPS_OF_LENGTH.items():
        for length, count in counts.items():
            assert counted(lm.get_config(variant).model, length) == count, (variant, length)
    for variant, count in FLOPS.items():
        assert {counted(lm.get_config(variant).model, n) for n in LENGTHS} == {count}, variant
    assert {variant for variant, _ in JLA_FLOPS} == set(jla_trainer.PRESETS)
    for (variant, length), count in JLA_FLOPS.items():
        assert counted(jla_trainer.model_config(variant), length) == count, variant
    rows = [row for row in ROWS if "flops_per_token" in row and row["variant"] in jla_trainer.SIZES]
    assert rows
    for row in rows:
        assert row["vocab_size"] == VOCAB_SIZE
        config = lm.get_config(row["variant"])
        set_fields(config, row.get("mixer", ""))
        assert flops(row) == pytest.approx(counted(config.model, row["length"]), rel=1e-3)


def test_one_count_is_near_the_peers_own():
    rows = [row for row in ROWS if row.get("peer") == "jla" and "own_mfu_percent" in row]
    assert rows
    for row in rows:
        own = row["own_mfu_percent"] / 100 * PEAK / row["tokens_per_second"]
        assert flops(row) == pytest.approx(own, rel=5e-3)


def test_a_model_that_nobody_counted_is_an_error():
    with pytest.raises(KeyError, match="another"):
        flops(dict(variant="another", length=2048))


def test_flas_models_have_the_parameters_of_ours():
    """The numbers are equal but RWKV7's: in our first layer, too, values have the gate of rank 64 that mixes in those of the first layer; the biases of the peer's 49
    norms and its norm before the layers are not in ours.
    """
    gate, norms = 2048 * (64 + 1 + 64), 2048 * (24 * 2 + 1 + 2)
    more = {"rwkv7-1.3b": gate - norms}
    sizes = {row["variant"]: row["fla_parameters"] for row in ROWS if "fla_parameters" in row}
    assert len(sizes) >= 7
    for variant, number in sizes.items():
        config = lm.get_config(variant).model
        config.vocab_size = VOCAB_SIZE
        assert count_parameters(config)["total"] == number + more.get(variant, 0), variant


def test_sizes_of_the_peers_models():
    softmax, gated = map(jla_trainer.model_config, ("softmax-1.3b", "gated_deltanet-1.3b"))
    mixer = softmax.layers["L"].mixer
    assert (mixer.num_heads, mixer.num_kv_heads, softmax.num_layers) == (32, 8, 24)
    assert (gated.num_layers, gated.layers["L"].mixer.num_heads) == (21, 6)
    assert set(jla_trainer.SIZES) == set(jla_trainer.PRESETS)
    for variant in jla_trainer.SIZES:
        assert jla_trainer.model_config(variant).hidden_size == 2048


def test_a_size_without_a_field_is_an_error(monkeypatch):
    monkeypatch.setitem(jla_trainer.SIZES, "kda-1.3b", dict(num_head=3))
    with pytest.raises(
        AttributeError, match="neither the model nor its mixer has a field num_head"
    ):
        jla_trainer.model_config("kda-1.3b")


def test_fields_of_mixers_are_set_or_refused():
    config = lm.get_config("kda-nano")
    set_fields(config, "lower_bound=-5.0, full_rank_gates=True")
    mixer = config.model.layers["L"].mixer
    assert (mixer.lower_bound, mixer.full_rank_gates) == (-5.0, True)
    for text in ("lower=3", "lower_bound", "lower_bound=x", "lower_bound=2.0", "3", "heads="):
        with pytest.raises(UsageError, match=f"--mixer {text}: accepted is FIELD=VALUE"):
            set_fields(lm.get_config("kda-nano"), text)


def test_a_table_has_the_fastest_policy_of_the_peer_and_no_other_mixer():
    own = dict(
        variant="gated_deltanet-1.3b", rows=8, length=4096, commit="b", xla_flags="", remat="dots",
        tokens_per_second=56_000, vocab_size=VOCAB_SIZE, flops_per_token=9.4e9,
    )  # fmt: skip
    heads = dict(mixer="num_heads=16,head_dim=128,expand_v=1.0")
    peer = dict(own, peer="jla", own_mfu_percent=40.0, date="2026-11-28")
    rows = [
        own, own | heads | dict(tokens_per_second=58_000),
        peer | dict(peer_remat="none", error="no memory", tokens_per_second=1),
        *(peer | dict(peer_remat=n, tokens_per_second=speed) for n, speed in (("dots", 51_000), ("dots_kernels", 52_000))),
        peer | heads | dict(peer_remat="dots", tokens_per_second=57_000),
    ]  # fmt: skip
    pairs = TABLES["model_step_jla"].lines(rows)
    found = [tuple(row["tokens_per_second"] for row in pair) for pair in pairs]
    assert found == [(56_000, 52_000), (58_000, 57_000)]
    states = own | dict(remat="dots_and_states")
    fp8 = TABLES["model_step_fp8"]
    assert fp8.where(states) and not fp8.where(states | heads)


def test_a_table_has_the_run_in_which_the_peer_was_fastest():
    own = dict(variant="kda-1.3b", rows=8, length=4096, tokens_per_second=59_000)
    peer = dict(own, peer="jla", peer_remat="dots", tokens_per_second=45_000)
    rows = [own | dict(commit="a"), peer | dict(commit="a")]
    later = dict(commit="b", tokens_per_second=60_000)
    rows += [own | later, peer | later | dict(peer_remat="none", tokens_per_second=40_000)]
    ((ours, theirs),) = TABLES["model_step_jla"].lines(rows)
    assert (ours["tokens_per_second"], theirs["tokens_per_second"]) == (59_000, 45_000)


def test_a_table_has_flas_fastest_run_and_our_step_of_it():
    own = dict(variant="gla-340m", length=2048, remat="dots")
    states = own | dict(remat="dots_and_states")
    peer = dict(variant="gla-340m", length=2048, peer="fla")
    fast, slow = (peer | dict(fla_gradient_tokens_per_second=n) for n in (2, 1))
    table = TABLES["model_step_fla"]
    rows = [own | dict(commit="a"), fast | dict(commit="b"), slow | dict(commit="c")]
    assert table.lines(rows) == [(rows[0], rows[1])]
    rows += [states | dict(commit=n) for n in "bd"]
    assert table.lines(rows) == [(rows[3], rows[1])]
    rows += [peer | dict(fla_gradient_tokens_per_second=3, commit="e")]
    assert table.lines(rows) == [(rows[4], rows[5])]


def test_a_policy_of_the_peer_that_does_not_fit_has_a_line():
    row = dict(variant="gla-1.3b", peer_remat="dots", date="2026-11-28", commit="a")
    rows = [
        row | dict(error="RESOURCE_EXHAUSTED: Out of memory"),
        row | dict(error="not done after 170 s", mixer="num_heads=2"),
        row | dict(tokens_per_second=1_000, matmul="fp8"),
    ]
    columns = {column.title: column.cell for column in TABLES["model_step_jla_policies"].columns}
    assert [columns["10³ tokens/s"](r) for r in rows] == ["does not fit", "failed", "1.0"]
    assert [columns["model"](r) for r in rows[:2]] == ["`gla-1.3b`", "`gla-1.3b num_heads=2`"]


def test_times_by_category_stand_beside_those_of_the_release():
    row = dict(variant="gla-340m", rows=16, length=2048, milliseconds=100.0, commit="release 0.1")
    row["categories"] = {"matrix products": 50.0, "elementwise and reductions": 30.0}
    now = row | dict(milliseconds=70.0, commit="a", remat="dots_and_states")
    now["categories"] = {"matrix products": 50.0, "copies and fills": 2.5}
    other = now | dict(variant="kda-340m")
    pairs = step_profile.lines([row, now, other])
    assert pairs == [(row, now), (None, other)]
    assert step_profile.left(row) == 20 and step_profile.left(now) == 17.5
