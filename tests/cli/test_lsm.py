"""Tests of the command `lsm`: its pages of help, its own commands, and the configs that it finds by name."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs import lm
from lsm_jax import commands, interrupts, programs
from lsm_jax.cli import compare, completion, doctor, main
from lsm_jax.cli.declared import flags_of
from lsm_jax.cli.table import COMMANDS, EXPORTERS, IMPORTERS
from lsm_jax.convert import released_export
from lsm_jax.linearize.export import FORMATS
from lsm_jax.mixers import METHODS, WRAPPERS
from lsm_jax.names import did_you_mean

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "tests/training/goldens/release_0_1/run"
NAMES = [command.name for command in COMMANDS]


def test_help_imports_no_library():
    code = "import sys; from lsm_jax.cli import main; main(['--help']); main(['eval', '--help']); print(sorted(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = run.stdout.splitlines()[-1]
    assert "'lsm_jax.cli.main'" in modules
    for library in ("jax", "numpy", "absl", "flax", "rich"):
        assert f"'{library}'" not in modules


def test_the_overview_names_all_commands(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in NAMES)
    assert set(NAMES) >= {"train", "eval", "tokenize", "convert", "export", "plan", "methods", "compare", "doctor"}  # fmt: skip
    assert main([]) == 0 and main(["help"]) == 0
    assert capsys.readouterr().out == 2 * printed


def test_a_reader_that_is_gone_ends_a_command_without_a_word():
    command = f"set -o pipefail; {sys.executable} -m lsm_jax eval --help | true"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("name", NAMES)
def test_each_page_has_usage_examples_and_flags(name, capsys):
    assert main([name, "--help"]) == 0
    printed = capsys.readouterr().out
    (command,) = (c for c in COMMANDS if c.name == name)
    assert printed.splitlines()[2].startswith(f"    lsm {name} ")
    assert f"# {command.examples[0][0]}" in printed
    assert all(len(line) <= 110 for line in printed.splitlines())
    for flag in command.flags():
        assert f"  {flag.name}" in printed and flag.text
    assert "join(" not in printed and "%(" not in printed  # source text in place of its value
    for mode, _ in command.modes:
        assert f"Flags with {mode}:" in printed
        assert all(f"  {flag.name}" in printed and flag.text for flag in command.mode_flags(mode))
    assert main(["help", name]) == 0
    assert capsys.readouterr().out == printed


def test_flags_are_read_from_the_source():
    flags = {flag.name: flag for flag in flags_of(ROOT / "eval.py")}
    assert flags["--num_tokens"].default == "256" and not flags["--num_tokens"].switch
    assert flags["--chat"].switch and flags["--tasks"].default == "perplexity,generate"
    assert flags["--weights"].text.startswith("The trained parameters or their moving average")
    assert "--overwrite" in {flag.name for flag in flags_of(ROOT / "lsm_jax/data/tokenize.py")}


def test_the_fields_of_groups_are_those_of_the_configs():
    (command,) = (c for c in COMMANDS if c.name == "eval")
    source = (ROOT / "eval.py").read_text()
    for group, _, name in command.groups:
        assert f'"{group}": {name}()' in source
        fields = command.fields(group)
        assert fields and all(field.text for field in fields)


def test_an_unknown_command_names_the_nearest(capsys):
    assert main(["trian", "--config=lm:gla-tiny"]) == 2
    assert "there is no command 'trian'; did you mean 'train'?" in capsys.readouterr().err
    assert main(["xyz"]) == 2
    assert "Commands: train, eval" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "near"), [("GLA", "gla"), ("gal", "gla"), ("mamba_2", "mamba2")])
def test_the_nearest_name_has_the_same_letters(name, near):
    assert did_you_mean(name, METHODS) == f"; did you mean {near!r}?"


def test_the_page_of_export_names_all_formats(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")  # in one line
    assert main(["export", "--help"]) == 0
    (line,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith("  --format "))
    assert all(name in line for name in (*FORMATS, *EXPORTERS))


def test_a_command_without_its_arguments_prints_its_page(capsys):
    assert main(["train"]) == 2
    assert "lsm train --config=lm:gla-nano --workdir=runs/gla" in capsys.readouterr().err


def test_an_unknown_kind_names_the_nearest(capsys):
    assert main(["convert", "hugingface", "--source=x", "--workdir=y"]) == 2
    assert "did you mean 'huggingface'?" in capsys.readouterr().err


@pytest.mark.parametrize("kind", IMPORTERS)
def test_each_kind_of_import_has_its_help(kind, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["convert", kind, "--help"])
    assert exit_.value.code == 0
    assert "--" in capsys.readouterr().out


@pytest.mark.parametrize(
    "form, program",
    [
        ((), "lsm_jax.linearize.export"),
        (("--format=peft",), "lsm_jax.linearize.export"),
        (("--format=fox",), "lsm_jax.convert.fox_export"),
        (("--format", "fox"), "lsm_jax.convert.fox_export"),
        (("--format=released",), "lsm_jax.convert.released_export"),
    ],
)
def test_export_calls_the_exporter_of_the_format(form, program, monkeypatch):
    called: list[list[str]] = []
    monkeypatch.setattr(f"{program}.main", lambda arguments: called.append(arguments) or 0)
    assert main(["export", "--workdir=none", *form, "--out=x"]) == 0
    assert [{"--workdir=none", "--out=x"} <= set(arguments) for arguments in called] == [True]


def test_a_missing_run_is_named_by_an_export(capsys):
    assert main(["export", "--workdir=none", "--out=x"]) == 1
    assert capsys.readouterr().err.startswith("lsm export: workdir='none'")


def test_tokenize_writes_a_store(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("some text " * 100)
    store = tmp_path / "a.zarr"
    arguments = ["--tokenizer=bytes", "--sequence_length=64", "--pack", "--num_workers=1"]
    assert main(["tokenize", "--input", str(tmp_path / "a.txt"), "--output", str(store), *arguments]) == 0  # fmt: skip
    assert store.is_dir() and "rows of 64 tokens" in capsys.readouterr().out


def test_configs_are_found_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = f"{ROOT / 'configs' / 'lm.py'}:gla-tiny"
    for name in ("lm:gla-tiny", "lm.py:gla-tiny", "configs/lm.py:gla-tiny"):
        assert programs.expand(name) == path
    for other in ("other:x", "folder/lm.py:gla-tiny", "variants:x", "/configs/lm.py", "lmm"):
        assert programs.expand(other) == other
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "lm.py").write_text("")
    assert programs.expand("configs/lm.py:gla-tiny") == "configs/lm.py:gla-tiny"
    assert programs.expand("lm:gla-tiny") == path
    given = ["train", "--config", "lm:gla-tiny", "--workdir=lm:gla-tiny", "--config.name=lm"]
    assert programs.expand_arguments(given) == ["train", "--config", path, *given[3:]]


def test_all_configs_are_listed_with_a_sentence():
    listed = programs.config_files()
    assert set(listed) == {path.stem for path in ROOT.glob("configs/*.py")} - {"variants"}
    assert all(listed.values())


def test_an_unknown_config_names_the_nearest(tmp_path):
    command = [sys.executable, "-m", "lsm_jax", "plan", "--config=lmm:gla-tiny"]
    environment = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PATH": ""}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 1 and run.stderr.startswith("lsm plan: --config=lmm:gla-tiny: ")
    assert run.stderr.strip().endswith("e.g. lm:gla-340m; did you mean 'lm'?")


def test_methods_prints_the_table(capsys):
    assert main(["methods"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in METHODS | WRAPPERS)


@pytest.mark.parametrize("name", [*METHODS, *WRAPPERS])
def test_methods_describes_a_method(name, capsys):
    assert main(["methods", name]) == 0
    printed = capsys.readouterr().out
    method = (METHODS | WRAPPERS)[name]
    assert method.paper in printed and method.config.__name__ in printed
    assert "lsm train --config=" in printed


def test_an_unknown_method_names_the_nearest(capsys):
    assert main(["methods", "gated_delta"]) == 2
    assert "did you mean 'gated_deltanet'?" in capsys.readouterr().err


def test_doctor_names_what_serves_here(capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "jaxlib 0." in printed and "Devices" in printed
    assert "    mosaic_gpu: not here: requires NVIDIA, this is CPU" in printed
    assert main(["doctor", "--op=delta_memory"]) == 0
    assert "requires q in bfloat16" in capsys.readouterr().out
    assert main(["doctor", "--op=delta"]) == 2
    assert "did you mean 'delta_memory'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("capability", "expected"),
    [("9.0", "runs calls that meet its requirements"), ("8.0", "not here: requires compute capability 9.0, this is 8.0")],
)  # fmt: skip
def test_doctor_says_which_cards_a_kernel_is_for(capability, expected):
    card = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability=capability)
    lines = list(doctor.op_lines("dplr_memory", doctor.machine_of(card)))
    assert f"    mosaic_gpu: {expected}" in lines
    assert "    xla: runs every call" in lines


def test_compare_draws_runs_and_prints_a_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    other = shutil.copytree(RUN, tmp_path / "other")
    folder = other / "eval" / "8"
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps({"val/loss": 1.25, "val/bits_per_byte": 1.8}))
    picture = tmp_path / "picture.png"
    assert main(["compare", f"first={RUN}", str(other), f"--output={picture}"]) == 0
    printed = capsys.readouterr().out
    assert "first" in printed and "other" in printed and "1.2500" in printed and "9,052" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_example_of_an_export_fits_the_example_of_a_training():
    (command,) = (c for c in COMMANDS if c.name == "export")
    (example,) = (line for _, line in command.examples if "--format=released" in line)
    model = lm.get_config("gla-nano").model
    with pytest.raises(ValueError, match=r"norm_eps=1e-05 .*; with norm_eps \(--norm_eps=1e-06\)"):
        released_export.family_for(model)
    epsilon = float(example.rpartition("--norm_eps=")[2])
    assert released_export.family_for(model, epsilon)[0].model_type == "gla"


def test_messages_name_the_command_that_was_given(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lsm train", "--config=lm:gla-nano"])
    assert programs.shown_name("train.py") == "lsm train"
    monkeypatch.setattr(sys, "argv", ["/home/somebody/train.py"])
    assert programs.shown_name("train.py") == "train.py"


@pytest.mark.parametrize(
    "words",
    [["export", "--out=x", "--format=released"], ["convert", "huggingface", "--source=missing"]],
)
def test_errors_begin_with_the_command_that_was_given(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*words, f"--workdir={tmp_path / 'none'}"]) == 1
    assert capsys.readouterr().err.startswith(f"lsm {words[0]}: ")


def test_compare_counts_bytes_and_says_that_tokenizers_differ(tmp_path, capsys):
    other = shutil.copytree(RUN, tmp_path / "other")
    bytes_run, token_run = compare.read_run("run", RUN), compare.read_run("other", other)
    assert bytes_run.tokenizer == "bytes" and compare.unit_of([bytes_run, token_run]) == "byte"
    assert not compare.tokenizers_differ([bytes_run, token_run])
    config = json.loads((other / "config.json").read_text())
    config["data"]["tokenizer"] = "gpt2"
    (other / "config.json").write_text(json.dumps(config))
    assert main(["compare", str(RUN), str(other), f"--output={tmp_path / 'picture.png'}"]) == 0
    printed = capsys.readouterr()
    assert "tokens/s" in printed.out and "bytes/s" not in printed.out
    assert "different tokenizers (run: bytes, other: gpt2)" in printed.err


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        (["none"], "RUN='none': there is no metrics.jsonl"),
        ([str(RUN), str(RUN)], "two runs are called 'run'; name them: NAME=DIR"),
    ],
)
def test_compare_refuses(runs, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *runs]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "comparison.png").exists()


@pytest.mark.parametrize("output", ["picture.svg", "picture", ""])
def test_compare_writes_png_files_only(output, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", str(RUN), f"--output={output}"]) == 2
    assert "accepted is the path of a .png file" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_speed_ignores_the_first_row():
    run = compare.read_run("run", RUN)
    rows = run.metrics["perf/tokens_per_second"][1]
    assert run.speed() == pytest.approx(sorted(rows[1:])[len(rows) // 2])
    assert run.tokens_per_step() == 256


def test_completion_knows_commands_flags_configs_and_methods():
    words = completion.words_of("train")
    assert "--workdir=" in words and "--config=lm:" in words
    assert "--needle.lengths=" in completion.words_of("eval")
    assert set(METHODS) | set(WRAPPERS) <= set(completion.words_of("methods"))
    with pytest.raises(ValueError, match="SHELL='powershell'; accepted are bash, zsh, fish"):
        completion.script("powershell")


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("line", "index", "expected"),
    [
        ("lsm tr", 1, ["train"]),
        ("lsm methods gated_deltan", 2, ["gated_deltanet", "gated_deltanet2"]),
        ("lsm train --config=l", 4, ["liger:", "linear_moe:", "lm:"]),
        ("lsm eval --need", 2, None),
    ],
)
def test_bash_completes(line, index, expected):
    words = line.replace("=", " = ").split()
    setup = f"COMP_LINE={line!r}; COMP_POINT={len(line)}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={index}"
    script = f'{completion.script("bash")}\n{setup}; _lsm 2>/dev/null; echo "${{COMPREPLY[*]}}"'
    run = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    found = run.stdout.split()
    if expected is None:
        assert found and all(word.startswith("--needle.") for word in found)
    else:
        assert sorted(found) == expected


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("typed", "shown"),
    [("lsm train --conf", "--config="), ("lsm train --config=linear", "--config=linear_moe:"), ("lsm train --workdir=read", "readme\\ 1.md ")],
)  # fmt: skip
def test_the_tab_key_completes_in_an_interactive_bash(typed, shown, tmp_path):
    """Readline inserts the words without backslashes, which would end the completion; names of files have them."""
    (tmp_path / "readme 1.md").touch()
    (tmp_path / "script").write_text(completion.script("bash"))
    terminal, end = pty.openpty()
    shell = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"], stdin=end, stdout=end, stderr=end, cwd=tmp_path,
        env=os.environ | {"TERM": "dumb", "PS1": "> "}, start_new_session=True,
    )  # fmt: skip
    os.close(end)

    def type_until(text, expected):
        os.write(terminal, text.encode())
        printed = b""
        while not printed.replace(b"\a", b"").endswith(expected.encode()):
            ready, _, _ = select.select([terminal], [], [], 20)
            assert ready, printed
            printed += os.read(terminal, 4096)

    try:
        type_until("", "> ")
        type_until(". ./script\n", "\n> ")
        type_until(f"{typed}\t", shown)
    finally:
        shell.kill()
        shell.wait()
        os.close(terminal)


def test_the_page_of_a_config_lists_its_fields(capsys):
    assert main(["train", "--config=lm:gla-nano", "--help"]) == 0
    printed = capsys.readouterr().out
    assert "  optimizer.peak_lr = " in printed and "  model.layers.L.mixer.num_heads = " in printed
    assert main(["train", "--config=lm:gla-350m", "--help"]) == 2
    assert "did you mean '340m'" in capsys.readouterr().err


def test_a_signal_is_reported_under_the_name_of_the_command(monkeypatch):
    installed = []
    monkeypatch.setattr(interrupts, "leave_on_signals", lambda name, **_: installed.append(name))
    monkeypatch.setattr(sys, "argv", ["lsm", "plan", "--help"])
    assert main() == 0 and main(["plan", "--help"]) == 0
    assert installed == ["lsm plan"]  # of the process's own command alone
    monkeypatch.setattr(programs.runpy, "run_path", lambda *_, **__: installed.append(programs.shown_name("train.py")))  # fmt: skip
    assert main(["train", "--config=lm", "--workdir=x"]) == 0
    assert installed[1:] == ["lsm train"] and programs.shown_name("train.py") == "train.py"


def test_the_words_of_contributings_first_issue_lead_to_its_place():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (command, place), = re.findall(r"`(grep -rn [^`]+)` leads to\s+`([^`]+)`", text)  # fmt: skip
    found = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True).stdout
    assert {line.partition(":")[0] for line in found.splitlines()} == {place}


def test_an_unknown_flag_names_the_nearest(monkeypatch):
    given = ["eval.py", "--verbosty=1"]
    monkeypatch.setattr(commands.app, "run", lambda main, flags_parser: flags_parser(given))
    with pytest.raises(
        SystemExit, match="eval.py: unknown flag --verbosty; did you mean 'verbosity'"
    ):
        commands.run("eval.py", print)
    given[1] = "--zzz"
    with pytest.raises(SystemExit, match="unknown flag --zzz; --help lists all flags"):
        commands.run("eval.py", print)
