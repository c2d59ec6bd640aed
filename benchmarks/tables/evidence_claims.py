"""The statements of the papers on pairs of models, and this project's own comparisons, beside the differences in the rows of
`python -m benchmarks evidence`."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.tables import evidence
from benchmarks.tables.evidence import Runs
from benchmarks.tables.table import Column, Row, Table, group

Value = Callable[[Row], float | None]


@dataclass(frozen=True)
class Measure:
    """A measure of a model.

    Attributes:
        name: its name in the table.
        value: the value of a row, None if the row lacks it.
        form: how a value is written.
        larger: whether a larger value is better.
        trials: of a share, the number of questions of a row; None for a measure that is no share.
        ratio: whether values are compared by their ratio, as perplexities are: seeds whose perplexities are 250 and 258 say of 11
            that it varies by 3 %, not by 8.
    """

    name: str
    value: Value
    form: str
    larger: bool = False
    trials: Callable[[Row], int] | None = None
    ratio: bool = False

    def scaled(self, value: float) -> float:
        """Return a value on the scale on which differences are taken: its logarithm where they are ratios."""
        return math.log(value) if self.ratio else value


def _recall(name: str, task: str) -> Measure:
    trials = lambda row: row["recall"][task]["questions"]  # noqa: E731
    return Measure(name, evidence.recall(task), "{:.3f}", larger=True, trials=trials)


LOSS = Measure("held-out loss", evidence.heldout_loss, "{:.3f}")
FAR = Measure("P(65,536)", evidence.perplexity(65_536), "{:.2f}", ratio=True)
FIELDS = _recall("recall of fields", "fields")
NAMES = _recall("cloze of names", "names")
MULTIKEY = _recall("multi-key needles", "multikey")
RECALL = FIELDS, NAMES, MULTIKEY
NEEDLES = [
    Measure(
        f"easy needles in texts up to the training length, by {how}", evidence.needles("easy", beyond=False, by=by), "{:.2f}",
        larger=True, trials=evidence.needle_count,
    )
    for by, how in (("found", "its continuation"), ("below_one", "a loss of the answer below 1 nat"))
]  # fmt: skip


@dataclass(frozen=True)
class Claim:
    """A statement: one model has the better value than another, both trained on equal tokens or in equal time.

    It is the paper's if the paper compares these methods by such a measure: held-out loss stands for perplexity and for tasks of
    language, fields of records for FDA and SWDE. Otherwise it is a comparison of this project.

    Attributes:
        paper: whose models are compared.
        table: the table of `python -m benchmarks evidence` whose rows are compared.
        better, worse: the models, as FILE:VARIANT.
        measure: what is compared.
        equal: whether the statement is "at or below" or "at or above".
        in_time_of_worse: whether the better model was trained in the time that the worse one takes.
        least: if not None, the statement is of `better` alone: that its value is at least this, and `worse` is "".
        own: whether it is this project's comparison, of which the paper says nothing.
        size: the size of the paper's models, if it says this of one only.
    """

    paper: str
    table: str
    better: str
    worse: str
    measure: Measure
    equal: bool = False
    in_time_of_worse: bool = False
    least: float | None = None
    own: bool = False
    size: str = ""

    @property
    def whose(self) -> str:
        """The text of the table's cell: the paper, with the size of its models, or this project."""
        size = f" ({self.size})" if self.size else ""
        return f"this project, on {self.paper}'s models" if self.own else f"{self.paper}{size}"


def _pair(paper: str, table: str, better: str, worse: str, *measures: Measure, own: bool = False) -> list[Claim]:  # fmt: skip
    """Return a statement for each measure; names and several keys are tasks of this project, no paper's."""
    return [
        Claim(paper, table, better, worse, measure, own=own or measure in (NAMES, MULTIKEY))
        for measure in measures
    ]


def _of_equal_parameters(mom: str, single: str) -> list[Claim]:
    """Return what the paper says of MoM beside one memory in a model of as many parameters: it recalls more, and is as good a model of language."""
    return [Claim("MoM", "mom", mom, single, LOSS, equal=True), *_pair("MoM", "mom", mom, single, *RECALL)]  # fmt: skip


