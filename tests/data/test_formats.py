"""The same documents in every format give the same batches, in the same order; damage is named by file and row."""

from __future__ import annotations

import gzip
import json
import sys

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import pytest

from lsm_jax.data import (
    DataConfig,
    TokenStore,
    fingerprint,
    make_eval_iterator,
    make_train_iterator,
)
from lsm_jax.data.documents import Documents
from lsm_jax.data.tokenize import main
from tests.data.stores import assert_resumes, same

TEXTS = [f"document {i}: " + "é日 to be or not. " * (i % 5 + 1) for i in range(40)]
ROWS = [{"text": text, "id": i} for i, text in enumerate(TEXTS)]


def zstd(content: bytes) -> bytes:
    """Return the content as two frames of zstd, as parallel compressors write it."""
    codec, half = pyarrow.Codec("zstd"), len(content) // 2
    return b"".join(codec.compress(part).to_pybytes() for part in (content[:half], content[half:]))


def lines(rows) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def write(folder, name, rows=ROWS):
    """Write the rows in the format that the name's end tells; return the path."""
    path = folder / name
    content = (
        lines(rows)
        if "json" in name and not name.startswith("array")
        else json.dumps(rows, indent=1).encode()
    )
    if name.endswith(".parquet"):
        table = pyarrow.Table.from_pylist(rows)
        parquet.write_table(table, path, row_group_size=7, compression="zstd")
    elif name == "saved":
        datasets.Dataset.from_list(rows).save_to_disk(path)
    else:
        compress = {"gz": gzip.compress, "zst": zstd}.get(name.rpartition(".")[2], bytes)
        path.write_bytes(compress(content))
    return path


def config(path, tmp_path, **fields):
    fields = dict(sequence_length=32, heldout_fraction=0.0, num_threads=0, prefetch=0) | fields
    return DataConfig(path=str(path), cache_dir=str(tmp_path / "cache"), **fields)


def train(settings):
    return make_train_iterator(settings, global_batch_size=4, seed=1)


def evaluate(settings):
    settings.heldout_path = settings.path
    return list(make_eval_iterator(settings, global_batch_size=4, remainder="pad"))


FORMATS = (
    "x.jsonl.gz", "x.jsonl.zst", "x.ndjson.gz", "x.json.gz", "x.json.zst", "array.json", "array.json.gz", "x.parquet", "saved",
)  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_batches_of_jsonl(tmp_path, name):
    expected = config(write(tmp_path, "x.jsonl"), tmp_path)
    given = config(write(tmp_path, name), tmp_path)
    reference, iterator = train(expected), train(given)
    for _ in range(30):
        assert same(next(iterator), next(reference))
    for a, b in zip(evaluate(given), evaluate(expected), strict=True):
        assert same(a, b)


