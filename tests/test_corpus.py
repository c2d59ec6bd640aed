"""Tests of `scripts.make_corpus` on a small list of packages that are made here: the same bytes twice, the rules of
selection, resumption, and errors that name what is wrong.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import random
import re
import shutil
import tarfile
import zipfile

import numpy as np
import pytest

from lsm_jax.data.store import TokenStore
from scripts import corpus_table, make_corpus
from scripts.corpus import archives, select, text
from scripts.corpus.sources import read_sources

WORDS = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi".split()
)


def prose(seed: int, lines: int = 30) -> str:
    choice = random.Random(seed).choices
    return "".join(f"{' '.join(choice(WORDS, k=12))} number {seed}.\n" for _ in range(lines))


def write_tar(path, files):
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


@pytest.fixture
def downloads(tmp_path, monkeypatch):
    """Fixture: a folder of downloads with an npm package and a wheel, and the list that names them."""
    monkeypatch.setattr(select, "LONG_BYTES", 8000)
    folder = tmp_path / "downloads"
    (folder / "npm").mkdir(parents=True)
    (folder / "pip").mkdir()
    documents = {f"package/{n}.txt": prose(n).encode() for n in range(60)}
    more = {
        "package/copy.txt": prose(3).encode(),
        "package/near.txt": (prose(4) + prose(999, 5)).encode(),
        "package/short.txt": b"too short",
        "package/data.txt": b"\0" * 900,
        "package/page.html": f"<html><script>no()</script><p>{prose(77)}</p></html>".encode(),
        "package/z.txt.gz": gzip.compress(prose(78).encode(), mtime=0),
        "package/records.cfg": "\n\n".join(
            f"Package: tool-{n}\nVersion: 1.{n * 7}\nOwner: person-{n}" for n in range(40)
        ).encode(),
        "package/left/out.txt": prose(79).encode(),
        "package/min.txt": b"var_a=b;" * 300,
        "package/latin.txt": prose(83).encode() + b"caf\xe9\n",
        **{f"package/long{n}.txt": prose(n, 200).encode() for n in (84, 85, 86)},
    }
    write_tar(folder / "npm" / "texts-1.0.tgz", documents | more)
    with zipfile.ZipFile(folder / "pip" / "code-2.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("code/a.py", prose(100))
        wheel.writestr("code/b.py", prose(101))
    lines = []
    for registry, name, version, include in (
        ("npm", "texts", "1.0", '["*.txt", "*.html"]'),
        ("pip", "code", "2.0", '["*.py"]'),
    ):
        file = next((folder / registry).iterdir())
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        lines.append(
            f'[[source]]\npackage = "{name}"\nregistry = "{registry}"\nversion = "{version}"\nsha256 = "{digest}"\n'
            f'licence = "MIT"\nkind = "english"\ninclude = {include}\nexclude = ["*/left/*"]\nrecords = ["*.cfg"]\n'
        )
    (tmp_path / "list.toml").write_text("\n".join(lines))
    return folder


def make(tmp_path, out, *more):
    return make_corpus.main(
        [f"--out={tmp_path / out}", f"--downloads={tmp_path / 'downloads'}", f"--sources={tmp_path / 'list.toml'}",
         "--vocab_size=300", "--sequence_length=512", "--heldout=0.1", "--num_workers=1", *more]
    )  # fmt: skip


def test_a_corpus_has_the_same_ids_twice_and_its_rules_hold(tmp_path, downloads, capsys):
    assert make(tmp_path, "one") == 0
    report = json.loads((tmp_path / "one" / "corpus.json").read_text())
    counts = report["packages"]["texts"]
    assert (
        counts["duplicate"]
        == counts["near duplicate"]
        == counts["short"]
        == counts["not text"]
        == 1
    )
    assert counts["records documents"] == 1 and report["packages"]["code"]["documents"] == 2
    kept = sum(counts[f"{part} documents"] for part in ("train", "heldout", "long"))
    assert kept == counts["documents"] - 3  # of which one has records
    # The ids in the stores are those of the text, BOS after each document.
    store = TokenStore(tmp_path / "one" / "heldout.zarr")
    ids = store.read(np.arange(store.num_documents), 0, 512, vocab_size=300)
    texts = [json.loads(line)["text"] for line in (tmp_path / "one" / "heldout.jsonl").open()]
    decoded = make_corpus.build.load_tokenizer(str(tmp_path / "one" / "tokenizer.json")).decode(ids)
    assert "".join(f"{part}<|endoftext|>" for part in texts).startswith(decoded)
    assert report["stores"]["long"]["rows"] == counts["long documents"] >= 1
    # A second corpus, of packages that are read again, has the same digests; the first is not made again.
    for path in (downloads / "documents").iterdir():
        path.unlink()
    assert make(tmp_path, "two") == 0
    again = json.loads((tmp_path / "two" / "corpus.json").read_text())
    assert again == report
    capsys.readouterr()
    assert make(tmp_path, "one") == 0
    assert "has this corpus already" in capsys.readouterr().err


def test_an_interrupted_corpus_continues(tmp_path, downloads, monkeypatch):
    written = make_corpus.build.write_store
    calls = []

    def interrupted(text, sources, store, *rest, **options):
        calls.append(store.name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return written(text, sources, store, *rest, **options)

    monkeypatch.setattr(make_corpus.build, "write_store", interrupted)
    assert make(tmp_path, "out") == 130
    assert make(tmp_path, "out") == 0
    assert calls == ["train.zarr", "heldout.zarr", "heldout.zarr", "long.zarr"]


def test_damaged_inputs_are_named(tmp_path, downloads, capsys):
    def error(*more):
        assert make(tmp_path, "out", *more) == 1
        return capsys.readouterr().err

    assert "has no package nothing; accepted are texts, code" in error("--only=nothing")
    assert "--without: list.toml has no package nothing" in error("--without=nothing")
    for option in ("only", "without"):
        with pytest.raises(SystemExit):
            make_corpus.main([f"--out={tmp_path / 'out'}", f"--{option}="])
        assert f"--{option}= is empty: accepted are names" in capsys.readouterr().err
    (tmp_path / "broken").mkdir()
    for content in ("{", "[]"):
        (tmp_path / "broken" / "corpus.json").write_text(content)
        assert make_corpus.main([f"--out={tmp_path / 'broken'}", "--only=anarchism"]) == 1
        assert "broken/corpus.json: " in (line := capsys.readouterr().err) and line.count("\n") == 1
    assert "--without: no package remains" in error("--only=code", "--without=code")
    listed = (tmp_path / "list.toml").read_text()
    for old, new, message in (
        ('kind = "english"', 'kind = "latin"', "kind='latin'; accepted are english, code"),
        ("licence", "license", "unknown key 'license'"),
        ('["*.py"]', '["*.nothing"]', "code 2.0: no document; its patterns match 0 files"),
        ("[[source]]", "[[source", "no list of packages"),
    ):
        (tmp_path / "list.toml").write_text(listed.replace(old, new))
        assert message in error()
    with pytest.raises(SystemExit):
        make(tmp_path, "out", "--heldout=1")
    assert "--heldout=1.0: accepted are shares between 0 and 1" in capsys.readouterr().err
    damaged = tmp_path / "damaged.tgz"
    damaged.write_bytes(b"no archive at all")
    with pytest.raises(ValueError, match="damaged.tgz: the package is damaged"):
        list(archives.members(damaged, read_sources(only=["three"])[0]))


def test_the_text_of_a_page():
    page = "<head><title>x</title></head><nav>menu</nav><h1>A &amp; B</h1><p>one\ntwo <b>bold</b></p><pre>def f():\n    x &lt; 1</pre>"
    assert text.html_text(page) == "A & B\n\none two bold\n\ndef f():\n    x < 1\n"
    long = "a line of text\n" * 200_000
    parts = list(text.pieces(long))
    assert "".join(parts) == long and max(map(len, parts)) <= text.PIECE_CHARACTERS
    assert all(part.endswith("\n") for part in parts)


def test_the_order_and_parts_depend_on_names_only():
    positions = [select.position(f"name {n}") for n in range(2000)]
    assert positions == [select.position(f"name {n}") for n in range(2000)]
    assert 0.45 < np.mean(positions) < 0.55 and 0 <= min(positions) and max(positions) < 1


def test_the_list_of_packages_is_complete():
    sources = read_sources()
    assert read_sources(without=["django"]) == [s for s in sources if s.package != "django"]
    assert len(sources) > 50 and {source.registry for source in sources} == {"apt", "pip", "npm"}
    assert all(len(source.sha256) == 64 and source.licence and source.version for source in sources)


def test_the_packages_of_the_stored_rows_are_those_that_were_read():
    """docs/evidence.jsonl was made on a corpus with this key; packages that are added to the list go into the page's --without."""
    (given,) = re.findall(r"--without=(\S+)", corpus_table.PAGE.read_text())
    sources = read_sources(without=given.split(","))
    options = make_corpus.arguments(["--out=corpus"])
    assert len(sources) == 82 and make_corpus.corpus_key(sources, options) == "489d007a6634ae0c"