_PRO, _LLAMA, _MOM = "fox:pro-125m", "fox:llama-125m", "mom:125m"
_MOE = "linear_moe:a-small,"
_SETTING = ("length", "batch_size", "corpus")  # what models that are compared have in common
CLAIMS = [
    *_pair("FoX", "fox", _PRO, "fox:transformer-pro-125m", LOSS, FAR),
    *_pair("FoX", "fox", _LLAMA, "fox:transformer-llama-125m", LOSS, FAR),
    # "Near perfect" in the paper's figure; 0.9 is this table's reading of it.
    *(
        Claim("FoX", "fox", model, "", measure, least=0.9, size="760M, 48 B tokens")
        for measure in NEEDLES
        for model in (_PRO, _LLAMA, "fox:transformer-pro-125m", "fox:transformer-llama-125m")
    ),
    *(
        claim
        for other in ("lm:gated_deltanet-125m", "fox:mamba2-125m", "fox:hgrn2-125m")
        for claim in _pair("FoX", "fox", _PRO, other, LOSS, own=other.startswith("lm:"))
    ),
    *(
        claim
        for inner in ("", ",inner=gla")
        for baseline in ("inner", "expanded")
        for claim in _pair("MoM", "mom", _MOM + inner, f"{_MOM}{inner},baseline={baseline}", LOSS, *RECALL)
    ),
    *(
        claim
        for inner, ratio in (("", 8), (",inner=gla", 7))
        for claim in _of_equal_parameters(_MOM + inner, f"{_MOM}{inner},baseline=inner,hidden_ratio={ratio}")
    ),
    *(
        Claim("Linear-MoE", "moe", f"{_MOE}mixer=gla,pattern=LLLN", f"{_MOE}pattern=N", LOSS, equal=True, in_time_of_worse=time, own=time)
        for time in (False, True)
    ),
]  # fmt: skip


@dataclass(frozen=True)
class Noise:
    """The difference that chance alone makes between two models, on the measure's scale (`Measure.scaled`), and of what it was taken:
    "own seeds", "any model's seeds", or "questions" (`noise_of`)."""

    value: float
    of: str


@dataclass(frozen=True)
class Comparison:
    """A claim and the two values, means over seeds, that the rows have; of a claim about one model, its value and the least.
    `noise` is None if no model has two seeds."""

    claim: Claim
    better: float
    worse: float
    noise: Noise | None

    @property
    def holds(self) -> bool | None:
        """Whether the values agree with the statement; None if their difference is within the noise, or that is not known."""
        scaled = self.claim.measure.scaled
        difference = abs(scaled(self.better) - scaled(self.worse))
        if self.noise is None or difference <= self.noise.value + _ROUNDING:
            return None
        return (self.better > self.worse) == self.claim.measure.larger

    @property
    def verdict(self) -> str:
        """The text of the table's cell."""
        if self.holds is None:
            return "no second seed" if self.noise is None else "within the noise"
        return "yes" if self.holds else "**no**"

    @property
    def what(self) -> str:
        """The statement as words, such as "`a` below `b` in held-out loss"."""
        claim, place = self.claim, "above" if self.claim.measure.larger else "below"
        if claim.least is not None:
            return f"`{claim.better}` finds at least {claim.least:g} of the {claim.measure.name}"
        place = f"at or {place}" if claim.equal else place
        time = ", in equal time" if claim.in_time_of_worse else ""
        return f"`{claim.better}` {place} `{claim.worse}` in {claim.measure.name}{time}"


_ROUNDING = 1e-9  # of differences between shares


def spread(runs: Runs, measure: Measure) -> float | None:
    """Return the difference between the largest and the smallest value of a model's seeds, on the measure's scale; None if fewer than
    two have one."""
    values = [measure.scaled(value) for value in map(measure.value, runs) if value is not None]
    return max(values) - min(values) if len(values) > 1 else None


