"""Tests of the start of a training run: signals before the first step, wrong data and arguments, and the
files that a failed start leaves behind.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

import lsm_jax
from configs import lm, tracking
from lsm_jax.training import loop, memory_check, metrics, read_config, train, train_recall
from lsm_jax.training import start as training_start
from lsm_jax.training.config_json import to_dict
from lsm_jax.training.metrics import MetricsWriter, TrainProgress
from tests import doc_commands
from tests.marks import slow_after
from tests.training import tiny

SAID = "train.py: SIGINT: stopped; nothing further was saved"


def start(folder, *arguments, **environment):
    """Start train.py on the tiny run in another process, with its text and config in `folder`."""
    text = tiny.write_text(folder / "text")
    config = folder / "tiny_config.py"
    config.write_text(
        f"from tests.training import tiny\ndef get_config():\n    return tiny.config({str(text)!r})\n"
    )
    command = [sys.executable, "train.py", f"--config={config}", *arguments]
    settings = {"JAX_PLATFORMS": "cpu", **environment}
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | settings,
    )


def wait_until_caught(process, number):
    """Wait until a process has a handler for the signal `number`."""
    status, deadline = Path(f"/proc/{process.pid}/status"), time.monotonic() + 60
    while time.monotonic() < deadline:
        caught = next(x for x in status.read_text().splitlines() if x.startswith("SigCgt:"))
        if int(caught.split()[1], 16) >> (number - 1) & 1:
            return
        time.sleep(0.01)
    raise AssertionError(f"no handler of signal {number} after 60 s")


@pytest.mark.parametrize("when", slow_after(1, ["compiling the step", "importing", ": reading "]))
def test_a_signal_before_the_first_step_is_one_line(tmp_path, when):
    process = start(tmp_path, f"--workdir={tmp_path / 'run'}", JAX_ENABLE_COMPILATION_CACHE="0")
    said = []
    if when == "importing":
        wait_until_caught(process, signal.SIGTERM)
    else:
        for line in process.stderr:
            said.append(line)
            if when in line:
                break
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == SAID, errors
    assert "Traceback" not in errors and not output
    assert not (tmp_path / "run").exists()  # so a corrected command may use it


CODE = """
import hashlib, os, signal, sys, time
from lsm_jax import interrupts
from tests.marks import slow_after
interrupts.leave_on_signals("here")
with interrupts.noted() as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1.5)  # longer than the delay after which a signal that is not noted ends the process
    print(stop.signal, flush=True)
    if sys.argv[1] == "again":
        os.kill(os.getpid(), signal.SIGTERM)
