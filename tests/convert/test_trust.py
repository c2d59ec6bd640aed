"""Pretrained models that are damaged, or made to harm: nothing outside their folders is read or written, sizes are bounded
before anything is allocated, checksums are checked, and every error is one message that names file and field."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from absl import logging
from safetensors.numpy import load_file, save_file

from lsm_jax import convert
from lsm_jax.convert import Checkpoint, export, import_huggingface, load_params, model_config
from lsm_jax.data import load_tokenizer
from tests.convert.make_liger import write_liger
from tests.convert.test_fox import write as write_fox
from tests.convert.test_huggingface import GOLDENS, changed
from tests.convert.test_runs import with_tokenizer
from tests.faults.damage_checkpoints import KINDS, cases, read

INDEX, SUMS = "model.safetensors.index.json", "SHA256SUMS"


@pytest.fixture
def warnings(monkeypatch) -> list[str]:
    """Fixture: the list of the warnings that are logged from now on."""
    lines: list[str] = []
    monkeypatch.setattr(logging, "warning", lambda text, *values: lines.append(text % values))
    return lines


def edit(path: Path, **fields) -> Path:
    """Change fields of a JSON file, and return its path."""
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return path


# Point 1 of issue 28: paths and links.


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


# Point 4: sizes. Each file would require more than 1 GiB or a minute without bounds.


def gguf(*parts: bytes, fields: int = 1, tensors: int = 0) -> bytes:
    """Return a GGUF file with the given bytes after its counts."""
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, fields) + b"".join(parts)


def text(value: str, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value.encode()


def with_field(content: bytes, name: str, value: int) -> bytes:
    """Return a GGUF file in which an integer field of 32 bits has another value."""
    at = content.index(name.encode()) + len(name) + 4
    return content[:at] + struct.pack("<I", value) + content[at + 4 :]


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
    print(json.dumps([message, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20]), flush=True)
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


# Point 8: fields of wrong types, templates, strings.


def test_null_context_is_an_absent_field(tmp_path):
    folder = with_tokenizer(changed(tmp_path, "llama3", max_position_embeddings=None))
    assert import_huggingface(folder, tmp_path / "run").data.sequence_length == 8192


@pytest.mark.parametrize(
    ("file", "fields", "words"),
    [
        ("config.json", dict(max_position_embeddings=-1), "max_position_embeddings=-1; accepted is a whole number from 1"),
        ("config.json", dict(max_position_embeddings="64"), "max_position_embeddings='64'; accepted"),
        ("config.json", dict(model_type=["llama"]), r"model_type=\['llama'\]; accepted is a string"),
        ("config.json", dict(layer_types=[["a"]]), "layer_types=.*; accepted is a list of strings"),
        ("config.json", dict(rms_norm_eps=10**400), "rms_norm_eps=1000.*; accepted is a finite number"),
        ("config.json", dict(unknown={"\n": "x" * 9999}), "unknown fields, which may change"),
        ("tokenizer_config.json", dict(bos_token=-1), "bos_token=-1; accepted is a string, an object with"),
        ("tokenizer_config.json", dict(eos_token=["</s>"]), "eos_token=.*; accepted is a string"),
        ("tokenizer_config.json", dict(eos_token={"content": 5}), "eos_token=.*; accepted is a string"),
        ("tokenizer_config.json", dict(chat_template=5), "chat_template=5; accepted is a string"),
        ("tokenizer_config.json", dict(chat_template=[{"name": "default"}]), "chat_template=.*; accepted is a string, or a list"),
        ("tokenizer_config.json", dict(add_bos_token="yes"), "add_bos_token='yes'; accepted is true or false"),
        ("special_tokens_map.json", dict(bos_token=-1), "bos_token=-1; accepted is a string"),
        ("generation_config.json", dict(eos_token_id="2"), "eos_token_id='2'; accepted is a token id"),
        ("generation_config.json", dict(bos_token_id=-1), "bos_token_id=-1; accepted is a token id"),
    ],
)  # fmt: skip
def test_fields_of_wrong_types_are_named(tmp_path, file, fields, words):
    folder = with_tokenizer(changed(tmp_path, "llama3"))
    if not (folder / file).exists():
        (folder / file).write_text("{}")
    edit(folder / file, **fields)
    with pytest.raises(ValueError, match=f"{file}: {words}") as error:
        import_huggingface(folder, tmp_path / "run")
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for i in range(999999999) %}{% endfor %}", "Range too big"),
        ("{{ messages[5].content.x.y }}", "undefined|no element 5"),
        ("{% if %}\n{% endfor %}", r"\(line 1\)|line 1"),
        ("{{ raise_exception('no\nroom') }}", "no room"),
        ("{{ [].append.x() }}", "append"),
    ],
)
def test_errors_of_chat_templates_name_the_file(tmp_path, template, words, warnings):
    folder = with_tokenizer(changed(tmp_path, "llama3"), chat_template=template)
    config = import_huggingface(folder, tmp_path / "run")
    parses = "{% if %}" not in template
    found = [line for line in warnings if "chat_template cannot be used" in line]
    assert len(found) == (0 if parses else 1)
    assert all(str(folder / "tokenizer_config.json") in line for line in found)
    tokenizer = load_tokenizer(config.data.tokenizer)
    with pytest.raises(
        ValueError, match=f"tokenizer_config.json: its chat template refuses .*({words})"
    ) as error:
        tokenizer.chat_text([dict(role="user", content="a")])
    assert "\n" not in str(error.value)
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="chat_template.jinja cannot be read: byte 0 is no UTF-8"):
        import_huggingface(folder, tmp_path / "other")


def test_fields_of_the_tokenizer_that_are_not_used_are_told(tmp_path, warnings):
    folder = with_tokenizer(
        changed(tmp_path, "llama3"), bos="<s>", bos_token="<s>", add_bos_token=True, model_max_length=64, add_eos_token=True,
        new_option=[1],
    )  # fmt: skip
    import_huggingface(folder, tmp_path / "run")
    (line,) = warnings
    assert line.startswith(
        f"{folder / 'tokenizer_config.json'}: fields that are copied, but not used"
    )
    assert line.endswith("add_eos_token=True, new_option=[1]")
    warnings.clear()
    edit(
        folder / "tokenizer_config.json", add_bos_token=False, add_eos_token=False, new_option=None
    )
    import_huggingface(folder, tmp_path / "second")
    assert [line.rpartition(": ")[2] for line in warnings] == []  # false, as absent
    content = (GOLDENS / "llama.gguf").read_bytes()
    renamed = content.replace(b"tokenizer.ggml.add_bos_token", b"tokenizer.ggml.add_eos_token")
    at = renamed.index(b"tokenizer.ggml.add_eos_token") + len("tokenizer.ggml.add_eos_token") + 4
    (tmp_path / "x.gguf").write_bytes(renamed[:at] + b"\1" + renamed[at + 1 :])
    import_huggingface(tmp_path / "x.gguf", tmp_path / "third")
    assert warnings == [
        f"{tmp_path / 'x.gguf'}: fields of the tokenizer that are not used and not copied: tokenizer.ggml.add_eos_token=True"
    ]


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


# Point 9: checksums.


def test_exports_have_checksums_that_an_import_checks(tmp_path):
    source = with_tokenizer(changed(tmp_path, "llama2"))
    config = model_config(source)
    params = load_params(source, config)
    out = export(params, config, source, tmp_path / "out")
    names = {path.name for path in out.iterdir()} - {SUMS}
    assert {line.split("  ")[1] for line in (out / SUMS).read_text().splitlines()} == names
    if shutil.which("sha256sum"):
        subprocess.run(
            ["sha256sum", "-c", "--strict", SUMS], cwd=out, check=True, capture_output=True
        )
    load_params(out, config)
    again = export(params, config, out, tmp_path / "again")
    assert (again / SUMS).read_bytes() == (out / SUMS).read_bytes()
    for name in sorted(names - {"expected.npz"}):
        folder = tmp_path / f"damaged-{name}"
        shutil.copytree(out, folder)
        content = bytearray((folder / name).read_bytes())
        last = (
            len(content) - 1
            if name.endswith("safetensors")
            else content.rindex(b"\n" if b"\n" in content else b"}")
        )
        content[last] = content[last] ^ 1 if name.endswith("safetensors") else ord(" ")
        (folder / name).write_bytes(content)
        with pytest.raises(
            ValueError, match=rf"{name} (is damaged or was changed: its SHA-256|cannot be read)"
        ):
            import_huggingface(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_other_exports_have_checksums_too(tmp_path):
    folder = write_fox(tmp_path / "fox", "pro")[0]
    checkpoint = Checkpoint(folder)
    model = convert.fox_config(checkpoint)
    params = convert.fox_params(checkpoint, model)
    out = convert.export_fox(params, model, tmp_path / "out", source=folder)
    content = bytearray((out / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (out / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged or was changed"):
        convert.import_fox(out, tmp_path / "run")
    gguf_file = tmp_path / "llama.gguf"
    shutil.copy(GOLDENS / "llama.gguf", gguf_file)
    (tmp_path / SUMS).write_text(f"SHA256 (llama.gguf) = {'0' * 64}\n")
    with pytest.raises(ValueError, match=r"llama\.gguf is damaged or was changed"):
        import_huggingface(gguf_file, tmp_path / "run")
    (tmp_path / SUMS).unlink()
    (tmp_path / SUMS).symlink_to("nothing")
    with pytest.raises(ValueError, match="nothing cannot be read: no such file"):
        import_huggingface(gguf_file, tmp_path / "run")
    (tmp_path / SUMS).unlink()
    (tmp_path / SUMS).write_text("a line\n")
    with pytest.raises(ValueError, match="SHA256SUMS: line 1 is 'a line'; accepted is a SHA-256"):
        import_huggingface(gguf_file, tmp_path / "run")


# Point 11: the rotation.


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3", "longrope"])
@pytest.mark.parametrize(
    "value", [None, [8.0], "8", -1.0, 0, float("nan"), pytest.param(10**400, id="10**400")]
)
def test_factors_of_the_rotation_are_checked(tmp_path, kind, value):
    fields = dict(rope_type=kind, factor=value)
    if kind == "llama3":
        fields |= dict(
            low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
        )
    for name in ("rope_scaling", "rope_parameters"):
        folder = changed(tmp_path / name, "llama-linear", **{"rope_parameters": None, name: fields})
        with pytest.raises(
            ValueError,
            match=rf"config.json: .*(rope_scaling|rope_parameters)(\.factor| of type '{kind}')",
        ):
            model_config(folder)


def test_two_unequal_scalings_of_the_rotation_are_refused(tmp_path):
    linear = dict(rope_type="linear", factor=4.0, rope_theta=1e4)
    for other in (dict(factor=8.0), dict(rope_theta=5e5), dict(rope_type="llama3")):
        folder = changed(
            tmp_path / next(iter(other)),
            "llama-linear",
            rope_scaling=linear,
            rope_parameters=linear | other,
        )
        with pytest.raises(ValueError, match=f"but rope_parameters.{next(iter(other))}="):
            model_config(folder)
    folder = changed(tmp_path, "llama-linear", rope_scaling=linear, rope_parameters=linear)
    assert model_config(folder).layers["L"].mixer.rope_scaling.factor == 4.0


def test_a_chat_template_is_bounded_before_anything_is_written(tmp_path):
    folder = with_tokenizer(changed(tmp_path, "llama3"))
    (folder / "chat_template.jinja").write_bytes(b"x" * (16 * 2**20 + 1))
    with pytest.raises(ValueError, match=rf"^{folder}/chat_template.jinja has 16777217 bytes"):
        import_huggingface(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("value", [0, 0.0, -1.0, [1e4], float("inf")])
def test_the_base_of_the_rotation_is_not_replaced(tmp_path, value):
    folder = changed(tmp_path, "llama-linear", rope_parameters=None, rope_theta=value)
    with pytest.raises(
        ValueError, match=r"config.json: rope_theta=.*; accepted is a finite number above 0"
    ):
        model_config(folder)
    edit(
        folder / "config.json",
        rope_theta=None,
        rope_parameters=dict(rope_type="default", rope_theta=value),
    )
    with pytest.raises(ValueError, match=r"config.json: rope_parameters\.rope_theta="):
        model_config(folder)
    edit(folder / "config.json", rope_parameters=None, model_type="llama")
    assert model_config(folder).layers["L"].mixer.rope_base == 10000.0


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
