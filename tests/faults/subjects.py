"""The kinds of inputs that the campaign damages, and for each the calls of the library that read it.

`intact.build` writes them once to a folder. A `Subject` copies one of them; its `read` returns a value that is compared
with that of the intact input.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from tests.faults.intact import digest, evaluate, small
from tests.faults.mutations import Damage, for_file
from tests.faults.special import (
    index_outside,
    links_in_run,
    model_sizes,
    output_outside,
    store_links,
    store_sizes,
)

CHAT = [dict(role="user", content="to be or not")]


@dataclasses.dataclass(frozen=True)
class Subject:
    """One kind of damaged input.

    Attributes:
        name: the name in the results.
        read: function of (the damaged copy, a folder for output) that returns what was read.
        weight: relative number of cases.
        protected: function of (relative path of the damaged file) that returns whether a checksum, a digest or
            a copy in another file allows the library to detect a changed value.
        files: pattern of the files that are damaged.
        extra: further damages, functions as in `mutations` of (generator, the copy, folder outside).
        accept: function of (value, intact value): "no" if a value other than the intact one is wrong, "announced" if it
            is correct provided that a message says what is missing, "quiet" if it is correct.
        writable: the folder inside the copy that `read` may change; None is no folder, "" is all.
    """

    name: str
    read: Callable[[Path, Path], Any]
    weight: int = 1
    protected: Callable[[str], bool] = lambda path: False
    files: str = "**/*"
    extra: tuple[Callable[[Random, Path, Path], Damage], ...] = ()
    accept: Callable[[Any, Any], str] = lambda value, intact: "no"
    writable: str | None = None


def import_folder(given: Path, out: Path) -> Any:
    """Import a Hugging Face folder or a GGUF file as a run."""
    from lsm_jax.convert import import_huggingface
    from lsm_jax.training import load_run

    source = given / "llama.gguf" if (given / "llama.gguf").exists() else given
    config = import_huggingface(source, out / "run")
    run = load_run(out / "run")
    config = dataclasses.replace(
        config, name="", data=dataclasses.replace(config.data, tokenizer="")
    )
    return repr(config), digest(run.params), _tokens(out / "run" / "tokenizer")


def _tokens(folder: Path) -> Any:
    from lsm_jax.data import load_tokenizer

    tokenizer = load_tokenizer(str(folder))
    ids = tokenizer.encode("to be or not, 123 <s>")
    chat = tokenizer.chat_text(CHAT) if getattr(tokenizer, "chat_template", None) else ""
    return list(map(int, ids)), tokenizer.bos_id, tokenizer.eos_id, chat, tokenizer.decode(ids)


def read_tokenizer(given: Path, out: Path) -> Any:
    """Encode, decode and format with a tokenizer."""
    return _tokens(given)


def import_released(given: Path, out: Path) -> Any:
    """Import a checkpoint of Liger's authors as a run."""
    from lsm_jax.linearize.released import import_released as make
    from lsm_jax.training import load_run

    config = make(given, out / "run", window=32)
    return repr(config.model), digest(load_run(out / "run").params)


def import_adapters(given: Path, out: Path) -> Any:
    """Import adapters in PEFT's format as a run."""
    from lsm_jax.linearize.peft import import_adapters as make
    from lsm_jax.training import load_run

    config = make(given, _intact(given) / "source" / "llama", out / "run", method="liger", gate="mamba2")  # fmt: skip
    return repr(config.model), digest(load_run(out / "run").params)


def export_to(given: Path, out: Path) -> Any:
    """Export parameters with the names and files of a Hugging Face folder."""
    from lsm_jax.convert import export
    from lsm_jax.convert.huggingface import load_params, model_config

    source = _intact(given) / "source" / "llama"
    config = model_config(source)
    export(load_params(source, config), config, given, out / "exported")
    return digest(load_params(out / "exported", model_config(out / "exported")))


def read_store(given: Path, out: Path) -> Any:
    """Read the rows of a training store and a held-out store."""
    from lsm_jax.data import DataConfig, make_eval_iterator, make_train_iterator

    config = DataConfig(
        path=str(given), sequence_length=32, num_threads=0, prefetch=0, separate_documents=True
    )
    rows = make_train_iterator(config, global_batch_size=4, seed=0, vocab_size=257)
    batches = [next(rows) for _ in range(40)]
    held_out = make_eval_iterator(config, global_batch_size=4, vocab_size=257, remainder="pad")
    return digest([batches, list(held_out)])


