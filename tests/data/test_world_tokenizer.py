"""RWKV's World tokenizer: the longest token first, every byte without a loss, and errors that name the line."""

from __future__ import annotations

import random

import numpy as np
import pytest

from lsm_jax.data import WorldTokenizer, load_tokenizer
from lsm_jax.data.config import DataConfig
from lsm_jax.data.sources import tokenizer_of
from lsm_jax.data.tokenize import write_store
from lsm_jax.data.world_tokenizer import VOCABULARY
from tests.data.world import tokens, write_vocabulary


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    return write_vocabulary(tmp_path_factory.mktemp("world"))


def longest_first(text: str) -> list[int]:
    """Return the ids of a text by the definition: of all tokens that the rest begins with, the longest."""
    data, ids, table = text.encode(), [], tokens()
    while data:
        fitting = [token for token in table if data.startswith(token)]
        token = max(fitting, key=len)
        ids.append(table.index(token) + 1)
        data = data[len(token) :]
    return ids


def random_texts() -> list[str]:
    rng = random.Random(0)
    pieces = [
        "the",
        " the",
        "th",
        "the thing",
        "thing",
        "\n",
        "\n\n\n",
        "é",
        "日",
        "旨",
        "x",
        "\0",
        "😀",
        "\r",
        "\x85",
    ]
    return ["".join(rng.choices(pieces, k=rng.randrange(40))) for _ in range(200)]


def test_the_longest_token_is_taken_and_texts_come_back(vocabulary):
    tokenizer = load_tokenizer(str(vocabulary))
    assert isinstance(tokenizer, WorldTokenizer)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (len(tokens()) + 1, 0, 0)
    assert tokenizer.encode("the thing") == [260] and tokenizer.encode("the thin") == [258, *map(lambda c: ord(c) + 1, " thin"[:1]), 257, 106, 111]  # fmt: skip
    for text in random_texts():
        ids = tokenizer.encode(text)
        assert ids == longest_first(text)
        assert tokenizer.decode(ids) == text


def test_bytes_that_are_no_text(vocabulary):
    tokenizer = load_tokenizer(str(vocabulary.parent))  # the folder
    assert tokenizer.decode(np.arange(1, 257)) == bytes(range(256)).decode("utf-8", "replace")
    assert tokenizer.decode([0, 117, 0]) == "t"  # the end of a document is no text
    assert tokenizer.decode(tokenizer.encode("a\udcff")) == "a\ufffd"
    with pytest.raises(ValueError, match="token id 265 is outside the vocabulary"):
        tokenizer.decode([265])
    escaped = load_tokenizer(str(vocabulary), json_escape=True)
    assert escaped.decode(escaped.encode('a "b"\n')) == 'a "b"\n'
    assert escaped.encode("\n") == [93, 111]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("700 'a", "line 265: .*accepted are an id, a token as a literal"),
        ("700 open('x') 1", "accepted are an id, a token as a literal"),
        ("700 'abc' 2", "the token is not of 2 bytes"),
        ("700 '' 0", "the token is not of 0 bytes"),
        ("0 'abc' 3", "id 0; accepted are 1 to"),
        ("99999999 'abc' 3", "id 99999999; accepted are 1 to"),
        ("257 'abc' 3", "the id or the token occurs before"),
        ("700 'the' 3", "the id or the token occurs before"),
        ("700 'a' + 'b' 2", "accepted are an id|not of|malformed|cannot|invalid"),
    ],
)  # fmt: skip
def test_damaged_lines_are_named(line, words, tmp_path):
    path = write_vocabulary(tmp_path)
    with path.open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(ValueError, match=rf"{VOCABULARY}: line 265: .*|{words}") as error:
        load_tokenizer(str(path))
    assert __import__("re").search(words, str(error.value)), error.value


def test_other_text_files_are_refused(tmp_path):
    path = write_vocabulary(tmp_path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:40] + lines[41:]))
    with pytest.raises(ValueError, match="1 of the 256 bytes are no tokens, the first 0x28"):
        load_tokenizer(str(path))
    (tmp_path / "notes.txt").write_text("hello\n")
    with pytest.raises(ValueError, match="notes.txt: line 1: .*accepted are an id"):
        load_tokenizer(str(tmp_path / "notes.txt"))
    with pytest.raises(
        ValueError, match="is not a file; accepted is the path of RWKV's vocabulary"
    ):
        load_tokenizer(str(tmp_path / "absent.txt"))


def test_a_store_has_the_vocabulary(vocabulary, tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("the thing. " * 200)
    write_store(
        [tmp_path / "text"], str(tmp_path / "train.zarr"), tokenizer=str(vocabulary), sequence_length=32, num_workers=1
    )  # fmt: skip
    assert (tmp_path / "train.zarr" / VOCABULARY).read_bytes() == vocabulary.read_bytes()
    found = tokenizer_of(DataConfig(path=str(tmp_path / "train.zarr")))
    assert found.name == load_tokenizer(str(vocabulary)).name


def test_conversations_have_the_published_form(vocabulary):
    tokenizer = WorldTokenizer(vocabulary)
    messages = [
        dict(role="system", content="Be brief."),
        dict(role="user", content=" the\n\n \nthing\n"),
        dict(role="assistant", content="Yes."),
        dict(role="user", content="Why?"),
    ]
    text = "System: Be brief.\n\nUser: the\nthing\n\nAssistant: Yes.\n\nUser: Why?\n\nAssistant:"
    assert tokenizer.chat_text(messages) == text
    whole = tokenizer.chat_text(messages, add_generation_prompt=False)
    assert whole == text.removesuffix("Assistant:")
    assert tokenizer.decode(tokenizer.encode(text)) == text
    for message in (dict(role="tool", content="x"), dict(role="user", content=["x"]), {}):
        with pytest.raises(
            ValueError, match=r"messages\[1\]: role=.*accepted is a role of system, user"
        ):
            tokenizer.chat_text([messages[0], message])