def test_the_table_of_packages_is_up_to_date():
    text = corpus_table.PAGE.read_text()
    assert text == corpus_table.page(text), "run python -m scripts.corpus_table --write"
    counts = {"django": {"train documents": 3, "bytes": 2_000_000, "tokens": 500_000}}
    rows = corpus_table.table(read_sources(only=["django", "sympy"]), counts).splitlines()
    assert rows[2].startswith("| django |") and rows[2].endswith("| 3 | 2.0 | 0.50 |")
    assert rows[3].endswith("| - | - | - |") and rows[4].endswith("| 3 | 2.0 | 0.50 |")


def test_a_folder_has_one_corpus_at_a_time(tmp_path, downloads, capsys):
    """Another corpus in the same folder replaces the first, also if it fails on the way."""
    assert make(tmp_path, "out") == 0
    first = (tmp_path / "out" / "heldout.jsonl").read_text()
    assert make(tmp_path, "out", "--heldout=0.4", "--vocab_size=60000") == 1
    assert not (tmp_path / "out" / "corpus.json").exists()
    assert make(tmp_path, "out") == 0
    assert (tmp_path / "out" / "heldout.jsonl").read_text() == first
    shutil.rmtree(tmp_path / "out" / "train.zarr")
    assert make(tmp_path, "out") == 0
    assert "already" not in capsys.readouterr().err
    assert TokenStore(tmp_path / "out" / "train.zarr").num_documents > 1


def test_a_text_with_the_end_token_is_no_document():
    assert text.document("a.txt", (prose(1) + "<|endoftext|>").encode()) == ("", "end token")


def test_all_parts_of_a_file_are_in_one_part_of_the_corpus(tmp_path):
    file = tmp_path / "documents.jsonl"
    rows = [dict(name=f"p/a#{n}" if n else "p/a", file="p/a", text=prose(n)) for n in range(20)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    parts, _ = select.select([("p", file)], heldout=0.5, long=0.5, progress=lambda *_: None)
    assert sorted(len(places) for places in parts.values()) == [0, 0, 0, 20]