def read_text(given: Path, out: Path) -> Any:
    """Read the packed rows of a JSONL file."""
    from lsm_jax.data import DataConfig, make_eval_iterator, make_train_iterator

    config = DataConfig(
        path=str(given / "lines.jsonl"),
        heldout_fraction=0.3,
        sequence_length=32,
        num_threads=0,
        prefetch=0,
    )
    rows = make_train_iterator(config, global_batch_size=4, seed=0, vocab_size=257)
    batches = [next(rows) for _ in range(40)]
    held_out = make_eval_iterator(config, global_batch_size=4, vocab_size=257, remainder="pad")
    return digest([batches, list(held_out)])


def read_packed(given: Path, out: Path) -> Any:
    """Read the documents of compressed files and a parquet file."""
    from lsm_jax.data.documents import Documents

    files = [given / name for name in ("lines.jsonl.gz", "lines.jsonl.zst", "rows.parquet")]
    documents = [Documents([file], cache_dir=out / "cache") for file in files]
    return [[part[i].text for i in range(len(part))] for part in documents]


def load(given: Path, out: Path) -> Any:
    """Load the model of a finished run."""
    from lsm_jax.training import load_run

    run = load_run(given / "run")
    return run.step, digest(run.params), repr(run.config)


def load_on_base(given: Path, out: Path) -> Any:
    """Load a run with adapters whose pretrained model is the damaged folder."""
    run = out / "run"
    shutil.copytree(_intact(given) / "lora" / "run", run)
    config = json.loads((run / "config.json").read_text())
    config["base"]["path"] = str(given)
    (run / "config.json").write_text(json.dumps(config))
    from lsm_jax.training import load_run

    return digest(load_run(run).params)


def resume(given: Path, out: Path) -> Any:
    """Train a stopped run to its end.

    Returns:
        (the losses by step, a digest of the final parameters, the losses that could be read before, whether every
        line could be read before).
    """
    from lsm_jax.training import load_run, train

    readable, clean = _readable_rows(given / "metrics.jsonl")
    train(small("plain", _intact(given) / "source"), given)
    return (
        *_readable_rows(given / "metrics.jsonl")[:1],
        digest(load_run(given).params),
        readable,
        clean,
    )


def _readable_rows(path: Path) -> tuple[dict[int, float], bool]:
    """Return the losses by step of the lines of a metrics.jsonl that can be read, and whether all can, except for
    a last line without its end, as after a kill; a file that does not exist, or a link to nothing, has no lines."""
    try:
        lines = path.read_bytes().split(b"\n") if path.exists() else []
    except OSError:
        return {}, False
    rows, clean, last = {}, True, lines.pop() if lines else b""
    for line in lines + [last] * last.endswith(b"}"):
        try:
            row = json.loads(line.decode(), object_pairs_hook=_unique)
            if not isinstance(row["step"], int) or not 0 < row["step"] <= 6:
                raise ValueError("no step of the run")
            rows[row["step"]] = float(row["train/loss"])
        except (ValueError, TypeError, KeyError, RecursionError):
            clean = False
    return rows, clean


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key occurs twice")
    return dict(pairs)


def write_results(given: Path, out: Path) -> Any:
    """Evaluate a run whose folder of results is damaged, into the folder that output.txt names."""
    name = given / "output.txt"
    evaluate(given / "run", name.read_text() if name.is_file() else "first")
    results = json.loads((given / "run" / "eval" / "first" / "results.json").read_text())
    return results["val/loss"]


def run_tasks(given: Path, out: Path) -> Any:
    """Evaluate a run on the task choice of lm-evaluation-harness in a damaged folder."""
    from lsm_jax.evaluation import TASKS, HarnessConfig, Request
    from lsm_jax.training import load_run

    path = given / "choice.yaml"
    if path.is_file() and not path.is_symlink():  # reads the data of this copy
        intact = str(_intact(given) / "tasks" / "data.jsonl").encode()
        path.write_bytes(path.read_bytes().replace(intact, str(given / "data.jsonl").encode()))
    # Templates of a task file are code, for which `trust` is asked.
    known = {field.name for field in dataclasses.fields(HarnessConfig)}
    options = dict(trust=True) if "trust" in known else {}
    request = Request(
        lm_eval=HarnessConfig(tasks="choice", include_path=str(given), max_length=32, **options),
        batch_size=2,
    )
    request.validate()
    run = load_run(_intact(given) / "run")
    return TASKS["lm_eval"](run, request, out / "results")["results"]["choice"]["acc,none"]


