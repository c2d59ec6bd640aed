"""Tests of the tables of `benchmarks evidence`: the commands that they print, how learning rates were chosen, and which differences
are noise."""

from __future__ import annotations

import math
import shlex
from pathlib import Path

import pytest

from benchmarks import evidence
from benchmarks.__main__ import make_parser
from benchmarks.registry import get
from benchmarks.tables import evidence as tables
from benchmarks.tables import evidence_claims as claims
from benchmarks.tables.evidence_commands import CORPORA, OMITTED, commands, factors
from benchmarks.tables.table import read_rows
from scripts import evidence_page, evidence_texts

DOCS = Path(__file__).resolve().parents[2] / "docs"
PARSER = make_parser(get("evidence"))


def parsed(text):
    """Return the options of each command of a text, as the benchmark reads them."""
    found = []
    for line in text.splitlines():
        words = shlex.split(line)
        assert words[:4] == ["python", "-m", "benchmarks", "evidence"]
        found.append(PARSER.parse_args(words[4:]))
    return found


def assert_made(args, row, stored):
    """Assert that a command with these options makes the row; `stored` are the rows from which it takes learning rates."""
    for name in ("table", "length", "batch_size"):
        assert getattr(args, name) == row[name], (name, row["model"])
    assert args.only_rates == (row.get("kind") == "rates") and args.time_of == row.get("time_of")
    assert args.time_of or args.tokens == row["tokens"]
    assert args.remat == row.get("remat", None if args.only_rates else "full")
    assert args.corpus.as_posix() == CORPORA.get(row["corpus"], "data/corpus")
    if not args.only_rates:
        assert ",".join(args.tasks) == row["tasks"]
        assert "needle" not in row or args.needle_lengths == row["needle"]["lengths"]
    assert not args.rates or "rates_corpus" in row
    if args.rates and not args.time_of:
        chosen = evidence.chosen_rates(stored, [row["model"]], args)
        assert chosen[row["model"]]["peak_lr"] == row["peak_lr"]
    if args.rates:
        return
    published = evidence.base_config(row["model"]).optimizer.peak_lr
    if row["rates"] and "rates_corpus" not in row:
        assert [f"{published * factor:.3g}" for factor in args.factors] == list(row["rates"])
    else:
        assert [published * factor for factor in args.factors] == [pytest.approx(row["peak_lr"])]
    if tokens := row.get("short_tokens") or row.get("rates_tokens"):
        assert int(args.share * args.tokens) == tokens


@pytest.mark.parametrize("table", tables.with_rows(DOCS), ids=lambda table: table.name)
def test_the_commands_that_are_printed_make_the_rows(table):
    rows, stored = table.rows(DOCS), read_rows(DOCS, tables.FILE)
    text = table.markdown(DOCS, DOCS / "results" / "evidence.md")
    printed = "\n".join(line.strip() for line in text.splitlines() if line.startswith("    python"))
    made = [
        (model, seed, args.corpus.as_posix(), args)
        for args in parsed(printed)
        for seed in ([0] if args.only_rates else args.seeds)
        for model in args.models
    ]
    if table.name == "evidence_rates":
        rows = [row for row in rows if row.get("kind") == "rates"]
    assert len(made) == len(rows) > 0
    for row in rows:
        same = row["model"], row["seed"], CORPORA[row["corpus"]]
        (args,) = (one[-1] for one in made if one[:-1] == same)
        assert_made(args, row, stored)


def row(model, seed=0, **fields):
    common = dict(
        table="fox", model=model, seed=seed, tokens=10**6, length=4096, batch_size=16, corpus="c", remat="none",
        tasks="heldout,long,needle,recall", needle=dict(lengths=[1024, 2048, 4096, 8192, 16384]), peak_lr=1e-3, rates={},
    )  # fmt: skip
    return common | fields


SHORT = dict(short_tokens=10**5, rates_seconds=1, tokens_per_second=1e5)