def test_compressed_text_is_one_document(tmp_path):
    text = "\n".join(TEXTS) * 50
    (tmp_path / "x.txt").write_text(text)
    (tmp_path / "y.txt.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "z.md.zst").write_bytes(zstd(text.encode()))
    plain = Documents([tmp_path / "x.txt"], piece_bytes=1000)
    assert len(plain) > 100
    for name in ("y.txt.gz", "z.md.zst"):
        packed = Documents([tmp_path / name], piece_bytes=1000, cache_dir=tmp_path / "cache")
        assert [packed[i] for i in range(len(packed))] == [plain[i] for i in range(len(plain))]


def test_a_folder_with_files_of_all_kinds(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("plain")
    for i, name in enumerate(("b.jsonl", "c.jsonl.gz", "d.parquet", "e.json.zst")):
        write(folder, name, [{"text": f"{name} {i}"}])
    (folder / "settings.json").write_text("{}")
    documents = Documents([folder], cache_dir=tmp_path / "cache")
    texts = [documents[i].text for i in range(len(documents))]
    assert texts == ["plain", "b.jsonl 0", "c.jsonl.gz 1", "d.parquet 2", "e.json.zst 3"]


@pytest.mark.parametrize("name", ["x.parquet", "saved", "x.jsonl.zst"])
def test_resumes_exactly(tmp_path, name):
    settings = config(write(tmp_path, name), tmp_path)
    assert_resumes(lambda: train(settings), steps=5)


def test_hosts_make_the_rows_of_the_global_batch(tmp_path):
    settings = config(write(tmp_path, "x.parquet"), tmp_path)
    single = train(settings)
    hosts = [
        make_train_iterator(settings, global_batch_size=4, seed=1, shard_index=i, shard_count=2)
        for i in range(2)
    ]
    for _ in range(8):
        parts, whole = [next(host) for host in hosts], next(single)
        assert same({k: np.concatenate([p[k] for p in parts]) for k in whole}, whole)


def test_instructions_in_parquet(tmp_path):
    rows = [
        dict(instruction=f"Say {i}", input=None if i % 2 else "x", output=str(i)) for i in range(6)
    ]
    plain = [{k: v for k, v in row.items() if v is not None} for row in rows]
    settings = [
        config(write(tmp_path, name, data), tmp_path, format="alpaca", sequence_length=512)
        for name, data in (("x.parquet", rows), ("x.jsonl", plain))
    ]
    for a, b in zip(*map(evaluate, settings), strict=True):
        assert same(a, b)


def test_the_cache_is_written_once_for_each_content(tmp_path):
    path = write(tmp_path, "x.parquet")
    files = lambda: sorted((tmp_path / "cache").rglob("*.jsonl"))  # noqa: E731
    for _ in range(2):
        Documents([path], cache_dir=tmp_path / "cache")
        assert len(files()) == 1
    written = files()[0].stat().st_mtime_ns
    Documents([path], cache_dir=tmp_path / "cache")
    assert files()[0].stat().st_mtime_ns == written
    write(tmp_path, "x.parquet", ROWS[:3])
    assert Documents([path], cache_dir=tmp_path / "cache").num_documents == 3 and len(files()) == 2
    Documents([path], text_key="text", format="text", cache_dir=tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob(".*draft"))


def test_splits_and_ranges_of_a_saved_data_set(tmp_path):
    parts = {"train": ROWS[:10], "validation": ROWS[10:13]}
    saved = datasets.DatasetDict({k: datasets.Dataset.from_list(v) for k, v in parts.items()})
    saved.save_to_disk(tmp_path / "saved")

    def texts(name):
        documents = Documents([f"{tmp_path / 'saved'}{name}"], cache_dir=tmp_path / "cache")
        return [documents[i].text for i in range(len(documents))]

    assert texts("") == texts(":train") == TEXTS[:10]
    assert texts(":validation") == TEXTS[10:13]
    assert texts(":train[:4]") == TEXTS[:4] and texts(":train[2:4]") == TEXTS[2:4]
    with pytest.raises(ValueError, match="saved has no split 'test'; it has train, validation"):
        texts(":test")
    with pytest.raises(
        ValueError, match=r"the split is 'train\[1\]'; accepted are a name, such as train"
    ):
        texts(":train[1]")
    data = fingerprint(config(f"{tmp_path / 'saved'}:validation", tmp_path))
    assert data["kind"] == "data set" and "validation/state.json" in data["files"]


def first(path, tmp_path, **fields):
    return next(train(config(path, tmp_path, **fields)))


def test_missing_columns_and_bad_rows_are_named(tmp_path):
    for name in ("x.parquet", "saved"):
        path = write(tmp_path, name)
        with pytest.raises(
            ValueError, match=rf"{name}.* has no column 'body'; its columns are \['text', 'id'\]"
        ):
            first(path, tmp_path, text_key="body")
        with pytest.raises(ValueError, match=rf"{name}, row 0, has 'id'=0; accepted is a string"):
            first(path, tmp_path, text_key="id")
    path = write(tmp_path, "y.parquet", [*ROWS, {"text": None, "id": 7}])
    with pytest.raises(
        ValueError, match="y.parquet, row 40, has 'text'=None; accepted is a string"
    ):
        first(path, tmp_path)
    path.write_bytes(b"")
    latin = pyarrow.array([b"good", b"\xff"], pyarrow.binary()).cast(pyarrow.string(), safe=False)
    parquet.write_table(pyarrow.table({"text": latin}), path)
    with pytest.raises(ValueError, match="y.parquet, row 1, has text that is not UTF-8"):
        first(path, tmp_path)
    for compress, suffix in ((gzip.compress, "gz"), (zstd, "zst")):
        path = tmp_path / f"z.jsonl.{suffix}"
        path.write_bytes(compress(lines(ROWS[:2]) + b"\n" + b'{"text": \n' + lines(ROWS[2:3])))
        with pytest.raises(
            ValueError, match=rf"z.jsonl.{suffix}, line 4, at byte \d+, is not JSON"
        ):
            list(evaluate(config(path, tmp_path)))
        path.write_bytes(compress(b'{"body": "x"}\n'))
        with pytest.raises(
            ValueError, match=rf"z.jsonl.{suffix}, line 1, at byte 0, has no field 'text'"
        ):
            first(path, tmp_path)


def test_damaged_files_are_named(tmp_path):
    for name, keep in (
        ("x.jsonl.gz", 0.5),
        ("x.jsonl.zst", 0.5),
        ("x.txt.gz", 0.1),
        ("x.txt.zst", 0.9),
    ):
        path = write(tmp_path, name)
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * keep)])
        with pytest.raises(ValueError, match=f"{name} is truncated or damaged after") as error:
            first(path, tmp_path)
        assert "\n" not in str(error.value)
    for name in ("x.txt.gz", "x.jsonl.zst", "x.parquet"):
        (tmp_path / name).write_bytes(b"not what the name says" * 10)
        with pytest.raises(
            ValueError, match=f"{name} is (truncated or damaged after|no parquet file)"
        ):
            first(tmp_path / name, tmp_path)
    path = write(tmp_path, "y.parquet")
    content = bytearray(path.read_bytes())
    for place in range(40, 200):
        content[place] ^= 0x5A
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"y.parquet, row group 0, after row -1, is damaged"):
        first(path, tmp_path)
    assert not list((tmp_path / "cache").rglob("*.jsonl"))


def test_a_missing_package_is_named_by_its_extra(tmp_path, monkeypatch):
    files = [write(tmp_path, name) for name in ("x.parquet", "x.jsonl.zst", "saved", "x.jsonl.gz")]
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    for path, extra in zip(files[:3], ("data", "data", "datasets"), strict=True):
        with pytest.raises(
            ValueError,
            match=rf"requires .* of the extra \[{extra}\]: pip install 'lsm_jax\[{extra}\]'",
        ):
            first(path, tmp_path)
    first(files[3], tmp_path)


def test_a_store_of_every_format_is_that_of_jsonl(tmp_path):
    stores = []
    for name in ("x.jsonl", "x.parquet", "x.json.gz", "x.jsonl.zst", "saved"):
        out = tmp_path / f"{name}.zarr"
        options = ["--tokenizer=bytes", "--sequence_length=64", "--pack", "--num_workers=1"]
        assert main([f"--input={write(tmp_path, name)}", f"--output={out}", *options]) == 0
        store = TokenStore(out)
        stores.append(store.read(np.arange(store.num_documents), 0, 64, vocab_size=257))
    for rows in stores[1:]:
        np.testing.assert_array_equal(rows, stores[0])
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
