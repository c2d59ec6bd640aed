"""Tensors and keys that occur twice, and a few damages of every kind of checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from lsm_jax.convert import Checkpoint, import_huggingface
from tests.convert.edits import INDEX, edit
from tests.convert.test_huggingface import changed
from tests.convert.test_runs import with_tokenizer
from tests.faults.damage_checkpoints import KINDS, cases, read


def test_tensors_that_occur_twice_or_not_in_their_file_are_named(tmp_path):
    folder = changed(tmp_path, "llama2")
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    files = sorted(set(weight_map.values()))
    first = load_file(folder / files[0])
    name = next(iter(first))
    edit(folder / INDEX, weight_map=weight_map | {name: files[1]})
    with pytest.raises(
        ValueError, match=f"weight_map has tensors that are not in the files it names: {name}"
    ):
        Checkpoint(folder)
    edit(folder / INDEX, weight_map=weight_map)
    save_file(load_file(folder / files[1]) | {name: first[name]}, folder / files[1])
    with pytest.raises(ValueError, match=f"the tensor {name} is in .*{files[0]} and in {files[1]}"):
        Checkpoint(folder)


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k in ("peft", "fox") else pytest.mark.slow) for k in KINDS]
)
def test_few_damages_of_every_kind_of_checkpoint(tmp_path, kind):
    for case in cases(kind, tmp_path / "cases", step=401, limit=1):
        try:
            read(kind, case.path, tmp_path / "run")
            assert not case.refused, case.name
        except (ValueError, OSError) as error:
            assert any(word in str(error) for word in case.words), (case.name, error)
            assert not (tmp_path / "run").exists(), case.name
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
    assert set(os.listdir(tmp_path / "cases")) == {"intact", "damaged", "outside"}


def repeated(path: Path, key: str, value: str) -> None:
    """Put a key with a JSON value in front of the same key of a JSON file, or of a safetensors file's header."""
    content, start = path.read_bytes(), 0
    if path.suffix == ".safetensors":
        start = 8
    at = content.index(json.dumps(key).encode(), start)
    content = content[:at] + f"{json.dumps(key)}: {value}, ".encode() + content[at:]
    if start:
        size = int.from_bytes(content[:8], "little") + len(content) - path.stat().st_size
        content = size.to_bytes(8, "little") + content[8:]
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("config.json", "hidden_size", "32"),
        (INDEX, "lm_head.weight", '"model-00001-of-00003.safetensors"'),
        ("model-00003-of-00003.safetensors", "format", '"pt"'),
        (
            "model-00003-of-00003.safetensors",
            "lm_head.weight",
            '{"dtype": "F32", "shape": [24, 64], "data_offsets": [0, 6144]}',
        ),
        ("tokenizer.json", "type", '"BPE"'),
        ("tokenizer.json", "a", "5"),
        ("tokenizer_config.json", "bos_token", '"a"'),
    ],
)
def test_a_key_that_occurs_twice_is_named(tmp_path, file, key, value):
    folder = with_tokenizer(changed(tmp_path, "llama2"), bos_token="<s>")
    repeated(folder / file, key, value)
    with pytest.raises(ValueError, match=f"{file}.*(the key '{key}' occurs|duplicate) ") as error:
        import_huggingface(folder, tmp_path / "run")
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()
