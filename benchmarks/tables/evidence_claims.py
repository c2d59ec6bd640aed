"""The statements of the papers on pairs of models, beside the differences in the rows of `python -m benchmarks evidence`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.tables import evidence
from benchmarks.tables.table import Column, Row, Table

Value = Callable[[Row], float | None]
LOSS = "held-out loss", evidence.heldout_loss, "{:.3f}", False
FAR = "P(65,536)", evidence.perplexity(65_536), "{:.2f}", False
FIELDS = "recall of fields", evidence.recall("fields"), "{:.3f}", True
MULTIKEY = "multi-key needles", evidence.recall("multikey"), "{:.3f}", True
NEEDLES = (
    "easy needles in texts up to the training length",
    evidence.needles("easy", beyond=False),
    "{:.2f}",
    True,
)


@dataclass(frozen=True)
class Claim:
    """A statement of a paper: one model has the better value than another, both trained on equal tokens or in equal time.

    Attributes:
        paper: its name in the table.
        table: the table of `python -m benchmarks evidence` whose rows are compared.
        better, worse: the models, as FILE:VARIANT.
        measure: name, value of a row, format, and whether a larger value is better.
        equal: whether equal values agree with the statement, such as "at or below".
        in_time_of_worse: whether the better model was trained in the time that the worse one takes.
        least: if not None, the statement is of `better` alone: that its value is at least this, and `worse` is "".
    """

    paper: str
    table: str
    better: str
    worse: str
    measure: tuple[str, Value, str, bool]
    equal: bool = False
    in_time_of_worse: bool = False
    least: float | None = None


def _pair(paper: str, table: str, better: str, worse: str, *measures: tuple[str, Value, str, bool]) -> list[Claim]:  # fmt: skip
    return [Claim(paper, table, better, worse, measure) for measure in measures]


_PRO, _LLAMA, _MOM = "fox:pro-125m", "fox:llama-125m", "mom:125m"
_MOE = "linear_moe:a-small,"
CLAIMS = [
    *_pair("FoX", "fox", _PRO, "fox:transformer-pro-125m", LOSS, FAR),
    *_pair("FoX", "fox", _LLAMA, "fox:transformer-llama-125m", LOSS, FAR),
    # "Near perfect" in the paper's figure; 0.9 is this table's reading of it.
    *(
        Claim("FoX", "fox", model, "", NEEDLES, least=0.9)
        for model in (_PRO, _LLAMA, "fox:transformer-pro-125m", "fox:transformer-llama-125m")
    ),
    *(
        claim
        for other in ("lm:gated_deltanet-125m", "fox:mamba2-125m", "fox:hgrn2-125m")
        for claim in _pair("FoX", "fox", _PRO, other, LOSS)
    ),
    *(
        claim
        for inner in ("", ",inner=gla")
        for baseline in ("inner", "expanded")
        for claim in _pair("MoM", "mom", _MOM + inner, f"{_MOM}{inner},baseline={baseline}", LOSS, FIELDS, MULTIKEY)
    ),
    *(
        Claim("Linear-MoE", "moe", f"{_MOE}mixer=gla,pattern=LLLN", f"{_MOE}pattern=N", LOSS, equal=True, in_time_of_worse=time)
        for time in (False, True)
    ),
]  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """A claim and the two values, means over seeds, that the rows have; of a claim about one model, its value and the least."""

    claim: Claim
    better: float
    worse: float

    @property
    def holds(self) -> bool:
        """Whether the values agree with the statement."""
        larger = self.claim.measure[3]
        if self.claim.least is not None:
            return self.better >= self.claim.least
        if self.better == self.worse:
            return self.claim.equal
        return (self.better > self.worse) == larger

    @property
    def what(self) -> str:
        """The statement as words, such as "`a` below `b` in held-out loss"."""
        claim, place = self.claim, "above" if self.claim.measure[3] else "below"
        if claim.least is not None:
            return f"`{claim.better}` finds at least {claim.least:g} of the {claim.measure[0]}"
        place = f"at or {place}" if claim.equal else place
        time = ", in equal time" if claim.in_time_of_worse else ""
        return f"`{claim.better}` {place} `{claim.worse}` in {claim.measure[0]}{time}"


def comparisons(rows: list[Row]) -> list[Comparison]:
    """Return each claim of which the rows have the values. Of several settings of a model the one with the most tokens counts,
    and both models must have the same tokens, rows, length and corpus."""
    found = []
    for claim in CLAIMS:
        of_table = [row for row in rows if row["table"] == claim.table and row.get("kind") != "rates"]  # fmt: skip
        runs = evidence.by_model(of_table)
        if claim.least is not None:
            own = [found for found in runs if found[0]["model"] == claim.better and found[0].get("time_of") is None]  # fmt: skip
            for one in sorted(own, key=lambda one: -one[0]["tokens"])[:1]:
                value = evidence.mean(one, claim.measure[1])
                found += [Comparison(claim, value, claim.least)] if math.isfinite(value) else []
            continue
        pairs = [
            (better, worse)
            for better in runs
            for worse in runs
            if better[0]["model"] == claim.better and worse[0]["model"] == claim.worse
            and better[0].get("time_of") == (claim.worse if claim.in_time_of_worse else None)
            and worse[0].get("time_of") is None
            and (claim.in_time_of_worse or better[0]["tokens"] == worse[0]["tokens"])
            and all(better[0][key] == worse[0][key] for key in ("length", "batch_size", "corpus"))
        ]  # fmt: skip
        for better, worse in sorted(pairs, key=lambda pair: -pair[1][0]["tokens"])[:1]:
            values = [evidence.mean(runs, claim.measure[1]) for runs in (better, worse)]
            if all(map(math.isfinite, values)):
                found.append(Comparison(claim, *values))
    return found


def sentences(rows: list[Row]) -> str:
    """Return the two sentences that begin the page: what was found, and where it disagrees with a paper."""
    found = comparisons(rows)
    right = [c for c in found if c.holds]
    wrong = [c for c in found if not c.holds]
    models = len({row["model"] for row in rows if row.get("kind") != "rates"})
    first = (
        f"{models} models were trained; of {len(found)} statements of the papers on them, {len(right)} hold here"
    )  # fmt: skip
    if right:
        first += f": {'; '.join(_values(c) for c in right)}"
    if not found:
        return f"{first}. No pair of a paper is complete yet, so that nothing can be compared."
    second = "No statement fails"
    if wrong:
        second = f"Against the papers, these do not hold: {'; '.join(_values(c) for c in wrong)}"
    return f"{first}. {second}."


def _values(found: Comparison) -> str:
    form = found.claim.measure[2]
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
    return lambda c: c.claim.measure[2].format(getattr(c, which))


_COLUMNS = (
    Column("paper", lambda c: c.claim.paper),
    Column("statement", lambda c: c.what),
    Column("the first", _number("better")),
    Column("the second", _number("worse")),
    Column("holds here", lambda c: "yes" if c.holds else "**no**"),
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
