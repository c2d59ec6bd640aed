import json
import logging

import numpy as np
import pytest

from lsm_jax.data import ByteTokenizer, GPT2Tokenizer, TokenStore
from tests.data.stores import numbered, rewrite_with_chunks, write_array


def read_all(store, vocab_size=65536):
    return store.read(np.arange(store.num_documents), 0, store.length, vocab_size=vocab_size)


def random_ids(shape, seed=0):
    return np.random.default_rng(seed).integers(0, 50257, shape)


def test_a_written_store_has_the_published_metadata(tmp_path):
    ids = random_ids((2050, 2100))
    path = write_array(tmp_path / "x.zarr", ids)
    metadata = json.loads((path / ".zarray").read_text())
    metadata.pop("dimension_separator")
    assert metadata == {
        "chunks": [2048, 2048],
        "compressor": {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1, "blocksize": 0},
        "dtype": "<u2",
        "fill_value": 0,
        "filters": None,
        "order": "C",
        "shape": [2050, 2100],
        "zarr_format": 2,
    }
    assert json.loads((path / ".zattrs").read_text()) == {"encoder": "tiktoken-gpt2"}
    assert np.array_equal(read_all(TokenStore(path)), ids)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.zarr"]


def test_stores_are_compatible_with_zarr(tmp_path):
    zarr = pytest.importorskip("zarr")
    numcodecs = pytest.importorskip("numcodecs")
    ids = random_ids((37, 300))
    path = write_array(tmp_path / "ours.zarr", ids)
    assert np.array_equal(zarr.open(str(path), mode="r")[:], ids)
    theirs = zarr.create_array(
        str(tmp_path / "theirs.zarr"),
        shape=ids.shape,
        chunks=(16, 128),
        dtype="uint16",
        zarr_format=2,
        compressors=numcodecs.Blosc("lz4", 5, 1, 0),
        fill_value=0,
    )
    theirs[:] = ids.astype(np.uint16)
    assert np.array_equal(read_all(TokenStore(tmp_path / "theirs.zarr")), ids)


@pytest.mark.parametrize("compressor", ["blosc", "zlib", None])
@pytest.mark.parametrize("dtype", ["<u2", "<u4", "<i8"])
def test_reads_any_chunks_compressor_and_integer_type(tmp_path, compressor, dtype):
    ids = random_ids((11, 50)).astype(dtype)
    path = rewrite_with_chunks(
        tmp_path / "x.zarr", ids, (4, 16), compressor=compressor, dtype=dtype
    )
    store = TokenStore(path)
    assert np.array_equal(read_all(store), ids)
    rows, starts = np.array([3, 4, 5, 9, 0]), np.array([7, 7, 7, 20, 30])
    block = store.read(rows, starts, 20, vocab_size=50257)
    assert block.dtype == np.int32
    assert np.array_equal(block, [ids[r, s : s + 20] for r, s in zip(rows, starts, strict=True)])


def test_a_large_vocabulary_is_stored_in_four_bytes(tmp_path):
    ids = np.array([[0, 1, 151_642]])
    path = write_array(tmp_path / "x.zarr", ids, vocab_size=151_643)
    assert json.loads((path / ".zarray").read_text())["dtype"] == "<u4"
    assert np.array_equal(read_all(TokenStore(path), 151_643), ids)


def test_a_missing_chunk_is_read_as_the_fill_value(tmp_path, caplog):
    ids = numbered(8, 32) + 1
    path = rewrite_with_chunks(tmp_path / "x.zarr", ids.astype("<u2"), (4, 16))
    (path / "1.0").unlink()
    ids[4:, :16] = 0
    with caplog.at_level(logging.WARNING, logger="absl"):
        store = TokenStore(path)
    assert np.array_equal(read_all(store), ids)
    assert "1 of 4 chunks have no file" in caplog.text


@pytest.mark.parametrize("compressor", ["blosc", None])
@pytest.mark.parametrize("size", [0, 10, 100])
def test_a_truncated_chunk_is_named_when_the_store_is_opened(tmp_path, compressor, size):
    ids = random_ids((8, 32)).astype("<u2")
    path = rewrite_with_chunks(tmp_path / "x.zarr", ids, (4, 16), compressor=compressor)
    chunk = path / "1.0"
    chunk.write_bytes(chunk.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"chunk file 1\.0 is truncated"):
        TokenStore(path)


