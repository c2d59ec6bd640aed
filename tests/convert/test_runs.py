"""Tests of runs made from imported transformers: the import command, the checkpoint, the tokenizer."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tokenizers

import lsm_jax
from lsm_jax.convert import import_huggingface, load_params, tokenizer_of
from lsm_jax.convert.gguf_file import GGUF
from lsm_jax.convert.huggingface import main
from lsm_jax.convert.tokenizer import tokenizer_files, write_files
from lsm_jax.data import load_tokenizer
from lsm_jax.data.chat import chat_text
from lsm_jax.evaluation import TASKS, Request
from lsm_jax.training.runs import initial_params
from tests.convert.test_huggingface import GOLDENS, changed


def with_tokenizer(folder, bos: str | None = None, **config):
    """Write a tokenizer of letters, which adds `bos` in front of a text, and a tokenizer_config.json; return the folder."""
    vocabulary = {"<s>": 0, "</s>": 1, "<x>": 2, **{c: i + 3 for i, c in enumerate("abcdefgh ")}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<x>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(["<s>", "</s>", "<x>"])
    if bos:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
def test_the_command_makes_a_run(tmp_path, capsys):
    def to_bfloat16(tensors):
        tensors |= {n: v.astype(ml_dtypes.bfloat16) for n, v in tensors.items()}

    folder = changed(tmp_path, "mistral", to_bfloat16)
    folder = with_tokenizer(folder.rename(tmp_path / "Small-1.5B"), "<s>", bos_token="<s>")
    assert main([f"--source={folder}", f"--workdir={tmp_path / 'run'}"]) == 0
    assert "wrote the run Small-1.5B to" in capsys.readouterr().out
    run = lsm_jax.load_run(tmp_path / "run")
    assert (run.step, run.config.name, run.config.model.layers["L"].mixer.window) == (0, "Small-1.5B", 7)  # fmt: skip
    data = run.config.data
    assert (data.add_bos, data.bos_id, data.sequence_length) == (True, None, 128)
    tokenizer = load_tokenizer(data.tokenizer)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.encode("ba")) == (0, 1, [4, 3])
    expected = load_params(folder, run.config.model)
    for loaded in (run.params, initial_params(str(tmp_path / "run"), expected)):
        assert jax.tree.all(
            jax.tree.map(lambda a, b: (a == b).all() and a.dtype == jnp.float32, loaded, expected)
        )
    # The checkpoint is bfloat16, as the source is.
    saved = [p for p in (tmp_path / "run" / "checkpoints").rglob("*") if p.is_file()]
    kinds = {kind: any(kind in p.read_bytes() for p in saved) for kind in (b"bfloat16", b"float32")}
    assert kinds == {b"bfloat16": True, b"float32": False}
    assert main([f"--source={folder}", f"--workdir={tmp_path / 'run'}"]) == 1
    assert "contains a run; accepted is a new directory" in capsys.readouterr().err
    (folder / "tokenizer.json").unlink()
    assert main([f"--source={folder}", f"--workdir={tmp_path / 'other'}"]) == 1
    assert "has no tokenizer.json; write one with transformers" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_a_run_of_a_gguf_file(tmp_path):
    config = import_huggingface(GOLDENS / "llama.gguf", tmp_path / "run")
    assert config.name == "llama" and not config.data.add_bos
    tokenizer = load_tokenizer(config.data.tokenizer)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (1, 2, 64)
    assert tokenizer.chat_template == "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    # Letters are merged to "the" and " the", digits are not merged, and special tokens are recognised.
    ids = tokenizer.encode("the the 12<|im_end|>")
    assert ids == [31, 32, 29, 34, 35, 2]
    assert tokenizer.decode(ids) == "the the 12<|im_end|>"


@pytest.mark.slow
def test_generate_with_a_chat_template(tmp_path):
    config = import_huggingface(GOLDENS / "llama.gguf", tmp_path / "run")
    tokenizer = load_tokenizer(config.data.tokenizer)
    run = lsm_jax.load_run(tmp_path / "run")
    request = Request(prompt="the 1", chat=True, num_tokens=3, temperature=0.0)
    sample = TASKS["generate"](run, request, tmp_path / "eval")
    assert sample.prompt == "the 1"
    assert sample.tokens == expected_tokens(run, tokenizer, [31, 29, 34])
    (tmp_path / "run" / "tokenizer" / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="has no chat template; one is read from"):
        TASKS["generate"](run, request, tmp_path / "eval")


def expected_tokens(run, tokenizer, ids: list[int]) -> list[int]:
    """Return the tokens with which an imported model continues `ids` greedily, up to EOS, from the logits
    of the complete text for each token.
    """
    logits = jax.jit(lambda model, tokens: model(tokens)[0][0])
    drawn: list[int] = []
    while len(drawn) < 3:
        row = np.array([ids + drawn + [0] * (3 - len(drawn))])
        drawn.append(int(jnp.argmax(logits(run.model, row)[len(ids) + len(drawn) - 1])))
        if drawn[-1] == tokenizer.eos_id:
            return drawn[:-1]
    return drawn


def test_a_tokenizer_for_a_gguf_file_must_have_its_tokens(tmp_path):
    opened = GGUF(GOLDENS / "llama.gguf")
    files = tokenizer_files(opened)
    given = write_files(files, tmp_path / "given")
    opened.fields["tokenizer.ggml.model"] = "llama"  # SentencePiece
    with pytest.raises(ValueError, match="model='llama'.*accepted are 'gpt2' with.*--tokenizer=FILE"):  # fmt: skip
        tokenizer_files(opened)
    assert tokenizer_files(opened, given) == tokenizer_files(opened, given.parent) == files
    last = len(opened.fields["tokenizer.ggml.tokens"]) - 1
    opened.fields["tokenizer.ggml.tokens"][last] = "other"
    with pytest.raises(
        ValueError, match=f"is not that of .*llama.gguf: its id {last} is .* 'other' in"
    ):
        tokenizer_files(opened, given)
    opened.fields["tokenizer.ggml.tokens"].pop()
    opened.fields["tokenizer.ggml.token_type"].pop()
    with pytest.raises(ValueError, match=f"it has {last + 1} tokens, but the model has {last}"):
        tokenizer_files(opened, given)
    with pytest.raises(ValueError, match="accepted is a tokenizer.json or its folder"):
        tokenizer_files(opened, GOLDENS / "llama.gguf")
    run = [f"--source={GOLDENS / 'llama.gguf'}", f"--workdir={tmp_path / 'run'}"]
    assert main([*run, f"--tokenizer={given}"]) == 0


def test_special_tokens_and_chat_template_of_a_tokenizers_folder(tmp_path):
    def read(**config):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        return folder, load_tokenizer(str(with_tokenizer(folder, **config)))

    folder, plain = read()
    assert (plain.bos_id, plain.eos_id, plain.adds_bos, plain.chat_template) == (0, 1, False, None)
    with pytest.raises(ValueError, match="has no chat template; one is read from"):
        plain.chat_text([])
    folder, named = read(bos="<x>", bos_token={"content": "<x>"}, eos_token="a", chat_template="T")
    assert (named.bos_id, named.eos_id, named.adds_bos, named.chat_template) == (2, 3, True, "T")
    (folder / "chat_template.jinja").write_text("{{ bos_token + messages[0].content + eos_token }}")
    copied = load_tokenizer(str(tokenizer_of(folder, tmp_path / "copied")))
    assert copied.chat_text([dict(role="user", content="bc")]) == "<x>bca"
    listed = [dict(name="default", template="D"), dict(name="tools", template="X")]
    folder, several = read(chat_template=listed, bos_token=None)
    assert (several.bos_id, several.chat_template) == (0, "D")
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(
        ValueError, match="tokenizer_config.json contains a list; accepted is an object"
    ):
        load_tokenizer(str(folder))


def test_chat_texts_are_those_of_transformers():
    cases = json.loads((GOLDENS / "chat.json").read_text())
    assert len({case["text"] for case in cases}) > 8
    for case in cases:
        arguments = dict(add_generation_prompt=case["answer"], bos_token="<B>", eos_token="<E>")
        if case["text"] is not None:
            assert chat_text(case["template"], case["messages"], **arguments) == case["text"]
            continue
        with pytest.raises(ValueError, match="chat template refuses this conversation: no system"):
            chat_text(case["template"], case["messages"], **arguments)
    with pytest.raises(ValueError, match="chat template refuses this"):  # the sandbox
        chat_text("{{ messages.__class__.__mro__ }}", [])
    with pytest.raises(ValueError, match="chat template refuses this"):
        chat_text("{% for %}", [])


def test_errors_of_other_gguf_files(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"nothing of that kind, but long enough to be read")
    with pytest.raises(ValueError, match="x.gguf cannot be read as a GGUF file"):
        import_huggingface(tmp_path / "x.gguf", tmp_path / "run")
    for name, old, new, words in (
        ("qwen2", b"qwen2.rope.freq_base", b"qwen2.rope.freq_bass", "unknown fields, .*: qwen2.rope.freq_bass=10000.0"),
        ("qwen2", b"attn_q.bias", b"attn_x.bias", "unexpected: blk.0.attn_x.bias"),
        ("llama", b"smollm", b"smollx", "tokenizer.ggml.pre='smollx'; accepted are 'gpt2' with"),
    ):  # fmt: skip
        content = (GOLDENS / f"{name}.gguf").read_bytes()
        assert old in content
        (tmp_path / "y.gguf").write_bytes(content.replace(old, new, 1))
        with pytest.raises(ValueError, match=words):
            import_huggingface(tmp_path / "y.gguf", tmp_path / "run")
    assert not (tmp_path / "run").exists()
