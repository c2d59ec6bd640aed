"""Sizes in files of pretrained models are bounded before anything is allocated, and damage of GGUF files is named."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lsm_jax.convert import import_huggingface
from tests.convert.edits import INDEX, edit, gguf, text, with_field
from tests.convert.test_fox import write as write_fox
from tests.convert.test_huggingface import GOLDENS, changed
from tests.convert.test_runs import with_tokenizer


def oversized(folder: Path) -> dict[Path, str]:
    """Write damaged models into a folder, and return by path what the error of each must contain."""
    golden = (GOLDENS / "llama.gguf").read_bytes()
    array = struct.pack("<I", 9)
    files = {
        "array.gguf": (gguf(text("tokenizer.ggml.tokens"), array, struct.pack("<IQ", 8, 2**40)), "field tokenizer.ggml.tokens"),
        "numbers.gguf": (gguf(text("a.b"), array, struct.pack("<IQ", 0, 2**40)), "field a.b is an array of 1099511627776"),
        "string.gguf": (gguf(text("a.b"), struct.pack("<I", 8), text("x", 2**40)), "field a.b .* length of 1099511627776"),
        "name.gguf": (gguf(text("x", 2**62)), "name of field 0 .* length of"),
        "fields.gguf": (gguf(fields=2**60), "number of fields is 1152921504606846976"),
        "tensors.gguf": (gguf(fields=0, tensors=2**60), "number of tensors is 1152921504606846976"),
        "blocks.gguf": (with_field(golden, "llama.block_count", 2 | 1 << 30), "llama.block_count=1073741826; .* tensors of 2 layers"),
        "width.gguf": (with_field(golden, "llama.feed_forward_length", 2**30), "llama.feed_forward_length=1073741824"),
        "scaled.gguf": (
            with_field((GOLDENS / "llama3.2.gguf").read_bytes(), "llama.embedding_length", 2**31 - 1), "rope_freqs.weight is not",
        ),
        "nested.gguf": (gguf(text("a.b"), array * 50_000), "field a.b is an array of"),
    }  # fmt: skip
    words: dict[Path, str] = {}
    for name, (content, expected) in files.items():
        (folder / name).write_bytes(content)
        words[folder / name] = rf"{name}\b.*{expected}"

    def copy(name: str, kind: str = "llama2") -> Path:
        return with_tokenizer(Path(shutil.copytree(GOLDENS / kind, folder / name)))

    for field in (
        "num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
        "head_dim",
    ):  # fmt: skip
        path = copy(field)
        edit(path / "config.json", **{field: 10**9})
        words[path] = rf"config.json: {field}=1000000000"
    for field in ("num_hidden_layers", "sliding_window", "max_window_layers"):
        path = copy(f"{field}-2", "qwen2-windows")
        edit(path / "config.json", **{field: 10**30})
        words[path] = rf"config.json: {field}=1000000000000000000000000000000; accepted is"
    deep = b"[" * 200_000
    for name in ("config.json", INDEX, "tokenizer.json", "tokenizer_config.json"):
        path = copy(f"deep-{name}")
        (path / name).write_bytes(b'{"a": ' + deep)
        words[path] = name
    path = copy("header", "mistral")
    content = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", 2**40) + content[8:])
    words[path] = "model.safetensors cannot be read: its header has a length of 1099511627776"
    for kind, field in {
        "pro": "num_hidden_layers", "mamba2": "state_size", "deltanet": "conv_size", "hgrn2": "expand_ratio", "llama": "hidden_ratio",
    }.items():  # fmt: skip
        path = write_fox(folder / f"fox-{kind}", kind)[0]
        edit(path / "config.json", **{field: 10**9})
        words[path] = rf"config.json: {field}=1000000000"
    return words


READ = """
import json, resource, sys, time
from pathlib import Path
from lsm_jax.convert import Checkpoint, fox_config, import_huggingface, model_config
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))
for line in sys.stdin:
    path = Path(line.strip())
    began = time.monotonic()
    try:
        if path.name.startswith("fox"):
            fox_config(Checkpoint(path))
        else:
            import_huggingface(path, path.parent / "run")
        message = "accepted"
    except (ValueError, OSError) as error:
        message = str(error)
    seconds = time.monotonic() - began
    status = Path("/proc/self/status")  # the peak of getrusage begins with that of the process that started this one
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if status.exists():
        peak = next(int(x.split()[1]) for x in status.read_text().splitlines() if x.startswith("VmHWM"))
    print(json.dumps([message, seconds, peak / 2**20]), flush=True)
