"""The damaged inputs of the modules `damage_checkpoints`, `damage_runs` and `damage_data` as cases of the campaign.

These modules know the formats: they say of each damaged copy whether it must be refused, and which words the message
must contain. A module that does not exist yet adds no cases.
"""

from __future__ import annotations

import bisect
import contextlib
import importlib
import importlib.util
import json
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.faults.judging import Case


def _module(name: str) -> Any:
    full = f"tests.faults.{name}"
    return importlib.import_module(full) if importlib.util.find_spec(full) else None


def sources(intact: Path, seed: int) -> dict[str, Callable[[Path], Iterator[Case]]]:
    """Return the generators by name; each is called with a new folder for the copies.

    Args:
        intact: the folder of the intact inputs (`intact.build`).
        seed: decides which bytes and fields of checkpoints are damaged.
    """
    found: dict[str, Callable[[Path], Iterator[Case]]] = {}
    if (checkpoints := _module("damage_checkpoints")) is not None:
        for kind in checkpoints.KINDS:
            found[kind] = lambda folder, kind=kind: _checkpoints(checkpoints, kind, folder, seed)
    if (runs := _module("damage_runs")) is not None:
        found["runs"] = lambda folder: _runs(runs, intact, folder)
    if (data := _module("damage_data")) is not None:
        for name, (function, source, read) in _readers(data, intact).items():
            found[name] = lambda folder, function=function, source=source, read=read, name=name: (
                _data(name, function, source, read, folder)
            )
    return found


def _checkpoints(module: Any, kind: str, folder: Path, seed: int) -> Iterator[Case]:
    """Yield the cases of one kind of checkpoint."""
    rng = random.Random(f"{seed}/{kind}")
    step, limit = rng.randint(41, 71), rng.randint(2, 4)
    for number, case in enumerate(module.cases(kind, folder, step=step, limit=limit)):
        out = folder / f"out-{number}"

        def read(case: Any = case, out: Path = out) -> tuple[str, str]:
            module.read(case.kind, case.path, out)
            shutil.rmtree(out, ignore_errors=True)
            return "read", "" if case.refused else "read"

        yield Case(
            subject=f"generated {kind}",
            damage=case.name,
            read=read,
            names=frozenset(case.words),
            protected=case.refused,
            unchanged=((folder / "outside", lambda name: True), (case.path.parent, _any)),
        )


def _runs(module: Any, intact: Path, folder: Path) -> Iterator[Case]:
    """Yield the damaged runs: each is resumed or loaded, and has the parameters of the intact run."""
    from lsm_jax.training import load_run, train
    from tests.faults.intact import digest, small

    steps = [int(path.name) for path in (intact / "run" / "checkpoints").iterdir()]
    earlier = {digest(load_run(intact / "run", step=step).params) for step in sorted(steps)[:-1]}
    for damage in module.damaged_runs(intact / "run", folder):

        def read(damage: Any = damage) -> tuple[str, str]:
            if damage.act == "resume":
                train(small("plain", intact / "source"), damage.folder)
            value = digest(load_run(damage.folder).params)
            if damage.refused:
                return value, ""
            return value, digest(load_run(intact / "run").params)

        yield Case(
            subject="generated runs",
            damage=damage.name,
            read=read,
            protected=True,
            # A damaged checkpoint is announced, and the one before it is read.
            accept=lambda value, _, load=damage.act == "load" and not damage.refused: (
                "announced" if load and value in earlier else "no"
            ),
            unchanged=((damage.outside, _any),),
        )
        shutil.rmtree(damage.folder.parent)


def _any(name: str) -> bool:
    return True


