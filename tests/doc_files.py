"""Makes small files in place of those that the documentation's commands read and that no command before them has written:
texts, token stores, data of suites, pretrained models, and runs."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from scripts.doc_blocks import ROOT, blocks
from tests import doc_commands

GOLDENS = ROOT / "tests/convert"
OUTPUT = re.compile(r"--(?:out|output|workdir|heldout)[= ]\S+")
RUN = re.compile(r"(?<![\w/.-])runs/[\w.-]+")
# Options of a training run that make it small; a run's steps have 2 rows of 64 tokens.
SMALL = (
    "--config.batch_size=2 --config.data.sequence_length=64 --config.total_tokens=256 --config.optimizer.warmup_tokens=0 "
    "--config.eval_every=0 --config.log_every=1"
)


def write_texts(folder: Path) -> None:
    folder.mkdir(parents=True)
    for i in range(40):
        (folder / f"{i}.txt").write_text(
            f"The number {i} of list {i % 7} is followed by {i + 1}. " * 150
        )


def write_rows(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_store(folder: Path, *, encoder: str = "bytes", vocab_size: int = 257) -> None:
    """Write a folder of train.zarr and heldout.zarr with rows of 2,048 random tokens."""
    from tests.data.stores import write_array

    rng = np.random.default_rng(0)
    for name, count in (("train", 16), ("heldout", 4)):
        rows = rng.integers(0, vocab_size, (count, 2048))
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_array(folder / f"{name}.zarr", rows, vocab_size=vocab_size, encoder=encoder)


def write_gpt2_store(folder: Path) -> None:
    write_store(folder, encoder="tiktoken-gpt2", vocab_size=50257)


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer.json of bytes and two special tokens into a new folder."""
    from tests.linearize.make_pretrained import write_tokenizer as write

    folder.mkdir(parents=True, exist_ok=True)
    write(folder)


def write_tokenizer_file(path: Path) -> None:
    write_tokenizer(path.parent / "tokenizer")
    shutil.copy(path.parent / "tokenizer/tokenizer.json", path)


def write_slimpajama(folder: Path) -> None:
    from lsm_jax.data import load_tokenizer

    write_tokenizer(folder)
    encoder = load_tokenizer(str(folder / "tokenizer.json")).name
    write_store(folder, encoder=encoder, vocab_size=258)


def write_packages(folder: Path) -> None:
    """Write made-up packages, as scripts/make_corpus.py downloads them, and list.toml, which names them."""
    import hashlib

    from tests.test_corpus import prose, write_tar

    (folder / "npm").mkdir(parents=True)
    archive = folder / "npm" / "texts-1.0.tgz"
    names = [f"Alpha{i}Beta" for i in range(300)]
    files = {f"package/{n}.txt": prose(n, 60).encode() for n in range(200)}
    files |= {
        f"package/name{n}.txt": (
            f"The keeper is {names[n]} of the tower.\n{prose(1000 + n, 6)}Ask the people for {names[n]} again.\n"
        ).encode()
        for n in range(200)
    }
    files |= {f"package/long{n}.txt": prose(500 + n, 3000).encode() for n in range(8)}
    files |= {
        f"package/{part}.cfg": "\n\n".join(
            f"Package: tool-{part}-{n}\nVersion: 1.{n * 7}.{part}\nOwner: person-{n}" for n in range(400)
        ).encode()
        for part in range(40)
    }  # fmt: skip
    write_tar(archive, files)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    (folder / "list.toml").write_text(
        f'[[source]]\npackage = "texts"\nregistry = "npm"\nversion = "1.0"\nsha256 = "{digest}"\nlicence = "MIT"\n'
        'kind = "english"\ninclude = ["*.txt"]\nrecords = ["*.cfg"]\n'
    )


# Options of scripts.make_corpus that make a small corpus of these packages, without a network.
CORPUS = (
    "--sources=packages/list.toml --downloads=packages --vocab_size=400 --sequence_length=2048 --heldout=0.2 "
    "--num_workers=1"
)


