import json
import subprocess
import sys

import numpy as np
import pytest

from lsm_jax.data import (
    ByteTokenizer,
    DataConfig,
    TokenStore,
    make_eval_iterator,
    make_train_iterator,
    write_demo_store,
)
from lsm_jax.data.documents import Documents
from lsm_jax.data.sources import open_documents
from lsm_jax.data.tokenize import main, write_store

TEXTS = [f"{i}" * (20 * i % 71 + 1) for i in range(30)]


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    return str(path)


def read(path):
    store = TokenStore(path)
    return store.read(np.arange(store.num_documents), 0, store.length, vocab_size=257)


def test_the_end_of_one_text_is_held_out(tmp_path, capsys):
    path, store = tmp_path / "in.txt", tmp_path / "s"
    path.write_text("".join(f"line {i} of the text\n" for i in range(100)))
    command = ["--input", str(path), "--output", str(store / "train.zarr"), "--tokenizer", "bytes"]
    command += ["--sequence_length", "32", "--num_workers", "1"]
    assert main(command) == 1
    said = capsys.readouterr().err
    assert "cannot be divided" in said and "--pack, which divides" in said
    assert main([*command, "--pack"]) == 0
    assert "from the end of the only document, which is held out" in capsys.readouterr().out
    first, held = (store / f"{name}.zarr" for name in ("train", "heldout"))
    text = bytes(t for t in read(held).flatten().tolist() if t < 256).decode()
    assert text == "line 98 of the text\nline 99 of t" and len(read(first)) > 50
    # Training reads the file in the same parts.
    config = DataConfig(path=str(path), sequence_length=32)
    parts = [open_documents(config, heldout=heldout) for heldout in (False, True)]
    texts = ["".join(part[i].text for i in range(len(part))) for part in parts]
    assert "".join(texts) == path.read_text() and texts[1].startswith(text)


def test_the_share_of_one_text_that_is_held_out(tmp_path, caplog):
    path = tmp_path / "in.txt"
    path.write_text("".join(f"{i:09}\n" for i in range(20_000)))
    for fraction, length, held in (
        (0.01, 512, 2000),
        (0.3, 512, 60_000),
        (0.5, 65_536, 100_000),
        (0.01, 8192, 8200),  # a row, from the beginning of a line on
        (0.01, 100_000, 100_000),
    ):
        config = DataConfig(path=str(path), sequence_length=length, heldout_fraction=fraction)
        parts = [open_documents(config, heldout=heldout) for heldout in (False, True)]
        texts = ["".join(part[i].text for i in range(len(part))) for part in parts]
        assert "".join(texts) == path.read_text() and len(texts[1]) == held
        assert [part.num_documents for part in parts] == [1, 0]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and "last 8200 of 200000 bytes (4.1 %) are held out" in said[0]
    config = DataConfig(path=str(path), sequence_length=100_001)
    with pytest.raises(
        ValueError, match="200000 bytes: too short to hold out .* 200002 bytes or more"
    ):
        open_documents(config, heldout=False)
    # Six bytes for a token of another tokenizer.
    config = DataConfig(path=str(path), sequence_length=20_000, tokenizer="gpt2")
    with pytest.raises(ValueError, match="240000 bytes or more"):
        open_documents(config, heldout=True)
    # The end of a long line begins at a character, wherever the line's own end is.
    (path := tmp_path / "line.txt").write_text("Title\n" + "ü€" * 400 + "\n")
    for pieces in (1 << 16, 583):  # of the second, 1,749 is a border just behind the division
        documents = Documents([path], piece_bytes=pieces)
        parts = documents.split(0.01, row_bytes=257)
        texts = ["".join(part[i].text for i in range(len(part))) for part in parts]
        assert "".join(texts) == path.read_text() and len(texts[1].encode()) == 259


def test_long_documents_are_cut_and_short_ones_dropped(lines, tmp_path, capsys):
    out = str(tmp_path / "x.zarr")
    arguments = ["--input", lines, "--output", out, "--tokenizer", "bytes"]
    assert main([*arguments, "--sequence_length", "32", "--num_workers", "1"]) == 0
    expected = [list(t.encode()[:32]) for t in TEXTS if len(t) >= 32]
    assert read(out).tolist() == expected
    total = sum(map(len, TEXTS))
    printed = capsys.readouterr().out
    assert f"{len(expected)} rows of 32 tokens from 30 documents; {total} tokens" in printed
    assert f"{total - 32 * len(expected)} of them in no row" in printed
    assert f"{30 - len(expected)} documents were shorter" in printed
    assert main([*arguments, "--num_workers", "1"]) == 1  # the store exists
    assert TokenStore(out).attributes == {"encoder": "bytes"}


def test_packed_rows_are_the_concatenated_documents(lines, tmp_path):
    out = str(tmp_path / "x.zarr")
    (counts,) = write_store(
        [lines], out, tokenizer="bytes", sequence_length=64, pack=True, num_workers=1
    )
    stream = [i for t in TEXTS for i in [*t.encode(), 256]]
    rows = len(stream) // 64
    assert read(out).ravel().tolist() == stream[: rows * 64]
    assert counts.dropped == len(stream) - rows * 64
    assert TokenStore(out).attributes["separator"] == 256


