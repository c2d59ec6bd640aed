"""Train tiny runs of each configuration family with the code of a source tree, and read their losses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# Eight steps of 256 tokens; TEXT and SOURCE are replaced by paths.
_COMMON = (
    "--config.total_tokens=2048 --config.batch_size=4 --config.data.sequence_length=64 --config.log_every=1 "
    "--config.checkpoint_every=4 --config.keep_last=4 --config.eval_every=0 --config.optimizer.warmup_tokens=512"
).split()
_TEXT = ["--config.data.path=TEXT"]
_SMALL = (
    "--config.model.hidden_size=32 --config.model.num_layers=2 --config.model.vocab_size=257 --config.model.dtype=float32"
).split()
RUNS: dict[str, list[str]] = {
    "lm": ["--config=configs/lm.py:gated_deltanet-tiny,pattern=LN", *_COMMON, *_TEXT, *_SMALL],
    "lm-mamba2": ["--config=configs/lm.py:mamba2-tiny", *_COMMON, *_TEXT, *_SMALL],
    "fox": [
        "--config=configs/fox.py:pro-125m", *_COMMON, *_TEXT, *_SMALL, "--config.data.tokenizer=bytes",
        "--config.data.json_escape=False", "--config.model.layers.L.mixer.num_heads=2",
        "--config.model.layers.L.mixer.head_dim=16",
    ],
    "mom": ["--config=configs/mom.py:tiny,hybrid=0", *_COMMON, *_TEXT, *_SMALL],
    "linear_moe": ["--config=configs/linear_moe.py:tiny,mixer=gla,pattern=LN", *_COMMON, *_TEXT, *_SMALL],
    "liger": [
        "--config=configs/liger.py:auto,source=SOURCE,data=text", *_COMMON, *_TEXT, "--config.model.dtype=float32",
    ],
    "mqar": ["--config=configs/mqar.py:gla,width=32,suite=tiny", "--config.epochs=1"],
}  # fmt: skip


def _train(name: str, tree: Path, workdir: Path, text: Path) -> None:
    """Run the train.py of the source tree `tree` on the tiny run called `name` (an entry of `RUNS`), which
    starts the run or continues it.
    """
    source = _write_llama(text.parent / "llama")
    arguments = [a.replace("TEXT", str(text)).replace("SOURCE", str(source)) for a in RUNS[name]]
    command = [sys.executable, "train.py", *arguments, f"--workdir={workdir}"]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"training the tiny run {name} with the code in {tree} failed: {done.stdout[-2000:]}{done.stderr[-4000:]}"
        )


def _losses(workdir: Path) -> str:
    """Return as JSON the losses and gradient norms of all steps of a run, or the accuracies of a recall
    sweep.
    """
    result = workdir / "result.json"
    if result.is_file():
        members = json.loads(result.read_text())["members"]
        return json.dumps([[m["learning_rate"], m["accuracy"]] for m in members])
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    losses = {r["step"]: [r["train/loss"], r["train/grad_norm"]] for r in rows if "train/loss" in r}
    if not losses:
        raise RuntimeError(f"{workdir}: no losses in metrics.jsonl")
    return json.dumps(losses)


def write_text(folder: Path) -> Path:
    """Write the training text of the tiny runs, twelve short documents, into `folder`, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(12):
        line = "to be or not to be, that is the question. "
        (folder / f"{i}.txt").write_text(f"document {i}: " + line * (20 + i))
    return folder


def _write_llama(folder: Path) -> Path:
    """Write a tiny pretrained transformer with random weights and a tokenizer of bytes into a folder,
    unless it exists, and return the folder.
    """
    if folder.is_dir():
        return folder
    import tokenizers

    from tests.linearize.conftest import write_llama

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    write_llama(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def collect_runs(tree: Path, folder: Path, text: Path) -> Iterator[tuple[str, str]]:
    """Train each tiny run with the code of `tree`, and yield (name, losses as JSON); the runs remain in
    `folder`.
    """
    for name in RUNS:
        workdir = folder / name
        shutil.rmtree(workdir, ignore_errors=True)
        _train(name, tree, workdir, text)
        yield name, _losses(workdir)


def collect_resume(
    tree: Path, reference: Path, folder: Path, text: Path
) -> Iterator[tuple[str, str]]:
    """Yield (name, losses as JSON) of each tiny run that the code in the folder `tree` continues: a copy of
    the reference's finished run, without the checkpoints after the one in its middle.
    """
    for name in RUNS:
        if not (reference / name / "checkpoints").is_dir():
            continue
        workdir = folder / name
        shutil.rmtree(workdir, ignore_errors=True)
        # With the same text and source, since a config contains their paths.
        shutil.copytree(reference / name, workdir)
        shutil.rmtree(workdir / "checkpoints" / "8")
        _train(name, tree, workdir, text)
        yield name, _losses(workdir)
