"""Runs the commands of a page of the documentation as they are written, with options that make the large ones small.

Only sizes are changed, and files: `make_corpus` reads made-up packages in place of those that it would download, and what would write
into the checkout writes into the page's folder. An option that the page gives stays, unless it is a number, or a list of names, that
`SIZES` makes smaller; a field of a config (`--config.*`) that the page gives always stays, but for `sequence_length`, and
`total_tokens`. A hybrid that a variant names has one layer of each letter. `tests/test_blocks.py` parses the numbers of the page.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.doc_blocks import OTHERS, ROOT, Command
from tests import doc_commands, doc_files

TRAIN = f"{doc_files.SMALL} --config.model.num_layers=2 --config.model.hidden_size=256 --config.model.vocab_size=512"
SIZES = {
    "train": (TRAIN, ""),
    "eval": (
        "--batch_size=2 --needle.samples=1 --needle.lengths=600 --needle.depths=0,100 --maps.length=64 --lm_eval.limit=1 --lm_eval.gen_kwargs=max_gen_toks=4",
        "--max_tokens=512 --sequence_length=256 --num_tokens=8 --lm_eval.max_length=1024 --lm_eval.lengths=1024",
    ),
    "demo": ("--total_tokens=49152", ""),
    "scripts.make_corpus": (doc_files.CORPUS, ""),
    "scripts.draw_results": ("--output=docs/results/plots", ""),
    "scripts.compare_linearized": ("--tokens=4096 --base_tokens=4096 --heldout_tokens=512", "--methods=liger,lolcats"),
    "benchmarks convolution": ("--kinds=xla --shapes=1x64x128", ""),
    "benchmarks data_throughput": ("--seconds=0.1 --documents=512", ""),
    "benchmarks decode": ("--methods=gla,mamba --tokens=8", ""),
    "benchmarks decode_step": ("--kinds=xla --heads=1 --dim=16 --size=nano --tokens=8 --batches=1", ""),
    "benchmarks drift": ("--length=64", ""),
    "benchmarks expert_overflow": (
        "--balances=0 --steps=2 --layers=1 --batch_size=8 --length=32 --vocab_size=300",
        "--variant=tiny,mixer=gla",
    ),
    "benchmarks experts": ("--tokens=16 --width=16 --layers=dense,grouped", ""),
    "benchmarks lengths": ("--models=pro --length=64 --step_tokens=512 --tokens=2048 --width=128 --layers=1 --batch_size=1 --beyond=2 --batches=1", ""),
    "benchmarks liger": ("--model=auto --scale=1e-4 --seconds=1 --heldout_tokens=1024 --workers=1 --batch_size=1", ""),
    "benchmarks liger_branches": ("--model=auto --batch_size=1", ""),
    "benchmarks liger_decode": ("--model=smollm2-135m --layers=1 --tokens=1024 --batch_size=1 --seconds=1", "--sample_tokens=1024"),
    "benchmarks linear_moe_curve": ("--tokens=256 --length=32 --batch_size=2 --width=64 --layers=4", ""),
    "benchmarks linear_moe_decode": ("--size=tiny --tokens=1024 --batch_size=1", ""),
    "benchmarks methods": ("--methods=gla --size=nano --tokens=131072", ""),
    "benchmarks model_step": ("--lengths=32 --tokens=32 --vocab_size=64 --workers=1", ""),
    "benchmarks mom_generate": ("--size=tiny --contexts=64 --piece_length=32 --tokens=256 --batch_size=1", ""),
    "benchmarks mom_recall": ("--models=inner --steps=16 --batch_size=4 --length=16 --pairs=2", "--seeds=1"),
    "benchmarks mom_sequence": ("--devices=1,4 --forms=packed --max_bytes=200000", "--length=64 --documents=0"),
    "benchmarks ops": ("--shape=1x32x1x8 --ops=attention", ""),  # the other ops' recurrent form takes minutes
    "benchmarks optimizers": ("--tokens=2048 --seeds=0", ""),
    "benchmarks recall_table": ("--suite=tiny --methods=gla --widths=16 --epochs=1", ""),
    "benchmarks report": ("--root=.", ""),
    "benchmarks scans": ("--kinds=xla --shapes=1x8", ""),
    "benchmarks tracking": ("--size=small --tasks=parity --models=deltanet+positive --epochs=1", ""),
}  # fmt: skip
"""For each program two texts of options: those that are always appended, and those that only replace an option of the page."""


def program(words: Sequence[str]) -> str:
    """Return the name of the program that a command runs, such as "train", "benchmarks kernels" or "lsm_jax.convert.fox"."""
    if words[0] != "python":
        return words[1] if words[0] == "lsm" else words[0]
    if words[1] != "-m":
        return words[1].removesuffix(".py")
    return " ".join(words[2:4]) if words[2] == "benchmarks" else words[2]


def _options(words: Sequence[str]) -> dict[str, str]:
    """Return the values of the options of a command by name."""
    found = {}
    for word, following in itertools.zip_longest(words, words[1:], fillvalue=""):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            found[name] = value if equals else following
    return found


def _size(value: str) -> float:
    """Return the largest of the numbers in an option's value, such as "1000,4000"; of names, such as "liger,window", their
    number, negative to be less than each number's size."""
    numbers = re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", value)
    return max(map(float, numbers), default=-1 / len(value.split(",")))