def test_rows_of_other_options_have_commands_of_their_own():
    gla, softmax = "lm:gla-nano", "lm:softmax-nano"
    rates = dict(kind="rates", tasks="", factor=0.25, short_tokens=10**5, rates={"0.001": 3.0, "0.004": 4.0})  # fmt: skip
    chosen = dict(rates={"0.001": 3.0}, rates_corpus="d")
    rows = [
        row(gla, **chosen), row(gla, 1, **chosen), row(softmax, 0, **chosen), row(softmax, 1, **chosen),
        row(gla, 2, **chosen), row(gla, **chosen, time_of=softmax, tokens=1_200_000),
        row(gla, length=2048, needle=dict(lengths=[600]), peak_lr=evidence.base_config(gla).optimizer.peak_lr / 2),
        row(gla, tasks="heldout,long,needle", remat="full", rates_corpus="d"), row("lm:kda-nano", **rates),
    ]  # fmt: skip
    stored = [row(model, kind="rates", factor=1.0, **SHORT) for model in (gla, softmax)]
    printed = commands(rows, stored)
    found = parsed(printed)
    assert [(args.models, args.seeds) for args in found] == [
        ([gla], [0, 1, 2]), ([softmax], [0, 1]), ([gla], [0]), ([gla], [0]), ([gla], [0]), (["lm:kda-nano"], [0]),
    ]  # fmt: skip
    for args, number in zip(found, (0, 2, 5, 6, 7), strict=False):
        assert_made(args, rows[number], stored)
    assert found[2].tokens == 10**6 and found[5].corpus.as_posix() == "data/first"
    assert found[5].factors == factors(rows[8]) == [0.25, 1.0] and found[5].share == 0.1
    with pytest.raises(ValueError, match=f"in the time of {softmax}, which has no row with equal"):
        commands(rows[5:6], stored)


def test_a_rate_that_later_rates_replaced_is_given():
    """--rates takes the newest row of a model, which may have tried others than those of which a row has the best."""
    published = evidence.base_config("lm:gla-nano").optimizer.peak_lr
    made = row("lm:gla-nano", peak_lr=published / 2, rates_corpus="d")
    old = row("lm:gla-nano", kind="rates", peak_lr=published / 2, factor=0.5, **SHORT)
    new = old | dict(peak_lr=published / 4, factor=0.25)
    for stored, factor in (([old], None), ([new, old], None), ([old, new], 0.5), ([old | dict(length=8)], 0.5)):  # fmt: skip
        (args,) = parsed(commands([made], stored))
        assert_made(args, made, stored)
        assert args.rates is not None if factor is None else args.factors == [factor]


def test_what_the_commands_omit_are_the_defaults():
    words = [f"--{name}={value}" for name, value in OMITTED.items()]
    assert PARSER.parse_args(words) == PARSER.parse_args([])
    assert set(OMITTED) <= set(vars(PARSER.parse_args([])))


def test_every_row_says_how_its_learning_rate_was_chosen():
    three = {"0.0005": 5.0, "0.001": 4.0, "0.002": None}
    table = next(table for table in tables.EVERY if table.name == "evidence_rates")
    rates = row("lm:kda-nano", kind="rates", factor=1.0, rates=three, short_tokens=10**7)
    published = evidence.base_config("lm:gla-nano").optimizer.peak_lr
    given = row("lm:gla-nano", peak_lr=published / 2)
    within = row("lm:gla-nano", peak_lr=published, rates={f"{published:.3g}": 3.0, f"{2 * published:.3g}": 3.5}, rates_tokens=2 * 10**7)  # fmt: skip
    cells = [[column.cell(r | dict(rates_seconds=36)) for column in table.columns] for r in (rates, given, within)]  # fmt: skip
    assert cells[0][1:3] == ["10", "0.5, 1, 2"] and "0.002: diverged" in cells[0][3]
    assert cells[1][1:4] == ["", "none; 0.5 was given", ""] and cells[2][1:3] == ["20", "1, 2"]
    assert table.where(rates) and table.where(given)
    assert not table.where(row("lm:kda-nano", rates=three, rates_corpus="c"))  # told by `rates`
    assert tables.learning_rate([given]).endswith(", given")
    assert tables.learning_rate([within]).endswith(", best of 2")


def test_needles_at_one_place_count_once_and_have_two_scores():
    easy = dict(found=[[1, 0, 0], [1, 0, 0]], nll=[[0.5, 0.9, 2.0], [0.5, 3.0, 3.0]])
    one = row("a", needle=dict(lengths=[1024, 4096], easy=easy))
    assert tables.needle_count(one) == 5
    assert tables.needles("easy", beyond=False)(one) == 2 / 5
    assert tables.needles("easy", beyond=False, by="below_one")(one) == 3 / 5
    assert tables.needles("easy", beyond=True)(one) is None
    assert tables.needles("easy", beyond=False)(row("a", needle=None)) is None
    easy["below_one"] = [[1, 1, 0], [1, 0, 0]]  # as newer rows store it
    assert tables.needles("easy", beyond=False, by="below_one")(one) == 3 / 5


GLA, INNER = "mom:125m,inner=gla", "mom:125m,inner=gla,baseline=inner"


def mom(model, seed=0, loss=3.0, fields=0.0, **more):
    recall = dict(fields=dict(contains=fields, questions=100))
    return row(model, seed, table="mom", heldout=dict(loss=loss), recall=recall, needle=None) | more


def compared(rows):
    """Return the comparisons of MoM around GLA with its inner mixer: of loss, and of recall."""
    found = [c for c in claims.comparisons(rows) if (c.claim.better, c.claim.worse) == (GLA, INNER)]
    assert [c.claim.measure for c in found] == [claims.LOSS, claims.FIELDS]
    return found