@pytest.mark.parametrize("compressor", ["blosc", "zlib"])
def test_a_chunk_truncated_later_is_named_when_it_is_read(tmp_path, compressor):
    ids = random_ids((64, 64)).astype("<u2")
    path = rewrite_with_chunks(tmp_path / "x.zarr", ids, (32, 32), compressor=compressor)
    store = TokenStore(path)
    chunk = path / "1.0"
    chunk.write_bytes(chunk.read_bytes()[:200])
    assert np.array_equal(store.read([0], [0], 32, vocab_size=50257), ids[:1, :32])
    with pytest.raises(ValueError, match=r"truncated or corrupt.*x\.zarr/1\.0"):
        store.read([40], [0], 32, vocab_size=50257)


def test_ids_outside_the_vocabulary_are_named_with_document_and_column(tmp_path):
    ids = numbered(8, 32)
    ids[5, 9] = 60000
    store = TokenStore(write_array(tmp_path / "x.zarr", ids))
    assert store.read([4], [0], 32, vocab_size=50257).shape == (1, 32)
    with pytest.raises(ValueError, match="document 5, column 9 has token id 60000.*50257"):
        store.read([1, 5], [3, 3], 20, vocab_size=50257)


def test_errors_say_why_a_folder_is_no_store(tmp_path):
    with pytest.raises(ValueError, match="is not a folder"):
        TokenStore(tmp_path / "nowhere")
    folder = tmp_path / "x.zarr"
    folder.mkdir()
    with pytest.raises(ValueError, match="no .zarray"):
        TokenStore(folder)
    (folder / ".zgroup").write_text('{"zarr_format": 2}')
    with pytest.raises(ValueError, match="zarr group"):
        TokenStore(folder)
    (folder / ".zarray").write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        TokenStore(folder)

    def with_metadata(**changes):
        fields = {"zarr_format": 2, "shape": [4, 8], "chunks": [4, 8], "dtype": "<u2"}
        (folder / ".zarray").write_text(json.dumps(fields | changes))
        return folder

    for changes, message in [
        ({"zarr_format": 3}, "zarr_format=3"),
        ({"shape": [4, 8, 2]}, r"shape=\[4, 8, 2\]"),
        ({"chunks": [4]}, r"chunks=\[4\]"),
        ({"shape": [0, 8]}, "is empty: its shape"),
        ({"dtype": "<f4"}, "dtype='<f4'; accepted are integers"),
        ({}, "none of its 1 chunk files"),
    ]:
        with pytest.raises(ValueError, match=message):
            TokenStore(with_metadata(**changes))
    (tmp_path / "v3").mkdir()
    (tmp_path / "v3" / "zarr.json").write_text("{}")
    with pytest.raises(ValueError, match="zarr v3"):
        TokenStore(tmp_path / "v3")


def test_store_and_tokenizer_must_agree(tmp_path):
    ids = numbered(2, 8)
    store = TokenStore(write_array(tmp_path / "a.zarr", ids))
    store.check_tokenizer(GPT2Tokenizer())
    store.check_tokenizer(GPT2Tokenizer(json_escape=True))  # the published store does not say which
    with pytest.raises(ValueError, match="encoder 'tiktoken-gpt2', but the tokenizer is 'bytes'"):
        store.check_tokenizer(ByteTokenizer())
    path = write_array(tmp_path / "b.zarr", ids, json_escape=True)
    with pytest.raises(ValueError, match="json_escape=True"):
        TokenStore(path).check_tokenizer(GPT2Tokenizer())


def test_a_store_exists_only_if_it_is_complete(tmp_path):
    path = tmp_path / "x.zarr"
    with pytest.raises(RuntimeError), _writer(path) as writer:
        writer.add(numbered(3, 8))
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    write_array(path, numbered(3, 8))
    with pytest.raises(ValueError, match="exists already"):
        write_array(path, numbered(3, 8))
    with _writer(path, overwrite=True) as writer:
        writer.add(numbered(5, 8))
    assert TokenStore(path).num_documents == 5
    assert [p.name for p in tmp_path.iterdir()] == ["x.zarr"]
    # A folder that contains stores, or a file, is not overwritten.
    for other in (tmp_path, path / ".zattrs"):
        with pytest.raises(
            ValueError, match="is no token store; overwrite replaces only token stores"
        ):
            _writer(other, overwrite=True)
    with pytest.raises(ValueError, match="path of the store is empty"):
        _writer("", overwrite=True)


def _writer(path, **options):
    from lsm_jax.data.writer import StoreWriter

    return StoreWriter(path, 8, vocab_size=50257, attributes={"encoder": "bytes"}, **options)