def noise_of(compared: list[Runs], every: list[Runs], measure: Measure) -> Noise | None:
    """Return the difference that chance alone makes between models: the larger one of two.

    The first is the largest spread of seeds: of the compared models if each has two seeds, otherwise of any model of any table with
    equal rows in a step, length and corpus. One model with two seeds, which a claim compares with a fixed value, has the distance of
    its farthest seed from the mean: the question is whether a seed is on the other side.
    The second, of shares, is two standard errors of the difference between shares of so many questions, which count once: all seeds
    answer the same ones. Seeds that find nothing do not differ. Two standard errors of a share of n questions are at least 3 / n, the
    largest share of which none of n is likely, where two models are compared; a fixed value is compared with what was found.

    Args:
        compared: the rows of the models that a claim compares, one or two.
        every: the rows of all models of all tables.
        measure: what is compared.

    Returns:
        The difference; None if no model has two seeds.
    """
    first = compared[0][0]
    alike = [runs for runs in every if all(runs[0][key] == first[key] for key in _SETTING)]
    own = [] if None in [spread(runs, measure) for runs in compared] else compared
    for models, of in ((own, "own"), (alike, "any model's")):
        spreads = [found for runs in models if (found := spread(runs, measure)) is not None]
        if spreads:
            of_seeds = Noise(max(spreads), f"{of} seeds")
            break
    else:
        return None
    if own and len(compared) == 1:
        values = [measure.scaled(x) for x in map(measure.value, own[0]) if x is not None]
        of_seeds = Noise(
            max(abs(value - statistics.fmean(values)) for value in values), "own seeds"
        )
    variance = 0.0
    for runs in compared if measure.trials is not None else ():
        share = evidence.mean(runs, measure.value)
        count = min(map(measure.trials, runs))
        least = (1.5 / count) ** 2 if len(compared) > 1 else 0.0
        variance += max(share * (1 - share) / count, least)
    of_questions = Noise(2 * math.sqrt(variance), "questions")
    return max(of_seeds, of_questions, key=lambda noise: noise.value)


def comparisons(rows: list[Row]) -> list[Comparison]:
    """Return each claim of which the rows have the values. Of several settings of a model the one with the most tokens counts,
    and both models must have the same tokens, rows, length and corpus."""
    found = []
    every = [
        runs
        for of_table in group([row for row in rows if row.get("kind") != "rates"], lambda row: row["table"]).values()
        for runs in evidence.by_model(of_table)
    ]  # fmt: skip
    for claim in CLAIMS:
        runs = [runs for runs in every if runs[0]["table"] == claim.table]
        if claim.least is not None:
            own = [found for found in runs if found[0]["model"] == claim.better and found[0].get("time_of") is None]  # fmt: skip
            for one in sorted(own, key=lambda one: -one[0]["tokens"])[:1]:
                value = evidence.mean(one, claim.measure.value)
                noise = noise_of([one], every, claim.measure)
                found += (
                    [Comparison(claim, value, claim.least, noise)] if math.isfinite(value) else []
                )
            continue
        pairs = [
            (better, worse)
            for better in runs
            for worse in runs
            if better[0]["model"] == claim.better and worse[0]["model"] == claim.worse
            and better[0].get("time_of") == (claim.worse if claim.in_time_of_worse else None)
            and worse[0].get("time_of") is None
            and (claim.in_time_of_worse or better[0]["tokens"] == worse[0]["tokens"])
            and all(better[0][key] == worse[0][key] for key in _SETTING)
        ]  # fmt: skip
        for better, worse in sorted(pairs, key=lambda pair: -pair[1][0]["tokens"])[:1]:
            values = [evidence.mean(runs, claim.measure.value) for runs in (better, worse)]
            if all(map(math.isfinite, values)):
                noise = noise_of([better, worse], every, claim.measure)
                found.append(Comparison(claim, *values, noise))
    return found


_KINDS = (
    (False, True, "Statements of the papers that hold here"),
    (False, False, "Statements of the papers that do not hold here"),
    (True, True, "Comparisons of this project in which the first model is better"),
    (True, False, "Comparisons of this project in which the second is better"),
)


