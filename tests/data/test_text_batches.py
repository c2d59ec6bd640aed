import json
import time

import numpy as np
import pytest

from lsm_jax.data import (
    ByteTokenizer,
    DataConfig,
    documents,
    make_eval_iterator,
    make_train_iterator,
)
from lsm_jax.data.documents import Documents
from tests.data.stores import assert_resumes, same, write_texts

BOS = 256
WORDS = [f"document {i}: " + chr(97 + i) * (7 * i % 50 + 1) for i in range(20)]


@pytest.fixture
def lines(tmp_path):
    folder = tmp_path / "jsonl"
    folder.mkdir()
    for part in range(2):
        rows = [json.dumps({"text": t, "n": 1}) + "\n" for t in WORDS[10 * part : 10 * part + 10]]
        (folder / f"{part}.jsonl").write_text("\n".join(rows))  # with empty lines between
    return folder


def config(path, **fields):
    return DataConfig(path=str(path), **({"sequence_length": 24, "heldout_fraction": 0.0} | fields))


def documents_of(batches):
    """Return (tokens, labels) of every packed document in the batches, and check that the labels are the
    next tokens of the same document.
    """
    pieces = []
    for batch in batches:
        for tokens, labels, segments, positions, mask in zip(
            *(batch[k] for k in ("tokens", "labels", "segment_ids", "positions", "loss_mask")),
            strict=True,
        ):
            assert np.array_equal(mask, segments > 0)
            for s in range(1, segments.max() + 1):
                (inside,) = np.nonzero(segments == s)
                assert np.array_equal(inside, np.arange(inside[0], inside[-1] + 1))
                assert np.array_equal(positions[inside], np.arange(len(inside)))
                assert np.array_equal(labels[inside][:-1], tokens[inside][1:])
                pieces.append((tokens[inside], labels[inside]))
    return pieces


@pytest.mark.parametrize("packing", ["concat", "first_fit"])
@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("predict_end", [True, False])
def test_packing_never_predicts_across_documents(lines, packing, add_bos, predict_end):
    settings = config(
        lines,
        heldout_path=str(lines),
        packing=packing,
        add_bos=add_bos,
        predict_end=predict_end,
    )
    batches = list(make_eval_iterator(settings, global_batch_size=4))
    assert all(b["tokens"].shape == (4, 24) for b in batches)
    pieces = documents_of(batches)
    # Joined, the pieces are the documents; each token is predicted once, and from its document only.
    streams = []
    for text in WORDS:
        ids = list(text.encode())
        streams.append([BOS] * add_bos + ids + [BOS] * predict_end)
    if packing == "concat":
        # Concatenated, the pieces are the documents in order; no piece crosses the end of a document.
        for side, shift in enumerate((slice(None, -1), slice(1, None))):
            joined = np.concatenate([piece[side] for piece in pieces]).tolist()
            assert joined == [i for s in streams for i in s[shift]]
        ends = np.cumsum([len(s) - 1 for s in streams])
        assert set(ends) <= set(np.cumsum([len(t) for t, _ in pieces]))
        filled = np.concatenate([b["segment_ids"].ravel() > 0 for b in batches])
        assert filled[: ends[-1]].all() and not filled[ends[-1] :].any()
    else:
        # Documents that fit into a row are not cut; longer ones are cut into rows.
        expected = [
            (s[:-1][at : at + 24], s[1:][at : at + 24])
            for s in streams
            for at in range(0, len(s) - 1, 24)
        ]
        assert sorted((t.tolist(), y.tolist()) for t, y in pieces) == sorted(expected)


@pytest.mark.parametrize("packing", ["concat", "first_fit"])
def test_aligned_documents_begin_at_multiples_and_are_complete(lines, packing):
    """With alignment, packed documents begin at multiples of it and are complete: padding belongs to no
    document, and the documents' tokens are the same as without alignment.
    """
    settings = config(lines, heldout_path=str(lines), packing=packing, align_documents=8)
    batches = list(make_eval_iterator(settings, global_batch_size=4))
    gaps = 0
    for batch in batches:
        segments = batch["segment_ids"]
        padding = segments == 0
        assert np.array_equal(batch["loss_mask"], ~padding)
        for name in ("tokens", "labels", "positions"):
            assert not batch[name][padding].any()
        rows, starts = np.nonzero(~padding & (batch["positions"] == 0))
        assert not (starts % 8).any()
        gaps += np.sum(padding[:, :-1] & (segments[:, 1:] > 0))
    assert gaps
    pieces = documents_of(batches)
    streams = [[BOS, *text.encode(), BOS] for text in WORDS]
    if packing == "concat":
        for side, shift in enumerate((slice(None, -1), slice(1, None))):
            joined = np.concatenate([piece[side] for piece in pieces]).tolist()
            assert joined == [i for s in streams for i in s[shift]]
    else:
        expected = [
            (s[:-1][a : a + 24], s[1:][a : a + 24])
            for s in streams
            for a in range(0, len(s) - 1, 24)
        ]
        assert sorted((t.tolist(), y.tolist()) for t, y in pieces) == sorted(expected)
    assert_resumes(lambda: make_eval_iterator(settings, global_batch_size=3), steps=6)