def _intact(given: Path) -> Path:
    """Return the folder of the intact inputs, from the path of a damaged copy."""
    return given.parents[2] / "intact"


def _is_checkpoint(path: str) -> bool:
    return "checkpoints/" in path and path.count("/") >= 3


def _is_chunk(path: str) -> bool:
    return Path(path).name in ("0.0", "1.0", "0.1")


def _same_or_earlier(value: Any, intact: Any) -> str:
    """Accept an earlier checkpoint than the newest, if a message says so."""
    return "announced" if value[2] == intact[2] and value[0] < intact[0] else "no"


def _rows_are_there(value: Any, intact: Any) -> str:
    """Accept equal parameters and all rows of metrics that were readable before the run was resumed; a message
    must say that lines were unreadable."""
    (rows, params, readable, clean), (expected, expected_params, *_) = value, intact
    same = params == expected_params and all(rows.get(s) == x for s, x in readable.items())
    known = all(rows[step] == expected[step] for step in rows.keys() & expected.keys())
    return ("quiet" if clean else "announced") if same and known else "no"


SUBJECTS = (
    Subject("checkpoint", import_folder, 8, extra=(model_sizes,) * 12),
    Subject("sharded", import_folder, 8, extra=(index_outside,) * 12),
    Subject("exported", import_folder, 6, protected=lambda path: path.endswith(".safetensors"), files="*.safetensors"),
    Subject("export", export_to, 8, extra=(index_outside,) * 12),
    Subject("gguf", import_folder, 12),
    Subject("tokenizer", read_tokenizer, 10),
    Subject("released", import_released, 3, files="config.json", extra=(model_sizes,) * 4),
    Subject("adapters", import_adapters, 4),
    Subject("store", read_store, 14, protected=_is_chunk, extra=(store_sizes,) * 14 + (store_links,) * 4),
    Subject("text", read_text, 4),
    Subject("packed", read_packed, 4, protected=lambda path: path.endswith(".gz")),
    Subject("load", load, 10, protected=_is_checkpoint, accept=_same_or_earlier),
    Subject("lora", load, 5, protected=_is_checkpoint, files="run/*.json", accept=_same_or_earlier),
    Subject("frozen_base", load_on_base, 4, protected=lambda path: path.endswith(".safetensors")),
    Subject(
        "resume",
        resume,
        14,
        protected=lambda path: "checkpoints/" in path or path == "metrics.jsonl",
        extra=(links_in_run,) * 14,
        accept=_rows_are_there,
        writable="",
    ),
    Subject("metrics", resume, 8, protected=lambda path: True, files="metrics.jsonl", accept=_rows_are_there, writable=""),
    Subject("results", write_results, 5, files="run/eval/first/*", extra=(output_outside,) * 24, writable="run/eval"),
    Subject("tasks", run_tasks, 5, writable=""),
)  # fmt: skip


def source_of(subject: Subject, intact: Path) -> Path:
    """Return the folder of a subject's intact input."""
    names = {"metrics": "resume"}
    return intact / names.get(subject.name, subject.name)


def damage(subject: Subject, rng: Random, given: Path, outside: Path) -> tuple[str, str, set[str]]:
    """Damage a copy of a subject's input.

    Returns:
        (relative path of the damaged file, or "", what was done, names of which an error must contain one).
    """
    files = sorted(p for p in given.glob(subject.files) if p.is_file() and not p.is_symlink())
    # One file of each kind is as likely as another: a checkpoint has many small files.
    count = len({p.suffix for p in files}) + 2
    if subject.extra and rng.random() < len(subject.extra) / (len(subject.extra) + 4 * count):
        what, names = rng.choice(subject.extra)(rng, given, outside)
        return _changed_file(what, names, given), what, names
    kinds = sorted({(p.suffix, p.parent.name if p.suffix else "") for p in files})
    kind = rng.choice(kinds)
    file = rng.choice([p for p in files if (p.suffix, p.parent.name if p.suffix else "") == kind])
    relative = file.relative_to(given).as_posix()
    what, names = rng.choice(for_file(file))(rng, file, outside)
    step = [part for part in file.relative_to(given).parts if part.isdecimal()]
    return relative, what, {*names, file.name, *(f"checkpoint {s}" for s in step)}


def _changed_file(what: str, names: set[str], given: Path) -> str:
    return next((n for n in sorted(names) if (given / n).is_symlink()), "")
