"""Damaged runs: what resuming and loading them says, and that nothing outside of them changes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

import lsm_jax
from lsm_jax.training import TrainConfig, read_rows, train
from lsm_jax.training.config_json import check_types
from lsm_jax.training.metrics import MetricsWriter
from tests.faults.damage_runs import DAMAGES, damaged_runs
from tests.training import tiny


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return tiny.write_text(tmp_path_factory.mktemp("text"))


def config(text) -> TrainConfig:
    one = tiny.config(text, total_tokens=6 * 256, checkpoint_every=2, keep_last=3)
    one.model.num_layers, one.model.pattern = 1, "N"
    return one


@pytest.fixture(scope="module")
def intact(text, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("intact") / "run"
    assert train(config(text), workdir).step == 6
    return workdir


def losses(workdir):
    return [(row["step"], row["train/loss"]) for row in read_rows(workdir / "metrics.jsonl")]


def contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def marked(name):
    """Return the name of a damage as a parameter; slow, if the damaged run trains on."""
    act, refused, *_ = DAMAGES[name]
    trains = act == "resume" and not refused and name != "metrics-no-step"
    return pytest.param(name, marks=pytest.mark.slow if trains else ())


@pytest.mark.parametrize("name", map(marked, DAMAGES))
def test_damaged_runs(name, text, intact, tmp_path, capfd):
    [damage] = damaged_runs(intact, tmp_path, (name,))
    outside = contents(damage.outside)

    def act():
        if damage.act == "load":
            return lsm_jax.load_run(damage.folder)
        return train(config(text), damage.folder)

    if damage.refused:
        with pytest.raises(ValueError, match=damage.message) as error:
            act()
        assert len(str(error.value)) < 2000 and "incompatible handler" not in str(error.value)
    else:
        result = act()
        said = capfd.readouterr().err
        assert re.search(damage.message, said) and "Traceback" not in said
        if damage.act == "resume":
            assert losses(damage.folder) == losses(intact)
        else:
            other = lsm_jax.load_run(intact, step=result.step)
            for a, b in zip(
                jax.tree.leaves(result.params), jax.tree.leaves(other.params), strict=True
            ):
                np.testing.assert_array_equal(a, b)
    assert contents(damage.outside) == outside


def test_a_damaged_metrics_file_is_copied_beside(intact, text, tmp_path):
    [damage] = damaged_runs(intact, tmp_path, ("metrics-no-json",))
    before = (damage.folder / "metrics.jsonl").read_bytes()
    train(config(text), damage.folder)
    assert (damage.folder / "metrics.damaged-1.jsonl").read_bytes() == before
    assert (
        len(read_rows(damage.folder / "metrics.jsonl"))
        == len(read_rows(damage.folder / "metrics.damaged-1.jsonl"))
        == 6
    )


def test_a_repeated_row_of_another_metric_is_no_damage(tmp_path, capfd):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "train/loss": 2.0}\n{"step": 1, "val/loss": 3.0}\n')
    assert len(read_rows(path)) == 2
    path.write_text('{"step": 2, "a": 1}\n{"step": 1, "a": 2}\n{"step": 2, "a": 3}\n')
    assert read_rows(path) == [{"step": 1, "a": 2}, {"step": 2, "a": 3}]


def write_metrics(path, steps):
    path.write_text("".join(f'{{"step": {step}, "train/loss": 1.0}}\n' for step in steps))


@pytest.mark.parametrize(
    ("steps", "log_every", "missing"),
    [
        ([], 1, "1 to 6"),
        ([], 10, None),
        ([1, 2, 3, 4, 5, 6, 7, 8], 1, None),
        ([1, 2, 3, 4], 1, "5 to 6"),
        ([1, 2, 4, 5, 6], 1, "3 to 3"),
        ([3, 4, 5, 6], 1, "1 to 2"),
        ([2, 4], 4, None),
        ([1, 2, 4], 4, None),
    ],
)
def test_missing_rows_of_metrics_are_reported(tmp_path, capfd, steps, log_every, missing):
    """Rows up to checkpoint 6; the last two cases are of runs whose `log_every` was changed."""
    path = tmp_path / "metrics.jsonl"
    if steps:
        write_metrics(path, steps)
    MetricsWriter(tmp_path, 6, log_every=log_every).close()
    expected = (
        f"{path} has no rows of steps {missing}; training continues after step 6 without them\n"
    )
    assert capfd.readouterr().err == (expected if missing else "")
    assert [row["step"] for row in read_rows(path)] == [step for step in steps if step <= 6]


@pytest.mark.parametrize("change", ["removed", "emptied"])
def test_a_run_without_its_metrics_says_so_and_continues(text, intact, tmp_path, capfd, change):
    shutil.copytree(intact, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "6")
    path = tmp_path / "run" / "metrics.jsonl"
    path.unlink() if change == "removed" else path.write_text("")
    assert train(config(text), tmp_path / "run").step == 6
    assert losses(tmp_path / "run") == losses(intact)[4:]
    assert f"{path} has no rows of steps 1 to 4;" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("line", "message", "steps"),
    [
        (b'\xef\xbb\xbf{"step": 1, "train/loss": 1.0}', "line 1 begins with a byte-order mark", [1, 2]),
        (b"\xef\xbb\xbf", "line 1 begins with a byte-order mark", [2]),
        (b'{"step": 1, "a": 1.0, "a": 2.0}', r"line 1 cannot be read \(the key 'a' occurs twice in one object\)", [2]),
        (b'{"step": 1, "step": 2}', "line 1 cannot be read .the key 'step' occurs .*", [2]),
    ],
)  # fmt: skip
def test_other_damage_of_metrics_is_reported_and_kept(tmp_path, capfd, line, message, steps):
    path = tmp_path / "metrics.jsonl"
    before = line + b'\n{"step": 2, "train/loss": 1.0}\n'
    path.write_bytes(before)
    MetricsWriter(tmp_path, 2).close()
    assert re.search(f"metrics.jsonl: 1 damaged: {message}; .*damaged-1", capfd.readouterr().err)
    assert [row["step"] for row in read_rows(path)] == steps
    assert (tmp_path / "metrics.damaged-1.jsonl").read_bytes() == before


@pytest.mark.parametrize("name", ["config.json", "data.json"])
def test_a_key_that_occurs_twice_is_named(text, intact, tmp_path, name):
    shutil.copytree(intact, tmp_path / "run")
    path = tmp_path / "run" / name
    key = "seed" if name == "config.json" else "bytes"
    path.write_text(path.read_text().replace(f'"{key}":', f'"{key}": 5, "{key}":', 1))
    with pytest.raises(ValueError, match=f"{name}.*the key '{key}' occurs twice in one object"):
        train(config(text), tmp_path / "run")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("N.mixer.implementation", "model.layers.N.mixer.implementation='mosaic': attention has no backend 'mosaic'; accepted are None and 'xla'"),
        ("L.mixer.op.implementation", "model.layers.L.mixer.op.implementation='mosaic': delta_memory has no backend 'mosaic'"),
    ],
)  # fmt: skip
def test_an_unknown_backend_is_refused_before_anything_is_read(path, message):
    one = tiny.config("/nowhere")
    letter, *names, last = path.split(".")
    holder = one.model.layers[letter]
    for name in names:
        holder = getattr(holder, name)
    setattr(holder, last, "mosaic")
    with pytest.raises(ValueError, match=re.escape(message)):
        one.validate()
    setattr(holder, last, "xla")
    one.validate()
    if names[-1] == "op":
        setattr(holder, last, "mosaic_gpu,xla")
        one.validate()


def test_fields_of_another_type_are_refused():
    one = tiny.config("/nowhere")
    for name, value in (("trainable", 5), ("trainable", (5,)), ("seed", True), ("batch_size", "8")):
        with pytest.raises(ValueError, match=f"{name}=.*: accepted is"):
            tiny.config("/nowhere", **{name: value}).validate()
    one.data.sequence_length = 3.5
    with pytest.raises(ValueError, match="data.sequence_length=3.5: accepted is int"):
        check_types(one)


@pytest.mark.slow
def test_results_of_an_evaluation_stay_in_the_run(intact, tmp_path):
    for name in ("../x", ".."):
        command = [sys.executable, "eval.py", f"--workdir={intact}", f"--output={name}"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 1 and "output=" in done.stderr.splitlines()[-1]
        assert "Traceback" not in done.stderr and not (intact / "x").exists()


@pytest.mark.slow
def test_a_ring_of_init_from_is_an_error(intact, text, tmp_path):
    one = config(text)
    one.init_from, one.trainable = str(intact), ("mixer",)
    train(one, tmp_path / "run")
    lsm_jax.load_run(tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(init_from=str(path.parent))))
    with pytest.raises(ValueError, match="init_from of these runs is a ring: .*run -> .*run"):
        lsm_jax.load_run(tmp_path / "run")
