"""Fields of wrong types in the JSON files of pretrained models, chat templates, and the fields of the rotation."""

from __future__ import annotations

import pytest
from absl import logging

from lsm_jax.convert import import_huggingface, model_config
from lsm_jax.data import load_tokenizer
from tests.convert.edits import edit
from tests.convert.test_huggingface import GOLDENS, changed
from tests.convert.test_runs import with_tokenizer


@pytest.fixture
def warnings(monkeypatch) -> list[str]:
    """Fixture: the list of the warnings that are logged from now on."""
    lines: list[str] = []
    monkeypatch.setattr(logging, "warning", lambda text, *values: lines.append(text % values))
    return lines


def test_null_context_is_an_absent_field(tmp_path):
    folder = with_tokenizer(changed(tmp_path, "llama3", max_position_embeddings=None))
    assert import_huggingface(folder, tmp_path / "run").data.sequence_length == 8192


@pytest.mark.parametrize(
    ("file", "fields", "words"),
    [
        ("config.json", dict(max_position_embeddings=-1), "max_position_embeddings=-1; accepted is a whole number from 1"),
        ("config.json", dict(max_position_embeddings="64"), "max_position_embeddings='64'; accepted"),
        ("config.json", dict(model_type=["llama"]), r"model_type=\['llama'\]; accepted is a string"),
        ("config.json", dict(layer_types=[["a"]]), "layer_types=.*; accepted is a list of strings"),
        ("config.json", dict(rms_norm_eps=10**400), "rms_norm_eps=1000.*; accepted is a finite number"),
        ("config.json", dict(unknown={"\n": "x" * 9999}), "unknown fields, which may change"),
        ("tokenizer_config.json", dict(bos_token=-1), "bos_token=-1; accepted is a string, an object with"),
        ("tokenizer_config.json", dict(eos_token=["</s>"]), "eos_token=.*; accepted is a string"),
        ("tokenizer_config.json", dict(eos_token={"content": 5}), "eos_token=.*; accepted is a string"),
        ("tokenizer_config.json", dict(chat_template=5), "chat_template=5; accepted is a string"),
        ("tokenizer_config.json", dict(chat_template=[{"name": "default"}]), "chat_template=.*; accepted is a string, or a list"),
        ("tokenizer_config.json", dict(add_bos_token="yes"), "add_bos_token='yes'; accepted is true or false"),
        ("special_tokens_map.json", dict(bos_token=-1), "bos_token=-1; accepted is a string"),
        ("generation_config.json", dict(eos_token_id="2"), "eos_token_id='2'; accepted is a token id"),
        ("generation_config.json", dict(bos_token_id=-1), "bos_token_id=-1; accepted is a token id"),
    ],
)  # fmt: skip
def test_fields_of_wrong_types_are_named(tmp_path, file, fields, words):
    folder = with_tokenizer(changed(tmp_path, "llama3"))
    if not (folder / file).exists():
        (folder / file).write_text("{}")
    edit(folder / file, **fields)
    with pytest.raises(ValueError, match=f"{file}: {words}") as error:
        import_huggingface(folder, tmp_path / "run")
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for i in range(999999999) %}{% endfor %}", "Range too big"),
        ("{{ messages[5].content.x.y }}", "undefined|no element 5"),
        ("{% if %}\n{% endfor %}", r"\(line 1\)|line 1"),
        ("{{ raise_exception('no\nroom') }}", "no room"),
        ("{{ [].append.x() }}", "append"),
    ],
)
def test_errors_of_chat_templates_name_the_file(tmp_path, template, words, warnings):
    folder = with_tokenizer(changed(tmp_path, "llama3"), chat_template=template)
    config = import_huggingface(folder, tmp_path / "run")
    parses = "{% if %}" not in template
    found = [line for line in warnings if "chat_template cannot be used" in line]
    assert len(found) == (0 if parses else 1)
    assert all(str(folder / "tokenizer_config.json") in line for line in found)
    tokenizer = load_tokenizer(config.data.tokenizer)
    with pytest.raises(
        ValueError, match=f"tokenizer_config.json: its chat template refuses .*({words})"
    ) as error:
        tokenizer.chat_text([dict(role="user", content="a")])
    assert "\n" not in str(error.value)
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="chat_template.jinja cannot be read: byte 0 is no UTF-8"):
        import_huggingface(folder, tmp_path / "other")


