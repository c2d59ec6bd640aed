"""Damage pretrained models on disk, and read them as an import does.

    for case in cases("gguf", tmp_path): ...

yields copies of a small intact checkpoint in which one field of a JSON file, one region of bytes, one path or one link is
wrong. Every case must end within seconds, in under 1 GiB of memory, in success or in a ValueError or OSError in one message
that contains `Case.words`; with `Case.refused` it must not succeed. `read(case, out)` reads the case.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lsm_jax.convert.checkpoint import Checkpoint

GOLDENS = Path(__file__).resolve().parents[1] / "convert" / "goldens"
INDEX = "model.safetensors.index.json"


class Case(NamedTuple):
    """A damaged copy of a checkpoint.

    Attributes:
        name: what is wrong, such as "config.json: hidden_size = null".
        kind: the kind of checkpoint, one of `KINDS`.
        path: the damaged folder, or the .gguf file.
        refused: whether reading must raise an error; otherwise it may also succeed.
        words: strings of which an error's message must contain one.
    """

    name: str
    kind: str
    path: Path
    refused: bool
    words: tuple[str, ...]


# Intact checkpoints.


def _write_tokenizer(folder: Path, size: int) -> None:
    """Write a tokenizer of `size` tokens, a chat template and the files that transformers writes beside them."""
    import tokenizers

    vocabulary = {chr(0x100 + i): i for i in range(size)}
    model = tokenizers.models.WordLevel(vocabulary, unk_token=chr(0x100))
    tokenizers.Tokenizer(model).save(str(folder / "tokenizer.json"))
    bos, eos = chr(0x101), chr(0x102)
    config = dict(
        bos_token=bos, eos_token=dict(content=eos, lstrip=False), add_bos_token=False, model_max_length=64,
        tokenizer_class="PreTrainedTokenizerFast", added_tokens_decoder={"1": dict(content=bos)},
        chat_template=[dict(name="default", template="{{ messages[0].content }}"), dict(name="tools", template="x")],
    )  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "special_tokens_map.json").write_text(
        json.dumps(dict(bos_token=bos, eos_token=dict(content=eos)))
    )
    (folder / "generation_config.json").write_text(
        json.dumps(dict(bos_token_id=1, eos_token_id=[2, 3], temperature=0.6))
    )


def _write_huggingface(folder: Path, golden: str = "llama2") -> Path:
    shutil.copytree(GOLDENS / golden, folder)
    (folder / "expected.npz").unlink()
    config = json.loads((folder / "config.json").read_text())
    if golden == "llama2":
        config["auto_map"] = None
    (folder / "config.json").write_text(json.dumps(config))
    _write_tokenizer(folder, config["vocab_size"])
    return folder


def _write_scaled(folder: Path) -> Path:
    return _write_huggingface(folder, "llama3.1")


def _write_windows(folder: Path) -> Path:
    return _write_huggingface(folder, "qwen2-windows")


def _write_liger(folder: Path) -> Path:
    from tests.convert.make_liger import VOCAB, write_liger

    auto_map = {"AutoConfig": "configuration_liger_gsa.LigerGSAConfig"}
    write_liger(folder, "liger_gsa", auto_map=auto_map)
    _write_tokenizer(folder, VOCAB)
    return folder


def _write_fox(kind: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        from tests.convert import test_fox

        return test_fox.write(folder, kind)[0]

    return write


def _write_adapters(folder: Path) -> Path:
    from tests.linearize.test_released import write_adapters_of

    return write_adapters_of(folder)[0]


def _write_gguf(golden: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        folder.mkdir(parents=True)
        return Path(shutil.copy(GOLDENS / f"{golden}.gguf", folder / "model.gguf"))

    return write


KINDS: dict[str, Callable[[Path], Path]] = {
    "huggingface": _write_huggingface,
    "huggingface-scaled": _write_scaled,
    "huggingface-windows": _write_windows,
    "liger": _write_liger,
    "fox": _write_fox("pro"),
    "fox-fixed": _write_fox("fixed"),
    "fox-mamba2": _write_fox("mamba2"),
    "fox-hgrn2": _write_fox("hgrn2"),
    "fox-deltanet": _write_fox("deltanet"),
    "peft": _write_adapters,
    "gguf": _write_gguf("llama"),
    "gguf-scaled": _write_gguf("llama3.2"),
}
"""The functions that write an intact checkpoint into a new folder and return its path, by kind."""


def read(kind: str, path: Path, out: Path) -> Any:
    """Read a checkpoint as an import does, without the run's checkpoint: the config, the names and shapes of all tensors,
    checksums, one tensor's values, and the tokenizer, which is copied to the folder `out`.

    Returns:
        The model's config.

    Raises:
        ValueError: the checkpoint is refused.
    """
    from lsm_jax.convert.huggingface import (
        IGNORED,
        model_config,
        tokenizer_data,
        transformers_layout,
    )
    from lsm_jax.convert.tokenizer import check_companions, tokenizer_files
    from lsm_jax.linearize.released import open_pretrained

    if kind == "peft":
        from lsm_jax.linearize.peft import Adapters, lora_config

        adapters = Adapters(path)
        config = lora_config(adapters)
        adapters.verify()
        adapters.tensor(next(iter(adapters.shapes)))
        return config
    if kind.startswith("fox"):
        from lsm_jax.convert.fox_json import fox_config
        from lsm_jax.convert.fox_layout import fox_layout

        checkpoint = Checkpoint(path)
        config = fox_config(checkpoint)
        expected = fox_layout(checkpoint.config["model_type"], config).shapes
        checkpoint.check(expected, ignored=(".rotary.inv_freq", "fgate_bias", "lower_bounds"))
        checkpoint.verify()
        checkpoint.tensor(next(iter(expected)))
        return config
    source = open_pretrained(path)
    config = model_config(source)
    expected = transformers_layout(config).shapes
    source.check(expected, ignored=(*IGNORED, "lm_head.weight"))
    source.verify()
    source.tensor("model.layers.0.self_attn.q_proj.weight")
    check_companions(source)
    tokenizer_data(source, out, tokenizer_files(source))
    return config


# Damages.

_DELETED = object()
_NEST = 3000  # levels; Python's parser refuses them
VALUES: dict[str, Any] = {
    "deleted": _DELETED, "null": None, "-1": -1, "0": 0, "1": 1, "10**9": 10**9, "2**40": 2**40, "2**63": 2**63, "10**30": 10**30,
    "10**400": 10**400, "1.5": 1.5, "1e-300": 1e-300, "Infinity": float("inf"), "NaN": float("nan"), "true": True, "false": False,
    "empty string": "", "string": "x", "text of 5000": "no" * 2500, "path": "../../outside/x", "absolute": "/etc/passwd",
    "line break": "a\nb\x1b[31m", "surrogate": "\ud800", "empty list": [], "list": [1, "a", None], "nested list": [[[[1]]], {}],
    "empty object": {}, "object": {"a": {"b": [1]}}, "list of huge": [2**40, 2**40],
}  # fmt: skip


def _places(value: Any, names: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value in a JSON value: of lists only the first entry."""
    if isinstance(value, dict):
        for name in value:
            yield (*names, name)
            yield from _places(value[name], (*names, name))
    elif isinstance(value, list) and value:
        yield (*names, 0)
        yield from _places(value[0], (*names, 0))


