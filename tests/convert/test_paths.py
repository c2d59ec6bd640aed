"""Paths and links in pretrained models: nothing outside of the given folders is read or written, and a failed import
or export leaves nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lsm_jax.convert import export, import_huggingface, load_params, model_config
from tests.convert.edits import INDEX, edit
from tests.convert.make_liger import write_liger
from tests.convert.test_huggingface import GOLDENS, changed
from tests.convert.test_runs import with_tokenizer


@pytest.mark.parametrize("form", ["../outside.safetensors", "absolute", "config.json"])
def test_an_index_names_files_of_its_folder_alone(tmp_path, form):
    folder = changed(tmp_path, "llama2")
    outside = tmp_path / "outside.safetensors"
    index = json.loads((folder / INDEX).read_text())
    first = sorted(set(index["weight_map"].values()))[0]
    shutil.move(folder / first, outside)
    before = outside.read_bytes()
    name = str(outside) if form == "absolute" else form
    edit(
        folder / INDEX,
        weight_map={k: name if v == first else v for k, v in index["weight_map"].items()},
    )
    with pytest.raises(ValueError, match=rf"{INDEX}: weight_map names '.*{Path(name).name}'"):
        config = model_config(folder)
        export(load_params(folder, config), config, folder, tmp_path / "out")
    assert outside.read_bytes() == before and not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "notes.md"])
def test_links_to_files_outside_are_not_read_and_not_copied(tmp_path, name):
    folder = with_tokenizer(changed(tmp_path, "mistral"))
    config = model_config(folder)
    params = load_params(folder, config)
    secret = tmp_path / "secret"
    if (folder / name).exists():
        shutil.move(folder / name, secret)
    else:
        secret.write_text("secret")
    (folder / name).symlink_to(secret)
    with pytest.raises(
        ValueError, match=f"names '{name}', a link to .*secret, which is not inside"
    ):
        export(params, config, folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    if name != "notes.md":
        with pytest.raises(ValueError, match=f"names '{name}', a link to"):
            import_huggingface(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_snapshot_of_hugging_faces_cache_is_read_and_exported(tmp_path):
    folder = with_tokenizer(changed(tmp_path, "mistral"))
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0f1e"
    blobs = snapshot.parents[1] / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, file in enumerate(sorted(folder.iterdir())):
        shutil.move(file, blobs / f"{i}")
        (snapshot / file.name).symlink_to(f"../../blobs/{i}")
    config = model_config(snapshot)
    out = export(load_params(snapshot, config), config, snapshot, tmp_path / "out")
    assert (out / "tokenizer.json").read_bytes() == (snapshot / "tokenizer.json").read_bytes()
    assert not any(path.is_symlink() for path in out.iterdir())


def test_an_export_does_not_write_into_a_folder_with_files(tmp_path):
    folder, outside = GOLDENS / "mistral", tmp_path / "outside"
    config = model_config(folder)
    params = load_params(folder, config)
    outside.write_text("outside")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").symlink_to(outside)
    with pytest.raises(ValueError, match="out' is not empty"):
        export(params, config, folder, tmp_path / "out")
    (tmp_path / "nothing").symlink_to(tmp_path / "new")
    with pytest.raises(ValueError, match="nothing' is a link to nothing"):
        export(params, config, folder, tmp_path / "nothing")
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / "tokenizer").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="tokenizer is a link"):
        import_huggingface(GOLDENS / "llama.gguf", tmp_path / "run")
    assert outside.read_text() == "outside" and not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("path", ["../../x.Config", "/elsewhere/x.Config", 5, {"a": 1}])
def test_auto_map_names_modules(tmp_path, path):
    folder = write_liger(tmp_path / "liger", auto_map={"AutoConfig": path})
    with pytest.raises(
        ValueError, match="config.json: auto_map.AutoConfig=.*; accepted is module.Class"
    ):
        from lsm_jax.linearize.released import Released

        Released(folder)


FULL_DISK = """
import resource, signal, sys
from lsm_jax.convert import export, load_params, model_config
config = model_config(sys.argv[1])
params = load_params(sys.argv[1], config)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), int(sys.argv[3])))
try: export(params, config, sys.argv[1], sys.argv[2])
except (ValueError, OSError) as error: print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", [100, 20_000])
def test_an_export_to_a_full_disk_leaves_nothing(tmp_path, size):
    command = [
        sys.executable,
        "-c",
        FULL_DISK,
        str(GOLDENS / "mistral"),
        str(tmp_path / "out"),
        str(size),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path.cwd())
    lines = done.stdout.splitlines()
    assert len(lines) == 1 and str(tmp_path / "out") in lines[0] and "arge" in lines[0], done
    assert not list(tmp_path.iterdir())


def test_a_failed_import_can_be_repeated(tmp_path, monkeypatch, capsys):
    from lsm_jax.convert import huggingface

    def full(workdir, *_):
        (workdir / "config.json").write_text("half")
        raise OSError(28, "No space left on device", str(workdir / "checkpoints"))

    run = tmp_path / "run"
    command = [f"--source={GOLDENS / 'llama.gguf'}", f"--workdir={run}"]
    with monkeypatch.context() as patch:
        patch.setattr(huggingface, "save_run", full)
        assert huggingface.main(command) == 1
    message = f"lsm_jax.convert.huggingface: {run / 'checkpoints'}: the disk is full; no run was written\n"
    assert capsys.readouterr().err.endswith(message) and not run.exists()
    run.mkdir()
    (run / "config.json").symlink_to(tmp_path / "new")
    assert huggingface.main(command) == 1
    assert "contains a run" in capsys.readouterr().err and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("workdir", "message"),
    [
        ("", "workdir is empty; accepted is a new directory"),
        ("/proc/x", "workdir='/proc/x': no folder can be made in /proc"),
        ("/dev/null/x", "/dev/null is a file"),
    ],
)
def test_a_directory_that_cannot_be_made_is_an_error_at_once(tmp_path, workdir, message):
    with pytest.raises(ValueError, match=message):
        import_huggingface(GOLDENS / "llama.gguf", workdir)
    if workdir:
        config = model_config(GOLDENS / "mistral")
        with pytest.raises(ValueError, match=f"out_folder='{workdir}': "):
            export({}, config, GOLDENS / "mistral", workdir)
    with pytest.raises(ValueError, match="source='' does not exist"):
        import_huggingface("", tmp_path / "run")