def small(words: Sequence[str]) -> list[str]:
    """Return a command with the options appended that make it small."""
    always, most = SIZES.get(program(words), ("", ""))
    words = [re.sub(r"<\w+>", "gla", word) for word in words]
    # A model's name requires its sizes of the source, which is a small one here.
    words = [re.sub(r"liger\.py:llama3-8b(?=.*source=)", "liger.py:auto", word) for word in words]
    if program(words).startswith("benchmarks "):
        smaller = {"published": "tiny", "medium": "small"}  # of sizes by name
        words = [smaller.get(word, re.sub("-340m", "-nano", word)) for word in words]
    if program(words).startswith("benchmarks liger"):
        # The small model whose tokenizer has bytes; of the numbers of several rows the first.
        words = [re.sub(r"^SmolLM2\.gguf$", "SOURCE", word) for word in words]
        words = [re.sub(r"^(\d+)(,\d+){2,}$", r"\1", word) for word in words]
    given = _options(words)
    if program(words) == "eval" and re.search(
        "perplexity|routing", given.get("--tasks", "perplexity")
    ):
        # The other tasks' folders of results keep the names that the pages have.
        always += " --max_tokens=512 --sequence_length=256"
    added = {k: v for k, v in _options(always.split()).items() if k not in given}
    for option, value in _options(f"{always} {most}".split()).items():
        field = option.startswith("--config.")
        if option in given and not field and _size(given[option]) > _size(value):
            place = next(i for i, word in enumerate(words) if word.partition("=")[0] == option)
            if "=" in words[place]:
                words[place] = f"{option}={value}"
            else:
                words[place + 1] = value
    if program(words) == "train":
        _fit(words, added)
    given = _options(words)
    if re.fullmatch("benchmarks (?!report).*", program(words)):
        words = [*words, "--no-resume"]  # the stored rows of a case do not replace its run
    return [
        *words,
        *(f"{option}={value}" for option, value in added.items() if option not in given),
    ]


def _fit(words: list[str], added: dict[str, str]) -> None:
    """Change the sizes of a training run to those that its config accepts."""
    config = _options(words)["--config"]
    if "configs/mqar.py" in config:
        words[:] = [w + ",suite=tiny" if w.startswith("--config=") else w for w in words]
        added.clear()
        added["--config.epochs"] = "1"
        return
    if "configs/fox.py" in config and "--config.model.hidden_size" in added:
        added["--config.model.hidden_size"] = "192"
    if (count := _devices(words)) > 1 and "--config.batch_size" in added:
        added["--config.batch_size"] = str(count)
    text = " ".join(words)
    if (
        gpt2 := "longcrawl64" in text
        or "configs/fox.py" in config
        and "tokenizer=bytes" not in text
    ):
        small_rows = {"--config.batch_size": "1", "--config.data.sequence_length": "32"}
        added.update({k: v for k, v in small_rows.items() if k in added and _devices(words) == 1})
    if "source=" not in config:
        words[:] = [re.sub(r"(--config.data.sequence_length)=.*", r"\1=64", word) for word in words]
    sizes = _options(words) | added
    step = int(sizes["--config.batch_size"]) * int(sizes["--config.data.sequence_length"])
    if "--config.total_tokens" in added:
        added["--config.total_tokens"] = str(2 * step)
    else:
        # A folder of results is named by the last step of a small run of docs/papers/fox.md, which is the eighth.
        most = (8 if "configs/fox.py" in config else 2) * step
        most = max(most, 2 * int(float(sizes["--config.optimizer.warmup_tokens"])))
        most = min(most, int(float(sizes["--config.total_tokens"])))
        words[:] = [re.sub(r"(--config.total_tokens)=.*", rf"\1={most}", word) for word in words]
    if gpt2 and "slimpajama" not in config:
        added.pop("--config.model.vocab_size", None)
    if "source=" in config:  # the sizes are those of the pretrained model
        for option in [name for name in added if name.startswith("--config.model.")]:
            del added[option]
    elif "--config.model.num_layers" in added:
        given = sizes.get("--config.model.pattern")
        named = re.search(r"pattern=(\w+)", config)
        if given:
            added["--config.model.num_layers"] = str(len(given))
        elif named or "mom.py" in config and "hybrid=1" in config:
            letters = dict.fromkeys(named[1] if named else "LN")  # one layer of each letter
            added["--config.model.pattern"] = "".join(letters)
            added["--config.model.num_layers"] = str(len(letters))
        if "configs/linear_moe.py:a" in config or "feedforward=moe" in config:
            for letter in dict.fromkeys(added.get("--config.model.pattern", "L")):
                added[f"--config.model.layers.{letter}.feedforward.expert_size"] = "32"