def test_types_and_padding(lines):
    batches = list(make_eval_iterator(config(lines, heldout_path=str(lines)), global_batch_size=7))
    last = batches[-1]
    assert last["tokens"].shape == (7, 24)
    padding = last["segment_ids"] == 0
    assert padding.any() and not last["tokens"][padding].any() and not last["labels"][padding].any()
    assert {k: v.dtype.name for k, v in last.items()} == {
        "tokens": "int32",
        "labels": "int32",
        "loss_mask": "float32",
        "segment_ids": "int32",
        "positions": "int32",
    }


@pytest.mark.parametrize("packing", ["concat", "first_fit"])
@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("length", [7, 16, 200])
def test_resumes_exactly(lines, packing, threads, length):
    settings = config(lines, packing=packing, num_threads=threads, sequence_length=length)
    assert_resumes(lambda: make_train_iterator(settings, global_batch_size=3, seed=0), steps=6)


@pytest.mark.parametrize("packing", ["concat", "first_fit"])
def test_resumes_if_documents_end_at_the_ends_of_rows(tmp_path, packing):
    # Grain then stores no unfinished document, a state that once did not survive JSON's lists.
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"text": c * 7}) + "\n" for c in "abcdefghij"))
    settings = config(path, packing=packing, sequence_length=8)
    assert_resumes(lambda: make_train_iterator(settings, global_batch_size=2, seed=0))


def test_evaluation_resumes_exactly(lines):
    settings = config(lines, heldout_path=str(lines))
    assert_resumes(lambda: make_eval_iterator(settings, global_batch_size=3), steps=6)


def test_orbax_saves_and_restores_the_iterator(lines, tmp_path):
    from orbax.checkpoint import v1 as ocp

    def make():
        return make_train_iterator(config(lines), global_batch_size=4, seed=0)

    iterator = make()
    for _ in range(5):
        next(iterator)
    with ocp.training.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save_checkpointables(5, {"data": iterator})
        expected = [next(iterator) for _ in range(3)]
        other = make()
        checkpointer.load_checkpointables(5, {"data": other})
    assert all(same(next(other), batch) for batch in expected)


def test_the_shards_of_a_batch_are_the_batch_of_a_single_host(lines):
    def make(iterator, **shard):
        settings = config(lines, heldout_path=str(lines))
        seed = {"seed": 0} if iterator is make_train_iterator else {}
        return iterator(settings, global_batch_size=4, **seed, **shard)

    for iterator in (make_train_iterator, make_eval_iterator):
        single = make(iterator)
        shards = [make(iterator, shard_index=i, shard_count=2) for i in range(2)]
        for _ in range(6):
            parts = [next(shard) for shard in shards]
            batch = next(single)
            assert same({k: np.concatenate([p[k] for p in parts]) for k in batch}, batch)
    with pytest.raises(
        ValueError, match="resumes only with the batch size and the number of hosts"
    ):
        make(make_train_iterator).set_state(
            make(make_train_iterator, shard_index=0, shard_count=2).get_state()
        )


def test_each_epoch_has_every_document_once_in_a_new_order(lines):
    settings = config(lines, packing="first_fit", sequence_length=100)
    iterator = make_train_iterator(settings, global_batch_size=1, seed=0)
    seen = []
    while len(seen) < 60:
        for tokens, _ in documents_of([next(iterator)]):
            seen.append(bytes(tokens[1:].astype(np.uint8)).decode())
    for epoch in range(3):
        assert sorted(seen[20 * epoch : 20 * epoch + 20]) == sorted(WORDS)
    assert seen[:20] != seen[20:40]
    listed = make_train_iterator(
        config(lines, shuffle=False, sequence_length=300), global_batch_size=1, seed=0
    )
    (tokens, _), *_ = documents_of([next(listed)])
    assert bytes(tokens[1:].astype(np.uint8)).decode() == WORDS[0]


