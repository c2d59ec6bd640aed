"""Tests of generation options of evaluation tasks: every name is honoured, or refused by name."""

from __future__ import annotations

import pytest

from lsm_jax.evaluation.gen_kwargs import (
    Generation,
    parse_flag,
    parse_generation,
    replace_options,
)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, Generation()),
        ({"until": "\n"}, Generation(until=("\n",))),
        ({"until": ["a", ""], "stop": None}, Generation(until=("a",))),
        ({"stop_sequences": ["a"]}, Generation(until=("a",))),
        ({"max_gen_toks": 3}, Generation(num_tokens=3)),
        ({"max_new_tokens": 3, "max_tokens": 3}, Generation(num_tokens=3)),
        ({"max_completion_tokens": "3"}, Generation(num_tokens=3)),
        ({"do_sample": False, "temperature": 1}, Generation()),
        ({"do_sample": True}, Generation(temperature=1.0)),
        ({"do_sample": True, "temperature": 0.0}, Generation()),
        ({"temperature": 0.7, "top_k": 5}, Generation(temperature=0.7, top_k=5)),
        ({"temperature": 1, "top_k": -1, "top_p": 1}, Generation(temperature=1.0)),
        ({"do_sample": True, "top_p": 0.9}, Generation(temperature=1.0, top_p=0.9)),
        ({"num_beams": 1, "repetition_penalty": 1.0, "min_p": 0}, Generation()),
    ],
)
def test_names_of_options(options, expected):
    assert parse_generation(options) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 4}, "num_beams=4; accepted is 1"),
        ({"max_length": 99}, "max_length=99 counts the prompt's tokens too; give max_gen_toks"),
        ({"guidance": 2}, "guidance=2 is not an option; accepted are until"),
        (
            {"max_gen_toks": 3, "max_new_tokens": 4},
            "max_gen_toks=3, max_new_tokens=4 are names of one",
        ),
        ({"temperature": -1, "do_sample": True}, "temperature=-1.0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"until": [3]}, "until=.*accepted are strings"),
        ({"stop": 3}, "until=3; accepted are strings"),
        ({"max_tokens": 2.5}, "max_gen_toks=2.5; accepted is a whole number"),
        ({"max_gen_toks": 0}, "max_gen_toks=0; accepted is at least 1"),
        ({"top_k": 2.5}, "top_k=2.5; accepted is a whole number"),
        ({"temperature": "hot"}, "temperature='hot'; accepted is a number"),
        ({"temperature": float("nan")}, "temperature=nan; accepted is a number"),
        ({"do_sample": "maybe"}, "do_sample='maybe'; accepted are true and false"),
    ],
)
def test_refused_options(options, message):
    with pytest.raises(ValueError, match=message):
        parse_generation(options)


def test_the_flag_is_pairs_or_json():
    assert parse_flag("") == {}
    assert parse_flag("temperature=0.7,do_sample=True,until=END") == {
        "temperature": 0.7,
        "do_sample": True,
        "until": "END",
    }
    assert parse_flag('{"until": ["\\n"], "max_tokens": 4}') == {"until": ["\n"], "max_tokens": 4}
    with pytest.raises(ValueError, match="accepted is name=value"):
        parse_flag("greedy")
    with pytest.raises(ValueError, match="not JSON"):
        parse_flag("{")
    for text in ("top_k=3,top_k=4", '{"top_k": 3, "top_k": 4}'):
        with pytest.raises(ValueError, match="'top_k' occurs twice"):
            parse_flag(text)
    with pytest.raises(ValueError, match="lm_eval.gen_kwargs='beams=2': .* is not an option"):
        parse_flag("beams=2")


def test_the_flag_replaces_every_name_of_a_tasks_option():
    task = {"until": ["\n"], "max_new_tokens": 48, "do_sample": False, "temperature": 0.0}
    changed = replace_options(task, {"max_gen_toks": 4, "temperature": 0.5})
    assert changed == {"until": ["\n"], "max_gen_toks": 4, "temperature": 0.5}
    assert parse_generation(changed) == Generation(("\n",), 4, 0.5)
    assert "until" not in replace_options(task, {"stop": "x"})
    assert replace_options(task, {"top_k": 3}) == {**task, "top_k": 3}
