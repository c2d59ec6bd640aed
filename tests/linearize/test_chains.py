"""Exports of runs that follow from other runs by `init_from`: rings, and runs that have moved."""

from __future__ import annotations

import dataclasses
import shutil

import pytest

from lsm_jax.linearize.export import export_run, main
from lsm_jax.training.run_files import write_config
from tests.linearize.conftest import config_of


def write_runs(folder, llama, instructions, starts: dict[str, str]) -> None:
    """Write the config.json of runs by name, of which each starts from another run (`init_from`), or from the pretrained
    model if that is ""."""
    config = config_of(llama, instructions)
    for name, start in starts.items():
        base = None if start else config.base
        init_from = str(folder / start) if start else ""
        write_config(folder / name, dataclasses.replace(config, base=base, init_from=init_from), {})


@pytest.mark.parametrize("starts", [dict(a="a"), dict(a="b", b="a"), dict(a="b", b="c", c="b")])
def test_a_ring_of_runs_is_named(llama, instructions, tmp_path, capsys, starts):
    write_runs(tmp_path, llama, instructions, starts)
    assert main([f"--workdir={tmp_path / 'a'}", f"--out={tmp_path / 'out'}"]) == 1
    message = capsys.readouterr().err
    first = "b" if len(starts) == 3 else "a"
    names = [first, starts[first]] if starts[first] == first else [first, starts[first], first]
    ring = " -> ".join(str(tmp_path / name) for name in names)
    assert f"init_from of these runs is a ring: {ring};" in message and message.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_path_of_a_moved_run_is_named(llama, instructions, tmp_path):
    write_runs(tmp_path, llama, instructions, dict(a="b", b="c", c=""))
    shutil.move(tmp_path / "c", tmp_path / "moved")
    with pytest.raises(ValueError, match="no config.json|is not the directory") as error:
        export_run(tmp_path / "a", tmp_path / "out")
    message = str(error.value)
    assert f"{tmp_path / 'b' / 'config.json'}: init_from='{tmp_path / 'c'}'" in message
    assert "if the run has moved, change init_from in that file" in message
    # A source replaces the pretrained model, not the run that has the frozen parameters.
    with pytest.raises(ValueError, match="is not the directory of a run"):
        export_run(tmp_path / "a", tmp_path / "out", source=llama)
