"""Tests of eval.py and its tasks on a run of a few steps: the files and metric keys that it writes, equal
results if it is repeated, and error messages of one line.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import lsm_jax
from lsm_jax.evaluation import (
    TASKS,
    LossCurve,
    Request,
    check_tasks,
    output_folder,
    perplexity_table,
    read_metrics,
)
from lsm_jax.evaluation.request import heldout_config

ROOT = Path(__file__).resolve().parents[2]


def eval_script(*flags: str, limit: int | None = None) -> subprocess.CompletedProcess:
    """Run eval.py; no file that it writes may be larger than `limit` bytes."""
    command = [sys.executable, str(ROOT / "eval.py"), *flags]
    if limit is not None:
        command = ["prlimit", f"--fsize={limit}", *command]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )


def test_eval_writes_results_plots_and_a_sample(workdir):
    done = eval_script(
        f"--workdir={workdir}",
        "--max_tokens=2048",
        "--prompt=def ",
        "--num_tokens=8",
        "--output=one",
    )
    assert done.returncode == 0, done.stderr
    assert "bits per byte" in done.stdout and "bytes/s" in done.stdout
    folder = workdir / "eval" / "one"
    files = {p.name for p in folder.iterdir()}
    assert files == {
        "results.json",
        "results.npz",
        "loss_by_position.png",
        "sample.json",
        "sample.txt",
    }

    results = json.loads((folder / "results.json").read_text())
    loss = np.load(folder / "results.npz")["val/loss_per_token"]
    assert loss.shape == (32,) and loss.dtype == np.float64
    for length in (32, 16, 8, 4):
        assert results[f"val/loss_avg_len_{length}"] == pytest.approx(
            loss[:length].mean(), rel=1e-12
        )
        assert results[f"val/perplexity_len_{length}"] == pytest.approx(
            np.exp(loss[:length].mean()), rel=1e-12
        )
    assert results["val/tokens"] == 2048 and results["step"] == 3
    assert LossCurve.load(folder / "results.npz").average(16) == pytest.approx(
        results["val/loss_avg_len_16"]
    )
    assert (folder / "sample.txt").read_text().startswith("def ")


@pytest.mark.slow
def test_tasks_repeat_and_count_every_token(run, workdir, tmp_path):
    first = TASKS["perplexity"](run, Request(), tmp_path)
    again = TASKS["perplexity"](run, Request(batch_size=7), tmp_path)
    assert again["val/loss"] == pytest.approx(first["val/loss"], rel=1e-9)
    store = lsm_jax.data.TokenStore(workdir.parent / "text" / "heldout.zarr")
    assert again["val/tokens"] == first["val/tokens"] == store.num_documents * 64
    assert again["num_sequences"] == store.num_documents * 2
    bits = first["val/loss"] / np.log(2)  # per token; the same per byte, if each token is a byte
    assert first["val/bits_per_byte"] >= bits * (1 - 1e-12)
    sample = [
        TASKS["generate"](run, Request(num_tokens=6, top_k=5), tmp_path).text for _ in range(2)
    ]
    assert sample[0] == sample[1]
    assert perplexity_table(first)


def test_other_data_and_longer_rows(run, workdir, tmp_path):
    request = Request(
        data=str(workdir.parent / "text"), sequence_length=64, piece_length=32, max_tokens=512
    )
    results = TASKS["perplexity"](run, request, tmp_path)
    assert results["val/tokens"] == 512 and "val/perplexity_len_64" in results
    assert request.folder(3) == "3-text-T64-first512"
    assert Request(data="a/b/heldout.zarr").folder(7) == "7-b-heldout"
    (tmp_path / "more.txt").write_text("some text that was never in a store\n" * 20)
    text = TASKS["perplexity"](run, Request(data=str(tmp_path / "more.txt")), tmp_path)
    assert text["val/tokens"] > 500


def test_alignment_is_reduced_to_a_divisor_of_the_length(run):
    aligned = dataclasses.replace(run.config.data, align_documents=16, sequence_length=64)
    other = dataclasses.replace(run, config=dataclasses.replace(run.config, data=aligned))
    assert heldout_config(other, Request(sequence_length=72)).align_documents == 8


def test_a_store_of_another_tokenizer(run, workdir, tmp_path):
    store = workdir.parent / "text" / "heldout.zarr"
    other = tmp_path / "other.zarr"
    other.mkdir()
    for file in store.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    (other / ".zattrs").write_text('{"encoder": "tiktoken-gpt2"}')
    (other / "checksums.json").unlink()
    with pytest.raises(ValueError, match="encoder 'tiktoken-gpt2', but the tokenizer is 'bytes'"):
        TASKS["perplexity"](run, Request(data=str(other)), tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_tokens", 0, "at least 1"),
        ("num_tokens", 2**31, "below 2\\^31"),
        ("sequence_length", -1, "at least 1"),
        ("temperature", -1.0, "0 \\(greedy\\)"),
        ("top_k", 0, "at least 1"),
        ("top_p", 1.5, "\\(0, 1\\]"),
        ("seed", 2**64, "2\\^63"),
    ],
)
def test_numbers_out_of_range(field, value, message):
    with pytest.raises(ValueError, match=f"{field}={value}.*{message}"):
        Request(**{field: value}).validate()


def test_a_chat_is_greedy_by_default():
    assert Request(chat=True).sampling_temperature == 0.0
    assert Request().sampling_temperature == 0.8
    assert Request(chat=True, temperature=0.5).sampling_temperature == 0.5


def test_unknown_tasks_are_refused():
    assert check_tasks(["generate"]) == ["generate"]
    with pytest.raises(
        ValueError, match="tasks='perplexity,haystack', accepted: perplexity, needle, "
    ):
        check_tasks(["perplexity", "haystack"])


@pytest.mark.slow
def test_errors_are_one_line(workdir):
    for flags, message in (
        (("--workdir=/nowhere/at/all",), "no config.json"),
        ((f"--workdir={workdir}", "--step=2"), "steps 3"),
        (
            (f"--workdir={workdir}", "--data=/nowhere.zarr"),
            "eval.py: data='/nowhere.zarr' does not exist",
        ),
        (
            (f"--workdir={workdir}", os.fsdecode(b"--prompt=a\xff")),
            r"prompt='a\udcff': not UTF-8 at character 1",
        ),
        ((f"--workdr={workdir}",), "workdr"),
        (
            (f"--workdir={workdir}", "--needle.length=5"),
            "--needle.length; accepted after needle. are lengths,",
        ),
    ):
        done = eval_script(*flags)
        assert done.returncode == 1
        assert message in done.stderr and "Traceback" not in done.stderr
        said = [
            line for line in done.stderr.strip().splitlines() if ": loading the run in " not in line
        ]
        assert len(said) == 1, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("when", ["loading the run", "perplexity: "])
def test_a_signal_is_one_line(workdir, when):
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "eval.py"), f"--workdir={workdir}", "--output=stopped"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert process.stderr is not None
    for line in process.stderr:
        if when in line:
            break
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    assert process.wait(timeout=60) == 130
    assert rest == "eval.py: SIGINT: stopped; nothing further was saved\n"
    assert not (workdir / "eval" / "stopped").exists()


@pytest.mark.parametrize("output", ["../..", "../../elsewhere", "/elsewhere", "a/../../b", "."])
def test_outputs_stay_in_the_run(workdir, output):
    with pytest.raises(ValueError, match="output=.* is not inside .*eval; accepted is the name of"):
        output_folder(workdir, output)


def test_outputs_never_go_through_links(run, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "run" / "eval").mkdir(parents=True)
    (tmp_path / "run" / "eval" / "linked").symlink_to(outside)
    with pytest.raises(ValueError, match="output='linked' names .* is a link"):
        output_folder(tmp_path / "run", "linked")
    (tmp_path / "run" / "eval" / "file").write_text("")
    with pytest.raises(
        ValueError, match="output='file': .*eval/file is a file; accepted is a folder"
    ):
        output_folder(tmp_path / "run", "file")
    with pytest.raises(ValueError, match="'eval/file/x': a part of the path is no folder"):
        output_folder(tmp_path / "run", "file/x")
    folder = output_folder(tmp_path / "run", "new")
    folder.mkdir()
    (outside / "kept.txt").write_text("kept")
    for name in ("sample.txt", "sample.json"):
        (folder / name).symlink_to(outside / "kept.txt")
    TASKS["generate"](run, Request(num_tokens=2), folder)
    assert (outside / "kept.txt").read_text() == "kept"
    assert not any(path.is_symlink() for path in folder.iterdir())


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_is_known_before_the_run_is_loaded(workdir):
    done = eval_script(f"--workdir={workdir}", "--output=big/folder", limit=1000)
    assert done.returncode == 1 and "loading the run" not in done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert f"{workdir / 'eval'}" in line or f"{workdir}" in line
    assert "the file is larger than the limit" in line and "nothing was computed" in line
    assert not (workdir / "eval" / "big").exists()


@pytest.mark.slow
def test_results_that_cannot_be_written_are_printed(workdir, tmp_path):
    # results.npz is a folder: the first file of `perplexity` cannot be written.
    (workdir / "eval" / "blocked" / "results.npz").mkdir(parents=True)
    done = eval_script(
        f"--workdir={workdir}",
        "--tasks=generate,perplexity",
        "--max_tokens=512",
        "--output=blocked",
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert (
        "blocked/results.npz: it is a folder; the results of perplexity could not be saved" in last
    )
    assert "those of generate are in" in last
    results = json.loads(done.stdout.strip().splitlines()[-1])
    assert results["val/tokens"] == 512
    names = {p.name for p in (workdir / "eval" / "blocked").iterdir()}
    assert names == {"results.npz", "sample.txt", "sample.json"}


def test_rows_of_a_damaged_metrics_file_are_read_as_far_as_possible(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [b'{"step": 1, "loss": 2.0}', b"[1]", b"{", b"\xff", b'{"loss": 1.0}', b"[" * 100_000]
    path.write_bytes(b"\n".join([*lines, b'{"step": 2, "loss": 1.5}']) + b"\n")
    steps, values = read_metrics(path)["loss"]
    assert steps.tolist() == [1, 2] and values.tolist() == [2.0, 1.5]


def test_a_length_that_does_not_divide_the_stores_reads_every_token(run, workdir, tmp_path):
    results = TASKS["perplexity"](run, Request(sequence_length=48), tmp_path)
    store = lsm_jax.data.TokenStore(workdir.parent / "text" / "heldout.zarr")
    assert results["val/tokens"] == store.num_documents * 64
    assert results["num_sequences"] == store.num_documents * 2