def test_a_difference_that_seeds_make_decides_nothing():
    one = [mom(GLA, loss=2.9), mom(INNER, loss=3.0)]
    loss, fields = compared(one)
    assert loss.noise is None and loss.verdict == fields.verdict == "no second seed"
    # The largest difference of any model's seeds, and own seeds, which replace it.
    other = [mom("fox:pro-125m", 0, 2.0, table="fox"), mom("fox:pro-125m", 1, 2.3, table="fox")]
    loss, _ = compared([*one, *other])
    assert loss.noise == claims.Noise(pytest.approx(0.3), "any model's seeds")
    assert loss.verdict == "within the noise"
    table = [mom("mom:125m", 0, 2.5), mom("mom:125m", 1, 2.55), *(mom(GLA, 1, 2.9),)]
    loss, _ = compared([*one, *other, *table])
    assert loss.noise == claims.Noise(pytest.approx(0.3), "any model's seeds")
    loss, _ = compared([*one, *table])
    assert loss.noise == claims.Noise(pytest.approx(0.05), "any model's seeds")
    assert loss.verdict == "yes"
    own = [mom(INNER, 1, 3.02)]
    loss, _ = compared([*one, *other, *table, *own])
    assert loss.noise == claims.Noise(pytest.approx(0.02), "own seeds") and loss.worse == 3.01
    # Exactly as large as the noise, by values whose difference is rounded; and the other way round.
    loss, _ = compared([mom(GLA, 0, 2.7), mom(INNER, 0, 2.5), mom(INNER, 1, 2.7)])
    assert loss.holds is None
    loss, _ = compared([mom(GLA, 0, 2.9), mom(INNER, 0, 2.5), mom(INNER, 1, 2.7)])
    assert loss.verdict == "**no**"


def test_the_seeds_of_another_setting_are_no_noise():
    rows = [mom(GLA, loss=2.9), mom(INNER), mom("mom:125m", 0, 2.0, batch_size=8), mom("mom:125m", 1, 2.5, batch_size=8)]  # fmt: skip
    assert compared(rows)[0].noise is None


def test_shares_of_few_questions_differ_by_chance():
    """Seeds that answer nothing do not differ, which makes one right answer of a hundred no difference; two seeds answer the same
    questions, which count once."""
    seeds = [mom(INNER, 0), mom(INNER, 1), mom(GLA, 1, fields=0.01)]
    _, fields = compared([mom(GLA, fields=0.01), *seeds])
    assert fields.noise == claims.Noise(pytest.approx(2**0.5 * 3 / 100), "questions")
    assert fields.holds is None
    seeds[2]["recall"]["fields"]["contains"] = 0.12
    _, fields = compared([mom(GLA, fields=0.11), *seeds])
    assert fields.holds is True and fields.noise.value == pytest.approx(2 * (0.115 * 0.885 / 100 + (1.5 / 100) ** 2) ** 0.5)  # fmt: skip


def test_perplexities_are_compared_by_their_ratio():
    """Seeds of a model that fails at 65,536 tokens differ by 8, which says nothing of models whose perplexities are 11 and 18."""

    def found(model, seed, perplexity):
        long = dict(perplexity={"65536": perplexity})
        return row(model, seed, heldout={}, recall={}, needle=None, long=long)

    failing = [
        found("fox:transformer-llama-125m", seed, p) for seed, p in enumerate((250.0, 258.0))
    ]
    other = found("fox:transformer-pro-125m", 0, 18.0)
    (far,) = claims.comparisons([found("fox:pro-125m", 0, 11.0), other, *failing])
    noise = claims.Noise(pytest.approx(math.log(258 / 250)), "any model's seeds")
    assert far.verdict == "yes" and far.noise == noise
    (far,) = claims.comparisons([found("fox:pro-125m", 0, 17.5), other, *failing])
    assert far.holds is None
    cells = {column.title: column.cell(far) for column in claims._COLUMNS}
    assert cells["noise"] == "3.2%, any model's seeds"


def test_seeds_on_one_side_of_a_fixed_value_decide():
    def found(seed, easy):
        easy = dict(found=[easy], nll=[[5 + n for n in range(100)]])
        needle = dict(lengths=[1024], easy=easy)
        return row("fox:llama-125m", seed, needle=needle, heldout={}, recall={}) | dict(long={})

    def claim(*rows):
        one, by_loss = claims.comparisons(list(rows))
        assert one.claim.measure.name.endswith("by its continuation") and by_loss.better == 0
        return one

    many, few = found(0, [1] * 60 + [0] * 40), found(1, [1] * 4 + [0] * 96)
    one = claim(many, few)  # 0.60 and 0.04, whose range is larger than their distance from 0.9
    assert one.verdict == "**no**" and one.noise == claims.Noise(pytest.approx(0.28), "own seeds")
    assert claim(found(0, [1] * 100), many).verdict == "within the noise"
    assert claim(found(0, [1] * 100), found(1, [1] * 98 + [0] * 2)).verdict == "yes"