@pytest.mark.slow
def test_any_number_of_workers_writes_the_same_store(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for i in range(3):
        (folder / f"{i}.txt").write_text(f"line {i} of some text\n" * 60_000)
    options = ["--tokenizer", "bytes", "--pack", "--sequence_length", "4096", "--json_escape"]
    stores = []
    for workers in ("1", "2"):
        out = tmp_path / f"{workers}.zarr"
        held = tmp_path / f"{workers}-held.zarr"
        command = ["--input", str(folder), "--output", str(out), "--heldout", str(held)]
        command += ["--num_workers", workers, *options]
        if workers == "1":
            assert main(command) == 0
        else:
            command = [sys.executable, "-m", "lsm_jax.data.tokenize", *command]
            result = subprocess.run(command, capture_output=True, text=True)
            assert result.returncode == 0, result.stderr
            assert "rows of 4096 tokens" in result.stdout
        stores.append({p.name: p.read_bytes() for s in (out, held) for p in s.iterdir()})
        rows = read(out)
        assert TokenStore(out).attributes["json_escape"] is True
    assert stores[0] == stores[1]
    decoded = ByteTokenizer(json_escape=True).decode(rows[0])
    assert decoded.startswith("line 0 of some text\nline 0 of")


def test_no_file_remains_after_an_error(lines, tmp_path, capsys):
    out = tmp_path / "out" / "x.zarr"

    def run(*options):
        code = main(["--input", lines, "--output", str(out), "--num_workers", "1", *options])
        return code, " ".join(capsys.readouterr().err.split())

    code, printed = run("--tokenizer", "bytes")
    assert code == 1 and "the longest of 30 documents has 136; pass --pack" in printed
    code, printed = run("--tokenizer", "bytes", "--text_key", "body")
    assert code == 1 and "'body'" in printed
    held = str(tmp_path / "out" / "held.zarr")
    options = ("--sequence_length", "130", "--heldout", held)
    code, printed = run("--tokenizer", "bytes", *options)
    # Only one document is long enough, and one of the two stores does not have it.
    assert code == 1 and "sequence_length=130 is longer than the text" in printed
    code, printed = run("--tokenizer", "bytes", "--heldout", str(out))
    assert code == 1 and "output and heldout are the same store" in printed
    code, printed = run("--tokenizer", "bytes", "--heldout", str(out / "held.zarr"))
    assert code == 1 and "one is inside the other" in printed
    code, printed = run("--tokenizer", "nothing")
    assert code == 1 and "unknown tokenizer 'nothing'" in printed
    assert not list((tmp_path / "out").glob("*")) and not list((tmp_path / "out").glob(".*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", ""], "error: a data path is empty"),
        (["--input", "/proc/self/mem"], "error: /proc/self/mem: the disk reports an input/output"),
        (
            ["--sequence_length", str(10**20)],
            "error: sequence_length=1" + "0" * 20 + "; it must be",
        ),
        (["--output", "/proc/x.zarr"], "error: /proc/x.zarr: no folder can be made in /proc"),
    ],
)
def test_an_error_is_one_line(lines, tmp_path, capsys, arguments, message):
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    options = {
        "--input": lines,
        "--output": str(tmp_path / "x.zarr"),
        "--tokenizer": "bytes",
    } | given
    assert main([word for pair in options.items() for word in pair] + ["--pack"]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith(message) and printed.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_the_demo_store_is_the_same_every_time(tmp_path):
    train, held = write_demo_store(tmp_path / "demo", row_length=512, max_bytes=2_000_000)
    rows = read(train), read(held)
    assert len(rows[0]) > 2000 and len(rows[1]) % 32 == 0 and len(rows[1]) > 0
    assert "import" in ByteTokenizer().decode(rows[0][:50].ravel())
    again = write_demo_store(tmp_path / "again", row_length=512, max_bytes=2_000_000)
    for one, two in zip((train, held), again, strict=True):
        assert {p.name: p.read_bytes() for p in one.iterdir()} == {
            p.name: p.read_bytes() for p in two.iterdir()
        }
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "demo"]


def test_an_empty_path_selects_the_demo_text(tmp_path):
    config = DataConfig(cache_dir=str(tmp_path), sequence_length=1024)
    for _ in range(2):
        batch = next(make_train_iterator(config, global_batch_size=8, seed=0))
        assert batch["tokens"].shape == (8, 1024) and "segment_ids" not in batch
    assert next(make_eval_iterator(config, global_batch_size=32))["tokens"].shape == (32, 1024)
    with pytest.raises(ValueError, match="demo text in plain bytes"):
        make_train_iterator(
            DataConfig(cache_dir=str(tmp_path), tokenizer="gpt2"), global_batch_size=8, seed=0
        )


@pytest.mark.parametrize(
    "lines", [('{"text": "short"}', '{"text": '), ('{"text": ', '{"text": "short"}')]
)
def test_a_damaged_line_is_named_before_a_text_that_is_too_short(tmp_path, lines):
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=r"a\.jsonl, line [12], at byte \d+, is not JSON"):
        write_store(
            [file], str(tmp_path / "train.zarr"), tokenizer="bytes", sequence_length=64, heldout=str(tmp_path / "held.zarr"),
            heldout_fraction=0.5, num_workers=1,
        )  # fmt: skip
    assert not (tmp_path / "train.zarr").exists()