assert sys.argv[1] == "compiling"
print("compiling", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # executes no Python code
"""


@pytest.mark.parametrize("case", ["again", "compiling"])
def test_a_signal_is_noted_once_and_ends_even_what_is_not_python(case):
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, case],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "15\n"
    if case == "compiling":
        assert process.stdout.readline() == "compiling\n"
        process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 143
    assert process.stderr.read() == "here: SIGTERM: stopped; nothing further was saved\n"


def test_a_signal_ends_an_import_that_would_abort_the_process(tmp_path):
    (tmp_path / "extension.py").write_text(
        "import os, time\ntry:\n    print('importing', flush=True)\n    time.sleep(60)\n"
        "except BaseException:\n    os.abort()\n"
    )
    code = 'from lsm_jax import interrupts; interrupts.leave_on_signals("here"); import extension'
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])},
    )
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 130
    assert process.stderr.read() == "here: SIGINT: stopped; nothing further was saved\n"


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_the_imports_of_a_module_with_one_line(tmp_path, name):
    (tmp_path / "grain.py").write_text(
        "import time\nprint('importing', flush=True)\ntime.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "lsm_jax.data.tokenize", "--help"],
        env=os.environ | dict(PYTHONPATH=f"{tmp_path}{os.pathsep}{os.getcwd()}"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.Signals[name])
    assert process.wait(timeout=20) == 128 + signal.Signals[name]
    line = f"lsm_jax.data.tokenize: {name}: stopped; nothing further was saved\n"
    assert process.stderr.read() == line


def test_bad_data_raises_before_anything_is_compiled_or_written(tmp_path, monkeypatch):
    bad = tmp_path / "lines.jsonl"
    bad.write_text('{"text": "a good line"}\n{"no": 1}\n{"no": 2}\n')

    def compiled(*_):
        raise AssertionError("bad data reached the model")

    monkeypatch.setattr(loop.TrainLoop, "run", compiled)
    with pytest.raises(ValueError, match="line .*, at byte .* has no field 'text'"):
        config = tiny.config(bad)
        config.data.heldout_fraction = 0.0
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_other_kind_of_config_is_refused(tmp_path):
    with pytest.raises(ValueError, match="config=TrackingConfig: accepted is a TrainConfig"):
        train(tracking.get_config(), tmp_path)
    with pytest.raises(ValueError, match="config=TrainConfig: accepted is a RecallConfig or Tra"):
        train_recall(lm.get_config("gla-nano"), tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workdir=", "--config=configs/mqar.py"], "--workdir is missing; give the run's directory"),
        (["--workdir=x", "--config=none.py"], "--config=none.py: there is no file 'none.py'; accepted is FILE.py:VARIANT"),
        (["--workdir=x", "--config="], "--config is missing; accepted is FILE.py:VARIANT"),
        (["--workdir=x", "--config=configs/lm.py:"], "variant '': accepted is <method>-<size>"),
        (["--workdir=x", "--config=/dev/zero"], "--config=/dev/zero: '/dev/zero' is no regular file; accepted is"),
        (["--workdir=x", "--config", "/dev/zero:gla-tiny"], "--config=/dev/zero: '/dev/zero' is no regular file"),
        (["--workdir=x", "--config=README.md"], "--config=README.md: 'README.md' is not a Python file"),
        (["--workdir=x", "--config=configs/lm.py:gla-tiny", "--config.model.layers.L.mixer=deltanet"],
         "--config.model.layers.L.mixer=deltanet: accepted is None; set the fields one by one"),
        (["--workdir=x", "--config=configs/lm.py:gla-tiny", "--config.model.lora.rank=4"],
         "--config.model.lora.rank: lora is None here, which has no fields"),
        (["--workdir=x", "--config.batch_size=3"], "--config is missing; accepted is FILE.py:VARIANT"),
        (["--workdri=x", "--config=configs/lm.py:gla-tiny"], "unknown flag --workdri; did you mean '--workdir'?"),
        (["--workdir=x", "--config=configs/lm.py:gla-tiny", "--lr=1"], "unknown flag --lr; did you mean '--config.optimizer.peak_lr'?"),
        (["--workdir=x", "--config=configs/lm.py:gla-tiny", "--config.total_tokens=1.5e0"],
         "--config.total_tokens=1.5e0: accepted are whole numbers"),
        (["--workdir=x", "--config=configs/lm.py:gla-tiny", "--config.total_tokens=1M"],
         "--config.total_tokens=1M: accepted are whole numbers, such as 1000000 or 1e6"),
        (["--workdir=x", "--config=configs/lm.py:gla-tiny", "--config.optimizer.peak_lr=fast"],
         "--config.optimizer.peak_lr=fast: accepted are numbers, such as 1e-3"),
        (["--workdir=x", "--config=configs/lm.py:gla-tiny", "--config.model.layers.N.mixer.window=4"],
         "--config.model.layers.N.mixer.window: no layer of the model has the letter N, its pattern is 'L'; accepted are fields of "
         "model.layers.L, or another pattern"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(arguments, message):
    with pytest.raises(AssertionError) as refused:
        doc_commands.parse(["python", "train.py", *arguments])
    printed = str(refused.value).partition(f"{' '.join(arguments)}: ")[2]
    assert printed.startswith(f"train.py: {message}") and len(printed.splitlines()) == 1


def test_an_error_of_the_command_is_one_line():
    command = [sys.executable, "train.py", "--workdir=x", "--config=configs/lm.py:gla-nano", "--init_from="]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "train.py: --init_from is empty; give the directory of a run, or leave it out\n"  # fmt: skip


def test_the_command_without_arguments_prints_its_page():
    for words in (["train.py"], ["-m", "lsm_jax.plan"]):
        with pytest.raises(AssertionError) as refused:
            doc_commands.parse(["python", *words])
        page = str(refused.value)
        assert "--config is missing" in page and page.count("    python ") >= 3


SHORT = """
import sys, train
train.parse(["train.py", "--config=configs/lm.py:gla-tiny", "--workdir=x", *sys.argv[1:]])
config = train.FLAGS.config
print(config.total_tokens, config.optimizer.warmup_tokens, config.optimizer.peak_lr)
"""


@pytest.mark.parametrize(
    ("flags", "output"),
    slow_after(1, [
        (["total_tokens=1e6"], "1000000 200000 0.003"),
        (["total_tokens=1.5e5"], "150000 15000 0.003"),  # the warm-up becomes a tenth of the run
        (["total_tokens=1e5", "optimizer.warmup_tokens=5e3", "optimizer.peak_lr=1e-3"], "100000 5000 0.001"),
    ]),
)  # fmt: skip
def test_a_short_trial_needs_one_number(flags, output):
    command = [sys.executable, "-c", SHORT, *(f"--config.{flag}" for flag in flags)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.strip() == output, done.stderr
    assert ("warmup_tokens=15000, a tenth" in done.stderr) == ("15000" in output)


SETS = """
import sys, train
train.parse(["train.py", "--config=configs/fox.py:transformer-llama-360m", "--workdir=x", *sys.argv[1:]])
print(train.FLAGS.config.model.layers["L"].mixer.rope_base, train.FLAGS.config.seed)
"""


@pytest.mark.parametrize(
    ("field", "output"),
    slow_after(1, [
        ("model.layers.L.mixer.rope_base", "None 3"),
        ("model.layers.L.mixer.num_heads", "train.py: --config.model.layers.L.mixer.num_heads=None: accepted is int, and the config has 16"),
        ("model.layers.L.feedforward", "500000.0 3"),
        ("model.layers.L.mixer.rope", "train.py: --config.model.layers.L.mixer.rope: FoXConfig has no field 'rope'"),
    ]),
)  # fmt: skip
def test_none_is_set_where_a_field_accepts_it(field, output):
    command = [sys.executable, "-c", SETS, f"--config.{field}=None", "--config.seed=3"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.stdout + done.stderr).startswith(output)
    assert done.returncode == output.startswith("train.py")


def test_invalid_directories_are_refused(tmp_path):
    config = tiny.config(tiny.write_text(tmp_path / "text"))
    file = tmp_path / "file"
    file.write_text("")
    for workdir in (file, file / "inside"):
        with pytest.raises(ValueError, match=f"workdir='{workdir}': {file} is a file; accepted is"):
            train(config, workdir)
    for workdir, message in (
        ("/proc/x", "no folder can be made in /proc"),
        (tmp_path / ("x" * 300), "the name is too long"),
    ):
        with pytest.raises(ValueError, match=f"workdir='{workdir}': .*{message}"):
            train(config, workdir)  # which would fail after the first step, without the check
    folder = tmp_path / "run"
    folder.mkdir()
    for content in (
        "",
        "{",
        "[]",
        "3",
        '{"type": "lsm_jax.nowhere:Thing"}',
        '{"type": 7}',
        "\udcff",
    ):
        (folder / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
        with pytest.raises(
            ValueError, match=f"workdir='{folder}': its config.json is not a config"
        ):
            train(config, folder)
        with pytest.raises(ValueError, match="init_from=.*: its config.json is not a config"):
            read_config(folder, "init_from")
    with pytest.raises(ValueError, match="init_from='/nowhere': no config.json there"):
        train(tiny.config(tmp_path / "text", init_from="/nowhere"), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_progress_shows_no_unknown_values(capsys, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(metrics, "SECONDS_BETWEEN_LINES", -1.0)
    with TrainProgress("tiny", 9, 9):
        assert capsys.readouterr().err == "tiny: step 9 of 9; the run is complete\n"
    with TrainProgress("tiny", 0, 9) as progress:
        progress.advance(1, 5.0, 0.0)
        progress.advance(2, 4.5, 7.0, 0.4321)
        progress.advance(3, 4.0, 7.0)
    lines = capsys.readouterr().err.splitlines()
    assert lines[-3] == "step 1/9 · loss 5.0000"
    start = "step 2/9 · loss 4.5000 (mean of 2: 4.7500) · 7 tokens/s · MFU 43.2% · "
    assert lines[-2].startswith(start)
    start = "step 3/9 · loss 4.0000 (mean of 3: 4.5000) · 7 tokens/s · "
    assert lines[-1].startswith(start) and "left" in lines[-1]
    with TrainProgress("tiny", 0, 90, "bytes") as progress:
        for step in range(1, 71):
            progress.advance(step, float("nan") if step == 70 else float(step), 7.0)
    assert "(mean of 50: 44.5000) · 7 bytes/s" in capsys.readouterr().err.splitlines()[-1]
    writer = MetricsWriter(tmp_path, 0)
    writer.write(1, {"loss": float("nan"), "rate": 1.0})
    writer.close()
    assert "NaN" not in caplog.text


def test_the_speed_counts_steps_that_have_ended(monkeypatch):
    now = iter([0.0, 2.0, 3.0, 7.0])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(now))
    meter = metrics.Meter()
    assert (
        meter.tokens_per_second(100) == 0.0
    )  # reported after the compiled step: nothing ended yet
    meter.step()
    assert meter.tokens_per_second(100) == 50.0  # since the start, not since the last call
    meter.pause(0.5)
    meter.step()
    assert meter.tokens_per_second(100) == 200.0


def test_a_damaged_config_of_a_run_is_an_error(tmp_path):
    config = tiny.config(tiny.write_text(tmp_path / "text"))
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(ValueError, match="checkpoints is a file; accepted is a directory"):
        train(config, tmp_path)
    saved = to_dict(config)
    for model in (None, saved["model"] | dict(hidden_size="abc")):
        (tmp_path / "config.json").write_text(json.dumps(saved | dict(model=model)))
        with pytest.raises(ValueError, match="config.json describes no model"):
            lsm_jax.load_run(tmp_path)


DEMO = """
import os, runpy, signal, sys, time
import lsm_jax
from lsm_jax import training
training.train = lambda *_: training.TrainResult(1, None, 1.0)
lsm_jax.load_run = lambda _: (os.kill(os.getpid(), signal.SIGINT), time.sleep(9))
sys.argv = ["demo.py", "--workdir=" + sys.argv[1]]
runpy.run_path("demo.py", run_name="__main__")
"""


def test_a_signal_ends_the_demo_s_evaluation_with_one_line(tmp_path):
    command = [sys.executable, "-c", DEMO, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 128 + signal.SIGINT
    assert done.stderr == "demo.py: SIGINT: stopped; nothing further was saved\n"


@pytest.mark.slow
def test_every_run_has_a_picture(tmp_path):
    """`train.py` draws the training curves at the end of a run."""
    flags = ["--config=configs/lm.py:gla-nano", f"--workdir={tmp_path / 'run'}"]
    text = tiny.write_text(tmp_path / "text")
    small = [f"data.path={text}", "data.sequence_length=32", "batch_size=4", "eval_every=0"]
    small += ["model.hidden_size=16", "model.num_layers=1", "total_tokens=4e2", "log_every=1"]
    small += ["model.layers.L.mixer.num_heads=1", "data.heldout_fraction=0.2"]
    command = [sys.executable, "train.py", *flags, *(f"--config.{field}" for field in small)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "3 steps of 128 bytes = 384 bytes" in done.stderr and "bytes/s" in done.stderr
    assert (tmp_path / "run" / "plots" / "training.png").stat().st_size > 1000


def test_the_memory_is_compared_before_anything_is_compiled(tmp_path, monkeypatch, capsys):
    def compiled(*_):
        raise AssertionError("compiled")

    monkeypatch.setattr(training_start, "make_program", compiled)
    monkeypatch.setattr(memory_check, "device_bytes", lambda _: 24 * 2**30)
    config = lm.get_config("gla-340m")
    config.data.path = str(tiny.write_text(tmp_path / "text"))
    config.batch_size *= len(jax.devices())
    message = r"requires about 9\d\.\d GiB of memory on each device, which has 24.0 GiB; with "
    with pytest.raises(
        ValueError, match=message + r"--config.accumulation_steps=(4|8) it requires"
    ):
        train(config, tmp_path / "run")
    monkeypatch.setattr(memory_check, "device_bytes", lambda _: 3 * 2**30)
    monkeypatch.setattr(memory_check, "_HOPELESS", 10**9)
    config.batch_size = len(jax.devices())
    with pytest.raises(AssertionError, match="compiled"):
        train(config, tmp_path / "run")
    printed = capsys.readouterr().err
    assert "accumulation_steps is not enough; it fits with shorter rows" in printed
    assert "a smaller size (at most 125m) or more devices" in printed
    assert not (tmp_path / "run").exists()


def test_small_runs_are_not_planned(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_check, "plan", None)
    memory_check.check_memory(tiny.config(tmp_path))
    assert memory_check.device_bytes(jax.local_devices()[0]) > 2**28