def _readers(module: Any, intact: Path) -> dict[str, tuple[Any, Path, Callable[[Path, Any], Any]]]:
    """Return (generator, intact input, function of (copy, damage) that reads it) by name."""

    def read_store(path: Path, damage: Any) -> None:
        from lsm_jax.data import TokenStore

        store = TokenStore(path)
        store.read(range(store.num_documents), 0, store.length, vocab_size=257)

    def read_tokenizer(path: Path, damage: Any) -> None:
        from lsm_jax.data import load_tokenizer

        tokenizer = load_tokenizer(str(path))
        if damage.name.startswith("chat template"):
            tokenizer.chat_text([dict(role="user", content="x")])

    def read_tasks(path: Path, damage: Any) -> None:
        from lsm_jax.evaluation.task_files import check_task_files

        check_task_files(path, trust=False)

    def write_results(path: Path, damage: Any) -> None:
        from tests.faults.intact import evaluate

        evaluate(path, "x")

    plain = intact / "tasks-without-code"
    return {
        "store": (module.damaged_stores, intact / "store" / "train.zarr", read_store),
        "tokenizer": (module.damaged_tokenizers, intact / "tokenizer", read_tokenizer),
        "tasks": (module.damaged_task_folders, plain, read_tasks),
        "results": (module.damaged_result_folders, intact / "run", write_results),
    }


def _data(
    name: str, function: Any, source: Path, read: Callable[[Path, Any], Any], folder: Path
) -> Iterator[Case]:
    """Yield the cases of one function of `damage_data`."""
    folder.mkdir()
    for damage in function(source, folder):
        refused = damage.expected == "refused"

        def call(damage: Any = damage, refused: bool = refused) -> tuple[str, str]:
            try:
                read(damage.path, damage)
            except (ValueError, OSError) as error:
                if damage.message and not re.search(damage.message, str(error)):
                    raise ValueError(f"another message than {damage.message!r}") from error
                raise ValueError(f"{damage.message}") from error
            return "read", "" if refused else "read"

        yield Case(
            subject=f"generated {name}",
            damage=damage.name,
            read=call,
            names=frozenset({damage.message} if damage.message else ()),
            protected=refused,
            unchanged=((folder / "outside", _any),) if (folder / "outside").is_dir() else (),
        )


def write_counts(folder: Path, seed: int) -> None:
    """Count the cases of each generator, and write the counts to counts.json in the campaign's folder."""
    (folder / "cases").mkdir(exist_ok=True)
    counts = {}
    for name, generate in sources(folder / "intact", seed).items():
        with tempfile.TemporaryDirectory(dir=folder / "cases") as copies:
            counts[name] = sum(1 for _ in generate(Path(copies) / "generated"))
    (folder / "counts.json").write_text(json.dumps(counts))


class Sample:
    """Draw the same number of cases from each generator, by number.

    Args:
        folder: the campaign's folder, with the counts of `write_counts`.
        total: number of cases, 0 if there is no generator.
        seed: the seed of the choice.
    """

    def __init__(self, folder: Path, total: int, seed: int):
        self.folder, self.seed = folder, seed
        self.sources = sources(folder / "intact", seed)
        self.counts = json.loads((folder / "counts.json").read_text())
        count = len(self.sources)
        self.first = [
            total * i // count for i in range(count)
        ]  # number of the first case of each generator
        self.total = total
        self.name, self.copies = "", contextlib.ExitStack()

    def make(self, number: int) -> Case:
        """Return the case of a number; numbers must be requested in ascending order, since the copies of a
        generator exist one after another."""
        index = bisect.bisect_right(self.first, number) - 1
        name, place = list(self.sources)[index], number - self.first[index]
        if self.name != name:
            self.name = name
            self.copies.close()
            folder = tempfile.TemporaryDirectory(
                dir=self.folder / "cases", ignore_cleanup_errors=True
            )
            copies = Path(self.copies.enter_context(folder)) / "generated"
            rng = random.Random(f"{self.seed}/{name}")
            quota = [*self.first[1:], self.total][index] - self.first[index]
            self.chosen = sorted(rng.choices(range(self.counts[name]), k=quota))
            self.cases = enumerate(self.sources[name](copies))
            self.last = next(self.cases)
        while self.last[0] < self.chosen[place]:
            self.last = next(self.cases)
        return self.last[1]