def write_corpus(folder: Path) -> None:
    """Write a corpus of the packages of `write_packages`."""
    from scripts import make_corpus

    packages = folder.parent.parent / "packages"
    if not packages.exists():
        write_packages(packages)
    options = CORPUS.replace("packages", str(packages))
    assert make_corpus.main([f"--out={folder}", *options.split()]) == 0


def write_recall(folder: Path) -> None:
    """Write prompts of both tasks of `lsm_jax.evaluation.recall_corpus` into a corpus's folder."""
    from lsm_jax.evaluation import recall_corpus

    for task, source in (("fields", "records"), ("names", "heldout")):
        recall_corpus.main([f"--task={task}", f"--source={folder.parent / source}.jsonl", f"--out={folder.parent}"])  # fmt: skip


def write_suites(folder: Path) -> None:
    from tests.evaluation.make_suites import make_suites

    make_suites(folder)


def write_needle_prompt(path: Path) -> None:
    """Write a prompt of the task needle, as fox.json."""
    from tests.evaluation.make_suites import make_needle_prompt

    make_needle_prompt(path.parent)
    (path.parent / "needle_prompt.json").rename(path)


def write_fda(path: Path) -> None:
    """Write a parquet file in the form of the public data set FDA."""
    import pyarrow
    import pyarrow.parquet

    from tests.evaluation.make_suites import public_recall_rows

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(public_recall_rows("fda")), path)


def write_instructions(path: Path) -> None:
    from tests.linearize.make_pretrained import write_instructions as write

    path.parent.mkdir(parents=True, exist_ok=True)
    write(path)
    if path.suffix == ".jsonl":
        write_rows(path, json.loads(path.read_text()))


def pretrained(name: str) -> Callable[[Path], None]:
    """Return a function that writes a small transformer in the proportions of a model of configs/liger.py."""

    def write(folder: Path) -> None:
        from tests.linearize.make_pretrained import write_pretrained

        write_pretrained(name, folder)

    return write


def write_smollm2(folder: Path) -> None:
    """Write a small model of SmolLM2's proportions, whose tokenizer has a chat template."""
    pretrained("smollm2-135m")(folder)
    path = folder / "tokenizer_config.json"
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(chat_template=template)))


def golden(path: str) -> Callable[[Path], None]:
    """Return a function that copies a checkpoint of tests/convert."""

    def write(folder: Path) -> None:
        shutil.copytree(GOLDENS / path, folder)

    return write


def write_gguf(path: Path) -> None:
    shutil.copy(GOLDENS / "goldens/llama3.2.gguf", path)


def write_released(kind: str) -> Callable[[Path], None]:
    """Return a function that writes a small released model with RWKV's vocabulary."""

    def write(folder: Path) -> None:
        from tests.linearize.released_models import write_model

        write_model(folder, kind)

    return write


def write_leaky(path: Path) -> None:
    """Write the method of docs/new_method.md, which is the page's first block of Python."""
    found = blocks(ROOT / "docs/new_method.md")
    path.write_text(next(block.text for block in found if block.language == "python"))


def write_liger(folder: Path) -> None:
    """Write a checkpoint of Liger's authors, with a tokenizer."""
    from tests.convert.make_liger import write_liger as write

    write(folder)
    write_tokenizer(folder)


def write_adapters(folder: Path) -> None:
    from tests.linearize.test_released import write_adapters_of

    write_adapters_of(folder)


def write_released_config(path: Path) -> None:
    shutil.copy(GOLDENS / "released_goldens/fla-gla/config.json", path)