def _devices(words: Sequence[str]) -> int:
    """Return the number of devices of the mesh that a command's options give."""
    axes = [int(v) for k, v in _options(words).items() if k.startswith("--config.mesh.")]
    return math.prod(axes)


def recipe(target: str) -> list[list[str]]:
    """Return the commands of the Makefile's recipe of a target that `$(RUN)`, the Python of `.venv`, runs."""
    rule = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert rule, target
    found = re.findall(r"^\t\$\(RUN\) (.*)$", rule[1], re.MULTILINE)
    assert found, f"make {target} runs no Python; mark it by a reason"
    return [["python", *line.split()] for line in found]


def run(command: Command, folder: Path, cache: Path) -> None:
    """Run a command of a page in the page's folder.

    Args:
        command: the command.
        folder: the folder.
        cache: a folder in which files that commands read are made, see `doc_files.provide`.

    Raises:
        AssertionError: the command failed; the message is what it printed.
    """
    name = command.words[0]
    if name == "make":
        for target in command.words[1:]:
            for words in recipe(target):
                run(command._replace(words=words), folder, cache)
        return
    if name in OTHERS:
        return _subprocess(command.text, folder, {})
    words, environment = small(command.words), dict(command.environment)
    if program(words) == "demo":
        _demo(words, folder, cache)
        return
    doc_files.provide(words, folder, cache)
    if program(words) == "benchmarks mom_recall":  # it refuses a file with rows of other sizes
        (folder / _options(words)["--output"]).unlink(missing_ok=True)
    if (count := _devices(words)) > 1 and "XLA_FLAGS" not in environment:
        environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={count}"
    if not environment:
        doc_commands.run(words, folder)
        return
    start = [sys.executable] if name == "python" else [sys.executable, "-m", "lsm_jax"]
    rest = words[1:]
    if name == "python" and rest[0] != "-m":
        rest[0] = str(ROOT / rest[0])
    if "XLA_FLAGS" in environment:
        environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {environment['XLA_FLAGS']}"
    _subprocess([*start, *rest], folder, environment)


def _demo(words: list[str], folder: Path, cache: Path) -> None:
    """Run demo.py once for all pages, and copy its run into a page's folder.

    So small a run ends with the error that its model is worse than the order-2 model, after everything is written; `make
    newcomer` runs the complete demo.
    """
    run = cache / "runs/demo"
    if not run.exists():
        # The compiler optimises, since the tests' settings make the evaluation of 2^18 tokens several times slower.
        environment = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "XLA_FLAGS": ""}
        try:
            _subprocess([sys.executable, str(ROOT / words[1]), *words[2:]], cache, environment)
        except AssertionError as error:
            worse = (
                r"the model has [\d.]+ bits per byte, not less than the order-2 model's [\d.]+\s*$"
            )
            if not re.search(worse, str(error)):
                shutil.rmtree(run, ignore_errors=True)
                raise
    shutil.copytree(run, folder / "runs/demo", dirs_exist_ok=True)


def _subprocess(command: list[str] | str, folder: Path, environment: dict[str, str]) -> None:
    """Run a command, or a line of a shell, in a process of its own.

    Raises:
        AssertionError: it failed; the message is what it printed.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)} | environment
    done = subprocess.run(
        command, shell=isinstance(command, str), cwd=folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}: {done.stdout}"
