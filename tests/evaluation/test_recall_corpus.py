"""Tests of recall tasks that are made of documents: answers are in the context, questions name one record or one place, and
the suite reads the files.
"""

from __future__ import annotations

import json
import re

import pytest

from lsm_jax.data import ByteTokenizer
from lsm_jax.evaluation import recall_corpus, suites
from lsm_jax.evaluation.suites import recall
from lsm_jax.evaluation.suites.recall import find_answer

RECORDS = "\n\n".join(
    f"Package: tool-{n}\nVersion: {n}.{7 * n}.3\nSection: science\nMaintainer: Person N{n}\nDescription: makes\n {n} things"
    for n in range(400)
)
FILLER = "The quiet river moved past the old mill and nobody spoke of it again that day. " * 6


def story(name: str) -> str:
    return f"{FILLER}It was then that {name} arrived with a lamp. {FILLER}In the end they followed {name} to the gate. {FILLER}"


def test_a_question_about_a_field_has_one_answer_in_its_context():
    rows = recall_corpus.make_questions("fields", [dict(text=RECORDS)], 100)
    assert len(rows) > 3 and rows == recall_corpus.make_questions("fields", [dict(text=RECORDS)], 100)  # fmt: skip
    for row in rows:
        record, _, key = row["question"].removeprefix(". ").partition("\n")
        (answer,) = row["answers"]
        assert row["context"].lower().count(answer.lower()) == 1
        assert f"{record}\n" in row["context"] and key[:-1] in ("Version", "Maintainer")
        # The answer is that record's.
        stanza = next(s for s in row["context"].split("\n\n") if s.startswith(f"{record}\n"))
        assert f"{key} {answer}" in stanza.split("\n")


def test_a_question_about_a_name_repeats_it_and_no_other_document_has_it():
    documents = [dict(text=story("Zephandra")), dict(text=story("Korvath")), dict(text=FILLER * 4)]
    rows = recall_corpus.make_questions("names", documents, 10)
    assert sorted(row["answers"][0] for row in rows) == ["Korvath", "Zephandra"]
    for row in rows:
        assert row["question"] == ". In the end they followed"
        assert row["context"].count(row["answers"][0]) == 1
        assert find_answer(row["question"], row["answers"]) is None
    # A name that two documents have can be known without reading this one.
    with pytest.raises(ValueError, match="none of the 2 documents has names that are repeated"):
        recall_corpus.make_questions("names", [dict(text=story("Korvath"))] * 2, 10)


def test_a_question_of_several_keys_has_one_answer_among_four():
    lines = "".join(f"Line {n} of a text about rivers and mills.\n" for n in range(400))
    documents = [
        dict(text=lines),
        dict(text=lines[:5000]),
        dict(text=lines),
    ]  # the second is too short
    rows = recall_corpus.make_questions("multikey", documents, 10)
    assert len(rows) == 2 and rows == recall_corpus.make_questions("multikey", documents, 10)
    for row in rows:
        needles = re.findall(r"^One of the special magic numbers for (\w+) is: (\d{7})\.$", row["context"], re.M)  # fmt: skip
        assert len({key for key, _ in needles}) == len(needles) == 4
        key = row["question"].split()[-2]
        assert row["answers"] == [value for k, value in needles if k == key]
        removed = re.sub(r"One of the special .*\n", "", row["context"])
        assert lines.startswith(removed)
    with pytest.raises(ValueError, match="none of the 1 documents has 3000 characters in lines"):
        recall_corpus.make_questions("multikey", [dict(text="short")], 1)


def test_the_suite_reads_the_files(tmp_path):
    source = tmp_path / "documents.jsonl"
    source.write_text("".join(json.dumps(dict(text=t)) + "\n" for t in (RECORDS, story("Korvath"))))
    for task in ("fields", "names"):
        recall_corpus.main(
            [f"--task={task}", f"--source={source}", f"--out={tmp_path}", "--count=3"]
        )
        chosen = suites.SuiteSettings(ByteTokenizer(), bos_id=256, max_length=1500, data=tmp_path)
        for doc in recall.load(task, chosen)["test"]:
            assert find_answer(doc["prompt"], doc["answers"]) is not None
            assert chosen.count(doc["prompt"]) <= 1500 - recall.ANSWER_TOKENS
            assert recall.score(doc, [f" {doc['answers'][0]}"]) == {"contains": 1}
    assert set(suites.SUITES["recall_corpus"].averages["average"]) == {"recall_fields", "recall_names"}  # fmt: skip
    none = suites.SuiteSettings(ByteTokenizer(), bos_id=256, max_length=1500, data=tmp_path / "none")  # fmt: skip
    with pytest.raises(ValueError, match="python -m lsm_jax.evaluation.recall_corpus --task=names"):
        recall.load("names", none)


def test_wrong_sources_are_named():
    with pytest.raises(ValueError, match="document 1 has no field 'text'; it has body"):
        recall_corpus.make_questions("names", [dict(body="x")], 10)
    with pytest.raises(ValueError, match="none of the 1 documents has records of lines"):
        recall_corpus.make_questions("fields", [dict(text=FILLER)], 10)
    with pytest.raises(ValueError, match="--count=0"):
        recall_corpus.main(["--task=names", "--source=x", "--out=y", "--count=0"])
