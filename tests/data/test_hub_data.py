"""Data sets of the hub, streamed from a server on the loopback address, in processes with the environment variables of
huggingface_hub.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet as parquet
import pytest

from tests.hub_server import Hub

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [f"row {i} of the data set" for i in range(20)]
CARD = b"""---
configs:
- config_name: default
  data_files:
  - split: train
    path: train/*.parquet
  - split: validation
    path: validation.parquet
- config_name: small
  data_files: small/*.parquet
---
"""
# Prints for each argument the texts of the documents, or the error.
SCRIPT = """
import json, sys
from lsm_jax.data import DataConfig, fingerprint
from lsm_jax.data.documents import Documents
from lsm_jax.data.sources import pin
for name in sys.argv[2:]:
    try:
        pinned = pin(DataConfig(path=name, cache_dir=sys.argv[1])).path
        documents = Documents([pinned], cache_dir=sys.argv[1])
        data = fingerprint(DataConfig(path=pinned, cache_dir=sys.argv[1]))
        texts = [documents[i].text for i in range(len(documents))]
    except ValueError as error:
        pinned, texts, data = "", str(error), {}
    print(json.dumps([pinned, texts, data]))
"""


def table(rows) -> bytes:
    file = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


@pytest.fixture(scope="module")
def server():
    server = Hub()
    yield server
    server.close()


def read(server, folder, *names, **variables):
    environment = {k: v for k, v in os.environ.items() if "proxy" not in k.lower()}
    environment |= {
        "HF_ENDPOINT": server.url, "HF_HOME": str(folder / "home"), "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT),
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }  # fmt: skip
    command = [sys.executable, "-c", SCRIPT, str(folder / "cache"), *names]
    run = subprocess.run(command, env=environment | variables, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def files(rows):
    return {
        "README.md": CARD,
        "train/0.parquet": table(rows[:6]),
        "train/1.parquet": table(rows[6:15]),
        "validation.parquet": table(rows[15:]),
        "small/0.parquet": table(rows[:3]),
    }


@pytest.mark.slow
def test_splits_subsets_ranges_commits_and_no_network(server, tmp_path):
    rows = [{"text": text, "id": i} for i, text in enumerate(TEXTS)]
    commit = server.add("datasets", "org/corpus", files(rows))
    server.add("datasets", "org/closed", files(rows))
    server.gated.add("org/closed")
    server.add(
        "datasets", "org/bad", files([{"text": t if i != 7 else None} for i, t in enumerate(TEXTS)])
    )
    names = ["org/corpus", "org/corpus:validation", "org/corpus/small", "org/corpus:train[4:8]"]
    wrong = ["org/corpus:test", "org/corpus/nothing", "org/absent", "org/corpus@v2", "org/bad"]
    results = read(server, tmp_path, *names, *wrong, "org/closed")
    expected = [TEXTS[:15], TEXTS[15:], TEXTS[:3], TEXTS[4:8]]
    for name, texts, (pinned, found, data) in zip(names, expected, results, strict=False):
        place, colon, split = name.partition(":")
        assert pinned == f"{place}@{commit}{colon}{split}" and found == texts
        assert data == {"kind": "data set", "tokenizer": "bytes", "data_set": pinned}
    messages = [message for _, message, _ in results[len(names) :]]
    parts = [
        ("org/corpus", "cannot be read", "test", "train"),
        ("org/corpus/nothing", "cannot be read", "default", "small"),
        ("data.path='org/absent': there is no such file or folder here, and no such data set at",),
        ("the data set org/corpus has no revision 'v2'",),
        ("org/bad@", "row 7, has 'text'=None; accepted is a string"),
        ("data set='org/closed@", "the data set is gated; accept its licence at", "HF_TOKEN"),
    ]
    for message, words in zip(messages, parts, strict=True):
        assert isinstance(message, str) and "\n" not in message
        assert all(word in message for word in words), message

    # A newer commit is read by the branch's name, and the earlier one by its commit.
    newer = server.add("datasets", "org/corpus", files([{"text": f"new {t}"} for t in TEXTS]))
    found = read(server, tmp_path, "org/corpus", f"org/corpus@{commit}")
    assert found[0][:2] == [f"org/corpus@{newer}", [f"new {t}" for t in TEXTS[:15]]]
    assert found[1][:2] == [f"org/corpus@{commit}", TEXTS[:15]]
    server.requests.clear()
    offline = read(
        server,
        tmp_path,
        "org/corpus",
        f"org/corpus@{commit}:validation",
        "org/never",
        HF_HUB_OFFLINE="1",
    )
    assert offline[0] == found[0] and offline[1][1] == TEXTS[15:] and not server.requests
    assert "HF_HUB_OFFLINE=1 permits only the cache" in offline[2][1]
