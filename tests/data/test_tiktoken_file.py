"""A tiktoken.model gives the ids of the package tiktoken, for a vocabulary that is trained here."""

from __future__ import annotations

import base64
import json
import random

import pytest
import tiktoken
import tokenizers

from lsm_jax.convert.tokenizer import tokenizer_files
from lsm_jax.data import DataConfig, JSONTokenizer, TokenStore, load_tokenizer
from lsm_jax.data.sources import with_tokenizer
from lsm_jax.data.tiktoken_file import PATTERNS, tokenizer_json
from lsm_jax.data.tokenize import main

TEXT = (
    "To be or not to be: THAT'S the Question — 12345 times, we'll see!  \n\n中文字符 是 漢字, déjà Vu naïveté\tἀρχή\r\n"
    * 3
)
LETTERS = "abcABC   \n\t\r.,'sLl0123456789中文是漢é日ἀß\u0301\U0001f600-_()"


def vocabulary() -> list[bytes]:
    """Return the tokens of a byte-level BPE of 600 tokens in the order of their ranks."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = level
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, show_progress=False
    )
    generator = random.Random(0)
    noise = ["".join(generator.choices(LETTERS, k=40)) for _ in range(200)]
    tokenizer.train_from_iterator([TEXT, *noise], trainer)
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = iter(range(256, 512))
    byte_of = {chr(b) if b in shown else chr(next(hidden)): b for b in range(256)}
    ids = tokenizer.get_vocab()
    return [bytes(byte_of[c] for c in token) for token in sorted(ids, key=ids.__getitem__)]


@pytest.fixture(scope="module")
def tokens():
    return vocabulary()


@pytest.fixture
def folder(tokens, tmp_path):
    folder = tmp_path / "kimi"
    folder.mkdir()
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_text("".join(lines))
    count = len(tokens)
    special = {str(count): {"content": "[BOS]"}, str(count + 2): {"content": "<|im_end|>"}}
    fields = dict(
        tokenizer_class="TikTokenTokenizer",
        bos_token="[BOS]",
        eos_token="<|im_end|>",
        added_tokens_decoder=special,
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    return folder


def test_ids_are_those_of_tiktoken(tokens, folder):
    count = len(tokens)
    special = {"[BOS]": count, "<|im_end|>": count + 2}
    reference = tiktoken.Encoding(
        "x", pat_str=PATTERNS["TikTokenTokenizer"], special_tokens=special,
        mergeable_ranks={token: rank for rank, token in enumerate(tokens)},
    )  # fmt: skip
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.vocab_size == count + 256
    assert (tokenizer.bos_id, tokenizer.eos_id) == (count, count + 2)
    generator = random.Random(1)
    texts = [TEXT, "", *("".join(generator.choices(LETTERS, k=60)) for _ in range(400))]
    for text in [*texts, "a[BOS]b<|im_end|>"]:
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text, allowed_special="all"), text
        assert tokenizer.decode(ids) == text
    assert load_tokenizer(str(folder / "tiktoken.model")).name == tokenizer.name


def test_imports_and_stores_have_the_tokenizer(folder, tmp_path):
    files = tokenizer_files(folder)
    assert files["tokenizer.json"] == tokenizer_json(folder / "tiktoken.model")
    (tmp_path / "text.txt").write_text(TEXT * 20)
    store = tmp_path / "store.zarr"
    options = [f"--tokenizer={folder}", "--sequence_length=64", "--pack", "--num_workers=1"]
    assert main([f"--input={tmp_path / 'text.txt'}", f"--output={store}", *options]) == 0
    config = with_tokenizer(DataConfig(path=str(store)))
    tokenizer = load_tokenizer(config.tokenizer)
    assert isinstance(tokenizer, JSONTokenizer)
    TokenStore(store).check_tokenizer(tokenizer)


def test_errors_name_the_file_and_line(folder):
    model, config = folder / "tiktoken.model", folder / "tokenizer_config.json"
    good = model.read_text()
    for text, message in {
        "zzz\n": "tiktoken.model, line 1, is no token in base64 with its rank",
        good + "YWJj 5\n": "with the rank 5; accepted are different tokens, in the order",
        good.partition("\n")[2]: "line 1, has the token",
        "": "has no token of the byte 0",
    }.items():
        model.write_text(text)
        with pytest.raises(ValueError, match=message):
            load_tokenizer(str(folder))
    model.write_text(good)
    fields = json.loads(config.read_text())
    for changes, message in (
        (dict(tokenizer_class="Other"), "tokenizer_class='Other'; accepted with a tiktoken.model"),
        (dict(added_tokens_decoder={"3": {"content": "a"}}), "accepted are ids from 600 to 855"),
    ):
        config.write_text(json.dumps(fields | changes))
        with pytest.raises(ValueError, match=message):
            load_tokenizer(str(folder))
    config.unlink()
    with pytest.raises(ValueError, match="tokenizer_class=None"):
        load_tokenizer(str(folder))
