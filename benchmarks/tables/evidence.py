"""The results tables of the models that `python -m benchmarks evidence` trained: a line a model, means over its seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tables.evidence_commands import commands, factors
from benchmarks.tables.table import Column, Row, Table, group, read_rows

FILE = "evidence.jsonl"
Runs = list[Row]
"""The rows of one model, one for each seed."""


def _run(row: Row) -> tuple:
    fields = ("model", "tokens", "length", "batch_size", "corpus", "peak_lr")
    return *(row[name] for name in fields), row.get("time_of")


def by_model(rows: list[Row]) -> list[Runs]:
    """Return the rows of each model, setting and time limit, the lowest mean loss first."""
    runs = group(rows, _run).values()
    return sorted(runs, key=lambda rows: mean(rows, heldout_loss))


def heldout_loss(row: Row) -> float | None:
    """Return the held-out loss of a row, None if it was not evaluated."""
    return row.get("heldout", {}).get("loss")


def mean(runs: Runs, value: Callable[[Row], float | None]) -> float:
    """Return the mean of a value over the seeds; NaN if a seed lacks it."""
    values = [value(row) for row in runs]
    return float("nan") if None in values else statistics.fmean(v for v in values if v is not None)


def perplexity(length: int) -> Callable[[Row], float | None]:
    """Return the function from a row to P(length), the perplexity of the first `length` tokens of long documents."""
    return lambda row: row.get("long", {}).get("perplexity", {}).get(str(length))


def _prompts(row: Row, mode: str, *, beyond: bool) -> list[dict[str, float]]:
    """Return `found` and `below_one` of the prompts with a needle up to the training length, or beyond it. Depths between which a text
    has no full stop are one prompt: their losses are equal in all digits."""
    needle, distinct = row["needle"], {}
    for number, length in enumerate(needle["lengths"]):
        scores = {name: values[number] for name, values in needle[mode].items()}
        for place, nll in enumerate(scores["nll"]):
            below = scores["below_one"][place] if "below_one" in scores else float(nll < 1)
            if (length > row["length"]) == beyond:
                distinct[length, nll] = dict(found=scores["found"][place], below_one=below)
    return list(distinct.values())


def needles(mode: str, *, beyond: bool, by: str = "found") -> Callable[[Row], float | None]:
    """Return the function from a row to the share of needles recalled in texts up to the training length, or beyond it: those that the
    model's continuation contains (`by` "found"), or those whose answer has a loss below 1 nat a token ("below_one")."""

    def value(row: Row) -> float | None:
        found = _prompts(row, mode, beyond=beyond) if row.get("needle") else []
        return statistics.fmean(prompt[by] for prompt in found) if found else None

    return value


def needle_count(row: Row, mode: str = "easy") -> int:
    """Return the number of different prompts with a needle up to the training length."""
    return len(_prompts(row, mode, beyond=False))


def recall(task: str) -> Callable[[Row], float | None]:
    """Return the function from a row to the share of answers that contain the right one."""
    return lambda row: row.get("recall", {}).get(task, {}).get("contains")


def card_seconds(runs: Runs) -> float:
    """Return the seconds of all cards that a model took: the short runs that chose its learning rate, and training and evaluation
    of all its seeds, with compiling unless another model trained on the card meanwhile."""
    return runs[0]["rates_seconds"] + sum(
        row["training_seconds"] + row["evaluation_seconds"] for row in runs
    )


def _column(title: str, value: Callable[[Row], float | None], form: str) -> Column:
    def cell(runs: Runs) -> str:
        values = [value(row) for row in runs]
        if None in values:
            return ""
        text = form.format(mean(runs, value))
        return text if len(runs) == 1 else f"{text} ({', '.join(map(form.format, values))})"

    return Column(title, cell)


def name(runs: Runs) -> str:
    """Return a model's name as code, and the model whose time it was trained for, if there is one."""
    limit = runs[0].get("time_of")
    return f"`{runs[0]['model']}`" + (f", in the time of `{limit}`" if limit else "")


def learning_rate(runs: Runs) -> str:
    """Return a model's learning rate, and of how many it is the best, or that it was given."""
    tried = len(runs[0]["rates"])
    return f"{runs[0]['peak_lr']:.1e}, {f'best of {tried}' if tried else 'given'}"


COLUMNS = (
    Column("model", name),
    Column("seeds", lambda runs: ", ".join(str(row["seed"]) for row in runs)),
    Column("10⁶ tokens", lambda runs: f"{runs[0]['tokens'] / 1e6:.0f}"),
    Column("active parameters, M", lambda runs: f"{runs[0]['parameters']['active'] / 1e6:.0f}"),
    Column("state, MB", lambda runs: f"{runs[0]['state_bytes'] / 1e6:.2f}"),
    _column("held-out loss", heldout_loss, "{:.3f}"),
    *(_column(f"P({n:,})", perplexity(n), "{:.2f}") for n in (4096, 16384, 65536)),
    *(
        _column(f"{title}{name}", needles(mode, beyond=beyond, by=by), "{:.2f}")
        for title, mode, beyond in (("needles, easy: ", "easy", False), ("standard: ", "standard", False), ("easy, beyond T: ", "easy", True))
        for name, by in (("found", "found"), ("below 1 nat", "below_one"))
    ),
    *(_column(task, recall(task), "{:.3f}") for task in ("multikey", "fields", "names")),
    Column("learning rate", learning_rate),
    Column("remat", lambda runs: ", ".join(dict.fromkeys(row.get("remat", "full") for row in runs))),
    Column("10³ tokens/s", lambda runs: f"{mean(runs, lambda r: r['tokens_per_second']) / 1e3:.0f}"),
    Column("card hours", lambda runs: f"{card_seconds(runs) / 3600:.2f}"),
)  # fmt: skip


