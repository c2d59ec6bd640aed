import json

import numpy as np
import pytest

from lsm_jax.data import ByteTokenizer, json_escape, json_unescape, load_tokenizer

TEXTS = ["", "plain", 'a\n\n"b"', "tab\t back\\slash / ü 😀 \x00", "\\n is not a newline"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("escape", [False, True])
def test_bytes_round_trip(text, escape):
    tokenizer = load_tokenizer("bytes", json_escape=escape)
    ids = tokenizer.encode(text)
    assert tokenizer.decode([tokenizer.bos_id, *ids]) == text
    assert all(i < 256 for i in ids) and tokenizer.vocab_size == 257


def test_the_byte_tokenizer_decodes_invalid_utf8():
    assert ByteTokenizer().decode(np.array([97, 0xFF, 98])) == "a\ufffdb"
    with pytest.raises(ValueError, match="token id 257 is outside"):
        ByteTokenizer().decode([257])


@pytest.mark.parametrize("text", TEXTS)
def test_json_escape_is_a_json_string_without_quotes(text):
    assert json_escape(text) == json.dumps(text)[1:-1]
    assert json_unescape(json_escape(text)) == text


def test_json_escape_of_longcrawl():
    assert json_escape('a\n\n"b"') == r"a\n\n\"b\""


@pytest.mark.parametrize(
    ("cut", "begins"),
    [("a\\nb\\", "a\nb"), ("a\\nb\\u00", "a\nb"), ("\\ud83d", "\ufffd"), ('say "x', 'say "x')],
)
def test_text_that_ends_inside_an_escape_is_decoded_up_to_there(cut, begins):
    assert json_unescape(cut).startswith(begins)
    json_unescape(cut).encode()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["the cat and the hat and the rat"] * 10, trainer)
    path = tmp_path_factory.mktemp("t") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize("escape", [False, True])
def test_tokenizer_json(trained, escape):
    tokenizer = load_tokenizer(str(trained), json_escape=escape)
    assert tokenizer.bos_id == 0
    assert tokenizer.name.startswith("tokenizer.json-") and len(tokenizer.name) > 20
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("the cat")) < 7
    assert max(tokenizer.encode("the hat")) < tokenizer.vocab_size
    assert load_tokenizer(str(trained.parent)).name == tokenizer.name


def test_errors_of_unknown_tokenizers(tmp_path):
    with pytest.raises(ValueError, match="accepted: 'bytes', 'gpt2'"):
        load_tokenizer("llama")
    with pytest.raises(ValueError, match="is not a file"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a tokenizer.json"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))


def test_the_error_of_gpt2_without_its_files_names_alternatives(monkeypatch):
    import tiktoken

    def offline(name):
        raise OSError("this test has no network")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    tokenizer = load_tokenizer("gpt2")
    assert (tokenizer.vocab_size, tokenizer.bos_id) == (50257, 50256)
    with pytest.raises(ValueError, match=r"path of GPT-2's tokenizer\.json"):
        tokenizer.encode("a")


def test_gpt2_ids_of_longcrawl():
    tokenizer, plain = load_tokenizer("gpt2", json_escape=True), load_tokenizer("gpt2")
    try:
        tokenizer.encode("a")
    except ValueError as error:
        pytest.skip(f"GPT-2's vocabulary files are not here: {error}")
    text = 'a\n\n"b"'
    assert tokenizer.encode(text) == [64, 59, 77, 59, 77, 7879, 65, 7879]
    assert plain.encode(text) == [64, 198, 198, 1, 65, 1]
    assert tokenizer.decode(tokenizer.encode(text)) == plain.decode(plain.encode(text)) == text
    assert plain.encode("<|endoftext|>") != [50256]


def test_tokenizer_json_replaces_bytes_that_are_not_utf8(trained):
    tokenizer = load_tokenizer(str(trained))
    text = b"the \xff hat".decode("utf-8", "surrogateescape")
    assert tokenizer.encode(text) == tokenizer.encode("the \ufffd hat")
    assert tokenizer.encode("the \ud83d hat") == tokenizer.encode("the \ufffd hat")
