"""The commands of `python -m benchmarks evidence` that make stored rows, written from the rows' fields."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.tables.table import Row, group, matches

CORPORA = {"90a9649fdba351e3": "data/corpus", "dbcf15abba494571": "data/first"}
"""Folders in which docs/corpus.md makes the corpora of docs/evidence.jsonl, by the digests that the rows have."""

OMITTED = {
    "length": "4096",
    "tasks": "heldout,long,needle,recall",
    "needle_lengths": "1024,2048,4096,8192,16384",
}
"""Options that are written only where a row differs from these values, the defaults of the command."""


def commands(rows: Iterable[Row], stored: Sequence[Row]) -> str:
    """Return the commands that make the rows, one a line: rows of equal options are made by one command, for which all their models
    have equal seeds.

    Args:
        rows: the rows of a table.
        stored: all rows of docs/evidence.jsonl in the file's order, from which `--rates` takes the learning rates.

    Raises:
        ValueError: a row was trained for the time of a model that has no row.
    """
    rows = list(rows)
    lines = []
    for options, alike in group(rows, lambda row: tuple(_options(row, rows, stored))).items():
        models = group(alike, lambda row: row["model"])
        seeds = {model: tuple(sorted({row["seed"] for row in own})) for model, own in models.items()}  # fmt: skip
        for given, named in group(seeds, seeds.__getitem__).items():
            lines.append(_line(options, named, given))
    return "\n".join(lines)


def _line(options: Sequence[tuple[str, Any]], models: Sequence[str], seeds: Sequence[int]) -> str:
    fields = dict(options)
    words = [f"--table={fields.pop('table')}", "--models", *map(shlex.quote, models)]
    if not fields.pop("only_rates"):
        words.append(f"--seeds={','.join(map(str, seeds))}")
    else:
        words.append("--only_rates")
    words += [f"--{name}={value}" for name, value in fields.items()]
    return " ".join(["python -m benchmarks evidence", *words, "--output=rows.jsonl"])


def _options(row: Row, rows: Sequence[Row], stored: Sequence[Row]) -> Iterable[tuple[str, Any]]:
    """Yield (name, value) of the options of a row's command, without its model and seed."""
    only_rates = row.get("kind") == "rates"
    yield "table", row["table"]
    yield "only_rates", only_rates
    if limit := row.get("time_of"):
        yield "time_of", limit
    yield "tokens", _tokens(row, rows)
    yield "batch_size", row["batch_size"]
    given = dict(length=str(row["length"]))
    if not only_rates:
        given |= dict(tasks=row["tasks"])
        if "needle" in row:
            given |= dict(needle_lengths=",".join(map(str, row["needle"]["lengths"])))
    yield from ((name, value) for name, value in given.items() if value != OMITTED[name])
    # Rows of learning rates before the field, which have none, say nothing about it; those of models had their configs' "full".
    if remat := row.get("remat", None if only_rates else "full"):
        yield "remat", remat
    yield "corpus", CORPORA.get(row["corpus"], "data/first" if only_rates else "data/corpus")
    if "rates_corpus" in row:  # chosen by an earlier call
        if limit or _is_newest(row, stored):
            yield "rates", "docs/evidence.jsonl"
        else:  # other rates were tried since then, and --rates would take the best of those
            yield "factors", f"{row['peak_lr'] / _published(row['model']):.3g}"
        return
    yield "factors", ",".join(f"{factor:.3g}" for factor in factors(row))
    if tokens := row.get("short_tokens") or row.get("rates_tokens"):
        yield "share", f"{tokens / row['tokens']:g}"


def _is_newest(row: Row, stored: Sequence[Row]) -> bool:
    """Return whether a row has the learning rate that `--rates` of the stored rows gives to its model."""
    fields = {name: row[name] for name in ("model", "length", "batch_size")}
    found = [other for other in stored if matches(other, kind="rates", **fields)]
    return bool(found) and found[-1]["peak_lr"] == row["peak_lr"]


def _published(model: str) -> float:
    from benchmarks.evidence import base_config  # imports JAX, which most tables do without

    return base_config(model).optimizer.peak_lr


def factors(row: Row) -> list[float]:
    """Return the learning rates that were tried for a row, or the only one that was given, as multiples of the published one."""
    published = row["peak_lr"] / row["factor"] if "factor" in row else _published(row["model"])
    return [float(rate) / published for rate in row["rates"] or [row["peak_lr"]]]


def _tokens(row: Row, rows: Sequence[Row]) -> int:
    """Return `--tokens` of a row: its own, or those of the model in whose time it was trained."""
    limit = row.get("time_of")
    if limit is None:
        return row["tokens"]
    same = ("table", "length", "batch_size", "corpus")
    for other in reversed(rows):
        if other["model"] == limit and other.get("kind") != "rates" and not other.get("time_of"):
            if all(other[name] == row[name] for name in same):
                return other["tokens"]
    raise ValueError(
        f"{row['model']} was trained in the time of {limit}, which has no row with equal {', '.join(same)}"
    )
