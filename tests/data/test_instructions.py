"""Instruction files: only the answer and the EOS after it are predicted, not the prompt."""

from __future__ import annotations

import json

import numpy as np
import pytest

from lsm_jax.data import ByteTokenizer, DataConfig, make_eval_iterator, make_train_iterator

ROWS = [
    dict(instruction="Add", input="1, 2", output="3"),
    dict(instruction="Greet", output="Hello."),
]


def config(path, **changes):
    fields = dict(
        path=str(path), heldout_path=str(path), sequence_length=512, format="alpaca", packing="first_fit", shuffle=False,
        num_threads=0, prefetch=0,
    )  # fmt: skip
    return DataConfig(**fields | changes)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_only_answers_are_predicted(path):
    batch = next(make_eval_iterator(config(path), global_batch_size=1))
    tokens, labels, ids = (batch[n][0] for n in ("tokens", "labels", "segment_ids"))
    decode = ByteTokenizer().decode
    for number, (row, ends) in enumerate(zip(ROWS, ("3", "Hello."), strict=True), 1):
        mine = ids == number
        text = decode(tokens[mine])
        assert (
            tokens[mine][0] == 256 and (batch["positions"][0][mine] == np.arange(mine.sum())).all()
        )
        assert text.startswith("Below is an instruction that describes a task")
        assert f"### Instruction:\n{row['instruction']}\n\n" in text
        assert (
            ("### Input:\n1, 2\n\n" in text)
            == (", paired with an input" in text)
            == ("input" in row)
        )
        assert text.endswith(f"### Response:\n{ends}")
        predicted = mine & (batch["loss_mask"][0] > 0)
        assert labels[predicted].tolist() == [*ends.encode(), 256]
        assert np.flatnonzero(predicted)[-1] == np.flatnonzero(mine)[-1]


def test_only_answers_are_predicted_if_a_row_ends_inside_a_document(path):
    cut = config(path, sequence_length=64, packing="concat")
    predicted = []
    for batch in make_eval_iterator(cut, global_batch_size=2):
        predicted += batch["labels"][batch["loss_mask"] > 0].tolist()
    assert predicted == [*b"3", 256, *b"Hello.", 256]


def test_a_json_array_gives_the_batches_of_its_lines(path, tmp_path):
    rows = [
        dict(instruction=f'Nenne {i}: ü, [\\"}}, 日', input="é" * (i % 3), output=f"ö {i}")
        for i in range(12)
    ]
    array, lines = tmp_path / "alpaca_data_cleaned.json", tmp_path / "rows.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for indent, escape in ((4, False), (None, True)):
        array.write_text(
            json.dumps(rows, indent=indent, ensure_ascii=escape) + "\n", encoding="utf-8"
        )
        batches = [
            list(make_eval_iterator(config(file), global_batch_size=2, remainder="pad"))
            for file in (array, lines)
        ]
        for a, b in zip(*batches, strict=True):
            for name in b:
                np.testing.assert_array_equal(a[name], b[name])
    train = next(make_train_iterator(config(array, heldout_path="", heldout_fraction=0.5), global_batch_size=1, seed=0))  # fmt: skip
    assert train["loss_mask"].any()


def test_the_first_instructions_can_be_held_out(tmp_path):
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([dict(instruction="Say", output=chr(97 + i)) for i in range(6)]))
    data = config(file, heldout_path="", heldout_first=2, packing="concat", sequence_length=64)

    def answers(batches):
        labels = [b["labels"][b["loss_mask"] > 0] for b in batches]
        return "".join(map(chr, filter(lambda i: i < 256, np.concatenate(labels).tolist())))

    assert answers(make_eval_iterator(data, global_batch_size=1, remainder="pad")) == "ab"
    train = make_train_iterator(data, global_batch_size=1, seed=0)
    assert set(answers(next(train) for _ in range(20))) == set("cdef")
    for changes, message in {
        6: "heldout_first=6 leaves none of the 6 documents",
        -1: "data.heldout_first=-1; it must be at least 0",
    }.items():
        with pytest.raises(ValueError, match=message):
            bad = config(file, heldout_path="", heldout_first=changes)
            next(make_train_iterator(bad, global_batch_size=1, seed=0))


def test_errors_name_the_element_of_an_array(tmp_path):
    file = tmp_path / "rows.json"
    for text, message in {
        '{"instruction": "a"}': "rows.json is no JSON array; accepted are a list of objects",
        '[{"instruction": "a", "output": "b"}, {"instruction": "a"}]': "rows.json, element 1 of the array, has no field 'output'",
        '[{"instruction": "a", "output": "b"}, 3]': "element 1 of the array, is a int; accepted is an object",
        '[{"instruction": "a", "output": "b"}, {]': "element 1 of the array, is not JSON",
        '[{"instruction": "a", "output": "b"} {}]': "no comma and no ] after element 0 of the array, at character 37",
        '[{"instruction": "a", "output": "b"}': "no comma and no ] after element 0",
        '[{"instruction": "a", "output": "b"}] 1': "text after the array, at character 38",
        "[]": "every file is empty",
    }.items():
        file.write_text(text)
        with pytest.raises(ValueError, match=message.replace("[", r"\[")):
            list(make_eval_iterator(config(file), global_batch_size=1, remainder="pad"))


def test_errors_name_the_line_or_file(path, tmp_path):
    other = tmp_path / "other.jsonl"
    for rows, message in {
        '{"instruction": "a", "output": 3}': r"line 1, at byte 0, has 'output'=3; accepted is a string",
        '{"text": "a"}': r"has no field 'instruction'; its fields are \['text'\]",
        "[1]": "is a list; accepted is an object with 'instruction'",
    }.items():
        other.write_text(rows + "\n")
        with pytest.raises(ValueError, match=message):
            next(make_train_iterator(config(other), global_batch_size=1, seed=0))
    plain = tmp_path / "plain.txt"
    plain.write_text("text")
    with pytest.raises(
        ValueError, match=r"format='alpaca' requires files that end in .jsonl.*plain.txt"
    ):
        next(make_train_iterator(config(plain), global_batch_size=1, seed=0))
    with pytest.raises(ValueError, match="data.format='chat'; accepted: 'text', 'alpaca'"):
        config(path, format="chat").validate()