def test_the_stored_page_is_that_of_the_rows():
    assert evidence_page.content() == evidence_page.PAGE.read_text(), (
        "run python -m scripts.evidence_page"
    )


def test_the_places_of_a_text_have_the_values_of_the_rows():
    common = dict(tokens=10**8, batch_size=16, recall={}, state_bytes=4_720_000, parameters=dict(active=1.1e8, total=2e8), tokens_per_second=5e5)  # fmt: skip
    rows = [
        row("lm:gla-125m", 0, heldout=dict(loss=2.0), table="methods", **common),
        row("lm:gla-125m", 1, heldout=dict(loss=2.5), table="methods", **common),
        row("lm:gla-125m", 0, heldout=dict(loss=3.0), table="methods", **common | dict(peak_lr=9.0)),
        row("lm:gla-125m", 0, kind="rates", rates={"0.001": 5.0}),
    ]  # fmt: skip
    text = (
        "{loss|lm:gla-125m} {mb|lm:gla-125m} {short|lm:gla-125m|0.001} {methods} {missing|methods}"
    )
    filled = evidence_texts.filled(text, rows)
    assert filled.startswith("2.000 and 2.500 4.7 5.000 `gla` 2.250 (4.7 MB, 110 M), `gla` 3.000")
    assert "`gla`" not in filled.partition(" of ")[2] and "`mamba2`" in filled
    for wrong in ("{loss|lm:kda-125m}", "{short|lm:gla-125m|0.5}"):
        with pytest.raises(LookupError, match="no "):
            evidence_texts.filled(wrong, rows)


def test_methods_that_mix_neighbours_are_below_those_that_do_not():
    """As the page's text says, without a number."""
    losses = {
        r["model"]: r["heldout"]["loss"]
        for r in read_rows(DOCS, tables.FILE)
        if tables.belongs(r, "methods")
    }
    mixing = ("gated_deltanet", "mamba2", "rwkv6", "kda", "deltanet")
    others = ("retnet", "gated_retention", "gla", "lightning", "linear_attention")
    most, least = (
        by(losses[f"lm:{name}-125m"] for name in names)
        for by, names in ((max, mixing), (min, others))
    )
    assert most < least


def test_the_paper_page_of_fox_has_the_values_of_the_rows():
    names = {
        "FoX (Pro)": "fox:pro-125m", "FoX (LLaMA)": "fox:llama-125m", "Transformer (Pro)": "fox:transformer-pro-125m",
        "Transformer (LLaMA)": "fox:transformer-llama-125m", "Gated DeltaNet": "lm:gated_deltanet-125m",
        "Mamba-2": "fox:mamba2-125m", "HGRN2": "fox:hgrn2-125m",
    }  # fmt: skip
    lines = (DOCS / "papers" / "fox.md").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("| The same at 125M"))
    (table,) = (table for table in tables.EVERY if table.name == "evidence_fox")
    trained = [r for r in table.rows(DOCS) if r["tokens"] == 10**8 and not r.get("time_of")]
    found = {runs[0]["model"]: runs for runs in reversed(tables.by_model(trained))}
    assert set(found) == set(names.values())
    for name, model in names.items():
        loss = tables.mean(found[model], tables.heldout_loss)
        near, far = (tables.mean(found[model], tables.perplexity(n)) for n in (4096, 65536))
        assert f"{name} {loss:.3f}, {near:.2f}, {far:.2f}" in line
    one, two = (line.index(text) for text in ("of one seed: ", "means of two seeds: "))
    assert two < one
    for name, model in names.items():
        assert (line.index(name, two) > one) == (len(found[model]) == 1)


def test_one_memory_has_no_routing_to_show():
    def routed(loads):
        return row("a", router=dict(steps=[1], load=[[loads]], entropy=[[0.0]]))

    assert not tables.has_routing(routed([1.0])) and not tables.has_routing(row("a"))
    assert tables.has_routing(routed([0.5, 0.5]))


def test_the_numbers_that_the_page_types_are_those_of_the_rows():
    trained = [r for r in read_rows(DOCS, tables.FILE) if r.get("kind") != "rates"]
    assert "means over 29 documents" in evidence_texts.NOTES
    assert {r["long"]["sequences"] for r in trained} == {29}
    assert "14 prompts of each mode" in evidence_texts.NOTES
    assert {tables.needle_count(r, mode) for r in trained for mode in ("easy", "standard")} == {14}
    assert {r["recall"]["names"]["questions"] for r in trained} == {280}