"""


def test_sizes_are_bounded_before_anything_is_allocated(tmp_path):
    words = oversized(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", READ], input="\n".join(map(str, words)), capture_output=True, text=True, timeout=90,
        cwd=Path.cwd(),
    )  # fmt: skip
    assert not done.returncode, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    for (path, expected), (message, seconds, gigabytes) in zip(words.items(), lines, strict=True):
        pattern = pytest.raises(ValueError, match=expected)
        with pattern:
            raise ValueError(message)
        assert "\n" not in message and len(message) < 1000, message
        assert seconds < 5 and gigabytes < 1, (
            path,
            seconds,
            gigabytes,
        )  # a second on an idle machine
    assert not (tmp_path / "run").exists()


def test_the_rank_of_adapters_is_bounded(tmp_path):
    from lsm_jax.linearize.peft import Adapters, lora_config
    from tests.linearize.test_released import write_adapters_of

    folder, _ = write_adapters_of(tmp_path / "adapters", dict(r=10**9))
    with pytest.raises(
        ValueError,
        match="adapter_config.json: r=1000000000, but the largest rank of the stored .* is 3",
    ):
        lora_config(Adapters(folder))


def test_a_chat_template_is_bounded_before_anything_is_written(tmp_path):
    folder = with_tokenizer(changed(tmp_path, "llama3"))
    (folder / "chat_template.jinja").write_bytes(b"x" * (16 * 2**20 + 1))
    with pytest.raises(ValueError, match=rf"^{folder}/chat_template.jinja has 16777217 bytes"):
        import_huggingface(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_damaged_strings_and_tensors_of_a_gguf_file_are_named(tmp_path):
    golden = (GOLDENS / "llama.gguf").read_bytes()
    offset = golden.index(b"blk.0.attn_k.weight")
    offset += len("blk.0.attn_k.weight") + 4 + 16 + 4
    cases = {
        "the field tokenizer.ggml.model at byte .* is no UTF-8": golden.replace(b"gpt2", b"\xffpt2"),
        "the field tokenizer.ggml.merges": golden.replace(b"tokenizer.ggml.merges", b"tokenizer.ggml.m\xffrges"),
        "tokens and tokenizer.ggml.merges are no tokenizer: the merge 'th_e'": golden.replace(b"th e", b"th_e"),
        "the tensor blk.0.attn_k.weight is at byte": golden[:offset] + b"\x40\x00\x00" + golden[offset + 3 :],
        "the tensor .* requires .* bytes .*, but the file has": golden[:-40],
        "tokenizer.ggml.bos_token_id=99999; accepted are the ids of": with_field(golden, "tokenizer.ggml.bos_token_id", 99999),
        "split.count=3; accepted is a complete file": gguf(text("split.count"), struct.pack("<IH", 2, 3)),
        "llama.vocab_size=65, but token_embd.weight has": with_field(golden, "llama.vocab_size", 65),
    }  # fmt: skip
    cases["the name of field .* is no UTF-8"] = cases.pop("the field tokenizer.ggml.merges")
    for words, content in cases.items():
        assert content != golden, words
        (tmp_path / "x.gguf").write_bytes(content)
        with pytest.raises(ValueError, match=f"x.gguf.*{words}") as error:
            import_huggingface(tmp_path / "x.gguf", tmp_path / "run")
        assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_big_endian_gguf_file_has_the_same_fields(tmp_path):
    from lsm_jax.convert.gguf_reader import read_gguf

    for name, order in (("little", "<"), ("big", ">")):
        parts = (
            ("4sIQQ", (b"GGUF", 3, 1, 1)), ("Q3sI", (3, b"a.b", 9)), ("IQ3f", (6, 3, 0.5, 1.0, 2.0)), ("Q1sIQIQ", (1, b"t", 1, 4, 0, 0)),
        )  # fmt: skip
        header = b"".join(struct.pack(order + form, *values) for form, values in parts)
        header = header.ljust(-(-len(header) // 32) * 32, b"\0")
        (tmp_path / name).write_bytes(header + struct.pack(order + "4f", 1, 2, 3, 4))
        fields, tensors = read_gguf(tmp_path / name)
        assert fields == {"a.b": [0.5, 1.0, 2.0]}
        np.testing.assert_array_equal(tensors["t"].data, [1, 2, 3, 4])
