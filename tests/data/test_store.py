import json
import logging
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from lsm_jax.data import ByteTokenizer, GPT2Tokenizer, TokenStore, checksums
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


def test_a_missing_chunk_is_named(tmp_path):
    ids = numbered(8, 32).astype("<u2")
    path = rewrite_with_chunks(tmp_path / "x.zarr", ids, (4, 16))
    store = TokenStore(path)
    (path / "1.0").unlink()
    assert np.array_equal(store.read([0], [0], 32, vocab_size=50257), ids[:1])
    with pytest.raises(ValueError, match=r"chunk file 1\.0 cannot be read: no such file"):
        store.read([5], [0], 32, vocab_size=50257)
    with pytest.raises(
        ValueError, match=r"chunk file 1\.0 is missing: .*are 4 chunk files, and 3 exist"
    ):
        TokenStore(path)


def test_a_store_of_zeros_has_all_its_chunks(tmp_path):
    store = TokenStore(write_array(tmp_path / "x.zarr", np.zeros((5, 8), int)))
    assert not read_all(store).any() and store.largest_token_id == 0


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
    with pytest.raises(ValueError, match=r"x\.zarr: chunk file 1\.0 is truncated or corrupt"):
        store.read([40], [0], 32, vocab_size=50257)


def test_ids_outside_the_vocabulary_are_named_with_document_and_column(tmp_path):
    ids = numbered(8, 32)
    ids[5, 9] = 60000
    store = TokenStore(rewrite_with_chunks(tmp_path / "x.zarr", ids.astype("<u2"), (4, 16)))
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


def test_written_stores_have_checksums_which_are_compared_when_a_chunk_is_read(tmp_path):
    ids = random_ids((2050, 2100))
    path = write_array(tmp_path / "x.zarr", ids)
    content = json.loads((path / "checksums.json").read_text())
    assert set(content["files"]) == {".zarray", ".zattrs", "0.0", "0.1", "1.0", "1.1"}
    assert content["largest_token_id"] == ids.max() and TokenStore(path).check_files() == 4
    chunk = path / "1.0"
    data = bytearray(chunk.read_bytes())
    data[len(data) // 2] ^= 1  # decodes without an error
    chunk.write_bytes(data)
    store = TokenStore(path)
    assert np.array_equal(store.read([0], [0], 2100, vocab_size=50257), ids[:1])
    with pytest.raises(ValueError, match=r"chunk file 1\.0 does not match checksums\.json"):
        store.read([2049], [0], 8, vocab_size=50257)
    # Checked again if the file changes after it was read.
    with open(path / "0.0", "r+b") as file:
        file.seek(100)
        file.write(b"damage")
    with pytest.raises(ValueError, match=r"chunk file 0\.0 does not match"):
        store.read([0], [0], 8, vocab_size=50257)
    content["files"].pop("0.1")
    (path / "checksums.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"has no checksum of chunk file 0\.1"):
        TokenStore(path).read([0], [2048], 8, vocab_size=50257)


@pytest.mark.parametrize("name", [".zarray", ".zattrs"])
def test_changed_metadata_are_named(tmp_path, name):
    path = write_array(tmp_path / "x.zarr", numbered(4, 8))
    (path / name).write_text((path / name).read_text().replace("}", " }", 1))
    with pytest.raises(ValueError, match=rf"{name} does not match checksums\.json"):
        TokenStore(path)


def test_checksums_of_older_stores_are_written_and_checked_by_a_command(tmp_path, capsys, caplog):
    path = rewrite_with_chunks(tmp_path / "x.zarr", numbered(8, 32).astype("<u2"), (4, 16))
    with caplog.at_level(logging.INFO, logger="absl"):
        for _ in range(2):
            assert not TokenStore(path).has_checksums
    assert caplog.text.count("has no checksums.json") == 1
    assert checksums.main(["--check", str(path)]) == 1
    assert checksums.main([str(path)]) == 0 and checksums.main(["--check", str(path)]) == 0
    assert TokenStore(path).largest_token_id == 731
    (path / "0.0").write_bytes((path / "0.1").read_bytes())
    assert checksums.main(["--check", str(path)]) == 1
    assert "chunk file 0.0 does not match" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": [10**15, 32]}, r"chunk file 2\.0 is missing: .*shape=\[1000000000000000, 32\]"),
        ({"shape": [8, 10**15]}, r"chunk file 0\.2 is missing"),
        ({"shape": [10**30, 10**30]}, r"chunk file 0\.2 is missing"),
        ({"chunks": [0, 16]}, r"chunks=\[0, 16\]; accepted are two positive"),
        ({"chunks": [2**40, 2**40]}, r"bytes a chunk; accepted are at most 268435456"),
        ({"chunks": [8, 32]}, r"it decodes to 128 bytes, but chunks=\[8, 32\].* are 512 bytes"),
        ({"chunks": [4.0, 16]}, r"chunks=\[4\.0, 16\]"),
        ({"dtype": "<u8"}, "it decodes to 128 bytes.*'<u8' are 512 bytes"),
        ({"dtype": "<u8" * 10**5}, r"dtype='<u8<u8.*\.\.\.; accepted are integers"),
        ({"dtype": [["a", "<u2"]]}, "dtype=.*; accepted are integers"),
        ({"compressor": "blosc"}, None),
        ({"compressor": {"id": "lzma"}}, "compressor={'id': 'lzma'}; accepted are null"),
        ({"compressor": {"id": "zlib"}}, r"chunk file 0\.0 is truncated or corrupt"),
        ({"compressor": {"id": "zstd"}}, r"chunk file 0\.0 is truncated or corrupt"),
        ({"fill_value": [1]}, "cannot be opened as a token store"),
        ({"filters": [1]}, "cannot be opened as a token store"),
        ({"dimension_separator": "x"}, "dimension_separator='x'; accepted are"),
    ],
)
def test_metadata_that_the_files_do_not_have_are_named_at_once(tmp_path, changes, message):
    path = rewrite_with_chunks(tmp_path / "x.zarr", numbered(8, 32).astype("<u2"), (4, 16))
    fields = json.loads((path / ".zarray").read_text())
    (path / ".zarray").write_text(json.dumps(fields | changes))
    start = time.perf_counter()
    with pytest.raises(ValueError, match=message):
        TokenStore(path).read([0], [0], 8, vocab_size=50257)
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize("name", [".zarray", ".zattrs", "checksums.json"])
@pytest.mark.parametrize(
    "text", ['{"a":' * 100_000, "[]", '{"a": "\\ud800"}', "1" * 10_000, "\xff"]
)
def test_metadata_that_are_no_object_name_the_file(tmp_path, name, text):
    path = write_array(tmp_path / "x.zarr", numbered(4, 8))
    (path / name).write_bytes(text.encode("latin1"))
    with pytest.raises(ValueError, match=rf"{name} "):
        TokenStore(path)


