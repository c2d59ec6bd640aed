"""Make recall tasks of one's own documents, in the form of FDA, SWDE and SQuAD: prompts that contain the answer.

    python -m lsm_jax.evaluation.recall_corpus --task=fields --source=corpus/records.jsonl --out=data
    python -m lsm_jax.evaluation.recall_corpus --task=names --source=corpus/heldout.jsonl --out=data
    python -m lsm_jax.evaluation.recall_corpus --task=multikey --source=corpus/heldout.jsonl --out=data

writes data/recall/fields.jsonl, names.jsonl and multikey.jsonl; the first two are for `--lm_eval.tasks=recall_corpus
--lm_eval.data=data`. A source has one JSON object with a "text" in a line, of documents on which the model was not trained.

fields: records of lines `Key: value`, such as package metadata, whose first line names the record; further lines of a
    value are indented, and blank lines separate records. A context is consecutive records of about 8,000 characters. The
    question repeats the first line of one of them and gives another of its keys, as FDA and SWDE ask for a key. The value
    is one line that the context has once, so that it cannot be guessed from other records.
names: cloze of a repeated name, as SQuAD's texts to continue. A name is a word of five characters or more with a capital
    letter, a digit or "_" behind its first character, or a capitalised word that no document has in lower case. It is
    in no other document of the source, has at most three places before the question, the last of them at least 200
    characters and the first at most 4,000 before it, and the question is the text from the last line or sentence end to
    the name.
multikey: RULER's multi-key needles (arXiv 2404.06654): the beginning of a document, of 3,000, 6,000 or 10,000 characters, with
    four lines that give numbers for four words, of which the question asks for one.

The questions are selected by a hash of names and places: the same source gives the same questions.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lsm_jax.evaluation.files import write_rows
from lsm_jax.evaluation.suites.local import read_rows

CONTEXT_CHARACTERS = 8_000
MULTIKEY_CHARACTERS = (3_000, 6_000, 10_000)
_KEYS = 4
_KEY_WORDS = "apple bridge candle desert engine forest garden hammer island jacket kettle ladder mirror needle orange pencil".split()  # fmt: skip
_NEEDLE = "One of the special magic numbers for {} is:"
_MOST_PLACES = 3
_NEAREST, _FARTHEST = 200, 4_000  # characters between a name's places and the question
_FIELD = re.compile(r"^([A-Za-z][A-Za-z0-9 _-]{0,30}):[ \t]+(\S.*)$")
_WORD = re.compile(r"(?<!\w)[A-Za-z_][A-Za-z0-9_]{4,39}(?!\w)")
_NAME = re.compile(r".+[A-Z0-9_].*|[A-Z][a-z]+")
_END = re.compile(r"[.!?]\s+(?=\S)|\n(?=\s*\S)")


def _order(*parts: object) -> bytes:
    """Return the place of a choice in a shuffled order that depends on the choice only."""
    return hashlib.blake2b("\0".join(map(str, parts)).encode("utf-8", "replace")).digest()


def read_records(text: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return (text, fields) of each record of a document: its lines, and pairs (key, value) of those that have both. A
    record has two fields or more."""
    records = []
    for stanza in re.split(r"\n[ \t]*\n", text):
        lines = stanza.strip("\n").split("\n")
        found = [_FIELD.match(line) for line in lines]
        fields = [(m[1], m[2].strip()) for m in found if m]
        if found[0] and len(fields) >= 2:
            records.append(("\n".join(line.rstrip() for line in lines), fields))
    return records