def sentences(rows: list[Row]) -> str:
    """Return what begins the page: two sentences that say what was found, and a list of what holds and what does not."""
    rows, found = [row for row in rows if row.get("kind") != "rates"], comparisons(rows)
    fox = [row for row in rows if row["table"] == "fox"]
    tokens = _range(row["tokens"] / 1e6 for row in rows)
    active = _range(row["parameters"]["active"] / 1e6 for row in rows)
    # Only runs of equal tokens are in one order: of those that most rows have, the larger number if two are equally frequent.
    whose = " of FoX's table" if fox else ""
    number = Counter(row["tokens"] for row in fox or rows)
    most = max(number, key=lambda count: (number[count], count))
    of = f"those{whose} with {most / 1e6:g} million tokens"
    order = ", ".join(
        f"{evidence.name(runs)} ({evidence.mean(runs, evidence.heldout_loss):.3f})"
        for runs in evidence.by_model([row for row in fox or rows if row["tokens"] == most])
        if math.isfinite(evidence.mean(runs, evidence.heldout_loss))
    )
    first = f"{len({row['model'] for row in rows})} models of {active} million active parameters were trained on {tokens} million tokens; by held-out loss {of} are in the order {order}."
    if not found:
        return f"{first} No pair of models is complete yet, so that nothing can be compared."
    second = f"Of {_count([c for c in found if not c.claim.own], 'statement', 'of the papers')}; of {_count([c for c in found if c.claim.own], 'comparison', 'of this project')}."
    lists = [
        f"- {title}: {'; '.join(map(_values, some))}."
        for own, holds, title in _KINDS
        if (some := [c for c in found if c.claim.own is own and c.holds is holds])
    ]
    return f"{first} {second}\n\n" + "\n".join(lists)


def _range(values: Iterable[float]) -> str:
    low, high = min(values := [round(value) for value in values]), max(values)
    return f"{low}" if low == high else f"{low} to {high}"


def _count(found: list[Comparison], what: str, of: str) -> str:
    """Return how many of some statements hold, do not, and are open, with that which limits the open ones."""
    number = {value: sum(c.holds is value for c in found) for value in (True, False)}
    open_ = [c for c in found if c.holds is None]
    limits = group(open_, lambda c: "no second seed" if c.noise is None else "the questions" if c.noise.of == "questions" else "seeds")  # fmt: skip
    by = ", ".join(f"{len(some)} by {limit}" for limit, some in limits.items())
    text = f"{len(found)} {what}{'s' * (len(found) != 1)} {of} {number[True]} hold{'s' * (number[True] == 1)}, {number[False]} do{'es' * (number[False] == 1)} not"
    return f"{text}, and {len(open_)} {'are' if len(open_) != 1 else 'is'} within the noise" + (
        f" ({by})" if by else ""
    )


def _values(found: Comparison) -> str:
    form = found.claim.measure.form
    if found.claim.least is not None:
        return f"{found.what} ({form.format(found.better)})"
    return f"{found.what} ({form.format(found.better)} and {form.format(found.worse)})"


class Sentences(Table):
    """A "table" of a page that is text: `sentences` of its rows."""

    def markdown(self, docs: Path, page: Path) -> str:
        """Return the sentences.

        Raises:
            ValueError: no stored row belongs to it.
        """
        if not (rows := self.rows(docs)):
            raise ValueError(f"table {self.name}: no row of {', '.join(self.files)} belongs to it")
        return sentences(rows)


def _number(which: str) -> Callable[[Comparison], str]:
    return lambda c: c.claim.measure.form.format(getattr(c, which))


def _noise(found: Comparison) -> str:
    """Return the cell of the noise, with that of which it was taken."""
    if found.noise is None:
        return ""
    if found.claim.measure.ratio:
        return f"{math.expm1(found.noise.value):.1%}, {found.noise.of}"
    return f"{found.claim.measure.form.format(found.noise.value)}, {found.noise.of}"


_COLUMNS = (
    Column("whose", lambda c: c.claim.whose),
    Column("statement", lambda c: c.what),
    Column("the first", _number("better")),
    Column("the second", _number("worse")),
    Column("noise", _noise),
    Column("holds here", lambda c: c.verdict),
)


def lines(rows: list[Row]) -> Iterable[Comparison]:
    """Return the lines of the table of claims."""
    return comparisons(rows)


def tables(docs: Path) -> list[Table]:
    """Return the tables of claims that the rows in the folder `docs` can fill: the sentences as soon as there is a row of a model, the
    comparisons as soon as there is one."""
    common = dict(
        files=(evidence.FILE,),
        where=lambda row: row.get("kind") != "rates",
        key=evidence.identity,
        caption=False,
    )
    every = [
        Sentences("evidence_found", columns=(), **common),
        Table("evidence_claims", columns=_COLUMNS, lines=lines, **common),
    ]
    if not (docs / evidence.FILE).is_file() or not (rows := every[0].rows(docs)):
        return []
    return every if comparisons(rows) else every[:1]


TABLES = tables(Path(__file__).resolve().parents[2] / "docs")
