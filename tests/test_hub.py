"""Models and tokenizers of the hub, from a server on the loopback address: what is downloaded, pinned, refused, and read
without a network.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from huggingface_hub import constants

from lsm_jax import hub
from lsm_jax.convert import model_config
from lsm_jax.convert.huggingface import open_source
from lsm_jax.data import DataConfig, TokenStore, load_tokenizer
from lsm_jax.data.sources import pin, with_tokenizer
from lsm_jax.data.tokenize import main as tokenize
from tests.data.world import write_vocabulary
from tests.hub_server import Hub

ROOT = Path(__file__).resolve().parents[1]
LLAMA = ROOT / "tests" / "convert" / "goldens" / "llama3"


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A hub with one model, and an empty cache."""
    server = Hub()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        server.url + "/{repo_id}/resolve/{revision}/{filename}",
    )
    for name in (
        "http_proxy",
        "https_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "all_proxy",
        "ALL_PROXY",
    ):
        monkeypatch.delenv(name, raising=False)
    yield server
    server.close()


def model_files(**changed: bytes) -> dict[str, bytes]:
    files = {p.name: p.read_bytes() for p in LLAMA.iterdir() if p.name != "expected.npz"}
    vocabulary = {"<s>": 0, "?": 1, "to": 2, "be": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    files |= {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": b'{"bos_token": "<s>"}',
    }
    others = {"pytorch_model.bin": b"x" * 100, "original/consolidated.00.pth": b"y" * 100}
    return files | others | changed


def downloaded(server: Hub) -> list[str]:
    """Return the names of the files whose contents were requested."""
    return [
        r.rpartition("/")[2].split()[0]
        for r in server.requests
        if r.startswith("GET") and "/resolve/" in r
    ]


def test_a_model_is_downloaded_once_and_by_its_commit(server):
    commit = server.add("models", "org/tiny.llama-1", model_files())
    path = hub.local_path("org/tiny.llama-1")
    names = {p.name for p in path.iterdir()}
    assert "model.safetensors" in names and "config.json" in names
    assert not names & {"pytorch_model.bin", "original"}
    for name in names:
        assert (path / name).read_bytes() == model_files()[name]
    assert str(hub.reference_of(path)) == f"org/tiny.llama-1@{commit}"
    count = len(downloaded(server))
    assert hub.local_path("org/tiny.llama-1") == path and len(downloaded(server)) == count
    newer = server.add("models", "org/tiny.llama-1", model_files(**{"README.md": b"new"}))
    assert hub.local_path("org/tiny.llama-1").name == newer != commit
    assert hub.local_path(f"org/tiny.llama-1@{commit}") == path


def test_one_file_of_a_model(server):
    server.add("models", "org/gguf", {"sub/a.gguf": b"GGUF", "b.gguf": b"B"})
    path = hub.local_path("org/gguf/sub/a.gguf")
    assert path.read_bytes() == b"GGUF" and downloaded(server) == ["a.gguf"]
    assert hub.reference_of(path).rest == "sub/a.gguf"
    with pytest.raises(
        ValueError,
        match="source='org/gguf/c.gguf': the model org/gguf of the hub has no file 'c.gguf'",
    ):
        hub.local_path("org/gguf/c.gguf")


def test_a_download_continues_after_the_connection_is_lost(server, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    content = os.urandom(24 << 20)  # huggingface_hub writes parts of 10 MiB
    server.add("models", "org/m", {"model.safetensors": content, "config.json": b"{}"})
    server.cut.add("model.safetensors")
    path = hub.local_path("org/m")
    assert (path / "model.safetensors").read_bytes() == content
    assert any(r.endswith("model.safetensors bytes=10485760-") for r in server.requests)


def test_an_interrupted_import_downloads_only_the_missing_files(server, monkeypatch):
    server.add("models", "org/m", {"config.json": b"{}", "model.safetensors": b"z" * 1000})
    server.gated.add("org/m")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ValueError, match="gated"):
        hub.local_path("org/m")
    server.gated.clear()
    hub.local_path("org/m/config.json")
    server.requests.clear()
    hub.local_path("org/m")
    assert downloaded(server) == ["model.safetensors"]


def test_errors_have_one_line_and_say_what_to_do(server, monkeypatch):
    server.add("models", "org/closed", {"config.json": b"{}", "tokenizer.json": b"{}"})
    server.gated.add("org/closed")
    cases = {
        "org/closed": r"source='org/closed': the model is gated; accept its licence at http://.*/org/closed, then give .* HF_TOKEN",
        "org/absent": r"source='org/absent': there is no such file or folder here, and no such model at http",
        "org/closed@v9": r"the model org/closed has no revision 'v9'; http://.*/org/closed/commits lists them",
    }
    for text, message in cases.items():
        with pytest.raises(ValueError, match=message) as error:
            hub.local_path(text)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="tokenizer='org/closed': the model is gated"):
        load_tokenizer("org/closed")
    with pytest.raises(ValueError, match="data.tokenizer='org/absent': there is no such"):
        pin(DataConfig(tokenizer="org/absent"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        ValueError,
        match="source='org/other': there is no such file or folder here, and it cannot be downloaded",
    ) as error:
        hub.local_path("org/other")
    assert "\n" not in str(error.value)


def test_a_file_of_rwkv_is_imported_by_its_id(server, tmp_path):
    """A model that is one .pth file, and what is said of a whole model that has none of the accepted files."""
    golden = ROOT / "tests" / "convert" / "released_goldens" / "rwkv7.pth"
    commit = server.add("models", "org/rwkv7", {"small.pth": golden.read_bytes(), "README.md": b""})
    source = open_source("org/rwkv7/small.pth")
    assert model_config(source).num_layers == 2
    assert hub.reference_of(source.folder) == hub.Reference("org/rwkv7", "small.pth", commit)
    with pytest.raises(ValueError, match="source='org/rwkv7' has no config.json; .* org/rwkv7/FILE.gguf or org/rwkv7/FILE.pth"):  # fmt: skip
        open_source("org/rwkv7")
    server.add("models", "org/old", {"config.json": b"{}", "pytorch_model.bin": b""})
    with pytest.raises(ValueError, match="has no model.safetensors and no .*; accepted are tensors in safetensors"):  # fmt: skip
        open_source("org/old")


def test_without_a_network_the_cache_is_read(server, monkeypatch):
    commit = server.add("models", "org/tiny", model_files())
    path = hub.local_path("org/tiny")
    server.add("models", "org/half", model_files())
    hub.local_path("org/half/config.json")
    server.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.local_path("org/tiny") == path
    assert hub.pinned("org/tiny", "base.path") == f"org/tiny@{commit}"
    for text in ("org/half", "org/never"):
        with pytest.raises(
            ValueError, match="HF_HUB_OFFLINE=1 permits only the cache .* unset HF_HUB_OFFLINE"
        ):
            hub.local_path(text)
    assert not server.requests


def test_a_path_is_never_an_id(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    assert hub.reference("org/tiny") is None and hub.local_path("org/tiny") == Path("org/tiny")
    for text in (
        "/org/tiny2",
        "./org/tiny2",
        "~/x",
        "tiny",
        "a b/c",
        "org/x?y",
        "org/../x",
        "",
        Path("org/other"),
    ):
        assert hub.reference(text) is None, text
    found = hub.reference("org/name.v1/sub/file.gguf@refs/pr/1")
    assert (found.id, found.rest, found.revision) == ("org/name.v1", "sub/file.gguf", "refs/pr/1")
    assert str(found) == "org/name.v1/sub/file.gguf@refs/pr/1" and not server.requests


def test_a_run_keeps_the_commits_with_which_it_began(server):
    old = server.add("models", "org/t", model_files())
    config = DataConfig(tokenizer="org/t")
    first = pin(config)
    assert first.tokenizer == f"org/t@{old}"
    new = server.add("models", "org/t", model_files(**{"README.md": b"new"}))
    assert pin(config, first) == pin(first) == first
    assert (
        pin(config).tokenizer
        == f"org/t@{new}"
        == pin(DataConfig(tokenizer="org/t@main"), first).tokenizer
    )
    for name in ("bytes", "gpt2", "auto", str(LLAMA)):
        assert pin(DataConfig(tokenizer=name)).tokenizer == name


def test_a_tokenizer_by_id_is_that_of_the_folder(server, tmp_path):
    server.add("models", "org/t", model_files())
    (tmp_path / "tokenizer.json").write_bytes(model_files()["tokenizer.json"])
    ours, theirs = load_tokenizer("org/t"), load_tokenizer(str(tmp_path))
    assert ours.encode("to be or") == theirs.encode("to be or") == [2, 3, 1]
    assert ours.name == theirs.name and ours.bos_id == 0
    assert "model.safetensors" not in downloaded(server)
    (tmp_path / "text.txt").write_text("to be or not to be " * 20)
    store = tmp_path / "store.zarr"
    options = ["--tokenizer=org/t", "--sequence_length=16", "--pack", "--num_workers=1"]
    assert tokenize([f"--input={tmp_path / 'text.txt'}", f"--output={store}", *options]) == 0
    config = with_tokenizer(DataConfig(path=str(store)))
    assert config.tokenizer == str(store / "tokenizer.json") and TokenStore(store).num_documents


def test_the_tokenizer_of_rwkv_by_id_is_its_vocabulary(server, tmp_path):
    path = write_vocabulary(tmp_path)
    files = {path.name: path.read_bytes(), "tokenizer_config.json": b"{}"}
    server.add("models", "org/rwkv", files | {"model.safetensors": b"no"})
    ours, theirs = load_tokenizer("org/rwkv"), load_tokenizer(str(path))
    assert ours.encode("the thing") == theirs.encode("the thing") and ours.eos_id == 0
    assert sorted(downloaded(server)) == sorted(files)


def test_liger_starts_from_an_id_and_keeps_its_commit(server, tmp_path):
    from configs.liger import get_config
    from lsm_jax.training.run_files import pinned

    commit = server.add("models", "org/tiny-llama", model_files())
    config = get_config("auto,source=org/tiny-llama")
    assert config.base.path == config.data.tokenizer == "org/tiny-llama" and not config.data.add_bos
    first = pinned(config, tmp_path)
    assert first.base.path == first.data.tokenizer == f"org/tiny-llama@{commit}"
    first.base.validate(first.model)
    again = get_config(f"auto,source=org/tiny-llama@{commit}")
    assert pinned(again, tmp_path).base == first.base
    with pytest.raises(ValueError, match="source='org/none': there is no such file or folder"):
        get_config("auto,source=org/none")


@pytest.mark.slow
def test_the_import_command_pins_the_commit(server, tmp_path):
    """The environment variables of huggingface_hub, as a user sets them, in a new process."""
    commit = server.add("models", "org/tiny-llama", model_files())
    environment = {
        **{k: v for k, v in os.environ.items() if "proxy" not in k.lower()},
        "HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home"), "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT),
    }  # fmt: skip

    def run(workdir, **variables):
        command = [
            sys.executable,
            "-m",
            "lsm_jax",
            "convert",
            "--source=org/tiny-llama",
            f"--workdir={tmp_path / workdir}",
        ]
        return subprocess.run(
            command, env=environment | variables, capture_output=True, text=True, cwd=tmp_path
        )

    assert (first := run("run")).returncode == 0, first.stderr
    assert json.loads((tmp_path / "run" / "source.json").read_text()) == {
        "source": f"org/tiny-llama@{commit}"
    }
    assert json.loads((tmp_path / "run" / "config.json").read_text())["name"] == "tiny-llama"
    server.requests.clear()
    assert (again := run("offline", HF_HUB_OFFLINE="1")).returncode == 0, again.stderr
    assert not server.requests