def _with(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    """Return a copy of a JSON value in which the value at `place` is `new`, or absent."""
    changed = copy.deepcopy(value)
    holder = changed
    for name in place[:-1]:
        holder = holder[name]
    if new is _DELETED:
        del holder[place[-1]]
    else:
        holder[place[-1]] = new
    return changed


def json_damages(content: bytes, limit: int | None = None) -> Iterator[tuple[str, bytes, bool]]:
    """Yield (what is wrong, contents, whether it must be refused) for a JSON file: every field with every value of
    `VALUES`, and files that are no JSON.

    Args:
        content: the intact contents.
        limit: how many places of values to damage, evenly chosen; None is all.
    """
    value = json.loads(content)
    places = list(_places(value))
    if limit is not None and len(places) > limit:
        places = places[:: -(-len(places) // limit)]
    for place in places:
        for label, new in VALUES.items():
            name = ".".join(map(str, place))
            yield f"{name} = {label}", json.dumps(_with(value, place, new)).encode(), False
    deep = b"[" * _NEST + b"]" * _NEST
    yield "a field that is nested deeply", content.rstrip()[:-1] + b', "x": ' + deep + b"}", True
    yield "nested deeply", b'{"a":' * 100_000, True
    yield "a list", b"[1]", True
    yield "null", b"null", True
    yield "empty", b"", True
    yield "cut", content[: len(content) // 2], True
    yield "no UTF-8", content.replace(b'"', b'"\xff', 1), True
    yield "no text", bytes(range(256)), True


def byte_damages(content: bytes, stop: int, step: int = 1) -> Iterator[tuple[str, bytes]]:
    """Yield (what is wrong, contents) for a binary file: every `step`-th byte up to `stop` changed in three ways, and
    the file cut there."""
    for at in range(0, min(stop, len(content)), step):
        for mask in (0x01, 0x80, 0xFF):
            changed = bytearray(content)
            changed[at] ^= mask
            yield f"byte {at} xor {mask:#x}", bytes(changed)
        yield f"cut to {at} bytes", content[:at]


def _number_damages(content: bytes, stop: int, step: int) -> Iterator[tuple[str, bytes]]:
    """Yield (what is wrong, contents): huge numbers of 8 bytes written over every `step`-th position up to `stop`."""
    for at in range(0, min(stop, len(content) - 8), step):
        for number in (2**40, 2**62, 2**64 - 1, 2**31, 0):
            changed = content[:at] + struct.pack("<Q", number) + content[at + 8 :]
            yield f"{number} at byte {at}", changed


def _header_end(path: Path) -> int:
    """Return the position after the metadata of a safetensors or GGUF file."""
    content = path.read_bytes()
    if path.suffix == ".safetensors":
        return 8 + int.from_bytes(content[:8], "little")
    at = content.find(b"output_norm.weight")
    return min(len(content), at + 4000) if at > 0 else len(content)


def cases(kind: str, folder: Path, *, step: int = 1, limit: int | None = None) -> Iterator[Case]:
    """Yield damaged copies of a checkpoint, each in `folder / "damaged"`, which the next case replaces. Files named by
    damaged paths are in `folder / "outside"`; nothing there may be read into a run or written.

    Args:
        kind: one of `KINDS`.
        folder: a new folder.
        step: only every `step`-th byte of headers is damaged.
        limit: how many places of each JSON file to damage; None is all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    intact = KINDS[kind](folder / "intact")
    base = intact if intact.is_dir() else intact.parent
    outside = folder / "outside"
    outside.mkdir()
    damaged = folder / "damaged"
    target = damaged if intact.is_dir() else damaged / intact.name

    def copied() -> None:
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(base, damaged, symlinks=True)

    def case(name: str, refused: bool, *words: str) -> Case:
        return Case(name, kind, target, refused, words)

    for file in sorted(base.iterdir()):
        content = file.read_bytes()
        damages: Iterator[tuple[str, bytes, bool]]
        if file.suffix == ".json":
            # All values of a vocabulary are alike.
            few = 12 if file.name == "tokenizer.json" else limit
            damages = json_damages(content, few if limit is None else min(few or limit, limit))
        else:
            stop = _header_end(file)
            damages = (
                (name, changed, False)
                for damage in (byte_damages, _number_damages)
                for name, changed in damage(content, stop, step)
            )
        read_by_import = file.name != "tokenizer.json" or kind.startswith(("huggingface", "liger"))
        for name, changed, refused in damages:
            copied()
            (damaged / file.name).write_bytes(changed)
            yield case(f"{file.name}: {name}", refused and read_by_import, file.name, damaged.name)
    yield from _places_of_files(kind, base, damaged, outside, copied, case)


def _places_of_files(
    kind: str,
    base: Path,
    damaged: Path,
    outside: Path,
    copied: Callable[[], None],
    case: Callable[..., Case],
) -> Iterator[Case]:
    """Yield cases in which a file is missing, a folder, a pipe or a link, the index names other files, or a checksum is
    wrong."""
    required = ("config.json", "adapter_config.json", "tokenizer.json")
    for file in sorted(base.iterdir()):
        path = damaged / file.name
        needed = file.name in required or file.suffix in (".safetensors", ".gguf")
        copied()
        path.unlink()
        yield case(f"{file.name} is missing", needed, file.name, damaged.name)
        copied()
        path.unlink()
        path.mkdir()
        yield case(f"{file.name} is a folder", needed, file.name, damaged.name)
        copied()
        path.unlink()
        os.mkfifo(path)
        yield case(f"{file.name} is a pipe", needed, file.name, damaged.name)
        copied()
        path.unlink()
        path.symlink_to(path.name)
        yield case(f"{file.name} is a link to itself", needed, file.name, damaged.name)
        if file.suffix == ".gguf":
            continue  # the file that the user names may be a link
        copied()
        path.unlink()
        shutil.copy(file, outside / file.name)
        path.symlink_to(outside / file.name)
        yield case(f"{file.name} is a link outside", needed, file.name)
    if (base / INDEX).exists():
        index = json.loads((base / INDEX).read_text())
        first = sorted(set(index["weight_map"].values()))[0]
        shutil.copy(base / first, outside / "model.safetensors")
        for name in (
            "../outside/model.safetensors", str(outside / "model.safetensors"), "./../outside/model.safetensors", f"x/../{first}",
            "..", ".", "", "a\0b", "config.json", "x" * 300, "no/such.safetensors", "a\n.safetensors",
        ):  # fmt: skip
            copied()
            changed = {k: name if v == first else v for k, v in index["weight_map"].items()}
            (damaged / INDEX).write_text(json.dumps(index | dict(weight_map=changed)))
            yield case(f"{INDEX}: weight_map names {name[:60]!r}", True, "weight_map", "such")
    sums = {
        "SHA256SUMS of another file": "0" * 64,
        "SHA256SUMS with a bad line": "nonsense",
    }
    for name, digest in sums.items():
        for file in sorted(base.iterdir()):
            if file.name not in required and file.suffix not in (".safetensors", ".gguf"):
                continue
            copied()
            (damaged / "SHA256SUMS").write_text(f"{digest}  {file.name}\n")
            yield case(f"{name}: {file.name}", True, file.name, "SHA256SUMS")