def test_fields_of_the_tokenizer_that_are_not_used_are_told(tmp_path, warnings):
    folder = with_tokenizer(
        changed(tmp_path, "llama3"), bos="<s>", bos_token="<s>", add_bos_token=True, model_max_length=64, add_eos_token=True,
        new_option=[1],
    )  # fmt: skip
    import_huggingface(folder, tmp_path / "run")
    (line,) = warnings
    assert line.startswith(
        f"{folder / 'tokenizer_config.json'}: fields that are copied, but not used"
    )
    assert line.endswith("add_eos_token=True, new_option=[1]")
    warnings.clear()
    edit(
        folder / "tokenizer_config.json", add_bos_token=False, add_eos_token=False, new_option=None
    )
    import_huggingface(folder, tmp_path / "second")
    assert [line.rpartition(": ")[2] for line in warnings] == []  # false, as absent
    content = (GOLDENS / "llama.gguf").read_bytes()
    renamed = content.replace(b"tokenizer.ggml.add_bos_token", b"tokenizer.ggml.add_eos_token")
    at = renamed.index(b"tokenizer.ggml.add_eos_token") + len("tokenizer.ggml.add_eos_token") + 4
    (tmp_path / "x.gguf").write_bytes(renamed[:at] + b"\1" + renamed[at + 1 :])
    import_huggingface(tmp_path / "x.gguf", tmp_path / "third")
    assert warnings == [
        f"{tmp_path / 'x.gguf'}: fields of the tokenizer that are not used and not copied: tokenizer.ggml.add_eos_token=True"
    ]


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3", "longrope"])
@pytest.mark.parametrize(
    "value", [None, [8.0], "8", -1.0, 0, float("nan"), pytest.param(10**400, id="10**400")]
)
def test_factors_of_the_rotation_are_checked(tmp_path, kind, value):
    fields = dict(rope_type=kind, factor=value)
    if kind == "llama3":
        fields |= dict(
            low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
        )
    for name in ("rope_scaling", "rope_parameters"):
        folder = changed(tmp_path / name, "llama-linear", **{"rope_parameters": None, name: fields})
        with pytest.raises(
            ValueError,
            match=rf"config.json: .*(rope_scaling|rope_parameters)(\.factor| of type '{kind}')",
        ):
            model_config(folder)


def test_two_unequal_scalings_of_the_rotation_are_refused(tmp_path):
    linear = dict(rope_type="linear", factor=4.0, rope_theta=1e4)
    for other in (dict(factor=8.0), dict(rope_theta=5e5), dict(rope_type="llama3")):
        folder = changed(
            tmp_path / next(iter(other)),
            "llama-linear",
            rope_scaling=linear,
            rope_parameters=linear | other,
        )
        with pytest.raises(ValueError, match=f"but rope_parameters.{next(iter(other))}="):
            model_config(folder)
    folder = changed(tmp_path, "llama-linear", rope_scaling=linear, rope_parameters=linear)
    assert model_config(folder).layers["L"].mixer.rope_scaling.factor == 4.0


@pytest.mark.parametrize("value", [0, 0.0, -1.0, [1e4], float("inf")])
def test_the_base_of_the_rotation_is_not_replaced(tmp_path, value):
    folder = changed(tmp_path, "llama-linear", rope_parameters=None, rope_theta=value)
    with pytest.raises(
        ValueError, match=r"config.json: rope_theta=.*; accepted is a finite number above 0"
    ):
        model_config(folder)
    edit(
        folder / "config.json",
        rope_theta=None,
        rope_parameters=dict(rope_type="default", rope_theta=value),
    )
    with pytest.raises(ValueError, match=r"config.json: rope_parameters\.rope_theta="):
        model_config(folder)
    edit(folder / "config.json", rope_parameters=None, model_type="llama")
    assert model_config(folder).layers["L"].mixer.rope_base == 10000.0