def identity(row: Row) -> tuple:
    """Return what is equal for rows of one run, of which the newest counts."""
    return row["table"], *_run(row), row["seed"]


def belongs(row: Row, kind: str) -> bool:
    """Return whether a row of a trained model stands in the table `kind`: in that for which it was trained, and a method of the
    registry (`lm:`) in "methods" too, since it was trained in the same way.
    """
    if row.get("kind") == "rates":
        return False
    shared = kind == "methods" and row.get("table") == "fox" and row["model"].startswith("lm:")
    return row.get("table") == kind or shared


def _table(kind: str) -> Table:
    return Table(
        f"evidence_{kind}",
        (FILE,),
        COLUMNS,
        where=lambda row: belongs(row, kind),
        key=identity,
        lines=by_model,
        command=lambda rows, docs: commands(rows, read_rows(docs, FILE)),
        not_run="trains models of 125M parameters",
    )


def _last(value: Callable[[np.ndarray], Any], form: str = "{:.2f}", of: str = "load") -> Callable[[Runs], str]:  # fmt: skip
    return lambda runs: ", ".join(form.format(value(np.array(row["router"][of][-1]))) for row in runs)  # fmt: skip


def has_routing(row: Row) -> bool:
    """Return whether a row has the routing of several memories; one memory, which has every token, has none to show."""
    return "router" in row and len(row["router"]["load"][-1][0]) > 1


def routed(rows: list[Row]) -> list[Runs]:
    """Return the rows of Mixtures-of-Memories whose routing was recorded, by model as `by_model` has them."""
    return by_model([row for row in rows if has_routing(row)])


ROUTING = (
    Column("model", name),
    Column("seeds", lambda runs: ", ".join(str(row["seed"]) for row in runs)),
    Column("smallest load", _last(np.min)),
    Column("largest load", _last(np.max)),
    Column("smallest of the layer with the evenest loads", _last(lambda load: load.min(1).max())),
    Column("layers with a memory below 0.05", _last(lambda load: (load.min(1) < 0.05).sum(), "{}")),
    Column("entropy, nats", _last(np.mean, of="entropy")),
)


def chose_rates(row: Row) -> bool:
    """Return whether a row tells how a learning rate was chosen that no other row tells: by a call of its own, by the call that
    trained the model, or not at all."""
    return row.get("kind") == "rates" or "rates_corpus" not in row


def rates_lines(rows: list[Row]) -> Iterable[Row]:
    """Return the rows of learning rates by model."""
    return sorted(rows, key=lambda row: (row["table"], row["model"]))


def _tried(row: Row) -> str:
    """Return the cell with the multiples of the published rate that were tried."""
    values = ", ".join(f"{factor:.3g}" for factor in factors(row))
    return values if row["rates"] else f"none; {values} was given"


def _short_tokens(row: Row) -> str:
    tokens = row.get("short_tokens") or row.get("rates_tokens")
    return f"{tokens / 1e6:.0f}" if tokens else ""


EVERY = [
    *map(_table, ("fox", "mom", "moe", "methods", "methods_xla")),
    Table(
        "evidence_routing",
        (FILE,),
        ROUTING,
        where=has_routing,
        key=identity,
        lines=routed,
        command=lambda rows, docs: commands(rows, read_rows(docs, FILE)),
        not_run="trains models of 125M parameters",
    ),
    Table(
        "evidence_rates",
        (FILE,),
        (
            Column("model", lambda row: f"`{row['model']}`"),
            Column("10⁶ tokens", _short_tokens),
            Column("tried, as multiples of the published rate", _tried),
            Column("held-out loss at each learning rate", lambda row: ", ".join(f"{rate}: " + ("diverged" if loss is None else f"{loss:.3f}") for rate, loss in row["rates"].items())),
            Column("used", lambda row: f"{row['peak_lr']:.1e}"),
            Column("card hours", lambda row: f"{row['rates_seconds'] / 3600:.2f}"),
        ),
        where=chose_rates,
        key=lambda row: (row["table"], row["model"], row.get("kind"), tuple(row["rates"]), _short_tokens(row), row["corpus"]),
        lines=rates_lines,
        command=lambda rows, docs: commands((row for row in rows if row.get("kind") == "rates"), read_rows(docs, FILE)),
        not_run="trains models of 125M parameters",
    ),
]  # fmt: skip


def with_rows(docs: Path) -> list[Table]:
    """Return the tables that have a row in the folder `docs`; a page can show these only."""
    return [table for table in EVERY if (docs / FILE).is_file() and table.rows(docs)]


TABLES = with_rows(Path(__file__).resolve().parents[2] / "docs")
