"""Damages of several files of an input, or of fields that `mutations` does not know: indices, links, folders of output,
sizes of stores and models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random

from tests.faults.mutations import Damage


def index_outside(rng: Random, given: Path, outside: Path) -> Damage:
    """Let an index of safetensors files name files outside of its folder."""
    index = given / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    names = sorted(value["weight_map"])
    files = sorted(set(value["weight_map"].values()))
    target = outside / "model.safetensors"
    shutil.copy(given / files[0], target)
    name = rng.choice(
        (
            "../../outside/model.safetensors",
            str(target),
            "./../../outside/model.safetensors",
            f"x/../{files[0]}",
            "a\u0000b",
            "..",
            ".",
            "",
            "config.json",
        )
    )
    chosen = [n for n in names if value["weight_map"][n] == files[0]]
    for key in chosen if rng.random() < 0.7 else chosen[:1]:
        value["weight_map"][key] = name
    index.write_text(json.dumps(value))
    return f"weight_map names {name!r}", {"weight_map", index.name, name}


_RUN_LINKS = (
    "metrics.draft",
    "metrics.jsonl",
    "tensorboard",
    "implementations.json",
    "environment.json",
    "config.json",
    "data.json",
    "broken_checkpoints",
    "broken_checkpoints/4",
    "broken_checkpoints/6",
    "checksums",
    "checksums/6.json",
    "checkpoints/6",
    "checkpoints",
    "plots",
)


def links_in_run(rng: Random, given: Path, outside: Path) -> Damage:
    """Put a link to a file or folder outside in the place of one of a run's files or folders, and damage the
    newest checkpoint so that it is moved."""
    name = rng.choice(_RUN_LINKS)
    path, target = given / name, outside / "target"
    if path.is_file():
        shutil.move(path, target)
    elif "." in name:
        target.write_text("content\n")
    elif path.is_dir():
        shutil.move(path, target)
    else:
        target.mkdir()
        (target / "file").write_text("content\n")
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(target)
    if name.startswith("broken"):
        newest = max((p for p in (given / "checkpoints").iterdir() if p.name.isdigit()), key=lambda p: int(p.name))  # fmt: skip
        for manifest in newest.rglob("manifest.ocdbt"):
            manifest.write_bytes(b"")
    return f"{name} is a link to a path outside", {name, path.name, "target"}


def output_outside(rng: Random, given: Path, outside: Path) -> Damage:
    """Name an output folder outside of the run's eval/, or let eval/ or a file in it be a link."""
    names = ("../..", "../../../outside/new", str(outside / "new"), "..", ".", "", "a/../../b", "x" * 300, "a\u0000b", "../first")  # fmt: skip
    if rng.random() < 0.6:
        name = rng.choice(names)
        (given / "output.txt").write_text(name)
        return f"--output={name[:40]!r}", {"output", name[:100] or "output"}
    name = rng.choice(("eval", "eval/first", "eval/first/results.json", "eval/first/results.npz"))
    path, target = given / "run" / name, outside / "target"
    shutil.move(path, target)
    path.symlink_to(target)
    return f"{name} is a link to a path outside", {name, path.name, "target"}


def store_links(rng: Random, given: Path, outside: Path) -> Damage:
    """Let a chunk, or a whole store, be a link to a file outside."""
    name = rng.choice(("train.zarr", "train.zarr/0.0", "heldout.zarr"))
    path, target = given / name, outside / "target"
    shutil.move(path, target)
    path.symlink_to(target)
    return f"{name} is a link to a path outside", {name, path.name, "target"}


_SIZES = (2**31, 2**40, 2**62, 10**9, 0, -1, None, "64", 64.5, 2**64)


def store_sizes(rng: Random, given: Path, outside: Path) -> Damage:
    """Change the shape, chunks or another field of a store's metadata."""
    path = given / rng.choice(("train.zarr", "heldout.zarr")) / ".zarray"
    value = json.loads(path.read_text())
    field = rng.choice(("shape", "shape", "chunks", "chunks", "compressor", "dtype", "order", "fill_value", "filters", "zarr_format"))  # fmt: skip
    if field in ("shape", "chunks"):
        value[field][rng.randrange(2)] = rng.choice(_SIZES)
    else:
        value[field] = rng.choice(
            ("blosc", {"id": "blosc"}, {"id": "x"}, None, 5, "<u8", "<f4", "F", [], {"id": 5}, -1)
        )
    path.write_text(json.dumps(value))
    return f"{field} = {value[field]!r}", {field, ".zarray", "0.0"}


def model_sizes(rng: Random, given: Path, outside: Path) -> Damage:
    """Change a size or a number in a config.json."""
    path = given / "config.json"
    value = json.loads(path.read_text())
    field = rng.choice(
        ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads",
         "intermediate_size", "max_position_embeddings", "rope_theta", "rope_scaling", "rms_norm_eps", "head_dim",
         "tie_word_embeddings", "model_type", "hidden_act")
    )  # fmt: skip
    value[field] = rng.choice(
        (*_SIZES, {"rope_type": "linear", "factor": None}, {"rope_type": "llama3", "factor": [1]}, {"type": "yarn", "factor": 0},
         [], True, "x")
    )  # fmt: skip
    path.write_text(json.dumps(value))
    return f"{field} = {value[field]!r}", {field, "config.json"}