FILES: dict[str, Callable[[Path], None]] = {
    "my_texts": write_texts,
    "TEXTS": write_texts,
    "stores/web": write_store,
    "stores/code": write_store,
    "my_store": write_store,
    "STORE": write_store,
    "longcrawl64": write_gpt2_store,
    "slimpajama": write_slimpajama,
    "TOKENIZER.json": write_tokenizer_file,
    "packages": write_packages,
    "data/corpus": write_corpus,
    "data/essays": lambda folder: write_suites(folder.parent),
    "data": write_suites,
    "fox.json": write_needle_prompt,
    "based-fda/validation.parquet": write_fda,
    "alpaca.jsonl": write_instructions,
    "alpaca_data_cleaned.json": write_instructions,
    "Llama-3.2-1B": pretrained("llama3.2-1b"),
    "Meta-Llama-3-8B": pretrained("llama3-8b"),
    "SOURCE": write_smollm2,
    "SmolLM2.gguf": write_gguf,
    "gla-1.3B-100B": write_released("gated_deltanet"),
    "rwkv7-1.5B": write_released("rwkv7"),
    "fox-pro-760m-longcrawl64-48b": golden("author_goldens/fox/pro"),
    "Liger-GLA-8B": write_liger,
    "liger_gla_base": write_liger,
    "iter_2400": write_adapters,
    "config.json": write_released_config,
    "leaky.py": write_leaky,
}
"""The program that writes each file or folder, by the path that commands have."""

RUNS = {
    "runs/fox": f"python train.py --config=configs/fox.py:pro-125m --config.data.path=longcrawl64 {SMALL} "
    "--config.batch_size=1 --config.data.sequence_length=32 --config.total_tokens=64 --config.model.num_layers=1 --config.model.hidden_size=192",
    "runs/mom": f"python train.py --config=configs/mom.py:tiny --config.data.path=my_texts {SMALL}",
    "runs/liger": "python train.py --config=configs/liger.py:auto,source=Llama-3.2-1B "
    f"--config.data.path=alpaca.jsonl --config.data.heldout_first=20 {SMALL} --config.data.sequence_length=256 --config.total_tokens=1024",
    "runs/smollm2": "python -m lsm_jax.convert.huggingface --source=SOURCE",
    "runs/any": f"python train.py --config=configs/lm.py:gla-nano --config.data.path=my_texts {SMALL} "
    "--config.model.num_layers=6 --config.model.hidden_size=64",
}
"""The command that makes each run; "runs/any" makes those with other names."""
READERS = (
    "eval.py", "eval", "compare", "scripts/plot_runs.py", "lsm_jax.linearize.export", "lsm_jax.convert.fox_export",
    "lsm_jax.convert.released_export",
)  # fmt: skip
"""Programs that read a run; the others that have --workdir make it."""


def prepare(folder: Path) -> None:
    """Put into a new folder what commands read of a checkout: configs, and the pages as texts."""
    folder.mkdir(parents=True)
    (folder / "configs").symlink_to(ROOT / "configs")
    for name in ("README.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=shutil.ignore_patterns("_build"))


def provide(words: Sequence[str], folder: Path, cache: Path) -> None:
    """Make the files and runs that a command reads and that its folder does not have.

    Args:
        words: the command's words.
        folder: the folder in which it will run.
        cache: a folder that was prepared and in which each is made once, to be copied.
    """
    text = " ".join(words)
    read = OUTPUT.sub("", text)
    for name, write in FILES.items():
        read, count = re.subn(rf"(?<![\w./-]){re.escape(name)}(?![\w=-])", "", read)
        if count:
            _copy(name, name, folder, cache, write)
    if set(words[:3]) & set(READERS):
        for run in RUN.findall(text):
            _copy(run, run if run in RUNS else "runs/any", folder, cache, _write_run)


def _copy(name: str, cached: str, folder: Path, cache: Path, write: Callable[[Path], None]) -> None:
    """Copy a file or folder from the cache, into which `write` writes it the first time, unless it is there."""
    source, target = cache / cached, folder / name
    if target.exists():
        return
    if not source.exists():
        source.parent.mkdir(parents=True, exist_ok=True)
        write(source)
    if source != target:
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)


def _write_run(run: Path) -> None:
    """Train or import the run `cache/runs/NAME`, by the command of `RUNS`."""
    cache = run.parent.parent
    command = RUNS[f"runs/{run.name}"].split()
    provide(command, cache, cache)
    # The data's path is absolute, since the run is copied.
    command = [word.replace("data.path=", f"data.path={cache}/") for word in command]
    doc_commands.run([*command, f"--workdir={run}"], cache)