def field_questions(documents: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the questions of the task `fields`, one for each context: id, context, question, answers."""
    records = [record for row in documents for record in read_records(row["text"])]
    context: list[tuple[str, list[tuple[str, str]]]] = []
    number, size = 0, 0
    for record in records:
        context.append(record)
        size += len(record[0])
        if size < CONTEXT_CHARACTERS:
            continue
        question = _field_question(context, number)
        if question is not None:
            yield question
        context, size, number = [], 0, number + 1


def _field_question(
    records: list[tuple[str, list[tuple[str, str]]]], number: int
) -> dict[str, Any] | None:
    """Return a question about one field of one of the records; None if no value can be asked for."""
    context = "\n\n".join(text for text, _ in records)
    lower = context.lower()
    choices = []
    for _, fields in records:
        first_key, name = fields[0]
        if lower.count(name.lower()) != 1:
            continue
        keys = [key for key, _ in fields]
        choices += [
            (first_key, name, key, value)
            for key, value in fields[1:]
            if 3 <= len(value) <= 100 and keys.count(key) == 1 and lower.count(value.lower()) == 1
        ]
    if not choices:
        return None
    first_key, name, key, value = min(choices, key=lambda choice: _order("field", *choice))
    return dict(
        id=f"fields-{number}",
        context=context,
        question=f". {first_key}: {name}\n{key}:",
        answers=[value],
    )


def name_questions(documents: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the questions of the task `names`, at most one for each document: id, context, question, answers."""
    number_of: dict[str, int] = {}
    for row in documents:
        for word in {match[0] for match in _WORD.finditer(row["text"])}:
            number_of[word] = number_of.get(word, 0) + 1
    for number, row in enumerate(documents):
        text = row["text"]
        places: dict[str, list[int]] = {}
        for match in _WORD.finditer(text):
            if number_of[match[0]] == 1 and _is_name(match[0], number_of):
                places.setdefault(match[0], []).append(match.start())
        for name in sorted(places, key=lambda word: _order("name", number, word)):
            question = _name_question(text, name, places[name])
            if question is not None:
                yield dict(id=f"names-{number}", **question)
                break


def _is_name(word: str, number_of: dict[str, int]) -> bool:
    lower = word.lower()
    return _NAME.fullmatch(word) is not None and (lower == word or lower not in number_of)


def _name_question(text: str, name: str, places: list[int]) -> dict[str, Any] | None:
    """Return the question for the last suitable place of a name; None if there is none."""
    for index in range(len(places) - 1, 0, -1):
        place, before = places[index], places[:index]
        ends = [match.start() for match in _END.finditer(text, max(0, place - 400), place)]
        if not ends or len(before) > _MOST_PLACES:
            continue
        start = ends[-1]
        asked = text[start:place].rstrip()
        far_enough = start - before[-1] >= _NEAREST and place - before[0] <= _FARTHEST
        if far_enough and len(asked) >= 12 and asked.strip(" .!?\n"):
            first = max(0, place - CONTEXT_CHARACTERS)
            return dict(context=text[first:start], question=asked, answers=[name])
    return None


def multikey_questions(documents: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the questions of the task `multikey`, at most one for each document: id, context, question, answers."""
    for number, row in enumerate(documents):
        size = MULTIKEY_CHARACTERS[number % len(MULTIKEY_CHARACTERS)]
        text = row["text"][:size]
        ends = [match.end() for match in re.finditer(r"\n", text)]
        if len(row["text"]) < size or len(ends) <= _KEYS:
            continue
        keys = sorted(_KEY_WORDS, key=lambda word: _order("key", number, word))[:_KEYS]
        values = [str(10**6 + int.from_bytes(_order("value", number, k)[:8]) % (9 * 10**6)) for k in keys]  # fmt: skip
        places = sorted(sorted(ends, key=lambda end: _order("place", number, end))[:_KEYS])
        parts, start = [], 0
        for place, key, value in zip(places, keys, values, strict=True):
            parts.append(f"{text[start:place]}{_NEEDLE.format(key)} {value}.\n")
            start = place
        asked = _order("asked", number)[0] % _KEYS
        yield dict(
            id=f"multikey-{number}-{size}", context="".join(parts) + text[start:].rstrip("\n"),
            question=f"\n{_NEEDLE.format(keys[asked])}", answers=[values[asked]],
        )  # fmt: skip


TASKS = {"fields": field_questions, "names": name_questions, "multikey": multikey_questions}


def make_questions(task: str, documents: Sequence[dict[str, Any]], count: int) -> list[dict]:
    """Return at most `count` questions of a task about documents with a "text", in a shuffled order.

    Raises:
        ValueError: a document has no text, or no question can be made; the message says of which.
    """
    for number, row in enumerate(documents, 1):
        if not isinstance(row.get("text"), str):
            raise ValueError(f"document {number} has no field 'text'; it has {', '.join(row)}")
    questions = sorted(TASKS[task](documents), key=lambda row: _order(row["id"], *row["answers"]))
    if not questions:
        needed = dict(
            fields="records of lines 'Key: value'", names="names that are repeated",
            multikey=f"{MULTIKEY_CHARACTERS[0]} characters in lines",
        )[task]  # fmt: skip
        raise ValueError(f"none of the {len(documents)} documents has {needed}")
    return questions[:count]


def main(argv: Sequence[str] | None = None) -> None:
    """Write the questions of one task about the documents of files, and print how many there are."""
    parser = argparse.ArgumentParser(
        "recall_corpus", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", required=True, choices=list(TASKS))
    parser.add_argument("--source", required=True, nargs="+", type=Path, help="JSONL files with 'text'")  # fmt: skip
    parser.add_argument("--out", required=True, type=Path, help="the folder for --lm_eval.data")
    parser.add_argument("--count", type=int, default=500, help="questions at most; default: 500")
    options = parser.parse_args(argv)
    if options.count < 1:
        raise ValueError(f"--count={options.count}: it must be at least 1")
    documents = [row for path in options.source for row in read_rows(path)]
    questions = make_questions(options.task, documents, options.count)
    path = options.out / "recall" / f"{options.task}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_rows(path, questions)
    print(f"{path}: {len(questions)} questions about {len(documents)} documents")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"recall_corpus: {error}")
