"""Results of killed runs: their rows of metrics and parameters, compared with those of undisturbed runs, and counts."""

from __future__ import annotations

import collections
import dataclasses
import re
from pathlib import Path
from typing import Any


@dataclasses.dataclass
class Kill:
    """One kill of a chain: what was killed, when and how, and what was wrong about its end."""

    kind: str
    moment: str
    signals: str
    resumed: bool
    seconds: float  # from the last signal to the end of the process
    problems: list[str]


@dataclasses.dataclass
class Chain:
    """The result of one chain.

    Attributes:
        kind: the kind of run.
        number: the chain's number, which decides its random choices.
        kills: the kills, in order.
        starts: number of starts.
        problems: what went wrong, as (category, text); the categories are those of `CATEGORIES`.
        leftovers: temporary files that remain in the run's directory after its end.
    """

    kind: str
    number: int
    kills: list[Kill] = dataclasses.field(default_factory=list)
    starts: int = 0
    problems: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    leftovers: list[str] = dataclasses.field(default_factory=list)


CATEGORIES = ("lost", "unequal", "hang", "traceback", "outside")


def outcome(workdir: Path) -> dict[str, Any]:
    """Return the rows of metrics of a finished run without speeds and memory, and the bytes of its final
    parameters by name."""
    import jax
    import numpy as np

    from lsm_jax.training import load_run, read_rows

    rows = [
        {name: value for name, value in row.items() if not name.startswith(("perf/", "memory/"))}
        for row in read_rows(workdir / "metrics.jsonl")
    ]
    run = load_run(workdir)
    leaves = jax.tree_util.tree_leaves_with_path(run.params)
    params = {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves}
    return dict(rows=rows, step=run.step, params=params)


def compare(expected: dict[str, Any], given: dict[str, Any]) -> list[str]:
    """Return the differences between two outcomes, as lines."""
    lines = []
    if expected["rows"] != given["rows"]:
        pairs = list(zip(expected["rows"], given["rows"], strict=False))
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        sizes = f"{len(given['rows'])} rows of metrics of {len(expected['rows'])}"
        lines.append(f"{sizes}; the first difference is in row {first}")
    if expected["step"] != given["step"]:
        lines.append(f"step {given['step']} in place of {expected['step']}")
    names = [n for n, value in expected["params"].items() if given["params"].get(n) != value]
    if names:
        lines.append(f"{len(names)} parameters differ: {', '.join(names[:3])}")
    return lines


def rows_of(chains: list[Chain], seed: int, seconds: float) -> list[dict[str, Any]]:
    """Return the rows of results of the campaign: one for each kind of run, and one for all."""
    rows = []
    for kind in [*dict.fromkeys(chain.kind for chain in chains), "all"]:
        part = [chain for chain in chains if kind in (chain.kind, "all")]
        kills = [kill for chain in part for kill in chain.kills]
        problems = collections.Counter(category for chain in part for category, _ in chain.problems)
        single = [k.signals if "+" not in k.signals else "several" for k in kills]
        rows.append(
            dict(
                part="kills",
                kind=kind,
                seed=seed,
                runs=len(part),
                starts=sum(chain.starts for chain in part),
                kills=len(kills),
                kills_of_resumed=sum(kill.resumed for kill in kills),
                signals=dict(collections.Counter(single)),
                moments=dict(collections.Counter(_moment(kill) for kill in kills)),
                **{category: problems[category] for category in CATEGORIES},
                leftovers=sum(len(chain.leftovers) for chain in part),
                longest_end=max((kill.seconds for kill in kills), default=0.0),
            )
        )
    rows[-1]["seconds"] = round(seconds)
    rows[-1]["problems"] = [
        f"chain {chain.number} ({chain.kind}): {category}: {text}"
        for chain in chains
        for category, text in chain.problems
    ][:50]
    rows[-1]["leftover_names"] = sorted(
        {re.sub(r"\d+", "N", name) for chain in chains for name in chain.leftovers}
    )[:20]
    return rows


def _moment(kill: Kill) -> str:
    return "prepare" if kill.kind == "tokenize" else kill.moment