@pytest.mark.parametrize("compressor", ["zlib", "gzip", "bz2"])
def test_a_chunk_that_decodes_to_far_more_is_not_decoded(tmp_path, compressor):
    import bz2
    import gzip
    import zlib

    path = rewrite_with_chunks(
        tmp_path / "x.zarr", numbered(8, 32).astype("<u2"), (4, 16), compressor="zlib"
    )
    fields = json.loads((path / ".zarray").read_text())
    (path / ".zarray").write_text(
        json.dumps(fields | {"compressor": {"id": compressor, "level": 1}})
    )
    compress = {"zlib": zlib.compress, "gzip": gzip.compress, "bz2": bz2.compress}[compressor]
    for chunk in path.glob("?.?"):
        chunk.write_bytes(compress(bytes(200_000)))
    with pytest.raises(
        ValueError, match="it decodes to more bytes, but|has .* bytes; accepted are at most"
    ):
        TokenStore(path).read([0], [0], 8, vocab_size=50257)


def test_links_that_lead_out_of_a_store_are_refused(tmp_path):
    path = write_array(tmp_path / "x.zarr", numbered(4, 8))
    other = tmp_path / "elsewhere"
    for name in ("0.0", ".zarray", ".zattrs", "checksums.json"):
        (path / name).rename(other)
        (path / name).symlink_to(other)
        with pytest.raises(
            ValueError, match=f"names '{name}', a link to .*elsewhere, which is not inside"
        ):
            TokenStore(path)
        (path / name).unlink()
        other.rename(path / name)
    link = tmp_path / "link.zarr"
    link.symlink_to(path)
    assert TokenStore(link).num_documents == 4  # the user's own link
    with pytest.raises(ValueError, match="is a link; accepted is the path of the store itself"):
        write_array(link, numbered(4, 8))


def test_pipes_and_folders_in_place_of_chunks_are_named(tmp_path):
    path = write_array(tmp_path / "x.zarr", numbered(4, 8))
    (path / "0.0").unlink()
    os.mkfifo(path / "0.0")
    with pytest.raises(ValueError, match=r"chunk file 0\.0 is no regular file"):
        TokenStore(path)


@pytest.mark.slow
def test_an_error_of_the_disk_is_one_line_and_leaves_nothing(tmp_path):
    code = f"""
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
from lsm_jax.data.tokenize import main
raise SystemExit(main(["--input", {str(tmp_path / "a.txt")!r}, "--output", {str(tmp_path / "x.zarr")!r}, "--tokenizer", "bytes",
    "--sequence_length", "64", "--pack", "--num_workers", "1"]))
"""
    (tmp_path / "a.txt").write_bytes(
        np.random.default_rng(0).integers(97, 122, 40_000, np.uint8).tobytes()
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    message = " ".join(done.stderr.split())
    assert "x.zarr: the file is larger than the limit" in message
    assert message.endswith("no store was written")
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]