def test_the_pieces_of_a_long_file_end_at_lines_and_are_complete(tmp_path):
    text = "".join(f"line {i} über {'x' * (i % 90)}\n" for i in range(300))
    path = tmp_path / "x.txt"
    path.write_text(text)
    documents = Documents([path], piece_bytes=1000)
    pieces = [documents[i] for i in range(len(documents))]
    assert len(pieces) > 10 and "".join(p.text for p in pieces) == text
    assert all(p.text.endswith("\n") for p in pieces)
    assert [p.begins for p in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [p.ends for p in pieces] == [False] * (len(pieces) - 1) + [True]
    assert documents.num_documents == 1
    train, held = documents.split(0.1, row_bytes=100)
    assert "".join(d[i].text for d in (train, held) for i in range(len(d))) == text
    # A line that is longer than a piece is cut between characters.
    path.write_text("ü€😀" * 5000)
    documents = Documents([path], piece_bytes=5000)
    assert "".join(documents[i].text for i in range(len(documents))) == "ü€😀" * 5000


def test_documents_are_split_into_the_same_parts_every_time(lines, tmp_path):
    train, held = Documents([lines]).split(0.2)
    texts = [{d[i].text for i in range(len(d))} for d in (train, held)]
    assert len(texts[1]) == 4 and texts[0] | texts[1] == set(WORDS) and not texts[0] & texts[1]
    again = Documents([lines]).split(0.2)[1]
    assert [again[i].text for i in range(4)] == [held[i].text for i in range(4)]
    settings = config(lines, heldout_fraction=0.2)
    pieces = documents_of(make_eval_iterator(settings, global_batch_size=1))
    assert sum(tokens[0] == BOS for tokens, _ in pieces) == 4


def test_json_escaped_text(tmp_path):
    folder = write_texts(tmp_path / "t", {"a.txt": 'a\n"b"', "b.txt": "c"})
    settings = config(folder, json_escape=True, shuffle=False, sequence_length=9)
    batch = next(make_train_iterator(settings, global_batch_size=1, seed=0))
    assert ByteTokenizer().decode(batch["labels"][0][:-1]) == r"a\n\"b\""
    tokenizer = ByteTokenizer(json_escape=True)
    assert tokenizer.decode(batch["labels"][0][:-1]) == 'a\n"b"'


def test_errors_name_the_file_or_line(tmp_path, lines):
    def first(path, **fields):
        return next(make_train_iterator(config(path, **fields), global_batch_size=1, seed=0))

    folder = write_texts(tmp_path / "t", {"a.bin": "x"})
    with pytest.raises(ValueError, match="neither a token store nor a folder with text"):
        first(folder)
    with pytest.raises(ValueError, match="does not exist"):
        first(tmp_path / "nowhere")
    (tmp_path / "x.bin").write_bytes(b"\x1f\x8b\0\0")
    with pytest.raises(ValueError, match="is not text"):
        first(tmp_path / "x.bin")
    (folder / "b.txt").write_text("")
    with pytest.raises(ValueError, match="every file is empty"):
        first(folder)
    (folder / "c.jsonl").write_text('{"text": ""}\n{"text": ""}\n')
    with pytest.raises(ValueError, match="every document is empty"):
        first(folder)
    # Without shuffling, a row of the batch reads every second document; here it would never find text.
    (folder / "c.jsonl").write_text('{"text": ""}\n{"text": "x"}\n')
    with pytest.raises(ValueError, match="every document whose number modulo 2 is 0"):
        unshuffled = config(folder, shuffle=False)
        next(make_train_iterator(unshuffled, global_batch_size=2, seed=0))
    (folder / "c.jsonl").write_text('{"text": null}\n')
    with pytest.raises(ValueError, match="has 'text'=None; accepted is a string"):
        first(folder)
    (folder / "c.jsonl").write_text("[" * 100_000 + "\n")
    with pytest.raises(ValueError, match=r"c\.jsonl, line 1, at byte 0, is not JSON"):
        first(folder)
    (folder / "c.jsonl").write_text('{"text": "x", "text": "y"}\n')
    with pytest.raises(ValueError, match=r"c\.jsonl.*the key 'text' occurs twice"):
        first(folder)
    (folder / "c.jsonl").write_text('{"body": "x"}\n')
    with pytest.raises(ValueError, match=r"c\.jsonl, line 1, at byte 0.*'text'.*\['body'\]"):
        first(folder)
    assert first(folder, text_key="body")["segment_ids"].max() > 0
    (folder / "c.jsonl").write_text('{"text": "x"}\n{"text": \n')
    with pytest.raises(ValueError, match=r"c\.jsonl, line 2, at byte 14, is not JSON"):
        first(folder)
    (folder / "c.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(ValueError, match="one document of 14 bytes that cannot be divided"):
        first(folder, heldout_fraction=0.1)
    (folder / "c.jsonl").write_text('{"body": "x"}\n')
    with pytest.raises(ValueError, match=r"c\.jsonl, line 1, at byte 0.*'text'.*\['body'\]"):
        first(folder, heldout_fraction=0.1)


def test_invalid_utf8_is_logged_and_encoded_unchanged_as_bytes(tmp_path, caplog):
    path = tmp_path / "x.txt"
    path.write_bytes(b"caf\xe9! \xe2\x82 \xc3\xa9")
    text = Documents([path])[0].text
    assert "is not UTF-8" in caplog.text
    assert bytes(ByteTokenizer().encode(text)) == path.read_bytes()
    escaped = ByteTokenizer(json_escape=True).encode(text)
    assert bytes(escaped) == rb"caf\ufffd! \ufffd \u00e9"
    batches = list(make_eval_iterator(config(path, heldout_path=str(path)), global_batch_size=1))
    scored = np.concatenate([b["labels"][b["loss_mask"] > 0] for b in batches])
    assert np.sum(scored < 256) == path.stat().st_size  # the number of bytes in bits per byte


@pytest.mark.parametrize("length", [100_000_000, 10**18])
def test_a_row_much_longer_than_the_text_is_an_error_at_once(tmp_path, length):
    folder = write_texts(tmp_path / "t", {"a.txt": "some words, " * 25_000, "b.txt": "more"})
    start = time.perf_counter()
    message = f"sequence_length={length}: .* has only 30000[0-9] of the {length} tokens of one row"
    with pytest.raises(ValueError, match=message):
        make_train_iterator(config(folder, sequence_length=length), global_batch_size=8, seed=0)
    settings = config("", heldout_path=str(folder), sequence_length=length)
    with pytest.raises(ValueError, match=f"heldout_path.* has only .* of the {length} tokens"):
        make_eval_iterator(settings, global_batch_size=8)
    assert time.perf_counter() - start < 5


def test_a_row_longer_than_the_text_is_a_warning(tmp_path, caplog):
    folder = write_texts(tmp_path / "t", {"a.txt": "abc" * 20})
    for length, said in (
        (61, ""),
        (62, "has only 61 of the 62 tokens of one row; the rest is repeated"),
    ):
        caplog.clear()
        batch = next(
            make_train_iterator(config(folder, sequence_length=length), global_batch_size=1, seed=0)
        )
        assert batch["loss_mask"].sum() == length
        assert said in caplog.text and bool(said) == bool(caplog.text)


def test_long_lines_and_arrays_name_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 1000)
    monkeypatch.setattr(documents, "MAX_ARRAY_BYTES", 1000)
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}\n' + json.dumps({"text": "b" * 986}) + "\n")
    assert len(Documents([path])) == 2
    path.write_text('{"text": "a"}\n' + json.dumps({"text": "b" * 1001}) + "\n")
    with pytest.raises(ValueError, match=r"x\.jsonl, line 2, at byte 14, has more than 1000 bytes"):
        Documents([path])
    array = tmp_path / "x.json"
    array.write_text(json.dumps([{"instruction": "b" * 1000, "output": ""}]))
    with pytest.raises(
        ValueError, match=r"x\.json has .* bytes; accepted are JSON arrays of at most"
    ):
        Documents([array], format="alpaca")


def test_messages_do_not_repeat_a_long_value(tmp_path):
    path = tmp_path / "x.jsonl"
    for line in (
        json.dumps({"text": list(range(100_000))}),
        json.dumps({f"field {i}": 1 for i in range(10_000)}),
        '{"text": ' + "1" * 10_000 + "}",
    ):
        path.write_text(line + "\n")
        with pytest.raises(ValueError, match=r"x\.jsonl, line 1, at byte 0, ") as error:
            Documents([path])[0]
        assert len(str(error.value)) < 600 and "\n" not in str(error.value)
