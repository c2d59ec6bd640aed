import json
import resource
import time

import numpy as np
import pytest

from lsm_jax.data import ByteTokenizer, chat, json_escape, json_unescape, load_tokenizer

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


def changed(trained, folder, change, **config):
    """Write a copy of the trained tokenizer.json whose fields `change` changed; return its path."""
    folder.mkdir(exist_ok=True)
    fields = json.loads(trained.read_text())
    change(fields)
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder / "tokenizer.json")


def set_vocabulary(fields, vocabulary):
    fields["model"].update(vocab=vocabulary, merges=[])
    fields["added_tokens"] = []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda f: f["model"]["vocab"].update(a=4_000_000_000),
            "token 'a' has id 4000000000, but there are only",
        ),
        (lambda f: set_vocabulary(f, {}), "its vocabulary is empty"),
        (lambda f: f["model"]["vocab"].update(a=-1), "is not a tokenizer.json"),
        (lambda f: f["model"]["vocab"].update(a=10**30), "is not a tokenizer.json"),
        (lambda f: f["model"].update(merges=["zzz qqq"]), "is not a tokenizer.json"),
        (lambda f: f.update(model=[]), "is not a tokenizer.json"),
        (
            lambda f: f.update(pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}}),
            "is not a tokenizer.json",
        ),
    ],
)
def test_absurd_tokenizer_files_are_named(trained, tmp_path, change, message):
    path = changed(trained, tmp_path / "t", change)
    with pytest.raises(ValueError, match=message) as error:
        load_tokenizer(path)
    assert path in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"\xff", b"1" * 10_000])
def test_tokenizer_files_that_are_no_json_are_named(trained, tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_bytes(trained.read_bytes())
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json (cannot be read|contains)"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("chat_template", 5),
        ("bos_token", ["<s>"]),
        ("eos_token", {"content": [1]}),
        ("bos_token", True),
    ],
)
def test_wrong_fields_of_tokenizer_config_are_named(trained, tmp_path, field, value):
    path = changed(trained, tmp_path / "t", lambda fields: None, **{field: value})
    with pytest.raises(ValueError, match=rf"tokenizer_config\.json: {field}="):
        load_tokenizer(path)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no\\nsystem') }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content.nothing.more }}",
        "{{ messages[5].content }}",
        "{{ 'a' * 10**10 }}",
        "{{ 10 ** (10**10) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ range(10**9) }}",
        "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% for %}",
        "{{ 'a'.encode('latin2').decode('utf-16') }}",
        "{{ strftime_now(5) }}",
    ],
)
def test_chat_templates_that_raise_are_one_line_with_their_folder(trained, tmp_path, template):
    path = changed(trained, tmp_path / "t", lambda fields: None, chat_template=template)
    start = time.perf_counter()
    with pytest.raises(ValueError, match="chat template refuses this conversation: .") as error:
        load_tokenizer(path).chat_text([{"role": "user", "content": "hi"}])
    assert str(tmp_path / "t") in str(error.value) and "\n" not in str(error.value)
    assert time.perf_counter() - start < 5


def test_chat_templates_that_do_not_end_are_stopped(monkeypatch):
    monkeypatch.setattr(chat, "_MOST_SECONDS", 0.2)
    template = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(ValueError, match="it runs longer than 0.2 seconds"):
        chat.chat_text(template, [])
    with pytest.raises(ValueError, match="it runs longer than 0.2 seconds"):
        chat.chat_text("{{ ('a' * 65536).replace('a', 'b' * 2048)|urlize }}", [])
    monkeypatch.undo()
    assert chat.chat_text("{{ 2 * 'ab' + 'c' * 2 }}", []) == "ababcc"


def test_chat_templates_have_what_transformers_gives_them():
    """Tags around the model's own words (LFM2), a test of `tools` against none, and lists without blanks (Kimi)."""
    template = (
        "{% for m in messages %}{%- if m.role == 'assistant' -%} {%- generation -%} A:{{ m.content }}{% set seen = 1 %}"
        "{%- endgeneration -%} {% else %}U:{{ m.content }}{% endif %}|{% endfor %}"
        "{{ tools is none and documents is none and seen is not defined }}"
        "{{ messages[0] | tojson(separators=(',', ':'), sort_keys=true) }}"
    )
    messages = [dict(role="user", content="q"), dict(role="assistant", content="é")]
    expected = 'U:q|A:é|True{"content":"q","role":"user"}'
    assert chat.chat_text(template, messages) == expected
    assert "endgeneration" in (chat.template_error("{% generation %}") or "")


@pytest.mark.parametrize(
    "template",
    [
        "{{ '%1500000000s' % 'a' }}",
        "{{ 'a'.ljust(1500000000)|length }}",
        "{{ ('a'|center(1500000000))|length }}",
        "{{ ([1]|batch(400000000, 'x')|list)|length }}",
        "{{ ([1]|tojson(indent=1500000000))|length }}",
        "{{ ((['a' * 1048576] * 2048)|join)|length }}",
        "{% set n = namespace(x='a') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x|length }}",
    ],
)
def test_chat_templates_that_allocate_in_c_are_stopped(template):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match="it requires more than 512 MiB of memory"):
        chat.chat_text(template, [])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000
