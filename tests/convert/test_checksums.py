"""Checksums beside weights: exports write them, and imports check them."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from lsm_jax import convert
from lsm_jax.convert import Checkpoint, export, import_huggingface, load_params, model_config
from tests.convert.edits import SUMS
from tests.convert.test_fox import write as write_fox
from tests.convert.test_huggingface import GOLDENS, changed
from tests.convert.test_runs import with_tokenizer


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
