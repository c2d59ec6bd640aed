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


def test_errors_name_the_line_or_file(path, tmp_path):
    other = tmp_path / "other.jsonl"
    for rows, message in {
        '{"instruction": "a", "output": 3}': r"the line at byte 0, has 'output'=3; accepted is a string",
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
